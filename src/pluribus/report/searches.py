"""Searches of `pluribus tune`, as their folders tell: the settings and the score of every trial."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pluribus.errors import PluribusError
from pluribus.storage.checks import is_count, is_number, is_table, is_text
from pluribus.storage.files import read_json, read_lines
from pluribus.study.proposal import PRUNED
from pluribus.study.space import parse_space

TRIALS = "trials.jsonl"
DIVERGED = 1e300  # a search writes the worst value that there is for training that diverged


@dataclass(frozen=True)
class Trial:
    """One trial. `score` is None if training diverged or a pruner stopped the trial."""

    number: int
    settings: dict[str, Any]
    score: float | None


@dataclass(frozen=True)
class Search:
    """The trials of a method."""

    path: Path
    trials: list[Trial] = field(default_factory=list)
    logarithmic: frozenset[str] = frozenset()  # settings that were searched on a logarithmic scale
    problem: str = ""


def search_folder(run: Path) -> Path | None:
    """The folder of the search that a run is a trial of: LABEL of LABEL/trial-3, or of LABEL/trial-3/seed-0."""
    return next((folder for folder in list(run.parents)[:2] if (folder / TRIALS).is_file()), None)


def find_searches(runs: Iterable[Path]) -> list[Search]:
    """The searches that runs are trials of."""
    return [_read(path) for path in dict.fromkeys(map(search_folder, runs)) if path is not None]


def _read(path: Path) -> Search:
    try:
        lines = read_lines(path / TRIALS)
        trials = [_trial(line) for line in lines]
        known = [one for one in trials if one is not None]
        problem = f"{path / TRIALS} is damaged: some of its lines hold no trial." if len(known) < len(lines) else ""
        return Search(path, known, _logarithmic(path / "search.json"), problem)
    except PluribusError as error:
        return Search(path, problem=error.sentence)
    except OSError as error:
        return Search(path, problem=f"cannot read {path}: {error.strerror}.")


def _trial(line: Any) -> Trial | None:
    """A trial, from a line that may have more than is needed here."""
    if not isinstance(line, dict) or not is_count(line.get("trial")):
        return None
    settings, score = line.get("settings"), line.get("score")
    if not is_table(is_text, lambda value: is_text(value) or is_number(value))(settings):
        return None
    ended = line.get("state") != PRUNED  # otherwise the score is that of a round, not of the trial
    known = score if ended and isinstance(score, int | float) and is_number(score) else None
    return Trial(line["trial"], dict(settings or {}), None if known is None or abs(known) >= DIVERGED else float(known))


def _logarithmic(path: Path) -> frozenset[str]:
    saved = read_json(path) if path.is_file() else {}
    space = saved.get("space") if isinstance(saved, dict) else None
    ranges = parse_space(space) if isinstance(space, str) else {}
    return frozenset(name for name, one in ranges.items() if one.log)
