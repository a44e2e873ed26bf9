"""FedProx: the pull by hand, and where it must be FedAvg."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from test_stacked import OneThread
from torch import Tensor

from conftest import assemble_tiny, make_host, run_tiny
from kit import differing, kept, numbers
from parties import client_of, data_of, flat_split, signs
from pluribus.client import Client
from pluribus.engines.stacked import Group, is_stackable
from pluribus.errors import RangeError
from pluribus.internal.batches import Batch
from pluribus.message import Message, decode, encode, schema_of
from pluribus.methods.fedavg import FedAvg
from pluribus.methods.fedprox import FedProx
from pluribus.optim import Rule
from pluribus.request import Work
from refusals import refused

PIXELS, LABELS = [[1, -1], [1, 1]], [0, 1]


def client_at(weight: list[list[float]], anchor: list[list[float]], rule: Rule | None = None) -> Client:
    """A linear model without bias at these weights, that got a global model with those."""
    model = flat_split(2, 2)
    client = client_of(model, data_of(signs(PIXELS), LABELS), rule=rule, down=schema_of(model, kept=True))
    received = {"head.weight": torch.tensor(anchor), "head.bias": torch.zeros(2)}
    client.take(Message(received))
    model.load_state_dict(received | {"head.weight": torch.tensor(weight)})
    return client


def whole_batch(client: Client) -> Batch:
    positions = torch.arange(len(client.data["train"]))
    return Batch(*client.data["train"].take(positions), positions, len(positions))


class TestPull:
    def test_the_loss_by_hand(self):
        """w = 0: cross-entropy log 2. Distance to the anchor: 1 + 4 = 5, mu / 2 = 1/4."""
        client = client_at([[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, -2.0]])
        found = FedProx(mu=0.5).loss(client, whole_batch(client)).item()
        assert found == pytest.approx(math.log(2) + 1.25, abs=1e-6)

    def test_a_step_by_hand(self):
        """w = 0, eta = 1: the gradient of the cross-entropy is (0, 1/2) in row 0 and its opposite in row 1.

        The pull's is mu (w - a) = -a / 2; both numbers are exact.
        """
        client = client_at([[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, -2.0]], Rule(lr=1.0))
        FedProx(mu=0.5).local_update(client)
        assert client.model.head.weight.tolist() == [[0.5, -0.5], [0.0, -0.5]]
        assert client.model.head.bias.tolist() == [0, 0]

    def test_the_anchor_stands_still_while_the_client_trains(self):
        client = client_at([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], Rule(lr=1.0))
        client.fit(FedProx(mu=0.5).step, epochs=3)
        assert client.model.head.weight.any()
        assert not client.got.tensor("head.weight").any()

    def test_a_stronger_pull_keeps_clients_nearer(self):
        distances = [distance(mu, batch_size=40, epochs=3) for mu in (0.0, 1.0, 10.0)]
        assert distances[0] > distances[1] > distances[2] > 0


def sent(method: str, **settings) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What came down to a client in round 0 and what it sent up."""
    parts = assemble_tiny(method, models="cnn-16-32", **settings)
    host, wire = make_host(parts), make_host(parts).wires(1)[0]
    down = Message.of(parts.task.build("cnn-16-32", "global"))
    reply = host.answer(Work(1, 0, 0, encode(down, wire.down, "server")))
    return down.part(), decode(reply.up, wire.up, "client").part()


def distance(mu: float, **settings) -> float:
    before, after = sent("fedprox", mu=mu, **settings)
    return sum(float((after[n] - before[n]).square().sum()) for n in after if n.endswith(("weight", "bias")))


class TestAgainstFedAvg:
    @pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.001}, {"optimizer": "adam"}])
    def test_without_a_pull_it_is_fedavg(self, settings):
        settings |= {"models": "cnn-16-32", "clients": 2}
        pulled, plain = run_tiny("fedprox", mu=0.0, **settings), run_tiny("fedavg", **settings)
        assert numbers(pulled) == numbers(plain)
        states = kept(plain)
        assert differing({n: v for n, v in kept(pulled).items() if n in states}, states) == []

    @pytest.mark.parametrize("mu", [0.01, 1000.0])
    def test_the_first_step_is_fedavgs_whatever_the_pull(self, mu):
        one_step = {"batch_size": 500}
        assert differing(sent("fedprox", mu=mu, **one_step)[1], sent("fedavg", **one_step)[1]) == []
        assert differing(sent("fedprox", mu=mu, epochs=2, **one_step)[1], sent("fedavg", epochs=2, **one_step)[1])

    def test_clients_train_together_where_fedavgs_do(self):
        """On a GPU; here the same arithmetic on a CPU. The pull is strong, so that a wrong anchor would show."""
        replies = []
        for together in (True, False):
            parts = assemble_tiny("fedprox", clients=9, mu=1.0, models="mlp-64", epochs=2)
            host = make_host(parts)
            assert is_stackable(parts.method, host.client(0))
            down = encode(Message.of(parts.task.build("mlp-64", "global")), host.wires(0)[0].down, "server")
            jobs = {k: partial(host.answer, Work(k, 0, 0, down)) for k in range(9)}
            told: list[str] = []
            group = Group(told.append)
            if together:
                futures = group.do({k: host.client(k) for k in jobs}, jobs, OneThread())
                found = {k: future.result() for k, future in futures.items()}
            else:
                found = {k: job() for k, job in jobs.items()}
            group.close()
            assert told == []
            replies.append({k: decode(reply.up, host.wires(k)[0].up, "client") for k, reply in found.items()})
        for k in range(9):
            for name, value in replies[0][k].part().items():
                torch.testing.assert_close(value, replies[1][k].tensor(name))


def test_the_anchor_is_what_came_down_last():
    result = run_tiny("fedprox", rounds=2, models="mlp-64")
    one_round = kept(run_tiny("fedprox", rounds=1, models="mlp-64"))
    states = kept(result)
    for name in schema_of(assemble_tiny("fedprox").task.build("mlp-64")):
        assert torch.equal(states[f"client 0 got.{name}"], one_round[f"server shared.{name}"])


def test_a_pull_below_zero_is_refused():
    with refused(RangeError, "--mu", 0, -1):
        assemble_tiny("fedprox", mu=-1.0)


def test_traffic_is_what_the_sheet_says():
    """The model each way, no more than FedAvg."""
    result, plain = run_tiny("fedprox"), run_tiny("fedavg")
    assert result.ledger.by("tensor") == plain.ledger.by("tensor")
    floats = sum(p.numel() for p in assemble_tiny("fedprox").task.build("cnn-16").parameters())
    for way in ("up", "down"):
        by_tensor = result.ledger.by("tensor", way)
        del by_tensor["(header)"]
        assert sum(by_tensor.values()) == 2 * 4 * 4 * floats


def test_what_is_overridden_leaves_the_step_alone():
    assert FedProx.step is FedAvg.step
