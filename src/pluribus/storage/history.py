"""metrics.jsonl, traffic.jsonl and result.json. They are checked as they are read: anybody may have written them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pluribus.errors import DamagedFileError
from pluribus.internal.ledger import DIRECTIONS
from pluribus.internal.metrics import LOSS, METRICS
from pluribus.storage.files import read_json, read_lines

Check = Callable[[Any], bool]
MOST = 2**63  # of a count


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of the rounds. All clients have the metrics that the first one has."""
    first: dict[str, Any] = {}

    def problem(line: Mapping[str, Any]) -> str | None:
        if wrong := _problem(line, NEEDED, FURTHER):
            return wrong
        for key, views in line["clients"].items():
            for view, figures in views.items():
                if missing := first.setdefault(view, figures).keys() - figures.keys():
                    return f"client {key} lacks the metric {min(missing)!r:.40}"
        return None

    return list(_checked(path, problem))


def read_traffic(path: Path) -> list[dict[str, Any]]:
    """The layouts of messages, and the transfers, each of which names a layout before it."""
    layouts = 0

    def problem(line: Mapping[str, Any]) -> str | None:
        nonlocal layouts
        if "tensors" in line:
            layouts += 1
            return _first_wrong(line, {"tensors": _is_table(_is_text, _is_count)})
        transfer = dict.fromkeys(("round", "exchange", "client"), _is_count)
        return _first_wrong(
            line, transfer | {"direction": DIRECTIONS.__contains__, "layout": range(layouts).__contains__}, True
        )

    return list(_checked(path, problem))


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    saved = read_json(path)
    wrong = _problem(saved, NEEDED_SUMMARY, FURTHER_SUMMARY) if isinstance(saved, dict) else f"it is {saved!r:.40}"
    if wrong:
        raise DamagedFileError(f"{path} is damaged: {wrong}. Restore the file, or start a new run.")
    return dict(saved)


def _checked(path: Path, problem: Callable[[Mapping[str, Any]], str | None]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_lines(path), 1):
        wrong = problem(line) if isinstance(line, dict) else f"it is {line!r:.40}"
        if wrong:
            raise DamagedFileError(
                f"{path} is damaged in line {number}: {wrong}. Restore the file, or start a new run."
            )
        yield line


def _first_wrong(line: Mapping[str, Any], checks: Mapping[str, Check], closed: bool = False) -> str | None:
    """What is wrong with the fields of a line. `closed`: it has no others."""
    for name, check in checks.items():
        if name not in line:
            return f"'{name}' is missing"
        if not check(line[name]):
            return f"'{name}' cannot be {line[name]!r:.40}"
    return next((f"'{name:.40}' is unknown" for name in line if name not in checks), None) if closed else None


def _problem(line: Mapping[str, Any], needed: Mapping[str, Check], further: Mapping[str, Check]) -> str | None:
    """What is wrong with the fields of a line. Versions before wrote only some of the `further` ones."""
    return _first_wrong(line, {**needed, **{name: check for name, check in further.items() if name in line}})


def _is_table(is_key: Check, is_value: Check) -> Check:
    return lambda table: isinstance(table, dict) and all(is_key(k) and is_value(v) for k, v in table.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(is_value: Check) -> Check:
    return lambda values: isinstance(values, list) and all(map(is_value, values))


def _is_client(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < MOST)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_view(figures: Any) -> bool:
    return _is_table(_is_metric, _is_number_or_none)(figures) and "val" in figures


def _is_metric(key: Any) -> bool:
    """Whether this is the key of a metric, such as test, test_loss or val_f1."""
    return isinstance(key, str) and key.partition("_")[2] in ("", LOSS, *METRICS)


NEEDED: dict[str, Check] = {
    "round": _is_count,
    "seconds": _is_number,
    "clients": _is_table(_is_client, _is_table(_is_text, _is_view)),
}
FURTHER: dict[str, Check] = {
    "metric": lambda name: _is_text(name) and name in METRICS,
    "loss": _is_number_or_none,
    "mean": _is_table(_is_text, _is_table(_is_text, _is_table(_is_text, _is_number_or_none))),
    "bytes": _is_table(_is_text, _is_count),
    "steps": _is_table(_is_client, _is_count),
    "spans": _is_table(_is_text, _is_number),
    "notes": _is_table(_is_text, lambda note: True),
}

FACTS: dict[str, Check] = {
    "model": _is_text,
    "classes": _is_list(_is_text),
    "train": _is_count_or_none,
    "test": _is_count_or_none,
}
FURTHER_FACTS: dict[str, Check] = {
    "name": _is_text,
    "exams": lambda sizes: _is_list(_is_count)(sizes) and len(sizes) == 2,
}
NEEDED_SUMMARY: dict[str, Check] = {
    "method": _is_text,
    "data": _is_text,
    "seed": lambda seed: type(seed) is int,
    "rounds": _is_count,
    "warnings": _is_list(_is_text),
    "summary": lambda views: _is_table(_is_text, lambda view: isinstance(view, dict))(views) and bool(views),
    "clients": _is_table(_is_client, lambda row: isinstance(row, dict) and not _problem(row, FACTS, FURTHER_FACTS)),
}
FURTHER_SUMMARY: dict[str, Check] = {
    "warmup": _is_count,
    "classes": _is_list(_is_text),
    "metric": FURTHER["metric"],
    "confusion": lambda table: isinstance(table, dict),
}
