"""Promises about equal bits: same seed, any order, resume, clients that leave memory, workers, a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import torch

from pluribus.conformance.bits import differing, kept, numbers, run_difference, tensor_difference
from pluribus.conformance.by_hand import ByHand
from pluribus.conformance.cases import Case
from pluribus.conformance.hands import born, present, worked
from pluribus.conformance.promise import BrokenError, SkippedError
from pluribus.engines.local import local_engine
from pluribus.errors import UserCodeError
from pluribus.federation import Federation
from pluribus.host import MOST_BYTES, Limits, make_host
from pluribus.result import Result
from pluribus.storage.folder import RunFolder


def same_seed_same_bits(case: Case) -> None:
    """A second run is the first one, whatever state the global generators are in."""
    with global_generators(seed=1):
        second = case.run()
    found = run_difference(case.result, second)
    if found is None:
        return
    with global_generators(seed=1):
        third = case.run()
    if run_difference(second, third) is None:
        raise BrokenError(
            f"the global generators of torch, numpy or random decide the run: {found}",
            "Take every random number from client.draw, server.draw, task.draw or their make().",
        )
    raise BrokenError(f"something is left of one run when the next one starts: {found}")


@contextmanager
def global_generators(seed: int) -> Iterator[None]:
    """Put the global generators of torch, numpy and random into another state, and back on exit."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _check_equal(what: str, one: Result, other: Result) -> None:
    if found := run_difference(one, other):
        raise BrokenError(f"{what}: {found}")


def other_seed_other_numbers(case: Case) -> None:
    """Another seed gives other initial weights, other metrics and other trained weights."""
    other = case.but(seed=1)
    before, reborn = case.once(born), other.once(born)
    if same := sorted(reborn.keys() - differing(before, reborn)):
        raise BrokenError(f"seeds 0 and 1 give the same initial weights of {same[0]}")
    if numbers(other.result) == numbers(case.result) or not differing(kept(other.result), kept(case.result)):
        raise BrokenError("seeds 0 and 1 give the same results")


def any_order_of_clients(case: Case) -> None:
    """Clients that work in the opposite order answer and become the same."""
    forwards, parts = case.once(worked), case.parts()
    backwards = ByHand(parts)
    for t, answers in enumerate(forwards.answers):
        others = backwards.round(t, reversed(present(parts, t)))
        for stage, k in sorted(answers):
            if others[stage, k] != answers[stage, k]:
                raise BrokenError(f"client {k} sends another message in round {t} if the clients work in another order")
    if found := tensor_difference(forwards.tensors, backwards.tensors()):
        raise BrokenError(f"if the clients work in another order, {found}")


def pure_evaluation(case: Case) -> None:
    """Evaluation leaves no trace: neither in a client nor in a run that is evaluated in every round."""
    hand, before = case.once(worked).hand, case.once(worked).tensors
    for k in hand.parts.cards:
        answer = hand.evaluate(hand.parts.task.rounds - 1, k)
        if answer.figures.keys() != set(hand.method.views):
            raise BrokenError(f"the views {sorted(answer.figures)} were evaluated, not {sorted(hand.method.views)}")
    if found := tensor_difference(before, hand.tensors()):
        raise BrokenError(f"evaluation changes {found}")
    after = kept(case.result)
    if found := tensor_difference({name: value for name, value in before.items() if name in after}, after):
        raise BrokenError(f"after a run without evaluation, {found}")


def resumed_equal(case: Case) -> None:
    """A run that is stopped and resumed ends as an unbroken one."""
    stop = case.settings["rounds"] - 2
    _check_equal(f"stopped after round {stop} and resumed, the run differs", case.result, case.run_in_two_parts(stop))


def clients_may_leave_memory(case: Case) -> None:
    """With room for one client, all others exist as saved state only; the run is the same."""
    parts = case.parts()
    with closing(RunFolder.create(case.folder())) as folder:
        host = make_host(parts, folder.checkpoint.client, Limits(1, MOST_BYTES, 0))
        run = Federation(parts, folder, engine=local_engine(host, parts.experiment, lambda note: None)).run()
    _check_equal("if clients are saved and leave memory between rounds, the run differs", case.result, run)


def workers_equal(case: Case) -> None:
    """Two worker processes give the same run."""
    if case.cls.__module__ == "__main__":  # a notebook, or a script that may lack a guard
        raise SkippedError("worker processes cannot import the class: define it in a module.")
    try:
        run = case.but(workers=2).run()
    except UserCodeError as error:
        raise SkippedError(str(error)) from error
    _check_equal("two worker processes (workers=2) give another result", case.result, run)


def captured_equals_eager(case: Case) -> None:
    """On a GPU, steps that are recorded and replayed give the same run as steps that run as written."""
    if not torch.cuda.is_available():
        raise SkippedError("torch finds no GPU.")
    eager = case.but(capture=False, stack=False)
    _check_equal("recorded steps give another result than the steps as written", eager.result, case.result)
