"""The documentation as a site: it is built without a warning, is whole, and is read without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pytest

import pluribus
from browser import Browser, until, violations
from conftest import new_folder
from pluribus.method import methods

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings", "griffe", "latex2mathml") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed"),
    pytest.mark.xdist_group("site"),
]


@cache
def site() -> Path:
    """Built once, with every warning an error."""
    folder = new_folder()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return Path(folder)


def pages() -> dict[str, str]:
    return {str(path.relative_to(site())): path.read_text(encoding="utf-8") for path in site().glob("**/*.html")}


def without_code(page: str) -> str:
    return re.sub(r"<(pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)


def test_every_page_of_ours_is_in_the_contents() -> None:
    home = pages()["index.html"]
    sources = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")]
    assert {f"methods/{name}.md" for name in methods()} < set(sources)
    contents = re.findall(r'<a href="([^"]+)" class="md-nav__link', home)
    assert {source.removesuffix(".md") + ".html" for source in sources} - {"index.html"} <= set(contents)


def test_files_outside_are_pages_and_lead_back() -> None:
    found = pages()
    assert 'href="../methods/fedgh.html"' in found["project/CONTRIBUTING.html"]
    assert 'href="../../../deployment.html#what-it-costs"' in found["project/examples/hospitals/index.html"]
    assert 'href="project/examples/my_method.py.html"' in found["add-a-method.html"]
    assert "PrototypePull" in found["project/examples/my_method.py.html"]
    assert 'href="project/CHANGELOG.html"' in found["index.html"]


def test_notebooks_are_pages_with_their_outputs() -> None:
    methods_of = {
        "first-steps": "fedgh",
        "new-method": "fedgh",
        "my-data-and-models": "fedproto",
        "compare-fairly": "fedavg",
        "privacy": "fedavg",
    }
    for name, method in methods_of.items():
        page = pages()[f"project/examples/{name}.html"]
        assert f'href="project/examples/{name}.html"' in pages()["notebooks.html"]
        assert f'href="project/examples/{name}.html" class="md-nav__link' in pages()["index.html"]
        assert f'href="../../methods/{method}.html"' in page
        assert 'src="data:image/png;base64,' in page
        assert "<td" in page
        assert "\x1b" not in page
        assert f'<a href="{name}.ipynb" download>' in page
        offered = (site() / "project" / "examples" / f"{name}.ipynb").read_bytes()
        assert offered == (ROOT / "examples" / f"{name}.ipynb").read_bytes()
    assert "Did you mean receive?" in pages()["project/examples/new-method.html"]


def test_the_reference_has_every_public_name() -> None:
    page = pages()["api.html"]
    shown = re.findall(r'<h3 id="(pluribus\.[\w.]+)" class="doc doc-heading">', page)
    homes = {f"{home}.{name}" for home, names in pluribus._HOMES.items() for name in names}
    assert sorted(shown) == sorted(f"pluribus.{place}" for place in homes)
    assert {place.rpartition(".")[2] for place in shown} == set(pluribus.__all__)
    assert "Run a federation and return its result." in page
    assert "doctest" not in page
    assert "&gt;&gt;&gt; " in page  # an example is code, not a quotation


def test_formulas_lists_and_blocks_of_code_are_no_longer_source() -> None:
    for name, page in pages().items():
        prose = without_code(page)
        assert "arithmatex" not in prose, name
        assert "```" not in prose, name
        assert not re.search(r"^(?:[-*|]|\d+\.) ", prose, re.MULTILINE), name  # a list or table that is read as text
        assert not re.search(r"\$[\w\\]", prose), name
    assert "<math" in pages()["methods/fedgh.html"]
    assert 'display="block"' in pages()["methods/fedl2g-l.html"]
    assert "python from" not in pages()["add-a-method.html"]


def test_no_page_asks_for_anything_from_elsewhere() -> None:
    for name, page in pages().items():
        assert re.findall(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//', page) == [], name
        assert re.findall(r'<link[^>]+href="(?:https?:)?//', page) == [], name
        assert 'class="mermaid"' not in page, name  # for which the theme would fetch a script
    for style in site().glob("**/*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8")


def test_a_browser_shows_and_searches_it_from_disk(browser: Browser) -> None:
    page = browser.open(f"{site().as_uri()}/methods/fedgh.html", width=390, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # wide tables scroll by themselves
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert page.evaluate("document.querySelector('math').getBoundingClientRect().height") > 5
    assert elsewhere(browser) == []
    page = browser.open(f"{site().as_uri()}/index.html")
    page.click(".md-search__input")
    page.keyboard.type("stragglers")
    until(page, "document.querySelectorAll('.md-search-result__item').length > 0")
    assert elsewhere(browser) == []
    assert browser.troubles == []


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_a_browser_shows_a_notebook(browser: Browser, width: int, scheme: Literal["light", "dark"]) -> None:
    page = browser.open(f"{site().as_uri()}/project/examples/new-method.html", width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (
        page.evaluate("[...document.querySelectorAll('.output img')].map(one => one.naturalWidth > 300)") == [True] * 2
    )
    assert page.evaluate("document.querySelectorAll('.output table').length") == 6
    assert (elsewhere(browser), browser.troubles) == ([], [])


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("index", 1200, "light"),
        ("quickstart", 375, "dark"),
        ("methods/fedl2g-l", 375, "light"),
        ("methods/fedl2g-l", 1200, "dark"),
        ("api", 1200, "dark"),
        ("reproduction", 375, "light"),
        ("project/examples/new-method", 1200, "light"),
        ("project/CHANGELOG", 375, "dark"),
    ],
)
def test_everybody_can_read_it(browser: Browser, name: str, width: int, scheme: Literal["light", "dark"]) -> None:
    """With a screen reader, with weak eyes and by keys."""
    assert violations(browser.open(f"{site().as_uri()}/{name}.html", width=width, scheme=scheme)) == []


def elsewhere(browser: Browser) -> list[str]:
    return [address for address in browser.requests if not address.startswith("file:")]
