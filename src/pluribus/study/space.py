"""What a search tries: a range of values for every setting that it searches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pluribus import errors
from pluribus.experiment import TRAINING, Experiment
from pluribus.method import hyperparameters
from pluribus.settings import convert_fields
from pluribus.storage.checks import is_number

SPACE = "lr=1e-3:1e-1:log"
MOST_WHOLE = 2**53  # beyond, a float does not hold every whole number


@dataclass(frozen=True)
class Range:
    """Values to try: an interval, on a linear or logarithmic scale, or a choice."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()
    whole: bool = False
    """Whether the interval is one of whole numbers."""

    @classmethod
    def of(cls, name: str, text: str) -> Range:
        """Parse `1e-3:1e-1:log`, `1:5` or `class|client`."""
        if "|" in text:
            return cls(choices=tuple(text.split("|")))
        low, _, rest = text.partition(":")
        high, _, scale = rest.partition(":")
        try:
            found = cls(float(low), float(high), scale == "log")
        except ValueError:
            found = cls()
        ordered = found.low < found.high and math.isfinite(found.high - found.low)
        if scale not in ("", "log") or not ordered or (found.log and found.low <= 0):
            raise errors.FormatError(f"--space takes LOW:HIGH, LOW:HIGH:log or ONE|OTHER for {name}, not '{text}'.")
        return found

    def fit(self, name: str, now: Any) -> Range:
        """The range of a setting, whose present value says of what kind its values are."""
        if self.choices:
            return replace(self, choices=tuple(_parse_choice(name, text, now) for text in self.choices))
        if isinstance(now, bool | str):
            raise errors.FormatError(f"--space takes a choice for {name}, such as ONE|OTHER, not an interval.")
        if not isinstance(now, int):
            return self
        if any(not end.is_integer() or abs(end) >= MOST_WHOLE for end in (self.low, self.high)):
            raise errors.FormatError(
                f"--space takes whole numbers for {name}, such as 1:10, not {self.low:g}:{self.high:g}."
            )
        return replace(self, whole=True)

    def distribution(self) -> Any:
        """The range as Optuna has it."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        if self.whole:
            return distributions.IntDistribution(int(self.low), int(self.high), log=self.log)
        return distributions.FloatDistribution(self.low, self.high, log=self.log)

    def holds(self, value: Any) -> bool:
        """Whether a search may have tried this value."""
        if self.choices:
            return any(type(value) is type(one) and value == one for one in self.choices)
        return is_number(value) and self.low <= value <= self.high and (type(value) is int or not self.whole)

    def middle(self) -> Any:
        """Some value of the range."""
        if self.choices:
            return self.choices[0]
        return (int(self.low) + int(self.high)) // 2 if self.whole else (self.low + self.high) / 2

    def size(self) -> float:
        """Number of values. An interval of real numbers has infinitely many."""
        if self.choices:
            return len(self.choices)
        return int(self.high) - int(self.low) + 1 if self.whole else math.inf

    def values(self) -> Iterable[Any]:
        """All values, if they can be counted."""
        return self.choices or range(int(self.low), int(self.high) + 1)


def _parse_choice(name: str, text: str, now: Any) -> Any:
    """One choice of a setting that has the value `now`. None says nothing of the kind of its values."""
    if isinstance(now, str):
        return text
    try:
        if isinstance(now, bool):
            return {"true": True, "false": False}[text.strip().lower()]
        return int(text) if isinstance(now, int) else float(text)
    except (ValueError, KeyError):
        if now is None:
            return text
        kind = "true|false" if isinstance(now, bool) else "whole numbers" if isinstance(now, int) else "numbers"
        raise errors.FormatError(f"--space takes {kind} for {name}, not '{text}'.") from None


def parse_space(text: str) -> dict[str, Range]:
    """Parse ranges by name from `lr=1e-3:1e-1:log,server_lr=0.01:1`.

    >>> parse_space("lr=0.1:1")["lr"].high
    1.0
    """
    space = {}
    for part in text.split(","):
        name, equals, values = part.strip().partition("=")
        if not equals:
            raise errors.FormatError(f"--space takes NAME=LOW:HIGH, with commas between several, not '{part}'.")
        space[name.replace("-", "_")] = Range.of(name, values)
    return space


def spaces_of(space: Mapping[str, Range], described: Mapping[str, Experiment]) -> dict[str, dict[str, Range]]:
    """By label, the ranges that concern a row. Refuse a name that concerns none, and choices that cannot run."""
    own = {label: hyperparameters(one.build_method()) for label, one in described.items()}
    known = [*TRAINING, *(name for names in own.values() for name in names)]
    for name in space:
        if name not in known:
            raise errors.unknown("setting in --space", name, known, f"pluribus run {next(iter(described))} --help")
    found: dict[str, dict[str, Range]] = {}
    for label, one in described.items():
        now = vars(one) | own[label]
        found[label] = {k: v.fit(k, now[k]) for k, v in space.items() if k in (*TRAINING, *own[label])}
        usual = {name: values.middle() for name, values in found[label].items()}
        for name, values in found[label].items():
            for choice in values.choices:
                set_all(one, usual | {name: choice}).build_method()
    return found


def set_all(described: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """An experiment with these training settings and hyper-parameters."""
    training = {name: value for name, value in settings.items() if name in TRAINING}
    hyper = {name: value for name, value in settings.items() if name not in TRAINING}
    return replace(described, **convert_fields(Experiment, training), hyper={**described.hyper, **hyper})
