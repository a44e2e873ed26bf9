"""Bounds are declared with their fields, and hold wherever a value comes from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pluribus.cli.flags import begin, explanations, parse_experiment
from pluribus.errors import FormatError, RangeError
from pluribus.experiment import TRAINING, Experiment, experiment, settings_of_sites
from pluribus.method import Method, methods
from pluribus.methods.fedgh import FedGH
from pluribus.settings import Setting, convert_fields, flag_name, setting, settings_of
from refusals import refused


@dataclass(frozen=True)
class Toy:
    share: float = setting(0.5, above=0, at_most=1, symbol="s")
    """Share of something."""
    steps: int | None = setting(None, at_least=1)
    """Number of steps. Default: all."""
    rate: float = setting(0.0, at_least=0, below=math.inf)
    """Rate of something."""
    free: float = 1.0
    """Anything."""


@pytest.mark.parametrize(
    "values",
    [{"share": 1.0}, {"share": 1e-9}, {"steps": None}, {"steps": 1}, {"rate": 0.0}, {"free": -1.0}, {"free": math.nan}],
)
def test_values_inside_pass(values: dict[str, Any]) -> None:
    assert str(convert_fields(Toy, values)) == str(values)


@pytest.mark.parametrize(
    "values",
    [{"share": 0.0}, {"share": 1.1}, {"share": math.nan}, {"steps": 0}, {"rate": -1.0}, {"rate": math.inf}],
)
def test_values_outside_are_refused(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with refused(RangeError, f"--{name}", value):
        convert_fields(Toy, values)


def test_help_shows_symbol_and_range() -> None:
    assert explanations(Toy) == {
        "share": "s: share of something. Above 0 and at most 1.",
        "steps": "Number of steps. Default: all. At least 1.",
        "rate": "Rate of something. At least 0.",
        "free": "Anything.",
    }


def outside(known: Setting, whole: bool) -> list[float]:
    """The values next to the bounds of a setting that it does not take."""
    step = 1 if whole else 1e-6
    found = [] if known.at_least is None else [known.at_least - step]
    found += [] if known.above is None else [known.above]
    found += [] if known.at_most is None else [known.at_most + max(step, known.at_most * 1e-9)]
    found += [] if known.below is None else [known.below]
    return found if whole or not found else [*found, math.nan]


BOUNDS = {
    f"{method} {name} {value}": (method, name, value)
    for method, cls in {**methods(), "settings": Experiment}.items()
    for name, known in settings_of(cls).items()
    for value in outside(known, whole="int" in str({f.name: f.type for f in dataclasses.fields(cls)}[name]))
}


@pytest.mark.parametrize(("method", "name", "value"), BOUNDS.values(), ids=BOUNDS)
def test_every_declared_bound_is_enforced_wherever_a_value_comes_from(
    method: str, name: str, value: float, tmp_path: Path
) -> None:
    cls: Any = methods().get(method, Experiment)
    method, table = ("local", "") if cls is Experiment else (method, "[hyper]")
    file = tmp_path / "config.toml"
    file.write_text(f"{table}\n{name} = {value}\n")
    for make in (
        lambda: cls(**{name: value}),
        lambda: experiment(method, **{name: value}),
        lambda: experiment(method, file),
        lambda: parse_experiment("run", *begin([method, f"{flag_name(name)}={value}"]), [])[0],
    ):
        with refused(RangeError, flag_name(name), value):
            make().build_method()


def test_bounds_were_found() -> None:
    assert len(BOUNDS) > 150


def test_every_setting_has_a_group() -> None:
    assert [name for name, one in settings_of(Experiment).items() if not one.group] == ["method", "hyper"]


def test_sites_take_what_they_share() -> None:
    """What decides data, models and machines is each site's own."""
    taken = settings_of_sites()
    own = {"normalize"}  # each site normalizes by its own rows
    assert {*TRAINING, "rounds", "participation", "width", "projector", "evaluate", "seed"} - own <= {*taken}
    assert {*own, "data", "models", "weights", "drop_rate", "device", "precision", "out", "method"} & {*taken} == set()


def test_a_method_takes_the_types_of_its_fields() -> None:
    assert isinstance(FedGH(server_lr=1).server_lr, float)
    with refused(FormatError, "--server-lr", "'0.1'"):
        FedGH(server_lr="0.1")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Own(Method):
    """A method of a user, whose constructor does its own checks and forgets ours."""

    share: float = setting(0.5, above=0, at_most=1)

    def __post_init__(self) -> None:
        pass


def test_settings_are_checked_for_a_method_with_its_own_constructor() -> None:
    with refused(RangeError, "--share", 1.5):
        experiment("test_settings.Own", share=1.5).build_method()
