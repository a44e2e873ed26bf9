"""FedMRL: a step by hand, what the projector and the shared model keep, and where it is local training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import assemble_tiny, run_tiny
from kit import kept
from parties import client_of, data_of, equal, federation_of, flat_split, run_through, server_of, signs, task_of
from pluribus.client import Batch
from pluribus.errors import MismatchError, RangeError
from pluribus.evaluate import measure
from pluribus.message import Message
from pluribus.methods.fedmrl import FedMRL
from pluribus.models import TwoPartModel
from pluribus.models.two_part import Pool
from pluribus.optim import Opt, Rule
from refusals import refused


def trio(method: FedMRL | None = None, lr: float = 1.0):
    """A client whose features are two pixels; the small model's feature is their mean (d_1 = 1), A is 2 x 3."""
    client = client_of(flat_split(2, 2), data_of(signs([[1, -1], [1, 1]]), [0, 1]), rule=Rule(lr=lr))
    pooled = nn.Sequential(nn.Flatten(), Pool(1), nn.Linear(1, 1, bias=False))
    pooled[2].weight.data.fill_(1.0)
    client.state.shared = TwoPartModel(pooled, nn.Linear(1, 2), 1)
    client.state.projector = nn.Linear(3, 2)
    with torch.no_grad():
        for module in (client.model, client.state.shared.head, client.state.projector):
            for value in module.parameters():
                value.zero_()
    client.equip((method or FedMRL()).optimizers(client), {})
    return client


def batch_of(client) -> Batch:
    x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
    return Batch(x, y, torch.arange(len(y)), len(y))


class TestStep:
    def test_the_heads_by_hand(self):
        """One sample of class 0. A = 0 but for its bias, so u = (1, 2); heads of zeros, so q - e_0 = (-1/2, 1/2).

        Private head: (1/2, -1/2) u^T = ((1/2, 1), (-1/2, -1)). Small head, of u_1 = 1 alone: (1/2, -1/2).
        """
        client = trio()
        client.state.projector.bias.data.copy_(torch.tensor([1.0, 2.0]))
        batch = batch_of(client)
        loss = FedMRL().step(client, Batch(batch.x[:1], batch.y[:1], batch.i[:1], 1))
        assert loss.item() == pytest.approx(math.log(2)), "the private head's loss is logged"
        assert client.model.head.weight.tolist() == [[0.5, 1.0], [-0.5, -1.0]]
        assert client.state.shared.head.weight.tolist() == [[0.5], [-0.5]]
        assert client.state.shared.head.bias.tolist() == [0.5, -0.5]
        assert client.state.projector.bias.tolist() == [1.0, 2.0], "heads of zeros pass no gradient on"

    def test_all_by_the_equations(self):
        """One step against u = A [phi_g, phi] and L = CE(psi(u)) + CE(psi_g(u_1)) written out."""
        client = trio(lr=0.5)
        parameters = [p for m in (client.model, client.state.shared, client.state.projector) for p in m.parameters()]
        with torch.no_grad():
            for value in parameters:
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel())))
        w, b, scale, w_g, b_g, a, c = (value.detach().clone().requires_grad_() for value in parameters)
        x = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
        r = torch.cat([x.mean(1, keepdim=True) * scale, x], 1)
        u = r @ a.T + c
        y = torch.tensor([0, 1])
        loss = F.cross_entropy(u @ w.T + b, y) + F.cross_entropy(u[:, :1] @ w_g.T + b_g, y)
        loss.backward()
        FedMRL().step(client, batch_of(client))
        for value, start in zip(parameters, (w, b, scale, w_g, b_g, a, c), strict=True):
            assert start.grad.abs().sum() > 0
            torch.testing.assert_close(value.detach(), start.detach() - 0.5 * start.grad)

    @pytest.mark.parametrize("zeroed", ["private", "small"])
    def test_both_losses_reach_the_small_features(self, zeroed):
        """With either head at zero, which passes no gradient, the other one's still arrives."""
        client = trio()
        with torch.no_grad():
            client.state.projector.weight.fill_(1.0)
            head = client.state.shared.head if zeroed == "private" else client.model.head
            head.weight.copy_(torch.arange(float(head.weight.numel())).reshape(head.weight.shape))
        before = client.state.shared.features[2].weight.clone()
        FedMRL().step(client, batch_of(client))
        assert not torch.equal(client.state.shared.features[2].weight, before)

    def test_prediction_goes_through_the_private_head(self):
        client = trio()
        client.state.projector.bias.data.copy_(torch.tensor([1.0, 2.0]))
        client.model.head.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        client.state.shared.head.weight.data.fill_(100.0)
        assert FedMRL().predict(client, batch_of(client).x).tolist() == [[1, 2], [1, 2]]


