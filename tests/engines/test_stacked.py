"""Clients that train together, on the CPU: the same arithmetic as on a GPU, only nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conftest import assemble_tiny, make_host
from pluribus.client import Batch, Client
from pluribus.conformance.kinds import SAMPLES
from pluribus.engines.stacked import Group, _group_steps, is_stackable, split_groups
from pluribus.host import Host
from pluribus.internal.steps import Eager
from pluribus.message import Field, Message, Wire
from pluribus.method import Method
from pluribus.methods.fedl2g import FedL2GFeatures
from pluribus.methods.local import Local
from pluribus.request import Work

CLIENTS = 9


class OneThread:
    """A lane without a GPU."""

    stream = None

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def do(self, work: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(work)


def worked(host: Host, rounds: int, tell: Callable[[str], None] | None = None) -> dict[int, list[Any]]:
    """Replies of all clients in some rounds: together if there is someone to tell, else one after the other."""
    replies: dict[int, list[Any]] = {k: [] for k in range(CLIENTS)}
    group = Group(tell) if tell else None
    for t in range(rounds):
        jobs = {k: partial(host.answer, Work(k, t)) for k in replies}
        if group is None:
            answers = {k: job() for k, job in jobs.items()}
        else:
            futures = group.do({k: host.client(k) for k in replies}, jobs, OneThread())
            answers = {k: future.result() for k, future in futures.items()}
        for k, reply in answers.items():
            replies[k].append(reply)
    if group is not None:
        group.close()
    return replies


@dataclass(frozen=True)
class TwoFits(Method):
    """Trains twice, with a look at the features in between."""

    def schema(self, task, card) -> Wire:
        return Wire(up={"seen": Field((card.width,))})

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        seen = client.sweep(Client.features).mean(0)
        client.fit(self.step, steps=3 if client.card.id % 2 else 1)
        return Message({"seen": seen})


@dataclass(frozen=True)
class Losses(Method):
    """Names what it descends: the same as `step`, and then twice as steep a loss."""

    def local_update(self, client: Client) -> Message:
        client.fit(self.loss, opts=("model",))
        client.fit(self.doubled, opts=("model",), steps=1)
        return Message({})

    def doubled(self, client: Client, batch: Batch) -> Tensor:
        return 2 * self.loss(client, batch)


@dataclass(frozen=True)
class WarmedUp(Method):
    """Its first round does not count for the learning rate."""

    warmup: int = 1

    def warmup_rounds(self) -> int:
        return self.warmup


@dataclass(frozen=True)
class Breaks(Method):
    """One client goes wrong before it trains."""

    def local_update(self, client: Client) -> Message:
        if client.card.id == 4:
            raise ValueError("client 4 is broken")
        return super().local_update(client)


@dataclass(frozen=True)
class Unstackable(Method):
    """Needs a number in mid-step, which vmap refuses."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        loss = super().loss(client, batch)
        return loss * 2 if loss > 1 else loss


def parts_of(method: Any, **settings: Any):
    small = {"rounds": 2, "clients": CLIENTS, "models": "cnn-16-32", "batch_size": 6, "min_samples": 4}
    return assemble_tiny(method, **small | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9, "weight_decay": 1e-2, "epochs": 2},
        {"models": "mlp-64", "batch_size": 5, "lr_decay": 0.5},
        {"models": "mlp-64", "momentum": 0.9, "optimizer_life": "run"},
        {"augment": "crop,flip,erase", "epochs": 2},
        {"models": "mlp-64", "lr": 0.5, "clip_norm": 0.1, "lr_schedule": "cosine", "lr_warmup": 1},
    ],
    ids=["plain", "momentum", "mlp", "life", "augment", "clip"],
)
@pytest.mark.parametrize("method", [Local, TwoFits, Losses])
def test_together_is_as_one_after_the_other(method, settings):
    assert_alike(method, **settings)


