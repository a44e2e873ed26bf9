"""pluribus check: hold a method, a model or a data set to what it promises."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal

from pluribus.cli.flags import JSON, flag, parse, word
from pluribus.storage.files import to_json

ABOUT = """\
Checks what a method, a model or a data set promises, one line per promise. A failure shows what was found, what to
change, and the smallest case that fails.

  pluribus check my_file.MyMethod   a method, or a name of pluribus list methods
  pluribus check my_file.my_net     a model, or a name of pluribus list models
  pluribus check photos/            data: a folder, a file, a function or a name

The exit status is 0 if no promise is broken, and 1 otherwise.
"""


def check(args: list[str]) -> None:
    """pluribus check: check a method, a model or a data set."""
    import tyro

    target = "A name, a path, or package.module.name of your own code."
    kind = "What TARGET is, if it could be several things. Default: a method, then a model, then data."
    flags: list[Any] = [
        ("target", word(tyro.conf.Positional[str], "TARGET", target, "(required)")),
        flag("kind", Literal["method", "model", "data"] | None, None, kind),
        flag("device", Literal["auto", "cpu"], "auto", "cpu: do not compare captured steps on a GPU."),
        flag(
            "shape", str | None, None, "Models: sizes of one row, such as 3x32x32. Default: small rows that it takes."
        ),
        flag("classes", int, 10, "Models: number of classes."),
        flag(*JSON),
    ]
    given = parse(dataclasses.make_dataclass("Check", flags), "pluribus check", ABOUT, args)
    settings = {name: value for name, value in vars(given).items() if name not in ("target", "json")}

    from pluribus.conformance.check import check

    report = check(given.target, progress=not given.json, **settings)
    if given.json:
        print(to_json(report.to_json()))
    if not report.passed:
        sys.exit(1)
