"""A short form of each table of the page "Each paper's claim": what the paper's protocol makes true."""

from __future__ import annotations

import pluribus
from conftest import new_folder


def test_fedl2g_warms_up_before_it_trains_and_that_lowers_the_loss_of_the_task() -> None:
    """Three rounds of training, which once had no warm-up. Vectors that have learned misguide less than random ones."""
    short = {"rounds": 3, "clients": 4, "alpha": 0.1, "evaluate_every": 3, "device": "cpu", "threads": 1}
    warm, cold = (
        pluribus.run("fedl2g-l", progress=False, out=new_folder(), **short, **how) for how in ({}, {"warmup": 0})
    )
    moved = [record["notes"]["guides_moved"] for record in warm.history]
    assert moved[warm.warmup - 1] > 0.1 > cold.history[0]["notes"]["guides_moved"]
    assert warm.history[-1]["loss"] < cold.history[-1]["loss"]
    assert len(warm.history) - warm.warmup == len(cold.history) == 3
