"""What MkDocs must know of these pages, which are written to be read in the repository, too.

Pages link to files outside this folder, such as ../CONTRIBUTING.md: those become pages of the site below `project/`,
Markdown as it is, code as a block, and notebooks as cells with their outputs. Formulas become MathML, which browsers
show without help. What a fence says beyond its language is for the tests, not for readers.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FENCE = re.compile(r"^(?P<open> *```\w*)(?P<more>[^\n]*)(?P<rest>\n.*?^ *```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!\w+:)(?P<path>[^)#\s]+)")
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"  # code would bury what the pages say
EMPTY_HEADING = re.compile(r"<th([^>]*)></th>")
LANGUAGES = {".py": "python", ".toml": "toml"}
COLOR = re.compile(r"\x1b\[[\d;]*m")


def on_config(config: MkDocsConfig) -> None:
    """Name every page that a pattern of the contents stands for."""
    config.nav = _expanded(config.nav or [])


def _expanded(parts: list[Any]) -> list[Any]:
    expanded: list[Any] = []
    for part in parts:
        if isinstance(part, dict):
            expanded.append({name: _expanded(p) if isinstance(p, list) else p for name, p in part.items()})
        else:
            found = sorted(DOCS.glob(part), key=lambda path: path.stem) if "*" in part else [DOCS / part]
            expanded += [str(path.relative_to(DOCS)) for path in found]
    return expanded


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Make pages of what lies outside and is linked, from there too."""
    outside: set[Path] = set()
    unread = list(DOCS.glob("**/*.md"))
    while unread:
        page = unread.pop()
        links = (_target(page, link["path"]) for link in LINK.finditer(FENCE.sub("", page.read_text("utf-8"))))
        new = {path for path in links if path and not path.is_relative_to(DOCS)} - outside
        outside |= new
        unread += [path for path in new if path.suffix == ".md"]
    for path in sorted(outside):
        files.append(File.generated(config, _place(path), content=_page(path)))
        if path.suffix == ".ipynb":
            files.append(File.generated(config, f"project/{path.relative_to(ROOT)}", abs_src_path=str(path)))


def _target(page: Path, link: str) -> Path | None:
    """The file of ours that a link means."""
    path = (page.parent / link).resolve()
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _place(path: Path) -> str:
    """Where a file is in the site."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    if path.suffix == ".ipynb":
        path = path.with_suffix(".md")  # beside it is the notebook itself, to be downloaded
    return f"project/{path.relative_to(ROOT)}" + ("" if path.suffix == ".md" else ".md")


def _source(place: str) -> Path:
    """Which file is in that place."""
    return ROOT / place.removeprefix("project/") if place.startswith("project/") else DOCS / place


def _page(path: Path) -> str:
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return _notebook(json.loads(text)["cells"], path.name)
    return f"{UNSEARCHED}# {path.relative_to(ROOT)}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{text}```\n"


def _notebook(cells: list[Any], name: str) -> str:
    """The cells of a notebook as Markdown, with the outputs that were saved in it."""
    title, _, rest = "".join(cells[0]["source"]).partition("\n")
    parts = [title, f'<p><a href="{name}" download>Download this notebook</a></p>', rest]
    for cell in cells[1:]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [f"```python\n{source}\n```", *_outputs(cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def _outputs(outputs: list[Any]) -> Iterator[str]:
    """Blocks of HTML: one for texts that follow each other, one for each table or figure."""
    text = ""
    for output in outputs:
        data = {kind: "".join(lines) for kind, lines in output.get("data", {}).items()}
        page, plain = data.get("text/html", ""), data.get("text/plain") or "".join(output.get("text", ""))
        if "image/png" not in data and (not page or page.startswith("<pre")):  # rich writes both; text suits any theme
            text += COLOR.sub("", plain).rstrip() + "\n"
            continue
        yield from _text_block(text)
        text = ""
        figure = f'<img alt="figure" src="data:image/png;base64,{data.get("image/png", "").strip()}">'
        yield f'<div class="output">{_plain_tables(page) if page else figure}</div>'
    yield from _text_block(text)


def _text_block(text: str) -> Iterator[str]:
    if text.strip("\n"):
        yield f'<pre class="output"><code>{html.escape(text.rstrip())}\n</code></pre>'


def _plain_tables(page: str) -> str:
    """Tables of pandas without their own style, so that they look as all others."""
    page = re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", page.replace(' border="1" class="dataframe"', ""))


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Links as the site has them, and fences with nothing but their language."""
    source, folder = _source(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        path = _target(source, link["path"])
        return posixpath.relpath(_place(path), folder or ".") if path else link["path"]

    done, text = 0, ""
    for fence in FENCE.finditer(markdown):
        text += LINK.sub(moved, markdown[done : fence.start()]) + fence["open"] + fence["rest"]
        done = fence.end()
    return text + LINK.sub(moved, markdown[done:])


def on_page_content(content: str, **_: Any) -> str:
    """Formulas in the words of browsers, and no heading of a column without words."""
    return EMPTY_HEADING.sub(r"<td\1></td>", FORMULA.sub(_formula, content))


def on_post_page(output: str, **_: Any) -> str:
    """A name for the search, which the theme leaves without one."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page that says that a page is missing."""
    return on_post_page(output_content)


def _formula(found: re.Match[str]) -> str:
    tex, block = html.unescape(found["tex"]), found["tag"] == "div"
    return f'<div class="formula">{convert(tex, display="block")}</div>' if block else convert(tex)
