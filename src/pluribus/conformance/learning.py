"""Promises about what is learned: it is kept, rounds build on it, the server uses it, steps can be captured."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pluribus.conformance.bits import differing, kept, state_of
from pluribus.conformance.by_hand import ByHand
from pluribus.conformance.cases import Case
from pluribus.conformance.hands import born, present, trained, worked
from pluribus.conformance.promise import BrokenError, SkippedError
from pluribus.conformance.steps import StepChecker
from pluribus.host import make_host
from pluribus.internal.metrics import headline_of
from pluribus.method import PeerMethod


def well_formed(case: Case) -> None:
    """A frozen dataclass without tensors, whose schema has one Wire per exchange."""
    parts = case.seen_parts
    method, cls = parts.method, type(parts.method)
    if not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False):
        raise BrokenError(f"{cls.__name__} is not a frozen dataclass", "Put @dataclass(frozen=True) above the class.")
    if held := [name for name, value in vars(method).items() if isinstance(value, Tensor | nn.Module)]:
        raise BrokenError(
            f"{cls.__name__}.{held[0]} holds tensors, which no run saves",
            "Allocate them in prepare as client.state, or in setup as server.state.",
        )
    wires = method.wires(parts.task, parts.cards[0])
    wanted = 1 if isinstance(method, PeerMethod) else len(cls.exchanges)
    if len(wires) != wanted:
        raise BrokenError(f"schema returns {len(wires)} Wires for {wanted} exchanges", "Return one Wire per exchange.")


def training_is_kept(case: Case) -> None:
    """Whatever has an optimizer learns, and what it learned is saved."""
    parts, result = case.seen_parts, case.result
    later = make_host(parts, state_of(result).client)
    fresh = make_host(parts, lambda k: None)
    for k in present(parts, 0):
        client = later.client(k)
        saved_at = {value.data_ptr() for value in client.tensors().values()}
        for key, optimizer in client.optimizers.items():
            if lost := [name for name, p in optimizer.parameters.items() if p.data_ptr() not in saved_at]:
                raise BrokenError(
                    f"optimizer '{key}' trains '{lost[0]}', which is neither in client.model nor in client.state",
                    "Attach it to client.state in prepare.",
                )
            unlike = differing(optimizer.parameters, fresh.client(k).optimizers[key].parameters)
            same, number = sorted(optimizer.parameters.keys() - unlike), len(optimizer.parameters)
            if 2 * len(same) >= number:  # fewer may be dead units, or layers that a download replaces
                raise BrokenError(
                    f"after {len(result.history)} rounds {len(same)} of {number} parameters of client {k}, optimizer "
                    f"'{key}', are as they were, such as '{same[0]}'",
                    "Train them with client.fit and keep what was trained, or leave them out of optimizers().",
                )


def rounds_build_on_each_other(case: Case) -> None:
    """The next round starts from what was learned."""
    parts, before = case.seen_parts, case.once(born)
    again = set(present(parts, 0)) & set(present(parts, parts.task.rounds - 1))
    expected = trained(make_host(parts, lambda k: None), sorted(again)).keys()
    found = case.once(worked).at_start
    if untrained := sorted(expected - found.keys()):
        raise BrokenError(f"{untrained[0]} was not trained in the last round", "Train with client.fit in every round.")
    starts = {key: found[key] for key in expected}
    if reset := sorted(starts.keys() - differing(before, starts)):
        raise BrokenError(f"in the last round {reset[0]} starts from the initial weights again")


def server_learns(case: Case) -> None:
    """Uploads change the server, and every trainable part of its state."""
    run = case.once(worked)
    before, after, state = run.server[0], run.server[1], run.hand.server.state
    if not before or not any(wire.up for wire in run.hand.host.wires(0)):
        raise SkippedError("nothing is learned on the server.")
    changed = differing(before, after)
    if not changed:
        raise BrokenError(f"server.state {sorted(before)[0]} and all the rest are the same after the first round")
    parts = [name for name, part in state.named_children() if any(p.requires_grad for p in part.parameters())]
    if still := [part for part in parts if not any(name.startswith(f"{part}.") for name in changed)]:
        raise BrokenError(f"server.state.{still[0]} is in no aggregation")


def predictions_differ(case: Case) -> None:
    """Two rounds make no good model, but some client tells some image from another."""
    hand = case.once(worked).hand
    if hand.classes_predicted(hand.parts.task.rounds - 1) < 2:
        raise BrokenError("every client predicts the same class for all images, in every view")


def finite_numbers(case: Case) -> None:
    """Losses, metrics and weights are finite."""
    result = case.result
    if found := [text for text in result.warnings if "is not finite" in text]:
        raise BrokenError(found[0].rstrip("."))
    for record in result.history:
        metric = headline_of(record)
        for k, views in record["clients"].items():
            for view, figures in views.items():
                if (test := figures["test"]) is not None and not metric.range[0] <= test <= metric.range[1]:
                    raise BrokenError(f"round {record['round']}, client {k}: the {metric.text} {view} is {test}")
    for name, value in kept(result).items():
        if not bool(torch.isfinite(value).all()):
            raise BrokenError(f"'{name}' holds NaN or infinity")


def pure_steps(case: Case) -> None:
    """Steps are pure tensor programs, which a GPU can record and replay."""
    parts = case.parts()
    checker = StepChecker(parts.method)
    hand = ByHand(parts, runner=checker)
    for t in range(parts.task.rounds):
        hand.round(t, present(parts, t))
        for k in parts.cards:
            hand.evaluate(t, k)
    if not checker.checked:
        raise BrokenError("no step was seen", "Train with client.fit.")
