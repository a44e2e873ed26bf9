"""Recorded steps of the server: buffers, row numbers, and which steps are recorded. No GPU is needed here.

A stand-in records operations on a tape, where a GPU would record a graph; `test_cuda.py` has real graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import assemble_tiny, run_tiny
from kit import assert_same
from parties import federation_of, run_through, server_of, task_of
from pluribus.client import Batch
from pluribus.conformance.bits import differing
from pluribus.engines import server_steps
from pluribus.engines.observe import ServerObserved, observe_server
from pluribus.engines.server_steps import CapturedServer
from pluribus.internal.steps import ServerRunner
from pluribus.ops import sgd_step
from pluribus.optim import Rule
from pluribus.server import Server


class Tape(TorchDispatchMode):
    """Notes operations with their tensors, and plays them again on the same tensors, as a CUDA graph does.

    Whatever Python decides is frozen: numbers, branches, which tensors are read.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before = [(value, value.clone()) for value in server.state.state_dict().values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before += [(one, one.clone()) for one in tree_leaves(value)]
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def rewind(self) -> None:
        """Undo what was done while it was recorded."""
        for value, before in reversed(self._before):
            value.copy_(before)

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for one, other in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(one, Tensor) and one.data_ptr() != other.data_ptr():  # equal: a view, or in place
                    one.copy_(other)


class StandIn:
    """Records on tapes, where a GPU records graphs."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.recorded = self.replayed = self.pools = 0
        self.broken = False
        self.server: Server | None = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        yield

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    def record(self, step: Any, pool: int) -> Any:
        if self.broken:
            raise RuntimeError("this GPU records nothing.\nmore lines")
        self.recorded += 1
        assert self.server is not None
        with Tape(self.server) as tape:
            step()
        tape.rewind()

        def replay() -> None:
            self.replayed += 1
            tape.play()

        return replay

    def drawn(self) -> int:
        return hash(bytes(torch.get_rng_state().numpy()))


X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 3
HOW: dict[str, Any] = {"opts": ("net",), "batch": 5, "shuffle": "order"}


def make_server(runner: ServerRunner | None = None) -> Server:
    server = server_of(task_of(3, 4), {0: 1})
    if runner is not None:
        server.runner, server.device = runner, runner.device
    server.state.net = server.make("net", lambda: nn.Linear(4, 3))
    server.optimize("net", server.state.net, Rule(lr=0.1, momentum=0.9))  # on a CPU, Adam reads its counters
    server.state.fix()
    server.begin(0, {})
    return server


class Pair:
    """A server that records and one that does not, which must stay equal."""

    def __init__(self) -> None:
        self.recorder, self.told = StandIn(), list[str]()
        self.runner = CapturedServer(self.recorder, self.told.append)  # type: ignore[arg-type]
        self.servers = make_server(self.runner), make_server()
        self.recorder.server = self.servers[0]

    def fit(self, loss: Any, rows: int, first: int = 0, **how: Any) -> None:
        settings = HOW | how
        one, other = (server.fit(loss, X[first:][:rows], Y[first:][:rows], **settings) for server in self.servers)
        assert torch.equal(one, other)
        assert differing(*(server.state.state_dict() for server in self.servers)) == []

    def counts(self) -> tuple[int, int]:
        found = self.recorder.recorded, self.recorder.replayed
        self.recorder.recorded = self.recorder.replayed = 0
        return found


def plain(server: Server, batch: Batch) -> Tensor:
    return F.cross_entropy(server.state.net(batch.x), batch.y)


def scaled(server: Server, batch: Batch) -> Tensor:
    return F.cross_entropy(server.state.net(batch.x) * server.given["scale"], batch.y)


class TestRecordings:
    def test_the_second_batch_of_a_size_is_recorded_and_later_ones_are_replayed(self):
        """Three epochs of 5, 5 and 2 rows: one of each size as written, then one recording of each size."""
        pair = Pair()
        pair.fit(plain, 12, epochs=3)
        assert pair.counts() == (2, 7)
        pair.fit(plain, 12, epochs=3)
        assert pair.counts() == (0, 9)
        assert pair.told == []

    def test_the_number_of_rows_may_change(self):
        """In buffers of 16 rows and 64 visits, 9 to 16 rows fit. Last batches of 4 and 1 rows are new."""
        pair = Pair()
        pair.fit(plain, 12, epochs=4)
        pair.counts()
        for rows, new in ((14, 1), (16, 1), (9, 0), (15, 0)):
            pair.fit(plain, rows, first=3, epochs=4)
            assert pair.counts()[0] == new
        assert pair.recorder.pools == 1
        pair.fit(plain, 17, epochs=4)
        assert (pair.counts()[0], pair.recorder.pools) == (2, 2), "larger buffers, in which all is recorded again"
        pair.fit(plain, 12, epochs=4)
        assert pair.counts() == (0, 12), "smaller numbers fit there, too"

    def test_more_visits_or_more_rows_need_more_room(self):
        pair = Pair()
        for pools, rows, epochs in ((1, 10, 1), (2, 10, 4), (3, 30, 1)):
            pair.fit(plain, rows, epochs=epochs)
            assert pair.recorder.pools == pools

    def test_what_is_given_may_change_in_value_and_shape(self):
        pair = Pair()
        for value in (0.5, 2.0, -1.0):
            pair.fit(scaled, 10, given={"scale": torch.tensor(value)})
        assert pair.counts() == (1, 5)
        pair.fit(scaled, 10, given={"scale": torch.tensor([1.0, 2.0, 3.0])})
        pair.fit(scaled, 10, given={"scale": torch.tensor([3.0, 1.0, 0.5])})
        assert pair.counts() == (1, 3)

    def test_losses_optimizers_and_modes_have_recordings_of_their_own(self):
        pair = Pair()
        pair.fit(plain, 10)
        pair.fit(other, 10)
        for server in pair.servers:
            server.state.net.eval()
        pair.fit(plain, 10)
        assert pair.counts() == (3, 3)

    def test_the_number_of_recordings_and_buffers_is_bounded(self, monkeypatch):
        monkeypatch.setattr(server_steps, "MOST_PLACES", 2)
        monkeypatch.setattr(server_steps, "MOST_RECORDINGS", 2)
        pair = Pair()
        for width in (1, 3, 1):  # a second fit of a width records, and the third finds that
            pair.fit(scaled, 10, given={"scale": torch.ones(width)})
        assert pair.counts() == (2, 4)
        pair.fit(plain, 10)
        pair.fit(scaled, 10, given={"scale": torch.ones(3)})
        assert pair.counts() == (2, 2), "the buffers of width 3 were used before those of width 1, and were dropped"
        for batch in (5, 4, 3, 1):
            pair.fit(plain, 12, batch=batch, epochs=3)
            assert all(len(place.recordings) <= 4 for place in pair.runner._places.values())


def other(server: Server, batch: Batch) -> Tensor:
    return 2 * plain(server, batch)


def peeking(server: Server, batch: Batch) -> Tensor:
    loss = plain(server, batch)
    return loss * 2 if loss.item() > 1 else loss


def dicing(server: Server, batch: Batch) -> Tensor:
    return F.cross_entropy(F.dropout(server.state.net(batch.x), 0.5), batch.y)


def timed(server: Server, batch: Batch) -> Tensor:
    return plain(server, batch) / (server.t + 1)


def scheduled(server: Server, batch: Batch) -> Tensor:
    return plain(server, batch) * (1 + len(server.now))


class TestRefusals:
    @pytest.mark.parametrize(
        ("loss", "why"),
        [(peeking, "reads a value"), (dicing, "random numbers"), (timed, "server.t"), (scheduled, "server.now")],
    )
    def test_a_loss_that_would_be_frozen_runs_as_written_and_says_why_once(self, loss, why):
        pair = Pair()
        pair.fit(loss, 12, epochs=2)
        pair.fit(loss, 14)
        assert pair.counts() == (0, 0)
        (sentence,) = pair.told
        assert f"{loss.__name__} is not captured" in sentence
        assert why in sentence

    def test_a_nested_function(self):
        pair = Pair()
        pair.fit(lambda server, batch: plain(server, batch), 12, epochs=2)
        pair.fit(lambda server, batch: plain(server, batch) * 2, 12, epochs=2)
        assert pair.counts() == (0, 0)
        (sentence,) = pair.told
        assert "nested function" in sentence

    def test_a_recording_that_fails(self):
        pair = Pair()
        pair.recorder.broken = True
        pair.fit(plain, 12, epochs=2)
        pair.fit(plain, 12, epochs=2)
        (sentence,) = pair.told
        assert sentence.endswith("plain is not captured: this GPU records nothing.")

    def test_numbers_on_the_cpu_among_tensors_elsewhere_are_found(self):
        """A device without numbers stands in for a GPU. Numbers of Python are constants, and allowed."""
        there, here = torch.ones(3, device="meta"), torch.tensor(2.0)
        for work, why in (
            (lambda: there * here, "CPU (mul)"),
            (lambda: there * 2.0, None),
            (lambda: there + there, None),
        ):
            with ServerObserved() as watch:
                work()
            assert (watch.reason is None) if why is None else why in watch.reason

    def test_a_watched_server_is_the_server_otherwise(self):
        server = make_server()
        with observe_server(server) as (watched, watch):
            assert watched.state is server.state
            assert watched.task is server.task
            assert watched.given is server.given
        assert watch.reason is None


class TestSteps:
    """A number of steps instead of epochs, and a learning rate that falls."""

    def seen(self, rows: int, **how: Any) -> list[list[int]]:
        server, found = make_server(), []

        def look(server: Server, batch: Batch) -> Tensor:
            found.append(batch.i.tolist())
            return plain(server, batch)

        server.fit(look, X[:rows], Y[:rows], **HOW | how)
        return found

    def test_all_batches_are_full_and_every_row_is_seen_as_often(self):
        found = self.seen(8, steps=8)
        assert [len(rows) for rows in found] == [5] * 8
        assert sorted(i for rows in found for i in rows) == sorted([*range(8)] * 5)

    def test_a_batch_has_no_more_rows_than_there_are(self):
        assert [sorted(rows) for rows in self.seen(3, steps=2)] == [[0, 1, 2]] * 2

    @pytest.mark.parametrize(("rows", "steps"), [(0, 3), (8, 0)])
    def test_nothing_to_do(self, rows, steps):
        assert make_server().fit(plain, X[:rows], Y[:rows], **HOW, steps=steps).isnan()

    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_the_rate_falls_along_a_cosine(self, steps):
        server = make_server()
        rates = []

        def sum_of_weights(server: Server, batch: Batch) -> Tensor:
            rates.append(server._optimizers["net"]._torch.param_groups[0]["lr"])
            return server.state.net.weight.sum()

        server.fit(sum_of_weights, X, Y, **HOW, steps=steps, anneal=True)
        expected = {1: [1.0], 2: [1.0, 0.5], 3: [1.0, 0.75, 0.25]}[steps]
        assert rates == pytest.approx([0.1 * share for share in expected])
        server.fit(sum_of_weights, X, Y, **HOW, steps=1)
        assert rates[-1] == 0.1, "the next fit has the whole rate"

    def test_recorded_steps_leave_the_same_bits(self):
        pair = Pair()
        for _ in range(2):
            pair.fit(plain, 12, steps=7)
        assert pair.counts() == (1, 13)

    def test_the_rate_of_a_step_is_set_before_it_is_replayed(self, monkeypatch):
        """A GPU keeps the rate in its memory, where replays read it. A tape has the number that was recorded."""
        pair, seen = Pair(), []
        usual = Server.anneal

        def watched(server: Server, opts: tuple[str, ...], share: float) -> None:
            seen.append((pair.recorder.replayed, round(share, 2)))
            usual(server, opts, share)

        monkeypatch.setattr(Server, "anneal", watched)
        pair.servers[0].fit(plain, X, Y, **HOW, steps=4, anneal=True)
        assert seen == [(0, 1.0), (0, 0.85), (1, 0.5), (2, 0.15), (3, 1.0)]

    @pytest.mark.parametrize(("life", "zero"), [("run", False), ("round", True)])
    def test_the_slots_of_an_optimizer_live_for_a_run_or_for_a_round(self, life, zero):
        server = server_of(task_of(3, 4), {0: 1})
        server.state.net = server.make("net", lambda: nn.Linear(4, 3))
        server.optimize("net", server.state.net, Rule(lr=0.1, momentum=0.9), life=life)
        server.fit(plain, X, Y, **HOW)
        server.begin(1, {})
        slots = {name: value for name, value in server.state.state_dict().items() if "momentum" in name}
        assert slots
        assert all(bool(value.any()) != zero for value in slots.values())


@dataclass(frozen=True)
class OfPart:
    """A loss that is an object."""

    name: str

    def __call__(self, server: Server, batch: Batch) -> Tensor:
        return F.cross_entropy(getattr(server.state, self.name)(batch.x), batch.y)


def test_a_loss_that_is_an_object_is_recorded_once():
    pair = Pair()
    for _ in range(3):
        pair.fit(OfPart("net"), 15)
    assert pair.counts() == (1, 8)
    assert pair.told == []


class TestMethods:
    """The losses of methods, whose number of uploads changes from round to round, are recorded."""

    @pytest.mark.parametrize("name", ["fedtgp", "fedgen"])
    def test_a_run_leaves_the_same_bits(self, name, monkeypatch):
        """Without Adam, which reads its counters on a CPU."""
        monkeypatch.setattr(
            Server, "descend", lambda server, loss, part: sgd_step(getattr(server.state, part), loss, 0.1)
        )
        settings = {"clients": 6, "rounds": 5, "participation": 0.7, "straggler_rate": 0.4, "partition": "pathological"}
        settings |= {"server_epochs": 4} if name == "fedtgp" else {"generator_steps": 4}
        usual, recorder, told = run_tiny(name, **settings), StandIn(), []
        assert len({record["answered"] for record in usual.history}) > 1
        runner = CapturedServer(recorder, told.append)
        monkeypatch.setattr("pluribus.federation.server_runner_for", lambda parts, tell: runner)
        federation = federation_of(assemble_tiny(name, **settings))
        recorder.server = federation.server
        assert_same(usual, run_through(federation))
        assert told == []
        assert recorder.replayed > recorder.recorded > 0
