"""Our metrics that a column of a paper is compared with, by name.

selected acc mean                accuracy in per cent: moment (selected on validation, or last), set, over clients
before last test weighted        the same in a given view; a method that lacks it shows its headline's view
KB per client and round          up and down, with headers; a KB is 1024 bytes, as in papers
rounds to 0.9                    rounds until the mean test accuracy first reached 0.9
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


def measure(name: str, one: Finished) -> float | None:
    """A metric of a run by its name, or None if the run lacks it."""
    if found := ACCURACY.fullmatch(name):
        view = found["view"] if found["view"] in one.run.result["summary"] else one.run.headline
        value = one.run.over_clients(view, found["moment"], found["of"]).get(found["over"])
        return None if value is None else 100 * value
    if found := TARGET.fullmatch(name):
        reached = one.reached.get(found["target"])
        return None if reached is None else reached[0] if found["what"] == "rounds" else reached[1] / KB
    if name == "KB per client and round":
        traffic = one.run.result["bytes"]["up"] + one.run.result["bytes"]["down"]
        return traffic / len(one.run.result["clients"]) / one.all_rounds / KB  # type: ignore[no-any-return]
    raise UnknownNameError(f"there is no metric '{name}'.")


def has_view(name: str, one: Finished) -> bool:
    """Whether a run has the view that a metric names. A metric without a view fits every run."""
    found = ACCURACY.fullmatch(name)
    return not (found and found["view"]) or found["view"] in one.run.result["summary"]


def targets(names: Iterable[str]) -> list[str]:
    """Target accuracies that some metrics name."""
    return sorted({found["target"] for name in names if (found := TARGET.fullmatch(name))})