@dataclass(frozen=True)
class PassThrough(FedMRL):
    """A = [0 | I], fixed: the private model sees its own features."""

    def prepare(self, client):
        super().prepare(client)
        projector, own = client.state.projector, client.card.width
        with torch.no_grad():
            projector.weight.zero_()
            projector.bias.zero_()
            projector.weight[:, -own:] = torch.eye(own)

    def optimizers(self, client):
        return {**super().optimizers(client), "projector": Opt(client.state.projector, Rule(lr=0.0))}


class TestRun:
    def test_a_projector_that_passes_through_and_no_small_loss_is_local_training(self):
        settings = {"rounds": 2, "lr": 0.05, "models": "mlp-64,cnn-16"}
        fused = federation_of(assemble_tiny(PassThrough, small_weight=0.0, **settings))
        alone = federation_of(assemble_tiny("local", **settings))
        results = run_through(fused), run_through(alone)
        for k in range(4):
            one, other = (dict(f.engine.host.client(k).model.state_dict()) for f in (fused, alone))
            assert equal(one, other)
        assert [r["loss"] for r in results[0].history] == [r["loss"] for r in results[1].history]

    def test_the_projector_learns_is_kept_and_stays_at_home(self):
        parts = assemble_tiny("fedmrl", rounds=1)
        fresh = federation_of(parts).engine.host
        born = [dict(fresh.client(k).state.projector.state_dict()) for k in range(4)]
        one, two = (kept(run_tiny("fedmrl", rounds=n, checkpoint_every=1)) for n in (1, 2))
        for k in range(4):
            name = f"client {k} state.projector.weight"
            assert not torch.equal(born[k]["weight"], one[name])
            assert not torch.equal(one[name], two[name])
        assert not torch.equal(born[0]["weight"], born[2]["weight"]), "each has its own"
        assert not [name for name in run_tiny("fedmrl", rounds=1).ledger.by("tensor", "up") if "projector" in name]

    def test_weighted_by_samples_and_not_the_last_client(self):
        """(1 * 0 + 3 * 4) / 4 = 3."""
        server = server_of(task_of(2, 2), {0: 1, 1: 3})
        server.state.shared = nn.Linear(2, 2)
        uploads = {
            k: Message({"weight": torch.full((2, 2), 4.0 * k), "bias": torch.full((2,), 4.0 * k)}) for k in (0, 1)
        }
        FedMRL().aggregate(server, uploads)
        assert (server.state.shared.weight == 3).all()
        assert (server.state.shared.bias == 3).all()

    def test_before_is_with_the_mean_small_model(self):
        federation = federation_of(assemble_tiny("fedmrl", rounds=1))
        run_through(federation)
        for k in range(4):
            client = federation.engine.host.client(k)
            own = dict(client.state.shared.state_dict())
            assert not equal(own, dict(federation.server.state.shared.state_dict()))
            FedMRL().receive(client, FedMRL().download(federation.server, k))
            assert measure(FedMRL().predict, client) == federation.history[0]["clients"][str(k)]["before"]

    @pytest.mark.parametrize("width", [None, 16])
    def test_traffic_is_what_the_sheet_says(self, width):
        """P_small each way, whatever the clients' own models are; a narrower one has a head of that width."""
        result = run_tiny("fedmrl", aux_model="cnn-16", small_width=width)
        sizes = {n: v.nbytes for n, v in assemble_tiny("fedmrl").task.build("cnn-16").state_dict().items()}
        sizes["head.weight"] = 4 * 10 * (width or 64)
        for way in ("up", "down"):
            by_tensor = result.ledger.by("tensor", way)
            del by_tensor["(header)"]
            assert by_tensor == {name: 2 * 4 * size for name, size in sizes.items()}


def narrow(shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 32))


class TestWidths:
    OWN = {"models": "mlp-64,test_fedmrl.narrow", "projector": "none"}  # noqa: RUF012

    def test_pooled_to_a_width(self):
        parts = assemble_tiny("fedmrl", small_width=16)
        small = parts.method.auxiliary(parts.task)
        assert (small.width, small.head.in_features) == (16, 16)
        assert small.features(torch.zeros(2, 1, 8, 8)).shape == (2, 16)

    def test_models_with_widths_of_their_own(self):
        federation = federation_of(assemble_tiny("fedmrl", small_width=32, rounds=1, **self.OWN))
        run_through(federation)
        found = [federation.engine.host.client(k).state.projector.weight.shape for k in range(2)]
        assert found == [(64, 96), (32, 64)]

    @pytest.mark.parametrize("width", [None, 33])
    def test_never_wider_than_a_client(self, width):
        with refused(MismatchError, "client 1 (test_fedmrl.narrow)", "--small-width 32"):
            assemble_tiny("fedmrl", aux_model="cnn-16", small_width=width, **self.OWN)

    @pytest.mark.parametrize(("name", "value"), [("small_width", 0), ("small_width", -1), ("small_weight", -1.0)])
    def test_numbers_that_make_no_sense(self, name, value):
        with refused(RangeError, f"--{name.replace('_', '-')}", value):
            assemble_tiny("fedmrl", **{name: value})
