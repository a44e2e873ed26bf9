"""pluribus reproduce: run the tables of papers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pluribus.cli.flags import JSON, QUIET, flag, is_shown, parse, word
from pluribus.cli.greeter import print_answer
from pluribus.internal.views import ABOUT, AFTER, View
from pluribus.storage.files import check_writable, write_text

ABOUT_REPRODUCE = """\
Runs the rows of a paper's table over several seeds, and shows our numbers beside the paper's.

Tables named claim-... show a paper's claim on embedded data. They hold no numbers from the paper, and take seconds to
minutes on a laptop.

  pluribus reproduce                                             list all tables, and what they need
  pluribus reproduce fedh2l-table2 --rounds 500 --seeds 1        run less than the paper; the heading says so
  pluribus reproduce fedh2l-table2 --summary benchmarks/results  show what was measured; run nothing

The same command resumes: what is finished, in --out or in a summary beside --save, is not run again. Rows that several
tables share are run once.
"""


def reproduce(args: list[str]) -> None:
    """pluribus reproduce: run a paper's table, or list all tables."""
    import tyro

    runs = "Folder of the runs of all tables."
    flags: list[Any] = [
        ("name", word(tyro.conf.Positional[str], "NAME", "The table.", "(default: list all)"), ""),
        ("seeds", word(int | None, "INT", "Number of seeds.", "(default: that of the table)"), None),
        ("rounds", word(int | None, "INT", "Rounds of every run.", "(default: that of the table)"), None),
        ("only", word(str, "ROW[,ROW...]", "Rows by name.", "(default: all)"), ""),
        flag("view", View, AFTER, f"For differences between rows. {ABOUT}"),
        ("jobs", word(int | None, "INT", "Runs at a time.", "(default: 1 on a GPU, otherwise one per core)"), None),
        flag("device", str, "auto", "cpu, cuda, mps, or auto."),
        ("out", word(str, "FOLDER", runs, "(default: runs/reproduce)"), "runs/reproduce"),
        ("save", word(str | None, "FILE", "Write the summary of the runs here.", "(default: OUT/NAME.json)"), None),
        ("summary", word(str | None, "PATH", "Run nothing: read this file or folder.", "(default: none)"), None),
        flag("markdown", str | None, None, "Write the tables to a file, as Markdown."),
        flag(*QUIET),
        flag(*JSON),
    ]
    given = parse(dataclasses.make_dataclass("Reproduce", flags), "pluribus reproduce", ABOUT_REPRODUCE, args)
    if not given.name:
        return _list_tables(given.json)
    from pluribus.study.reproduce.run import load_table, reproduce

    if given.markdown is not None:
        check_writable(Path(given.markdown))
    choices = {"seeds": given.seeds, "rounds": given.rounds, "view": given.view}
    choices["only"] = [word.strip() for word in given.only.split(",") if word.strip()]
    if given.summary is not None:
        found = load_table(given.name, given.summary, **choices)
    else:
        how = {name: getattr(given, name) for name in ("out", "save", "jobs", "device")}
        found = reproduce(given.name, **choices, **how, progress=is_shown(vars(given)))
    if given.markdown is not None:
        write_text(Path(given.markdown), found.to_markdown())
    print_answer(given.json, found.to_json, found.show)


def _list_tables(as_json: bool) -> None:
    from pluribus.listing import print_list
    from pluribus.study.reproduce.paper import find, names

    rows = [
        {"name": one.name, "about": one.title, "data": one.data, "needs": one.needs}
        | {"rows": ", ".join(row.label for row in one.rows)}
        for one in map(find, names())
    ]
    print_answer(as_json, lambda: {"tables": rows}, lambda: print_list(rows))
