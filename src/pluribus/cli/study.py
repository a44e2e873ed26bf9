"""pluribus study: compare rows over axes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pluribus.cli.flags import JSON, QUIET, TRACK, flag, is_shown, parse, word
from pluribus.cli.greeter import print_answer
from pluribus.errors import UnfinishedError
from pluribus.internal.views import ABOUT, View

ABOUT_STUDY = """\
Runs the rows of a file at every point of its axes over several seeds, and prints one table.

  pluribus study my.toml --jobs 4 --out runs/my --latex table.tex \\
    --plot figure.png

  title = "Server step of FedGH"
  seeds = 5
  baseline = "alone"
  [settings]
  clients = 10
  [axes]
  alpha = [0.1, 1.0]
  [rows.alone]
  method = "local"
  [rows.client]
  method = "fedgh"
  settings = {server_step = "client"}

[settings] are those of pluribus run, and hold for all rows. [axes] are settings with several values each, and every
combination of the values is a point. A hyper-parameter in one of them is for the rows that have it. The settings of a
row are hyper-parameters and training settings. The whole file is checked before the first run starts.

The same command with the same --out continues: finished runs are read, stopped runs are resumed.
"""


def study(args: list[str]) -> None:
    """pluribus study: run a study."""
    import tyro

    of_file, many = "(default: that of the file)", "(default: 1 on a GPU, otherwise one per core)"
    formats = {"markdown": "Markdown", "csv": "CSV, unrounded", "latex": "LaTeX (booktabs)"}
    flags: list[Any] = [
        ("file", word(tyro.conf.Positional[str], "FILE", "The study, a TOML file.", "(required)"), ""),
        ("seeds", word(int | None, "INT", "Number of seeds.", of_file), None),
        ("rounds", word(int | None, "INT", "Rounds of every run.", of_file), None),
        ("only", word(str, "ROW[,ROW...]", "Rows by label.", "(default: all)"), ""),
        ("baseline", word(str | None, "ROW", "Row that the others are compared with.", of_file), None),
        ("view", word(View | None, "VIEW", f"{ABOUT} after, before or own.", of_file), None),
        ("jobs", word(int | None, "INT", "Runs at a time.", many), None),
        ("device", word(str | None, "DEVICE", "cpu, cuda, mps, or auto.", of_file), None),
        ("out", word(str | None, "FOLDER", "Folder of the runs.", "(default: a new folder under runs/)"), None),
        flag(*TRACK),
        *(flag(kind, str | None, None, f"Write the tables to a file as {name}.") for kind, name in formats.items()),
        flag("plot", str | None, None, "Write the figure to a .png, .pdf or .svg file."),
        flag(*QUIET),
        flag(*JSON),
    ]
    given = parse(dataclasses.make_dataclass("Study", flags), "pluribus study", ABOUT_STUDY, args)
    _run(given, {Path(path): kind for kind in formats if (path := getattr(given, kind)) is not None})


def _run(given: Any, paths: dict[Path, str]) -> None:
    from pluribus.errors import MissingSettingError
    from pluribus.storage.files import check_writable
    from pluribus.study.figure import check_plot
    from pluribus.study.grid import new_folder
    from pluribus.study.study import study

    if not given.file:
        raise MissingSettingError("name the file of the study: pluribus study FILE. pluribus study --help shows one.")
    for path in paths:
        check_writable(path)
    if given.plot is not None:
        check_plot(given.plot)
    changes = {name: getattr(given, name) for name in ("seeds", "rounds", "baseline", "view", "device")}
    how = {name: getattr(given, name) for name in ("jobs", "track")}
    how["only"] = [word.strip() for word in given.only.split(",") if word.strip()]
    how["out"] = given.out or new_folder("study", Path(given.file).stem)
    changes = {name: value for name, value in changes.items() if value is not None}
    try:
        found = study(Path(given.file), progress=is_shown(vars(given)), **changes, **how)
    except UnfinishedError as error:
        if error.partial is not None and not given.json:
            error.partial.table()
        raise
    for path, kind in paths.items():
        getattr(found, f"to_{kind}")(path)
    if given.plot is not None:
        found.plot(given.plot)
    print_answer(given.json, found.to_json, found.table)
