"""The list of the runs below a folder, live: how far each is, and how long it will still take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from jinja2 import Template
from markupsafe import Markup

from pluribus.errors import PluribusError
from pluribus.report.numbers import Brief, find_runs, in_use, read_brief
from pluribus.report.page import page_policy, page_style, read_script, read_template
from pluribus.storage.code import Allow

FILES = ("config.toml", "metrics.jsonl", "result.json")  # what a row is made of


class Row(NamedTuple):
    """One run of the list: what is known about it, or why it cannot be read."""

    name: str  # path below the folder
    link: str
    run: Brief | None
    problem: str = ""


class Overview:
    """The runs below a folder. A run is read again when its files have changed."""

    def __init__(self, folder: Path, allow: Allow = False) -> None:
        self.folder, self._allow = folder, allow
        self._known: dict[Path, tuple[Any, Row]] = {}

    def find(self) -> dict[str, Path]:
        """The run folders by their paths below the folder, with slashes. There may be none yet."""
        return {path.relative_to(self.folder).as_posix(): path for path in find_runs(self.folder)}

    def rows(self) -> list[Row]:
        """Running runs first, then the others, by name."""
        rows = [self._row(name, path) for name, path in self.find().items()]
        return sorted(rows, key=lambda row: (row.run is None or row.run.state != "running", row.name))

    def page(self) -> str:
        """The page, which asks its server for updates of the list."""
        script = read_script("list.js")
        policy = page_policy(script, live=True)
        return self._template().render(self._values(), policy=policy, style=page_style(), script=Markup(script))

    def content(self) -> dict[str, Any]:
        """The part of the page that changes, as plain values."""
        template = self._template()
        return {"list": "".join(template.blocks["list"](template.new_context(self._values())))}

    def _template(self) -> Template:
        return read_template("pluribus.report", "list.html")

    def _values(self) -> dict[str, Any]:
        from pluribus import __version__

        return {"title": self.folder.resolve().name, "version": __version__, "rows": self.rows()}

    def _row(self, name: str, path: Path) -> Row:
        stamp = in_use(path), [_stamp(path / file) for file in FILES]
        if path not in self._known or self._known[path][0] != stamp:
            self._known[path] = stamp, self._read(name, path)
        return self._known[path][1]

    def _read(self, name: str, path: Path) -> Row:
        link = f"/runs/{quote(name)}/"
        try:
            return Row(name, link, read_brief(path, self._allow))
        except PluribusError as error:
            return Row(name, link, None, error.sentence)


def _stamp(file: Path) -> Any:
    try:
        facts = file.stat()
    except OSError:  # not there yet
        return None
    return facts.st_mtime_ns, facts.st_size
