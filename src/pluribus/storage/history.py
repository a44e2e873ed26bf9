"""metrics.jsonl, traffic.jsonl and result.json. They are checked as they are read: anybody may have written them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pluribus.errors import DamagedFileError
from pluribus.internal.ledger import DIRECTIONS
from pluribus.internal.metrics import LOSS, METRICS
from pluribus.storage.checks import (
    Check,
    first_wrong,
    is_client,
    is_count,
    is_count_or_none,
    is_list,
    is_number,
    is_number_or_none,
    is_table,
    is_text,
    read_checked_lines,
)
from pluribus.storage.files import read_json

REMEDY = "Restore the file, or start a new run."


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of the rounds. All clients have the metrics that the first one has."""
    first: dict[str, Any] = {}

    def problem(line: Any) -> str | None:
        if wrong := _problem(line, NEEDED, FURTHER):
            return wrong
        for key, views in line["clients"].items():
            for view, figures in views.items():
                if missing := first.setdefault(view, figures).keys() - figures.keys():
                    return f"client {key} lacks the metric {min(missing)!r:.40}"
        return None

    return read_checked_lines(path, problem, REMEDY)


def read_traffic(path: Path) -> list[dict[str, Any]]:
    """The layouts of messages, and the transfers, each of which names a layout before it."""
    layouts = 0

    def problem(line: Any) -> str | None:
        nonlocal layouts
        if isinstance(line, dict) and "tensors" in line:
            layouts += 1
            return first_wrong(line, {"tensors": is_table(is_text, is_count)})
        transfer = dict.fromkeys(("round", "exchange", "client"), is_count)
        return first_wrong(
            line, transfer | {"direction": DIRECTIONS.__contains__, "layout": range(layouts).__contains__}, True
        )

    return read_checked_lines(path, problem, REMEDY)


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    saved = read_json(path)
    if wrong := _problem(saved, NEEDED_SUMMARY, FURTHER_SUMMARY):
        raise DamagedFileError(f"{path} is damaged: {wrong}. {REMEDY}")
    return dict(saved)


def _problem(line: Any, needed: Mapping[str, Check], further: Mapping[str, Check]) -> str | None:
    """What is wrong with the fields of a line. Versions before wrote only some of the `further` ones."""
    known = line if isinstance(line, dict) else {}
    return first_wrong(line, {**needed, **{name: check for name, check in further.items() if name in known}})


def _is_view(figures: Any) -> bool:
    return is_table(_is_metric, is_number_or_none)(figures) and "val" in figures


def is_summary(views: Any) -> bool:
    """Whether these are metrics over clients, as a finished run has them: view, `last` or `selected`, metric."""
    return is_table(is_text, _is_moments)(views) and bool(views)


def _is_moments(moments: Any) -> bool:
    return first_wrong(moments, {"last": _is_moment, "selected": _is_moment}) is None


def _is_moment(metrics: Any) -> bool:
    """Empty if no client was evaluated. Versions before wrote only some of the numbers, but always the mean."""
    is_metric = is_table(is_text, is_number_or_none)
    has_mean = is_table(is_text, lambda row: is_metric(row) and "mean" in row)
    return has_mean(metrics) and (not metrics or "test" in metrics)


def is_figures(figures: Any) -> bool:
    """Whether these are the metrics of a client."""
    return is_table(is_text, is_number_or_none)(figures)


def _is_metric(key: Any) -> bool:
    """Whether this is the key of a metric, such as test, test_loss or val_f1."""
    return isinstance(key, str) and key.partition("_")[2] in ("", LOSS, *METRICS)


SPENT: dict[str, Check] = {"epsilon": is_table(is_client, is_number), "used_up": is_list(is_count)}
NEEDED: dict[str, Check] = {
    "round": is_count,
    "seconds": is_number,
    "clients": is_table(is_client, is_table(is_text, _is_view)),
}
FURTHER: dict[str, Check] = {
    "metric": lambda name: is_text(name) and name in METRICS,
    "loss": is_number_or_none,
    "mean": is_table(is_text, is_table(is_text, is_table(is_text, is_number_or_none))),
    "bytes": is_table(is_text, is_count),
    "steps": is_table(is_client, is_count),
    "spans": is_table(is_text, is_number),
    "notes": is_table(is_text, lambda note: True),
    "present": is_count,
    "answered": is_count,
    "attackers": is_list(is_count),
    "privacy": lambda spent: first_wrong(spent, SPENT) is None,
}

FACTS: dict[str, Check] = {
    "model": is_text,
    "classes": is_list(is_text),
    "train": is_count_or_none,
    "test": is_count_or_none,
}
FURTHER_FACTS: dict[str, Check] = {
    "name": is_text,
    "exams": lambda sizes: is_list(is_count)(sizes) and len(sizes) == 2,
}
NEEDED_SUMMARY: dict[str, Check] = {
    "method": is_text,
    "data": is_text,
    "seed": lambda seed: type(seed) is int,
    "rounds": is_count,
    "warnings": is_list(is_text),
    "summary": is_summary,
    "clients": is_table(is_client, lambda row: not _problem(row, FACTS, FURTHER_FACTS)),
}
FURTHER_SUMMARY: dict[str, Check] = {
    "warmup": is_count,
    "classes": is_list(is_text),
    "metric": FURTHER["metric"],
    "confusion": lambda table: isinstance(table, dict),
    "epsilon": is_number,
}
