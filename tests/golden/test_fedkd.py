"""FedKD: the losses by hand, and that both ends hold the same mentee, whatever was left out on the way."""

from __future__ import annotations

import math

import pytest
import torch
from test_fml import LN3, pair
from torch import nn

from conftest import assemble_tiny, run_tiny
from kit import ByHand
from parties import client_of, data_of, equal, flat_split, server_of, signs, task_of
from pluribus.client import Batch
from pluribus.errors import RangeError, UnknownNameError
from pluribus.message import Message
from pluribus.method import Sizes
from pluribus.methods._lowrank import Shelf
from pluribus.methods.fedkd import FedKD
from pluribus.models import TwoPartModel
from pluribus.models.two_part import Pool
from pluribus.optim import Rule
from pluribus.request import Work
from refusals import refused

SIZES = Sizes(10, 10, 10)


def trio(method: FedKD, lr: float = 0.5):
    """A client whose mentor's features are its two pixels (K = 2) and whose mentee's is their mean (K_g = 1)."""
    data = data_of(signs([[1, -1], [1, 1], [-1, 1]]), [0, 1, 1])
    client = client_of(flat_split(2, 2, 0, nn.Conv2d(1, 1, 1)), data, rule=Rule(lr=lr))
    mentee = nn.Sequential(nn.Flatten(), Pool(1), nn.Linear(1, 1))
    client.state.shared = TwoPartModel(mentee, nn.Linear(1, 2), 1)
    client.state.adapter = nn.Linear(1, 2, bias=False)
    for number, value in enumerate([*client.model.parameters(), *client.state.parameters()]):
        value.data.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(number)))
    client.equip(method.optimizers(client), {})
    client.begin(0, 0, method.schedule(0, 3))
    return client


def batch_of(client) -> Batch:
    x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
    return Batch(x, y, torch.arange(len(y)), len(y))


class TestStep:
    @pytest.mark.parametrize("losses", ["joint", "own"])
    @pytest.mark.parametrize("mentee_lr", [None, 0.125])
    def test_all_by_the_equations(self, mentee_lr, losses):
        """L and L_g written out, in double precision.

        Joint: everything descends L + L_g, and nothing is held fixed, the denominator neither. Own: the mentor descends
        dL / d theta, mentee and W_h descend dL_g / d theta_g.
        """
        client = trio(method := FedKD(mentee_lr=mentee_lr, losses=losses))
        groups = {"model": client.model, "mentee": client.state.shared, "adapter": client.state.adapter}
        live = [(name, p) for name, module in groups.items() for p in module.parameters()]
        start = [p.detach().double().clone().requires_grad_() for _, p in live]
        scale, shift, w, b, scale_g, shift_g, w_g, b_g, w_h = start
        x = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
        y = torch.tensor([0, 1, 1])
        z, z_g = x * scale.squeeze() + shift, x.mean(1, keepdim=True) * scale_g.squeeze() + shift_g
        o, o_g = z @ w.T + b, z_g @ w_g.T + b_g
        q, q_g = o.softmax(1), o_g.softmax(1)
        rows = torch.arange(3)
        ce, ce_g = -q[rows, y].log().mean(), -q_g[rows, y].log().mean()
        d = ce + ce_g
        mse = ((z - z_g @ w_h.T) ** 2).sum() / (3 * 2)
        loss = ce + (q_g * (q_g / q).log()).sum(1).mean() / d + mse / d
        loss_g = ce_g + (q * (q / q_g).log()).sum(1).mean() / d + mse / d
        if losses == "joint":
            grads = torch.autograd.grad(loss + loss_g, start)
        else:
            grads = (*torch.autograd.grad(loss, start[:4], retain_graph=True), *torch.autograd.grad(loss_g, start[4:]))
        said = method.step(client, batch_of(client))
        assert said.item() == pytest.approx(ce.item(), rel=1e-6), "the mentor's task loss is logged"
        for (name, value), before, grad in zip(live, start, grads, strict=True):
            lr = 0.125 if name == "mentee" and mentee_lr else 0.5
            assert grad.abs().sum() > 1e-3
            torch.testing.assert_close(value.detach().double(), before.detach() - lr * grad, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("losses", ["joint", "own"])
    def test_by_hand(self, losses):
        """Mentor logits (ln 3, 0), q = (3/4, 1/4); mentee logits 0, q_g = (1/2, 1/2); class 0. z = z_g and W_h = 1.

        CE = ln 4/3, CE_g = ln 2, D = ln 8/3. KL(q_g, q) = k = 1/2 ln 4/3; KL(q, q_g) = k_g = 3/4 ln 3/2 + 1/4 ln 1/2.
        Own: dL / do_0 = (3/4 - 1) (1 - k / D^2) + (3/4 - 1/2) / D, and likewise for the mentee.
        Joint adds the other's loss: -(3/4 - 1) k_g / D^2, as its D has CE, and 3/4 (ln 3/2 - k_g) / D of its KL.
        """
        client = pair([[LN3, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]])
        client.state.adapter = nn.Linear(2, 2, bias=False)
        client.state.adapter.load_state_dict({"weight": torch.eye(2)})
        method = FedKD(losses=losses)
        client.equip(method.optimizers(client), {})
        d, k, k_g = math.log(8 / 3), math.log(4 / 3) / 2, 3 / 4 * math.log(3 / 2) - math.log(2) / 4
        own = -1 / 4 * (1 - k / d**2) + 1 / 4 / d
        mentee = -1 / 2 * (1 - k_g / d**2) - 1 / 4 / d
        if losses == "joint":
            own += 1 / 4 * k_g / d**2 + 3 / 4 * (math.log(3 / 2) - k_g) / d
            mentee += 1 / 2 * k / d**2 + 1 / 2 * (math.log(2 / 3) - k) / d
        method.step(client, batch_of(client))
        assert client.model.head.bias.tolist() == pytest.approx([-own, own], abs=1e-6)
        assert client.state.shared.head.bias.tolist() == pytest.approx([-mentee, mentee], abs=1e-6)
        assert torch.equal(client.state.adapter.weight, torch.eye(2))

    def test_the_adapter_learns_to_map_mentee_onto_mentor(self):
        """With fixed models and so fixed distributions, W_h z_g goes where z is, as near as a line through 0 gets."""
        client = trio(method := FedKD(), lr=0.05)
        batch = batch_of(client)
        for name in ("model", "mentee"):
            client.optimizers[name].apply = lambda grads: None
        z, z_g = client.features(batch.x).detach(), client.state.shared.features(batch.x).detach()
        for _ in range(400):
            method.step(client, batch)
        best = torch.linalg.lstsq(z_g, z).solution.T
        torch.testing.assert_close(client.state.adapter.weight.detach(), best, rtol=1e-3, atol=1e-3)

    def test_rectangular_where_widths_differ(self):
        """W_h is K x K_g."""
        hand = ByHand(assemble_tiny("fedkd", models="mlp-64,test_fedkd.narrow", aux_model="mlp-64", projector="none"))
        assert [tuple(hand.host.client(k).state.adapter.weight.shape) for k in (0, 1)] == [(64, 64), (32, 64)]
        hand.round(0, range(4))


def narrow(shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 32))


