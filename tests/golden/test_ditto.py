"""Ditto: both models of a step by hand, and that it is FedAvg beside local training where nothing pulls."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from conftest import assemble_tiny, run_tiny
from kit import ByHand, differing, kept
from parties import client_of, copies, data_of, equal, federation_of, flat_split, run_through, signs
from pluribus.client import Client
from pluribus.errors import MismatchError, RangeError
from pluribus.message import Message, schema_of
from pluribus.methods.ditto import Ditto
from pluribus.optim import Rule
from pluribus.request import Evaluate
from refusals import refused

PIXELS, LABELS = [[1, -1], [1, 1]], [0, 1]
LN3 = math.log(3)
GLOBAL = [[LN3, 0.0], [0.0, 0.0]]


def client_at(method: Ditto, own: list[list[float]], downloaded: list[list[float]], lr: float = 1.0, **how) -> Client:
    """A linear personal model without bias at the first weights, that got a global model with the others."""
    client = client_of(flat_split(2, 2), data_of(signs(PIXELS), LABELS), **how)
    client.state.shared = flat_split(2, 2)
    client.local = client.local._replace(rule=Rule(lr=lr))
    client.equip(method.optimizers(client), schema_of(client.model, kept=True))
    client.begin(0, 0, {})
    down = Message({"head.weight": torch.tensor(downloaded), "head.bias": torch.zeros(2)})
    client.take(down)
    method.receive(client, down)
    client.model.load_state_dict({"head.weight": torch.tensor(own), "head.bias": torch.zeros(2)})
    return client


class TestStep:
    """Images (1, -1) of class 0 and (1, 1) of class 1, eta = 1.

    Global model: logits (ln 3, 0) for both, so p = (3/4, 1/4), and errors p - e_y are (-1/4, 1/4) and (3/4, -3/4). The
    gradient of row 0 is ((-1/4)(1, -1) + (3/4)(1, 1)) / 2 = (1/4, 1/2), of its bias 1/4; of row 1 the opposite.
    Personal model at 0: p = (1/2, 1/2), the gradient of row 0 is (0, 1/2), of its bias 0; of row 1 the opposite.
    """

    def test_both_models_by_hand(self):
        """lambda = 1/2: the pull adds -(v - w^t) / 2 = (ln 3 / 2, 0) to row 0 of v, and nothing to w_k."""
        method = Ditto(pull=0.5)
        client = client_at(method, [[0.0, 0.0], [0.0, 0.0]], GLOBAL)
        up = method.local_update(client)
        own, shared = client.model.head, client.state.shared.head
        assert own.weight.flatten().tolist() == pytest.approx([LN3 / 2, -0.5, 0, 0.5], abs=1e-6)
        assert own.bias.tolist() == pytest.approx([0, 0], abs=1e-6)
        assert shared.weight.flatten().tolist() == pytest.approx([LN3 - 0.25, -0.5, 0.25, 0.5], abs=1e-6)
        assert shared.bias.tolist() == pytest.approx([-0.25, 0.25], abs=1e-6)
        assert equal(up.part(), {f"head.{n}": v for n, v in shared.state_dict().items()}), "only w_k is sent"
        assert client.loss() == pytest.approx(math.log(2)), "the log is about v, without the pull"

    def test_the_pull_is_to_the_downloaded_model_not_to_the_trained_one(self):
        """Three steps, each of v - eta (grad F(v) + lambda (v - w^t))."""
        method = Ditto(pull=2.0)
        client = client_at(method, [[0.0, 0.0], [0.0, 0.0]], GLOBAL, lr=0.3, epochs=3)
        method.local_update(client)
        x, y = torch.tensor(PIXELS).float(), torch.tensor(LABELS)
        anchor = (torch.tensor(GLOBAL), torch.zeros(2))
        v = [torch.zeros(2, 2, requires_grad=True), torch.zeros(2, requires_grad=True)]
        for _ in range(3):
            grads = torch.autograd.grad(F.cross_entropy(x @ v[0].T + v[1], y), v)
            moved = [p - 0.3 * (g + 2.0 * (p - a)) for p, g, a in zip(v, grads, anchor, strict=True)]
            v = [p.detach().requires_grad_() for p in moved]
        torch.testing.assert_close(client.model.head.weight, v[0])
        torch.testing.assert_close(client.model.head.bias, v[1])

    def test_a_stronger_pull_keeps_the_personal_model_nearer(self):
        distances = []
        for pull in (0.0, 1.0, 3.0):
            client = client_at(method := Ditto(pull=pull), GLOBAL, GLOBAL, lr=0.3, epochs=3)
            method.local_update(client)
            distances.append(float((client.model.head.weight.detach() - torch.tensor(GLOBAL)).square().sum()))
        assert distances[0] > distances[1] > distances[2] > 0

    def test_a_download_leaves_the_personal_model_alone(self):
        client = client_at(Ditto(), [[1.0, 2.0], [3.0, 4.0]], GLOBAL)
        assert client.model.head.weight.tolist() == [[1, 2], [3, 4]]
        assert client.state.shared.head.weight.flatten().tolist() == pytest.approx([LN3, 0, 0, 0])


class TestSideBySide:
    @pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.001}, {"optimizer": "adam"}])
    def test_without_a_pull_it_is_local_training_beside_fedavg(self, settings):
        settings |= {"models": "cnn-16-32"}
        both = federation_of(assemble_tiny("ditto", pull=0.0, **settings))
        alone, averaging = (federation_of(assemble_tiny(name, **settings)) for name in ("local", "fedavg"))
        start = alone.engine.host.task.build("cnn-16-32", "global").state_dict()
        for k in range(4):  # as here, everyone starts from the global model
            alone.engine.host.client(k).model.load_state_dict(start)
        results = [run_through(one) for one in (both, alone, averaging)]
        for k in range(4):
            one, other = (dict(side.engine.host.client(k).model.state_dict()) for side in (both, alone))
            assert equal(one, other)
        assert equal(*(dict(side.server.state.shared.state_dict()) for side in (both, averaging)))
        for mine, local, fedavg in zip(*(result.history for result in results), strict=True):
            assert mine["loss"] == local["loss"]
            for k, views in mine["clients"].items():
                assert views["after"] == local["clients"][k]["after"]
                assert views["before"] == fedavg["clients"][k]["before"]

    def test_the_global_model_does_not_know_the_personal_ones(self):
        settings = {"rounds": 3, "participation": 0.5, "partition": "dirichlet"}
        one, other = kept(run_tiny("ditto", pull=3.0, **settings)), kept(run_tiny("fedavg", **settings))
        shared = {name: value for name, value in other.items() if name.startswith("server")}
        assert differing({name: one[name] for name in shared}, shared) == []


class TestViews:
    def test_everyone_starts_from_the_global_model(self):
        hand = ByHand(assemble_tiny("ditto", models="mlp-64"))
        shared = dict(hand.server.state.shared.state_dict())
        for k in range(4):
            assert equal(dict(hand.host.client(k).model.state_dict()), shared)

    def test_after_is_the_personal_model_and_before_the_newest_global_one(self):
        hand = ByHand(assemble_tiny("ditto", models="mlp-64"))
        hand.round(0, range(4))
        client, untouched = hand.host.client(1), copies(hand.host.client(1))
        measured = hand.host.answer(Evaluate(1, 0, hand.download(0, 1))).figures
        assert list(measured) == ["after", "before"]
        assert equal(copies(client), untouched), "evaluation leaves no trace"
        own, shared = client.model, hand.server.state.shared.eval()
        data = client.data["test"]
        x, y = data.take(torch.arange(len(data)))
        for view, model in {"after": own.eval(), "before": shared}.items():
            assert measured[view]["test_loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)

    def test_who_never_takes_part_keeps_its_first_model(self):
        hand = ByHand(assemble_tiny("ditto", models="mlp-64"))
        first = dict(hand.server.task.build("mlp-64", "global").state_dict())
        hand.round(0, [0, 3])
        found = [equal(dict(hand.host.client(k).model.state_dict()), first) for k in range(4)]
        assert found == [False, True, True, False]

    def test_the_model_of_a_client_is_its_personal_one(self):
        result = run_tiny("ditto", models="mlp-64")
        states = kept(result)
        for k in range(4):
            model = result.model(k, round="last").state_dict()
            assert all(torch.equal(states[f"client {k} model.{name}"], value) for name, value in model.items())
            assert not torch.equal(model["head.weight"], states["server shared.head.weight"])


def test_traffic_is_that_of_fedavg():
    assert run_tiny("ditto").ledger.by("tensor") == run_tiny("fedavg").ledger.by("tensor")


def test_a_pull_below_zero_is_refused():
    with refused(RangeError, "--pull", 0, -1):
        assemble_tiny("ditto", pull=-1.0)


def test_two_architectures_are_refused():
    with refused(MismatchError, "ditto", "mlp-64", "cnn-16"):
        assemble_tiny("ditto", models="mlp-64,cnn-16")
