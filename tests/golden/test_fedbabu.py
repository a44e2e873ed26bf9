"""FedBABU: one head that nobody trains, a body that everyone does, and fine-tuning by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import assemble_tiny, run_tiny
from kit import ByHand, differing, kept
from parties import client_of, copies, data_of, equal, noise
from pluribus.client import Client
from pluribus.engines.stacked import is_stackable
from pluribus.errors import RangeError, UnknownNameError
from pluribus.message import Message
from pluribus.methods.fedbabu import FedBABU
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from pluribus.request import Evaluate
from refusals import refused

LABELS = [0, 1, 2, 1, 0]
LR = 0.3


def client_with(method: FedBABU) -> Client:
    """Two layers and a head on five noisy images, all in one batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU()), nn.Linear(4, 3), 4)
    client = client_of(model, data_of(noise(5), LABELS), classes=3, rule=Rule(lr=LR))
    client.equip(method.optimizers(client), {})
    client.begin(0, 0, {})
    return client


def by_hand(client: Client, part: str, steps: int) -> dict[str, torch.Tensor]:
    """Steps on the whole training set, of this part of the model alone."""
    model = copy.deepcopy(client.model)
    x, y = client.data["train"].take(torch.arange(5))
    for _ in range(steps):
        parameters = list(model.get_submodule(part).parameters())
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= LR * g
    return {name: value.detach() for name, value in model.state_dict().items()}


def assert_close_to(client: Client, expected: dict[str, torch.Tensor]) -> None:
    for name, value in client.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


class TestTraining:
    def test_a_round_trains_the_body_alone(self):
        method = FedBABU()
        client = client_with(method)
        expected, head = by_hand(client, "features", 1), Message.of(client.model.head).part()
        up = method.local_update(client)
        assert_close_to(client, expected)
        assert equal(dict(client.model.head.state_dict()), head)
        assert equal(up.part(), dict(client.model.features.state_dict()))

    def test_heads_are_one_random_head_bit_for_bit(self):
        settings = {"models": "cnn-16-32", "rounds": 2, "participation": 0.5, "finetune_epochs": 1}
        parts = assemble_tiny("fedbabu", **settings)
        head = parts.task.build("cnn-16-32", "global").head.state_dict()
        states = kept(run_tiny("fedbabu", **settings))
        hand = ByHand(parts)  # who never took part has it too
        for k in range(4):
            assert equal(dict(hand.host.client(k).model.head.state_dict()), dict(head))
            for name, value in head.items():
                assert torch.equal(states.get(f"client {k} model.head.{name}", value), value)
        assert any(name.startswith("client") for name in states)

    def test_the_head_never_travels(self):
        tensors = run_tiny("fedbabu", finetune_epochs=0).ledger.by("tensor")
        features = assemble_tiny("fedbabu").task.build("cnn-16").features.state_dict()
        assert tensors.keys() == features.keys() | {"(header)"}

    def test_bodies_are_averaged_by_samples(self):
        hand = ByHand(assemble_tiny("fedbabu", models="mlp-64"))
        hand.round(0, range(4))
        samples = {k: hand.parts.cards[k].samples for k in range(4)}
        bodies = [hand.host.client(k).model.features.state_dict() for k in range(4)]
        for name, value in hand.server.state.shared.state_dict().items():
            mean = sum(body[name] * (samples[k] / sum(samples.values())) for k, body in enumerate(bodies))
            torch.testing.assert_close(value, mean)

    def test_clients_train_together_where_fedavgs_do(self):
        client = ByHand(assemble_tiny("fedbabu")).host.client(0)
        assert is_stackable(FedBABU(), client)
        assert set(client.parameters()) < set(dict(client.model.named_parameters())), "names are the model's"


class TestFineTuning:
    @pytest.mark.parametrize(("finetune", "part"), [("model", ""), ("head", "head")])
    def test_by_hand(self, finetune, part):
        method = FedBABU(finetune=finetune, finetune_epochs=3)
        client = client_with(method)
        expected = by_hand(client, part, 3)
        method.adapt(client, "finetuned")
        assert_close_to(client, expected)

    def test_ten_epochs_unless_told_otherwise(self):
        client = client_with(FedBABU())
        expected = by_hand(client, "", 10)
        FedBABU().adapt(client, "finetuned")
        assert_close_to(client, expected)

    def test_only_its_own_view_is_fine_tuned(self):
        client = client_with(FedBABU())
        before = copies(client)
        FedBABU().adapt(client, "before")
        assert equal(copies(client), before)

    def test_evaluation_measures_it_and_leaves_no_trace(self):
        hand = ByHand(assemble_tiny("fedbabu", models="mlp-64"))
        hand.round(0, range(4))
        client = hand.host.client(1)
        before = {n: v.clone() for n, v in client.tensors().items()}
        measured = hand.host.answer(Evaluate(1, 0, hand.download(0, 1))).figures
        assert list(measured) == ["finetuned", "before"]
        assert measured["finetuned"]["test_loss"] < measured["before"]["test_loss"]
        assert differing(before, client.tensors()) == []

    def test_none_at_all(self):
        for record in run_tiny("fedbabu", finetune_epochs=0, models="mlp-64").history:
            assert all(views["finetuned"] == views["before"] for views in record["clients"].values())


@pytest.mark.parametrize(
    ("wrong", "kind", "facts"),
    [
        ({"finetune_epochs": -1}, RangeError, ("--finetune-epochs", 0, -1)),
        ({"finetune": "body"}, UnknownNameError, ("--finetune", "model", "head", "body")),
    ],
)
def test_refusals(wrong, kind, facts):
    with refused(kind, *facts):
        assemble_tiny("fedbabu", **wrong)


def test_traffic_is_what_the_sheet_says():
    """The body each way."""
    result = run_tiny("fedbabu", models="mlp-64", finetune_epochs=0)
    body = 64 * 64 + 64
    for way in ("up", "down"):
        by_tensor = result.ledger.by("tensor", way)
        del by_tensor["(header)"]
        assert sum(by_tensor.values()) == 2 * 4 * 4 * body
