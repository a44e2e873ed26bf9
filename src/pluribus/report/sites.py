"""The sites of a federation, as its run folder knows them: when they last answered, and why they were missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from pluribus.evaluate import Chosen
from pluribus.storage.files import read_json, read_lines

MISSING = re.compile(r"site (\S+) is missing (.*?): (.*)", re.DOTALL)
SEEN = Path("link") / "seen.json"
NEVER = "not yet"


class Site(NamedTuple):
    """One row of the page."""

    name: str
    seen: str  # when it last answered, in the time of this machine
    model: str
    missing: int  # how often
    why: str  # when and why it was last missing
    test: float | None  # test metric in the selected round
    up: int  # bytes
    down: int
    epsilon: float | None  # spent so far; None: the run has no differential privacy


def is_federation(path: Path) -> bool:
    """Whether this is the run folder of `pluribus serve`."""
    return (path / SEEN).exists()


def read_sites(
    path: Path, history: Sequence[Mapping[str, Any]], chosen: Mapping[int, Chosen], sent: Counter[tuple[int, str]]
) -> tuple[Site, ...]:
    """Read the sites of a federation. A simulation has none."""
    if not is_federation(path):
        return ()
    seen, absences = read_json(path / SEEN), _read_absences(path / "missing.jsonl")
    agreed = path / "link" / "agreement.json"
    facts = read_json(agreed)["facts"] if agreed.exists() else {}
    return tuple(
        Site(
            name=str(name),
            seen=_format_time(time),
            model=str(facts[str(k)]["model"]) if str(k) in facts else "",
            missing=len(absences.get(name, ())),
            why=absences[name][-1] if name in absences else "",
            test=chosen[k].selected.get("test") if k in chosen else None,
            up=sent[k, "up"],
            down=sent[k, "down"],
            epsilon=_read_epsilon(history, k),
        )
        for k, (name, time) in enumerate(seen.items())
    )


def _format_time(time: str | None) -> str:
    return NEVER if time is None else f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M:%S}"


def _read_absences(path: Path) -> dict[str, list[str]]:
    """When and why each site was missing."""
    found: dict[str, list[str]] = {}
    for line in read_lines(path):
        if told := MISSING.fullmatch(str(line)):
            name, when, why = told.groups()
            found.setdefault(name, []).append(f"{when}: {why}")
    return found


def _read_epsilon(history: Sequence[Mapping[str, Any]], k: int) -> float | None:
    """What a client has spent. None: the run has no differential privacy."""
    return next((record["epsilon"][str(k)] for record in reversed(history) if str(k) in record["epsilon"]), None)
