"""pluribus list and data check: list the choices, and show what a data set holds."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from pluribus.cli.flags import (
    JSON,
    explanations,
    flag,
    flags_of,
    kinds_of,
    parse,
    parse_groups,
    parse_words,
    take_flag,
    word,
)
from pluribus.cli.greeter import print_answer
from pluribus.errors import UnknownNameError, unknown
from pluribus.settings import flag_name

ABOUT_DATA = """\
Shows what a data set holds: images per class, domain and split, their shapes and depths, which files are skipped and
which cannot be read, which images are scaled or rotated, and which are duplicates. Of signals, texts and tables: the
shape of a row, the classes or numbers to predict, and who holds the rows.

  pluribus data check photos/           a folder of images
  pluribus data check mine.npz          a file
  pluribus data check wards.csv --columns label=ward,client=city
  pluribus data check cifar10           a name of pluribus list data

The exit status is 0 if it can be read, and 2 if not.
"""


ABOUT_LISTS = """\
Lists what you can choose from. PATTERN selects names:

  pluribus list models                  all models
  pluribus list models 'resnet*'        models whose name begins with resnet
  pluribus list models --takes signal   models for signals; others take image, tokens, table or tensor
  pluribus list methods --help          the flags of this list
"""
ABOUT_METHODS = """\
Lists every method, what it sends and how many bytes: on its own default task, or on the given one. A PATTERN after
`methods` selects names: pluribus list methods 'fed*'.
"""


def show_list(args: list[str]) -> None:
    """pluribus list: list methods, models, groups, data or partitions."""
    from pluribus.listing import LISTS, print_list

    if args[:1] == ["methods"]:
        return _list_methods(args[1:])
    lists = ["methods", *LISTS]
    takes, args = take_flag(args, "--takes") if args[:1] == ["models"] else (None, args)
    words, as_json = parse_words("list", f"{{{','.join(lists)}}} [PATTERN]", ABOUT_LISTS, args, most=2)
    what, pattern = (*words, "*")[:2]
    if what not in LISTS:
        raise unknown("list", what, lists, "pluribus list --help")
    rows = LISTS[what](pattern) if takes is None else LISTS[what](pattern, takes=takes)
    _check_any(rows, what, pattern)
    print_answer(as_json, lambda: {what: rows}, lambda: print_list(rows))


def _list_methods(args: list[str]) -> None:
    from pluribus.experiment import SETTINGS, Experiment
    from pluribus.listing import TASK, list_methods, need_names, print_methods

    pattern, args = (args[0], args[1:]) if args and not args[0].startswith("-") else ("*", args)
    helps, kinds = explanations(Experiment), kinds_of(Experiment)
    groups = {group: [flag(name, kinds[name] | None, None, helps[name]) for name in SETTINGS[group]] for group in TASK}
    needs = f"Only methods that need all of these, comma-separated: {', '.join(need_names())}. Or nothing."
    groups["output"] = [flag("needs", str | None, None, needs), flag(*JSON)]
    parsed = parse_groups(groups, "pluribus list methods", ABOUT_METHODS, args)
    settings = {k: v for group in TASK for k, v in vars(getattr(parsed, group)).items() if v is not None}
    rows = list_methods(pattern, needs=parsed.output.needs, **settings)
    _check_any(rows, "methods", pattern)
    given = " ".join(f"{flag_name(name)} {value}" for name, value in settings.items())
    heading = f"with {given}" if given else "each on its default task"
    print_answer(parsed.output.json, lambda: {"methods": rows}, lambda: print_methods(rows, heading))


def _check_any(rows: list[Any], what: str, pattern: str) -> None:
    if not rows:
        raise UnknownNameError(f"no {what} match '{pattern}'. pluribus list {what} shows all.")


def data(args: list[str]) -> None:
    """pluribus data check: show what a data set holds."""
    import tyro

    if args and args[0] != "check" and not args[0].startswith("-"):
        raise unknown("command", f"data {args[0]}", ["data check"], "pluribus --help")
    from pluribus.data.reading import DEFAULT, Reading
    from pluribus.experiment import Experiment

    path = "A folder of images, a file (npz, CSV, TSV, JSONL, Parquet), or the name of a data set."
    flags: list[Any] = [
        ("path", word(tyro.conf.Positional[str], "PATH", path, "(required)")),
        *flags_of(Experiment, Reading._fields, DEFAULT._asdict() | {"columns": ""}),
        flag("json", bool, False, "Print what was found as one JSON object, and nothing else."),
    ]
    form = dataclasses.make_dataclass("DataCheck", flags)
    given = parse(form, "pluribus data check", ABOUT_DATA, args[1:] if args[:1] == ["check"] else args)
    from pluribus.data.check import check_data
    from pluribus.terminal import print_data_check

    how = {name: getattr(given, name) for name in Reading._fields}
    found = check_data(given.path, **how)
    print_answer(given.json, found.to_json, lambda: print_data_check(found))
    if found.problem is not None:
        print(f"error: {found.problem}", file=sys.stderr)
        sys.exit(2)
