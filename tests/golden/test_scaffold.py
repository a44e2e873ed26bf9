"""SCAFFOLD: control variates and the server's step by hand, and the identities that they must keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import assemble_tiny, run_tiny
from kit import kept
from parties import client_of, data_of, federation_of, flat_split, noise, run_through, server_of, signs, task_of
from pluribus.client import Client
from pluribus.errors import ConflictError, RangeError
from pluribus.internal.attacks import Attack
from pluribus.message import Field, Message
from pluribus.methods.scaffold import Scaffold
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from pluribus.privacy.messages import clip_message
from refusals import refused

P = 6  # of the linear model below: four weights, two biases
# x = 0, pixels (1, -1) of class 0 and (1, 1) of class 1: the mean of (p - e_y) r^T is (0, 1/2) in row 0.
GRADIENT = [0.0, 0.5, 0.0, -0.5, 0.0, 0.0]
C_I, C = [1.0, 0.0, -2.0, 0.0, 0.5, 0.0], [0.0, 0.25, 1.0, 0.0, 0.0, -4.0]


def client_at_zero(rule: Rule, epochs: int = 1, c_i: list[float] = C_I, c: list[float] = C) -> Client:
    """A linear model at x = 0 that got the control variate c and has c_i."""
    model = flat_split(2, 2)
    data = data_of(signs([[1, -1], [1, 1]]), [0, 1])
    client = client_of(model, data, rule=rule, epochs=epochs, down={"control": Field((P,))})
    Scaffold().prepare(client)
    client.state.control = torch.tensor(c_i)
    zeros = {"model.head.weight": torch.zeros(2, 2), "model.head.bias": torch.zeros(2)}
    down = Message({**zeros, "control": torch.tensor(c)})
    client.take(down)
    Scaffold().receive(client, down)
    return client


def weights(client: Client) -> Tensor:
    return torch.cat([client.model.head.weight.detach().flatten(), client.model.head.bias.detach()])


class TestClient:
    def test_one_step_by_hand(self):
        """y = x - eta (g - c_i + c); with K = 1 the new c_i is the gradient at x. eta = 1/2: all numbers are exact."""
        client = client_at_zero(Rule(lr=0.5))
        up = Scaffold().local_update(client)
        corrected = [g - own + all_ for g, own, all_ in zip(GRADIENT, C_I, C, strict=True)]
        assert weights(client).tolist() == [-0.5 * value for value in corrected]
        assert up.tensor("progress").tolist() == [-0.5 * value for value in corrected]
        assert client.state.control.tolist() == GRADIENT
        assert up.tensor("changes").tolist() == [g - own for g, own in zip(GRADIENT, C_I, strict=True)]

    def test_after_k_steps_c_i_is_the_mean_gradient_along_the_way(self):
        seen: list[Tensor] = []

        class Watched(Scaffold):
            def loss(self, client, batch):
                loss = super().loss(client, batch)
                seen.append(torch.cat([g.flatten() for g in client.grads(super().loss(client, batch)).values()]))
                return loss

        client = client_at_zero(Rule(lr=0.5), epochs=4)
        Watched().local_update(client)
        assert len(seen) == 4
        assert not torch.equal(seen[0], seen[3])
        torch.testing.assert_close(client.state.control, torch.stack(seen).mean(0), rtol=0, atol=1e-6)

    def test_eta_is_the_rate_of_the_round(self):
        """In round 2 the rate is 1/8 of the first one; K = 1 still gives the gradient."""
        client = client_at_zero(Rule(lr=1.0, decay=0.5**1.5))
        client.begin(2, 0, {})
        Scaffold().local_update(client)
        torch.testing.assert_close(client.state.control, torch.tensor(GRADIENT), rtol=0, atol=1e-6)

    def test_weight_decay_is_part_of_the_gradient(self):
        """x = (1, 0, ...), decay 1/2: c_i is the gradient of the loss and of x^2 / 4 together."""
        client = client_at_zero(Rule(lr=0.5, weight_decay=0.5))
        with torch.no_grad():
            client.model.head.bias.fill_(2.0)  # equal biases: the softmax stays
        Scaffold().local_update(client)
        assert client.state.control.tolist() == [0.0, 0.5, 0.0, -0.5, 1.0, 1.0]

    def test_who_has_no_data_says_nothing_new(self):
        client = client_at_zero(Rule(lr=0.5))
        client.data["train"] = data_of(signs([[1, 1]])[:0], [])
        up = Scaffold().local_update(client)
        assert not up.tensor("progress").any()
        assert not up.tensor("changes").any()
        assert client.state.control.tolist() == C_I

    def test_changes_are_measured_from_zero(self):
        """Both vectors are changes. So a lie and a bound of their length must not depend on what was downloaded."""
        client = client_at_zero(Rule(lr=0.5))
        up, got = Scaffold().local_update(client), Message({"control": torch.tensor(C)})
        lie = Attack("sign-flip", 1.0, frozenset({0}), 0).falsify(up, dict.fromkeys(up, Field((P,))), got, 0)
        clipped = clip_message(up, got, 0.5)
        norm = torch.cat([up.tensor(name) for name in up]).norm()
        assert norm > 0.5
        for name in up:
            assert torch.equal(lie.tensor(name), -up.tensor(name))
            torch.testing.assert_close(clipped.tensor(name).float(), up.tensor(name) * 0.5 / norm)


def normed(batches: int) -> TwoPartModel:
    """Batch norm without weights of its own, then a linear model."""
    model = flat_split(2, 2, 0, nn.BatchNorm2d(1, affine=False))
    model.features[0].num_batches_tracked.fill_(batches)
    return model


class TestServer:
    def test_the_server_step_by_hand(self):
        """x = 1, progress 2 and 4, eta_g = 1/2: x = 1 + 3/2. c = 1, changes 2 and -6, N = 4: c = 1 - 4/4.

        Samples differ; each client counts once.
        """
        server = server_of(task_of(2, 2, clients=4), {0: 1, 3: 1000})
        server.state.model, server.state.control = normed(0), torch.ones(P)
        for p in server.state.model.parameters():
            nn.init.ones_(p)
        statistics = "model.features.0."
        uploads = {
            k: Message(
                {
                    "progress": torch.full((P,), progress),
                    "changes": torch.full((P,), change),
                    f"{statistics}running_mean": torch.tensor([mean]),
                    f"{statistics}running_var": torch.tensor([mean + 1]),
                    f"{statistics}num_batches_tracked": torch.tensor(batches),
                }
            )
            for k, progress, change, mean, batches in ((0, 2.0, 2.0, 0.0, 9), (3, 4.0, -6.0, 5.0, 2))
        }
        Scaffold(server_lr=0.5).aggregate(server, uploads)
        assert all((p == 2.5).all() for p in server.state.model.parameters())
        assert server.state.control.tolist() == [0.0] * P
        norm = server.state.model.features[0]
        assert (norm.running_mean.item(), norm.running_var.item(), norm.num_batches_tracked.item()) == (2.5, 3.5, 9)


class TestRun:
    def test_the_first_round_is_uniform_fedavg(self):
        federation = federation_of(assemble_tiny("scaffold", rounds=1, models="cnn-16-32"))
        run_through(federation)
        models = [federation.engine.host.client(k).model.state_dict() for k in range(4)]
        for name, value in federation.server.state.model.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(value, torch.stack([model[name] for model in models]).mean(0))

    @pytest.mark.parametrize("participation", [1.0, 0.5])
    def test_c_is_the_mean_of_all_c_i(self, participation):
        states = kept(run_tiny("scaffold", rounds=3, models="mlp-64", epochs=2, participation=participation))
        server = states["server control"]
        own = [states.get(f"client {k} state.control", torch.zeros_like(server)) for k in range(4)]
        assert server.norm() > 0.1
        torch.testing.assert_close(server, torch.stack(own).mean(0), rtol=1e-4, atol=1e-6)

    def test_one_step_per_round_is_gradient_descent_on_the_mean_loss(self):
        """K = 1 under full participation: corrections cancel in the mean, so x descends the uniform mean of losses."""
        parts = assemble_tiny("scaffold", rounds=3, models="mlp-64", batch_size=500)
        federation = federation_of(parts)
        model = parts.task.build("mlp-64", "global")
        for _ in range(3):
            losses = []
            for k in range(4):
                train = parts.data.sets(k)["train"]
                x, y = train.take(torch.arange(len(train)))
                losses.append(F.cross_entropy(model(x), y))
            gradients = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= 0.05 * g
        run_through(federation)
        for name, value in federation.server.state.model.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-6)

    def test_later_rounds_differ_from_fedavg(self):
        """Else the corrections would do nothing."""
        corrected, plain = (kept(run_tiny(name, models="mlp-64", partition="pathological")) for name in METHODS)
        found = corrected["server model.head.weight"] - plain["server shared.head.weight"]
        assert found.abs().max() > 1e-3


METHODS = ("scaffold", "fedavg")


class TestRefusals:
    @pytest.mark.parametrize("rule", [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "amsgrad"}])
    def test_other_rules_than_plain_sgd(self, rule):
        with refused(ConflictError, "scaffold", "--optimizer sgd", "--momentum 0"):
            assemble_tiny("scaffold", **rule)

    def test_a_server_that_stands_still(self):
        with refused(RangeError, "--server-lr", 0.0):
            assemble_tiny("scaffold", server_lr=0.0)


@pytest.mark.parametrize("model", ["mlp-64", "cnn-16-32"])
def test_traffic_is_what_the_sheet_says(model):
    """2 P floats each way, and the buffers where there are some."""
    result = run_tiny("scaffold", models=model)
    built = assemble_tiny("scaffold", models=model).task.build(model)
    floats = sum(p.numel() for p in built.parameters())
    buffers = sum(value.nbytes for value in built.buffers())
    assert bool(buffers) == (model == "cnn-16-32")
    for way in ("up", "down"):
        by_tensor = result.ledger.by("tensor", way)
        del by_tensor["(header)"]
        assert sum(by_tensor.values()) == 2 * 4 * (2 * 4 * floats + buffers)


def test_buffers_travel_as_they_are():
    model = normed(0)
    client = client_of(model, data_of(noise(6, (1, 1, 2)), [0, 1] * 3), batch=3, down={"control": Field((P,))})
    Scaffold().prepare(client)
    up = Scaffold().local_update(client)
    assert torch.equal(up.tensor("model.features.0.running_mean"), model.features[0].running_mean)
    assert up.tensor("model.features.0.num_batches_tracked") == 2
    assert sorted(up) == sorted(
        ["progress", "changes", *(f"model.features.0.{n}" for n, _ in model.features[0].named_buffers())]
    )
