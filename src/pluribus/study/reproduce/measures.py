"""Which of our figures a column of a paper compares with, in a few words.

selected acc mean                accuracies in per cent: last or selected on validation; of which set; over clients
before last test weighted        in this view; of a method that lacks it, in that of its headline
KB per client and round          up and down, headers included; KB are 1024 bytes, as papers have them
rounds to 0.9                    until the mean test accuracy was first there
KB to 0.9                        up and down, of all clients, until then
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pluribus.errors import UnknownNameError
from pluribus.study.reproduce.summary import Finished

KB = 1024
TARGET = re.compile(r"(?P<what>rounds|KB) to (?P<target>[\d.]+)")
ACCURACY = re.compile(r"((?P<view>\w+) )?(?P<moment>selected|last) (?P<of>\w+) (?P<over>mean|weighted|worst|best)")


def figure(name: str, one: Finished) -> float | None:
    """A figure of a run by its name; None where the run has none."""
    if found := ACCURACY.fullmatch(name):
        view = found["view"] if found["view"] in one.run.result["summary"] else one.run.headline
        value = one.run.over_clients(view, found["moment"], found["of"]).get(found["over"])
        return None if value is None else 100 * value
    if found := TARGET.fullmatch(name):
        reached = one.reached.get(found["target"])
        return None if reached is None else reached[0] if found["what"] == "rounds" else reached[1] / KB
    if name == "KB per client and round":
        travelled = one.run.result["bytes"]["up"] + one.run.result["bytes"]["down"]
        return travelled / len(one.run.result["clients"]) / one.all_rounds / KB  # type: ignore[no-any-return]
    raise UnknownNameError(f"there is no figure '{name}'.")


def has_view(name: str, one: Finished) -> bool:
    """Whether a run has the view that a figure asks for; any will do for one that asks for none."""
    found = ACCURACY.fullmatch(name)
    return not (found and found["view"]) or found["view"] in one.run.result["summary"]


def targets(names: Iterable[str]) -> list[str]:
    """Accuracies that some figures ask for."""
    return sorted({found["target"] for name in names if (found := TARGET.fullmatch(name))})
