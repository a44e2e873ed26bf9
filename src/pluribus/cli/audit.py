"""pluribus audit: attack what the clients of a run upload."""

from __future__ import annotations

import dataclasses
from typing import Any

from pluribus.cli.flags import JSON, allow_flags, allowed, flag, parse, word
from pluribus.cli.greeter import print_answer

ABOUT = """\
Shows what the uploads of finished runs tell about private rows, by attacks on every field: what is disclosed by
construction, membership inference, and inversion to images. One web page has the numbers, the images and their limits.

  pluribus audit runs/a                       a table, and audit.html
  pluribus audit runs/a runs/a-private        with and without privacy, side by side

A run keeps no uploads: its clients work for one more round from the last checkpoint. Nothing is written to the folder.
"""


def audit(args: list[str]) -> None:
    """pluribus audit: attack what the clients of runs upload."""
    import tyro

    runs, most = tyro.conf.Positional[tuple[str, ...]], "Most clients that are attacked."
    flags: list[Any] = [
        ("runs", word(runs, "RUN...", "Folders of finished runs.", "(required)")),
        ("out", word(str, "FILE", "The page.", "(default: audit.html)"), "audit.html"),
        flag("clients", int, 10, most),
        flag("steps", int, 300, "Steps of the descent that looks for images."),
        flag(*JSON),
        *allow_flags(),
    ]
    given = parse(dataclasses.make_dataclass("Audit", flags), "pluribus audit", ABOUT, args)
    from pluribus.audit.audit import audit
    from pluribus.errors import MissingSettingError
    from pluribus.report import check_packages

    if not given.runs:
        raise MissingSettingError("name at least one run: pluribus audit runs/a.")
    check_packages("jinja2")
    found = audit(*given.runs, clients=given.clients, steps=given.steps, allow_code=allowed(given))
    path = found.save(given.out)

    def show() -> None:
        found.table()
        print(f"\nwrote {path}")

    print_answer(given.json, found.to_json, show)