@pytest.mark.parametrize(
    ("sample", "settings"),
    [
        ("signals", {"augment": "jitter,scale", "partition": "iid"}),  # each client has its own scale
        ("tokens", {"augment": "drop", "class_weights": "balanced"}),
        ("tables", {"class_weights": "balanced", "momentum": 0.9}),
        ("numbers to predict", {}),
        ("several labels", {"class_weights": "balanced"}),
    ],
)
def test_rows_of_every_kind_are_stacked(sample, settings):
    (of,) = (one for one in SAMPLES if one.name == sample)
    assert_alike(Local, **of.settings_for(same_model=True) | {"epochs": 2, "partition": "iid"} | settings)


@pytest.mark.parametrize("method", ["hetlora", "flora", "flexlora"])
def test_adapters_are_stacked(method):
    """Those of one rank, with the loss of their method."""
    assert_alike(method, models="tiny-vit-32", capacity="2", image_size=16, epochs=1)


def test_rounds_of_a_warm_up_do_not_count_for_the_rate():
    assert_alike(WarmedUp, models="mlp-64", lr=0.5, lr_decay=0.1)


def assert_alike(method, **settings):
    parts, told = parts_of(method, **settings), []
    alone, together = make_host(parts), make_host(parts)
    expected, found = worked(alone, 2), worked(together, 2, told.append)
    assert told == []
    for k in range(CLIENTS):
        for one, other in zip(expected[k], found[k], strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-4)
        for name, value in alone.client(k).tensors().items():
            torch.testing.assert_close(together.client(k).tensors()[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("method", [Local, Losses])
def test_the_stack_really_trains_them(method):
    """Nobody but the stack takes a step."""
    parts, told = parts_of(method), []
    host = make_host(parts)
    for k in range(CLIENTS):
        host.client(k).runner = NoSteps()
    worked(host, 1, told.append)
    assert told == []


class NoSteps(Eager):
    def fit(self, client, fit):
        raise AssertionError("trained alone")


def test_an_error_of_one_client_is_its_own():
    host = make_host(parts_of(Breaks))
    group = Group(pytest.fail)
    jobs = {k: partial(host.answer, Work(k, 0)) for k in range(CLIENTS)}
    futures = group.do({k: host.client(k) for k in range(CLIENTS)}, jobs, OneThread())
    with pytest.raises(ValueError, match="client 4 is broken"):
        futures[4].result()
    assert all(futures[k].result().loss > 0 for k in range(CLIENTS) if k != 4)
    group.close()


def test_what_cannot_be_stacked_trains_alone_and_says_why():
    parts, told = parts_of(Unstackable), []
    alone, together = make_host(parts), make_host(parts)
    expected, found = worked(alone, 2), worked(together, 2, told.append)
    (reason,) = told
    assert "not stacked" in reason
    assert [[r.loss for r in found[k]] for k in found] == [[r.loss for r in expected[k]] for k in expected]


def test_who_is_stackable():
    assert is_stackable(Local(), make_host(parts_of(Local)).client(0))
    assert not is_stackable(Local(), make_host(parts_of(Local, optimizer="adam")).client(0))
    assert not is_stackable(Local(), make_host(parts_of(Local, models="resnet18", image_size=32)).client(0))
    assert not is_stackable(FedL2GFeatures(), make_host(parts_of(FedL2GFeatures)).client(0))


def test_groups():
    assert split_groups(range(7)) == [[k] for k in range(7)]
    assert split_groups(range(8)) == [list(range(8))]
    assert [len(group) for group in split_groups(range(300))] == [128, 128, 44]


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=5))
def test_every_batch_has_one_turn_in_its_order(sizes):
    turns = _group_steps(sizes, len(sizes) + 2)
    for k, own in enumerate(sizes):
        mine = [(turn.size, turn.starts[k]) for turn in turns if turn.active[k]]
        assert mine == [(n, sum(own[:j])) for j, n in enumerate(own)]
    assert not any(turn.active[k] for turn in turns for k in range(len(sizes), len(sizes) + 2))