def mentees(hand: ByHand, k: int) -> tuple[dict, dict]:
    """What the server holds, and what the client does after its next download."""
    client = hand.host.client(k)
    message = hand.method.download(hand.server, k)
    with client.fork():
        hand.method.receive(client, message)
        got = {name: value.clone() for name, value in client.state.shared.state_dict().items()}
    return dict(hand.server.state.shared.state_dict()), got


def factored(message: Message) -> list[str]:
    return [name for name in message if name.endswith(".s")]


every_kind = pytest.mark.parametrize("what", ["updates", "parameters"])


class TestBothEnds:
    """Every client that is asked holds what the server holds, to the bit."""

    @every_kind
    @pytest.mark.parametrize("aux", ["cnn-16", "cnn-16-32"])
    def test_round_after_round(self, what, aux):
        hand = ByHand(assemble_tiny("fedkd", what=what, aux_model=aux, energy_start=0.7, energy_end=0.7, rounds=4))
        for t in range(3):
            assert all(equal(*mentees(hand, k)) for k in range(4))
            hand.round(t, range(4))
        assert factored(hand.method.download(hand.server, 0)), "something is compressed"
        assert all(equal(*mentees(hand, k)) for k in range(4))

    def test_who_was_away_gets_the_whole(self):
        hand = ByHand(assemble_tiny("fedkd", rounds=4))
        sizes = []
        for t, present in enumerate([(0, 1, 2), (0, 1, 3), (0, 2), (1,)]):
            hand.round(t, present)
            assert all(equal(*mentees(hand, k)) for k in range(4))
            sizes.append([bool(factored(hand.method.download(hand.server, k))) for k in range(4)])
        assert sizes == [[k in present for k in range(4)] for present in [(0, 1, 2), (0, 1, 3), (0, 2), (1,)]]

    def test_late_answers(self):
        """Clients work, and nobody's answer arrives; or only some do. What they hold is what the server says."""
        hand = ByHand(assemble_tiny("fedkd", rounds=6))
        hand.round(0, range(4))
        for t in (1, 2):
            for k in range(4):  # work whose answer is lost: the same update comes down twice
                hand.host.answer(Work(k, t, 0, hand.download(0, k)))
            assert all(equal(*mentees(hand, k)) for k in range(4))
        hand.host.answer(Work(3, 3, 0, hand.download(0, 3)))
        hand.round(3, (0, 1))
        assert all(equal(*mentees(hand, k)) for k in range(4))

    @every_kind
    def test_the_client_trains_on_from_what_came_down(self, what):
        hand = ByHand(assemble_tiny("fedkd", what=what))
        hand.round(0, range(4))
        trained = {n: v.clone() for n, v in hand.host.client(0).state.shared.state_dict().items()}
        assert not equal(trained, mentees(hand, 0)[1])


