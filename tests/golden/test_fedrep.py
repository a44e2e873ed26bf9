"""FedRep: heads and body in turns by hand, and heads that stay at home."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import assemble_tiny, run_tiny
from kit import ByHand, kept
from parties import client_of, data_of, equal, noise
from pluribus.client import Client
from pluribus.errors import RangeError
from pluribus.message import Message
from pluribus.methods.fedrep import FedRep
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from refusals import refused

LABELS = [0, 1, 2, 1, 0]
LR = 0.3


def client_with(method: FedRep, *before: nn.Module, **how) -> Client:
    """Two layers and a head on five noisy images, all in one batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TwoPartModel(nn.Sequential(*before, nn.Flatten(), nn.Linear(16, 4), nn.ReLU()), nn.Linear(4, 3), 4)
    client = client_of(model, data_of(noise(5), LABELS), classes=3, rule=Rule(lr=LR), **how)
    client.equip(method.optimizers(client), {})
    client.begin(0, 0, {})
    return client


def by_hand(model: TwoPartModel, client: Client, part: str, steps: int) -> None:
    """Steps on the whole training set, of this part of the model alone."""
    x, y = client.data["train"].take(torch.arange(5))
    for _ in range(steps):
        parameters = list(model.get_submodule(part).parameters())
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= LR * g


class TestRound:
    @pytest.mark.parametrize(("method", "head", "body"), [(FedRep(), 10, 1), (FedRep(head_epochs=3), 3, 2)])
    def test_the_head_then_the_body(self, method, head, body):
        client = client_with(method, epochs=body)
        model = copy.deepcopy(client.model)
        by_hand(model, client, "head", head)
        by_hand(model, client, "features", body)
        up = method.local_update(client)
        for name, value in client.model.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-6)
        assert equal(up.part(), dict(client.model.features.state_dict()))

    def test_each_stands_still_while_the_other_learns(self):
        """The body with its batch-norm statistics."""
        client = client_with(FedRep(), nn.BatchNorm2d(1))
        start = Message.of(client.model)
        client.fit(FedRep().head_loss, opts=("head",))
        assert equal(Message.of(client.model.features).part(), start.part("features."))
        assert not equal(Message.of(client.model.head).part(), start.part("head."))
        middle = Message.of(client.model)
        client.fit(FedRep().step)
        assert equal(Message.of(client.model.head).part(), middle.part("head."))
        after = Message.of(client.model.features).part()
        assert all(not torch.equal(after[name], value) for name, value in middle.part("features.").items())


class TestRun:
    def test_heads_stay_at_home(self):
        settings = {"models": "mlp-64", "rounds": 2}
        result = run_tiny("fedrep", **settings)
        features = assemble_tiny("fedrep", **settings).task.build("mlp-64").features.state_dict()
        assert result.ledger.by("tensor").keys() == features.keys() | {"(header)"}
        states = kept(result)
        assert {name for name in states if name.startswith("server")} == {f"server shared.{n}" for n in features}
        heads = [states[f"client {k} model.head.weight"] for k in range(4)]
        assert all(not torch.equal(heads[0], head) for head in heads[1:])

    def test_the_next_round_goes_on_with_the_own_head_and_the_global_body(self):
        hand = ByHand(assemble_tiny("fedrep", models="mlp-64"))
        hand.round(0, range(4))
        client = hand.host.client(2)
        head = Message.of(client.model.head).part()
        hand.method.receive(client, hand.method.download(hand.server, 2))
        assert equal(Message.of(client.model.head).part(), head)
        assert equal(Message.of(client.model.features).part(), Message.of(hand.server.state.shared).part())

    def test_who_never_takes_part_keeps_its_first_head(self):
        parts = assemble_tiny("fedrep", models="mlp-64")
        hand, fresh = ByHand(parts), ByHand(parts)
        hand.round(0, [0, 3])
        heads = [[Message.of(one.host.client(k).model.head).part() for k in range(4)] for one in (hand, fresh)]
        assert [equal(mine, first) for mine, first in zip(*heads, strict=True)] == [False, True, True, False]

    def test_bodies_are_averaged_by_samples(self):
        hand = ByHand(assemble_tiny("fedrep", models="mlp-64"))
        hand.round(0, range(4))
        samples = {k: hand.parts.cards[k].samples for k in range(4)}
        bodies = [hand.host.client(k).model.features.state_dict() for k in range(4)]
        for name, value in hand.server.state.shared.state_dict().items():
            mean = sum(body[name] * (samples[k] / sum(samples.values())) for k, body in enumerate(bodies))
            torch.testing.assert_close(value, mean)


def test_a_round_without_the_head_is_refused():
    with refused(RangeError, "--head-epochs", 1, 0):
        assemble_tiny("fedrep", head_epochs=0)


def test_traffic_is_what_the_sheet_says():
    """The body each way."""
    result = run_tiny("fedrep", models="mlp-64")
    body = 64 * 64 + 64
    for way in ("up", "down"):
        by_tensor = result.ledger.by("tensor", way)
        del by_tensor["(header)"]
        assert sum(by_tensor.values()) == 2 * 4 * 4 * body
