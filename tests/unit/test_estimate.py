"""The expected time of a run: what it counts, and from what."""

from __future__ import annotations

import pytest
import torch

from conftest import assemble_tiny, run_tiny
from pluribus.assembly import Assembly
from pluribus.study.bare import BareLoop, Pace
from pluribus.study.estimate import estimate


def rows_of(parts: Assembly) -> int:
    return sum(len(parts.data.rows(k)[name]) for k in parts.cards for name in ("val", "test"))


def test_the_steps_are_those_that_a_run_takes() -> None:
    settings = {"epochs": 2, "batch_size": 7, "rounds": 1}
    found = estimate(assemble_tiny("local", **settings))
    assert found is not None
    assert found.steps == sum(run_tiny("local", **settings).history[0]["steps"].values())


def test_a_round_costs_its_steps_and_its_evaluated_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = run_tiny("local", rounds=1, models="mlp-64,cnn-16").history[0]["steps"]
    parts = assemble_tiny("local", rounds=7, evaluate_every=3, models="mlp-64,cnn-16")
    paces = {"mlp-64": Pace(step=2.0, row=10.0), "cnn-16": Pace(step=5.0, row=10.0)}
    monkeypatch.setattr(BareLoop, "pace", lambda self, k: paces[parts.cards[k].model])
    found = estimate(parts)
    assert found is not None
    assert found.training == 7 * sum(steps * paces[parts.cards[int(k)].model].step for k, steps in taken.items())
    assert found.evaluation == 3 * 10.0 * rows_of(parts)  # after rounds 3, 6 and 7
    assert found.seconds == found.training + found.evaluation


def test_clients_that_do_not_take_part_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BareLoop, "pace", lambda self, k: Pace(1.0, 1.0))
    everyone = estimate(assemble_tiny("local"))
    half = estimate(assemble_tiny("local", participation=0.5))
    alone = estimate(assemble_tiny("local", participation=0.5, drop_rate=0.5, evaluate="participants"))
    assert everyone is not None
    assert half is not None
    assert alone is not None
    assert (half.training, half.evaluation) == (everyone.training / 2, everyone.evaluation)
    assert (alone.training, alone.evaluation) == (everyone.training / 4, everyone.evaluation / 4)


def test_a_pace_is_measured_and_leaves_no_trace() -> None:
    parts, threads, state = assemble_tiny("local"), torch.get_num_threads(), torch.get_rng_state()
    pace = BareLoop(parts).pace(0)
    assert pace.step > 0
    assert pace.row > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_private_training_has_no_estimate() -> None:
    pytest.importorskip("opacus")
    assert estimate(assemble_tiny("local", models="mlp-64", dp_epsilon=8.0)) is None