def wide_server(method: FedKD, value: torch.Tensor, clients=(0, 1)):
    server = server_of(task_of(2, 2), {k: 1 + 9 * k for k in clients})
    server.state.shared = nn.Linear(8, 8)
    server.state.shared.load_state_dict({"weight": value, "bias": torch.zeros(8)})
    server.state.sent = Shelf(server.state.shared.state_dict())
    server.state.version = torch.tensor(0, dtype=torch.int32)
    server.state.answered = torch.zeros(2, dtype=torch.bool)
    server.begin(0, method.schedule(0, 3))
    return server


def axis(*entries: float) -> torch.Tensor:
    """An 8 x 8 diagonal matrix."""
    return torch.diag(torch.tensor([*entries, *[0.0] * (8 - len(entries))]))


def factors_of(*entries: float) -> dict[str, torch.Tensor]:
    eye = torch.eye(8)[: len(entries)]
    return {"weight.u": eye.T, "weight.s": torch.tensor(entries), "weight.v": eye}


class TestServer:
    def test_updates_by_hand(self):
        """Updates diag(4, 2) and, whole, diag(4, 2, 2) to diag(5, 5, 5, 5): their mean is diag(4, 2, 1), squares 16, 4
        and 1. At a share of 0.95 < 20/21 the 1 is left out: diag(9, 7, 5, 5). Clients count once each."""
        server = wide_server(method := FedKD(), axis(5, 5, 5, 5))
        bias = {"bias": torch.ones(8)}
        uploads = {
            0: Message({**factors_of(4, 2), **bias}),
            1: Message({"weight": axis(9, 7, 7, 5), "bias": torch.zeros(8)}),
        }
        method.aggregate(server, uploads)
        torch.testing.assert_close(server.state.shared.weight.detach(), axis(9, 7, 5, 5))
        assert server.state.shared.bias.tolist() == [0.5] * 8
        down = method.download(server, 0)
        assert down.tensor("weight.s").tolist() == pytest.approx([4, 2])
        assert down.tensor("bias").tolist() == [0.5] * 8
        assert int(down.tensor("version")) == 1

    def test_parameters_by_hand(self):
        """The mean of diag(4, 2) and diag(4, 2, 2) is diag(4, 2, 1), of which diag(4, 2) is sent."""
        server = wide_server(method := FedKD(what="parameters"), axis(5, 5, 5, 5))
        zero = {"bias": torch.zeros(8)}
        method.aggregate(
            server, {0: Message({**factors_of(4, 2), **zero}), 1: Message({"weight": axis(4, 2, 2), **zero})}
        )
        torch.testing.assert_close(server.state.shared.weight.detach(), axis(4, 2))
        assert set(method.download(server, 1)) == {"weight.u", "weight.s", "weight.v", "bias"}

    @pytest.mark.parametrize(("weighting", "expected"), [("uniform", 2), ("samples", 40 / 11)])
    @every_kind
    def test_who_counts_how_much(self, what, weighting, expected):
        """Client 0 has 1 sample and says 0, client 1 has 10 and says 4: (0 + 4) / 2, or (1 * 0 + 10 * 4) / 11."""
        server = wide_server(method := FedKD(what=what, weighting=weighting), axis())
        method.aggregate(
            server, {k: Message({"weight": axis(4.0 * k), "bias": torch.full((8,), 4.0 * k)}) for k in (0, 1)}
        )
        torch.testing.assert_close(server.state.shared.weight.detach(), axis(expected))
        assert server.state.shared.bias.tolist() == pytest.approx([expected] * 8)
        assert FedKD().weighting == "uniform"

    def test_the_share_grows_over_the_rounds(self):
        assert [FedKD().schedule(t, 4)["energy"] for t in range(4)] == pytest.approx([0.95, 0.9575, 0.965, 0.9725])


