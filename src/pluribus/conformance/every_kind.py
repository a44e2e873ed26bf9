"""Promises about rows that are no images, and about targets that are no classes: the few that these can break."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from pluribus.conformance.bits import kept, run_difference
from pluribus.conformance.cases import Case
from pluribus.conformance.clients import runs
from pluribus.conformance.equality import captured_equals_eager, clients_may_leave_memory, global_generators
from pluribus.conformance.kinds import SAMPLES, Sample
from pluribus.conformance.learning import pure_steps
from pluribus.conformance.promise import BrokenError, Promise, SkippedError
from pluribus.errors import MismatchError

CHANGE = "Give batch.x to models alone, use client.task_loss, or name in takes and targets what the method works with."
SMALL = {"clients": 3}


def runs_and_repeats(case: Case) -> None:
    """It runs to finite numbers. A second run is equal to the bit, though the global generators are in another state
    and it is stopped and resumed. So is a third one with room for one client in memory."""
    runs(case)
    _check_finite(case)
    stop = case.settings["rounds"] - 2
    if stop >= 0:  # a smaller case has one round
        with global_generators(seed=1):
            again = case.run_in_two_parts(stop)
        if found := run_difference(case.result, again):
            raise BrokenError(f"a second run, stopped after round {stop} and resumed, differs: {found}")
    clients_may_leave_memory(case)


def _check_finite(case: Case) -> None:
    """Losses, metrics and weights are finite."""
    if found := [text for text in case.result.warnings if "is not finite" in text]:
        raise BrokenError(found[0].rstrip("."))
    for record in case.result.history:
        for k, views in record["clients"].items():
            for metrics in views.values():
                if odd := [name for name, value in metrics.items() if value is not None and not math.isfinite(value)]:
                    raise BrokenError(f"round {record['round']}, client {k}: the metric {odd[0]} is not finite")
    for name, value in kept(case.result).items():
        if not bool(torch.isfinite(value).all()):
            raise BrokenError(f"'{name}' holds NaN or infinity")


def _unless_refused(hold: Callable[[Case], None]) -> Callable[[Case], None]:
    """A method may refuse rows or targets, before round 0 and with a sentence."""

    def held(case: Case) -> None:
        try:
            _ = case.seen_parts
        except MismatchError as refusal:
            raise SkippedError(str(refusal)) from refusal
        hold(case)

    return held


def _promise(name: str, sample: Sample, hold: Callable[[Case], None], **settings: object) -> Promise[Case]:
    given = {**SMALL, "sample": sample, **settings}
    return Promise(f"{sample.name}: {name}", _unless_refused(hold), CHANGE, given, ({"clients": 2},), compares=True)


RUNS = "it runs, and resumes to the same bits"
STEPS = "steps are pure tensor programs"
GPU = "captured steps give the same bits"


def _promises() -> Iterator[Promise[Case]]:
    for sample in SAMPLES:
        yield _promise(RUNS, sample, runs_and_repeats)
        yield _promise(STEPS, sample, pure_steps)
    for sample in SAMPLES:
        yield _promise(GPU, sample, captured_equals_eager, device="cuda")


PROMISES = tuple(_promises())
