"""The sites of a federation, read from its folder."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pluribus.evaluate import Chosen
from pluribus.report.sites import NEVER, read_sites

SEEN = {"north": "2026-11-18T09:07:17Z", "south": None}
SENT: Counter[tuple[int, str]] = Counter({(0, "up"): 10, (0, "down"): 20, (1, "down"): 5})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "seen.json").write_text(json.dumps(SEEN))
    return tmp_path


def rows(folder: Path, history: list[dict[str, Any]] | None = None, chosen: dict[int, Chosen] | None = None) -> Any:
    return {site.name: site for site in read_sites(folder, history or [], chosen or {}, SENT)}


def test_a_simulation_has_no_sites(tmp_path: Path) -> None:
    assert read_sites(tmp_path, [], {}, Counter()) == ()


def test_before_the_first_round(folder: Path) -> None:
    """South has not come yet: there is no agreement and no record."""
    found = rows(folder)
    assert list(found) == ["north", "south"]
    assert (found["south"].seen, found["south"].model, found["south"].test) == (NEVER, "", None)
    assert found["north"].seen != NEVER
    assert (found["north"].up, found["north"].down, found["south"].up) == (10, 20, 0)


def test_who_was_missing_and_why(folder: Path) -> None:
    told = ["site south is missing at enrolment: late", "site south is missing in round 3: a: b", "something else"]
    (folder / "missing.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in told))
    found = rows(folder)
    assert (found["south"].missing, found["south"].why) == (2, "in round 3: a: b")
    assert (found["north"].missing, found["north"].why) == (0, "")


def test_the_newest_epsilon(folder: Path) -> None:
    found = rows(folder, [{"epsilon": {"0": 1.0, "1": 2.0}}, {"epsilon": {"0": 3.0}}])
    assert (found["north"].epsilon, found["south"].epsilon) == (3.0, 2.0)
    found = rows(folder, [{"epsilon": {}}])
    assert (found["north"].epsilon, found["south"].epsilon) == (None, None)
