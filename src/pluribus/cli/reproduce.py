"""pluribus reproduce: run the tables of papers."""

from __future__ import annotations

import json
from typing import Any

from pluribus.cli.flags import JSON, flag, parse, word

ABOUT_REPRODUCE = """\
Runs the rows of a paper's table over several seeds, and shows our numbers beside the paper's.

Tables named claim-... show a paper's claim on embedded data. They hold no numbers from the paper, and take seconds to
minutes on a laptop.

  pluribus reproduce                                            list all tables, and what they need
  pluribus reproduce fedh2l-table2 --rounds 500 --seeds 1       run less than the paper; the heading says so
  pluribus reproduce fedh2l-table2 --summary benchmarks/results show what was measured; run nothing

The same command resumes: what is finished, in --out or in a summary beside --save, is not run again. Rows that several
tables share are run once.
"""


def reproduce(args: list[str]) -> None:
    """pluribus reproduce: run a paper's table, or list all tables."""
    import dataclasses

    import tyro

    from pluribus.internal.views import ABOUT, AFTER, View

    runs = "Folder of the runs of all tables."
    flags: list[Any] = [
        ("name", word(tyro.conf.Positional[str], "NAME", "The table.", "(default: list all)"), ""),
        ("seeds", word(int | None, "INT", "Number of seeds.", "(default: that of the table)"), None),
        ("rounds", word(int | None, "INT", "Rounds of every run.", "(default: that of the table)"), None),
        ("only", word(str, "ROW[,ROW...]", "Rows by name.", "(default: all)"), ""),
        flag("view", View, AFTER, f"For differences between rows. {ABOUT}"),
        (
            "jobs",
            word(int | None, "INT", "Runs at a time.", "(default: 1 on a GPU, otherwise one per core)"),
            None,
        ),
        flag("device", str, "auto", "cpu, cuda, or auto."),
        ("out", word(str, "FOLDER", runs, "(default: runs/reproduce)"), "runs/reproduce"),
        (
            "save",
            word(str | None, "FILE", "Write the summary of the runs here.", "(default: OUT/NAME.json)"),
            None,
        ),
        (
            "summary",
            word(str | None, "PATH", "Run nothing: read this file or folder.", "(default: none)"),
            None,
        ),
        flag("markdown", str | None, None, "Write the tables to a file, as Markdown."),
        flag(*JSON),
    ]
    given = parse(dataclasses.make_dataclass("Reproduce", flags), "pluribus reproduce", ABOUT_REPRODUCE, args)
    if not given.name:
        return _list_tables(given.json)
    from pathlib import Path

    from pluribus.storage.files import check_place, to_json, write_text
    from pluribus.study.reproduce.run import reproduce, shown

    if given.markdown is not None:
        check_place(Path(given.markdown))
    choices = {"seeds": given.seeds, "rounds": given.rounds, "view": given.view}
    choices["only"] = [word.strip() for word in given.only.split(",") if word.strip()]
    if given.summary is not None:
        found = shown(given.name, given.summary, **choices)
    else:
        how = {name: getattr(given, name) for name in ("out", "save", "jobs", "device")}
        found = reproduce(given.name, **choices, **how, progress=not given.json)
    if given.markdown is not None:
        write_text(Path(given.markdown), found.to_markdown())
    if given.json:
        print(to_json(found.to_json()))
    else:
        found.show()


def _list_tables(as_json: bool) -> None:
    from pluribus.listing import print_list
    from pluribus.study.reproduce.paper import find, names

    tables = [find(name) for name in names()]
    rows = [
        {"name": one.name, "about": one.title, "data": one.data, "needs": one.needs}
        | {"rows": ", ".join(row.name for row in one.rows)}
        for one in tables
    ]
    if as_json:
        print(json.dumps({"tables": rows}))
    else:
        print_list(rows)