class TestLossless:
    @every_kind
    def test_all_energy_is_averaging(self, what):
        """tau = 1: the server's mentee is the plain mean of the clients', but for rounding."""
        hand = ByHand(assemble_tiny("fedkd", what=what, energy_start=1.0, energy_end=1.0))
        for t in range(2):
            hand.round(t, range(4))
            for name, value in hand.server.state.shared.state_dict().items():
                trained = [hand.host.client(k).state.shared.state_dict()[name] for k in range(4)]
                torch.testing.assert_close(value, torch.stack(trained).mean(0), rtol=1e-5, atol=1e-6)

    @every_kind
    def test_less_energy_loses_at_most_what_it_says(self, what):
        """Of each tensor, in squares, against the mean of what the clients say."""
        tau = 0.6
        hand = ByHand(assemble_tiny("fedkd", what=what, energy_start=tau, energy_end=tau))
        before = {n: v.clone() for n, v in hand.server.state.shared.state_dict().items()}
        said = {}
        whole = type(hand.method).aggregate

        def watched(self, server, uploads):
            said.update({k: upload.part() for k, upload in uploads.items()})
            whole(self, server, uploads)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FedKD, "aggregate", watched)
            hand.round(0, range(4))
        name = "features.backbone.fc1.weight"
        for k in range(4):
            u, s, v = (said[k][f"{name}.{factor}"] for factor in "usv")
            start = before[name] if what == "updates" else 0.0
            true = hand.host.client(k).state.shared.state_dict()[name] - start
            left = ((u * s) @ v - true).square().sum() / true.square().sum()
            assert 0 < left <= 1 - tau + 1e-6


class TestTraffic:
    @every_kind
    def test_traffic_is_what_the_sheet_says(self, what):
        """r (m + n + 1) numbers for a matrix in factors, m n for one that is not, and the rest whole; at most P."""
        result = run_tiny("fedkd", what=what, aux_model="cnn-16", energy_start=0.6, energy_end=0.6)
        parts = assemble_tiny("fedkd", what=what, aux_model="cnn-16")
        state = parts.task.build("cnn-16").state_dict()
        raw = sum(value.nbytes for value in state.values())
        bound = parts.method.traffic(parts.task, parts.cards[0], SIZES)
        assert bound == (raw, raw + (4 if what == "updates" else 0))
        assert result.ledger.by("tensor", "up")
        some_factored = False
        for way in ("up", "down"):
            for t in range(2):
                for k in range(4):
                    sent = {
                        e.tensor: e.bytes
                        for e in result.ledger.entries()
                        if (e.round, e.client, e.direction) == (t, k, way)
                    }
                    del sent["(header)"]
                    expected = {"version": 4} if what == "updates" and way == "down" else {}
                    for name, value in state.items():
                        if f"{name}.s" in sent:
                            some_factored = True
                            r, m, n = sent[f"{name}.s"] // 4, len(value), value[0].numel()
                            expected |= {f"{name}.u": 4 * r * m, f"{name}.s": 4 * r, f"{name}.v": 4 * r * n}
                            assert 0 < r * (m + n + 1) < m * n
                        else:
                            expected[name] = value.nbytes
                    assert sent == expected
                    assert sum(sent.values()) <= (bound.up if way == "up" else bound.down)
        assert some_factored
        first = {e.tensor for e in result.ledger.entries() if (e.round, e.direction) == (0, "down")}
        assert not [name for name in first if name.endswith(".s")], "everyone begins with the server's mentee, whole"

    def test_mentor_and_adapter_stay_at_home(self):
        names = set(run_tiny("fedkd", aux_model="cnn-16", rounds=1).ledger.by("tensor", "up")) - {"(header)"}
        state = assemble_tiny("fedkd").task.build("cnn-16").state_dict()
        assert {name.removesuffix(".u").removesuffix(".s").removesuffix(".v") for name in names} == set(state)


class TestRefusals:
    @pytest.mark.parametrize("name", ["energy_start", "energy_end"])
    @pytest.mark.parametrize("value", [0.0, 1.01])
    def test_shares(self, name, value):
        with refused(RangeError, f"--{name.replace('_', '-')}", 0, 1):
            assemble_tiny("fedkd", **{name: value})

    def test_learning_rate(self):
        with refused(RangeError, "--mentee-lr", 0.0):
            assemble_tiny("fedkd", mentee_lr=0.0)

    def test_no_other_kind(self):
        with refused(UnknownNameError, "--what", "updates", "parameters", "gradients"):
            assemble_tiny("fedkd", what="gradients")
