"""What `pluribus compare` wrote about its runs: labels, baseline, target and view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pluribus.errors import DamagedFileError, PluribusError
from pluribus.storage.checks import Check, first_wrong, is_list, is_number, is_table, is_text
from pluribus.storage.files import read_json

if TYPE_CHECKING:
    from pluribus.report.numbers import Run

FILE = "compare.json"
CHECKS: dict[str, Check] = {
    "labels": is_list(is_text),
    "baseline": is_text,
    "target": is_number,
    "view": is_text,
    "equal_steps": lambda value: isinstance(value, bool),
}
is_overruled = is_table(is_text, is_table(is_text, lambda value: True))


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison."""

    labels: tuple[str, ...]
    baseline: str
    target: float
    view: str
    equal_steps: bool
    overruled: dict[str, dict[str, Any]]  # by label, training defaults of the method that were replaced


def find_plan(runs: Iterable[Run]) -> tuple[Plan | None, str]:
    """The plan of the comparison that all runs belong to, if there is one, and what is wrong with its file."""
    folders = {run.path.parent for run in runs}
    if len(folders) != 1 or not (path := folders.pop() / FILE).is_file():
        return None, ""
    try:
        return _read(path), ""
    except PluribusError as error:
        return None, error.sentence
    except OSError as error:
        return None, f"cannot read {path}: {error.strerror}."


def _read(path: Path) -> Plan:
    saved = read_json(path)
    wrong = first_wrong(saved, CHECKS)
    if wrong is None and not is_overruled(saved.get("overruled", {})):
        wrong = "'overruled' holds no settings"
    if wrong is not None:
        raise DamagedFileError(f"{path} is damaged: {wrong}. Its baseline, target and view are not used.")
    known = {name: saved[name] for name in CHECKS}
    return Plan(**known | {"labels": tuple(saved["labels"])}, overruled=saved.get("overruled", {}))
