"""FCCL: the correlation of logits, its step and the private step by hand, and what the two teachers are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from conftest import assemble_tiny, few_digits, make_host, run_tiny
from kit import ByHand
from parties import equal, head_numbers, public_party
from pluribus.client import Batch, Client
from pluribus.errors import MismatchError, PartitionError, RangeError
from pluribus.message import Message, decode
from pluribus.methods._public import alignment
from pluribus.methods.fccl import EPS, FCCL, Teacher, correlation
from refusals import refused

LN3 = math.log(3)
TINY = {"data": few_digits(160), "public_fraction": 0.2, "pretrain_private": 1, "align": 12}
OPPOSED = [[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, 1.0]]  # two classes that exclude each other
APART = [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]  # two classes without correlation
PUBLIC = (((1, 1), 0), ((1, -1), 1))


def whole(client: Client) -> Batch:
    """All private samples."""
    x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
    return Batch(x, y, torch.arange(len(y)), len(y))


# ---- correlation ---------------------------------------------------------------------------------------------------


class Given(nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits


def collaborative_loss(own: list[list[float]], mean: list[list[float]], weight: float) -> float:
    client = public_party(method := FCCL(redundancy=weight), [((1, 1), 0)], PUBLIC * 2)
    client.model = Given(own)
    client.take(Message({"logits": torch.tensor(mean)}))
    return method.correlate(client, Batch(torch.zeros(4), torch.zeros(4), torch.arange(4), 4)).item()


class TestCorrelation:
    @pytest.mark.parametrize(
        ("own", "mean", "expected"),
        [
            (OPPOSED, OPPOSED, [[1, -1], [-1, 1]]),
            (APART, APART, [[1, 0], [0, 1]]),
            (OPPOSED, APART, [[1, 0], [-1, 0]]),
            ([[3.0, 10.0], [3.0, 10.0], [1.0, 50.0], [1.0, 50.0]], OPPOSED, [[1, -1], [-1, 1]]),  # not of the scale
        ],
    )
    def test_by_hand(self, own, mean, expected):
        found = correlation(torch.tensor(own), torch.tensor(mean))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=3e-5)

    def test_it_is_that_of_numpy(self):
        draw = torch.Generator().manual_seed(0)
        one, other = torch.randn(20, 3, generator=draw), torch.randn(20, 3, generator=draw)
        expected = torch.corrcoef(torch.cat([one, other], 1).T)[:3, 3:]
        torch.testing.assert_close(correlation(one, other), expected, rtol=0, atol=1e-4)

    def test_a_class_with_one_logit_has_no_correlation(self):
        found = correlation(torch.tensor([[2.0, 1.0], [2.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
        torch.testing.assert_close(found, torch.tensor([[0.0, 0.0], [1.0, -1.0]]), rtol=0, atol=3e-5)

    @pytest.mark.parametrize(
        ("own", "mean", "expected"),
        [
            (OPPOSED, OPPOSED, 0.0),  # 1 on the diagonal and -1 elsewhere
            (APART, APART, 2 * 0.25),  # the identity: lambda for each of two pairs
            ([[-a for a in row] for row in OPPOSED], OPPOSED, 2 * 4 + 0.25 * 2 * 4),
            (OPPOSED, APART, 0 + 1 + 0.25 * (1 + 0)),
        ],
    )
    def test_the_loss_by_hand(self, own, mean, expected):
        assert collaborative_loss(own, mean, 0.25) == pytest.approx(expected, rel=3e-5, abs=3e-5)

    def test_the_weight_of_the_paper(self):
        assert FCCL().redundancy == 0.0051
        assert collaborative_loss(APART, APART, FCCL().redundancy) == pytest.approx(0.0102, abs=1e-6)

    def test_a_step_by_hand(self):
        """Constant logits 0, so M = 0, dL/dM is -2 on the diagonal and 2 lambda elsewhere, and 1/sigma = EPS^-1/2.

        The mean logits of (1, 1) and (1, -1) are (1, -1) and (-1, 1). Class 0 of the first row has the gradient
        (-2 - 2 lambda) / (n sigma) = -(1 + lambda) / sigma =: -g, the second g. W_0 = g (1, 1) - g (1, -1) = (0, 2g).
        """
        client = public_party(method := FCCL(redundancy=0.25, public_lr=1.0), [((1, 1), 0)], PUBLIC)
        x, _ = alignment(client, 64).take(torch.arange(2))
        client.take(Message({"logits": torch.tensor([[row[1], -row[1]] for row in x.flatten(1).tolist()])}))
        client.fit(method.correlate, alignment(client, 64), opts=("public",), epochs=1)
        g = 1.25 / math.sqrt(EPS) / math.sqrt(1 + EPS)
        weight, bias = head_numbers(client)
        assert weight[0] + weight[1] == pytest.approx([0, 2 * g, 0, -2 * g], rel=1e-4, abs=1e-3)
        assert bias == pytest.approx([0, 0], abs=1e-3)
        assert client.loss() == pytest.approx(2 + 0.25 * 2)


# ---- private training ----------------------------------------------------------------------------------------------


def set_teacher(teacher: Teacher, logits: list[float]) -> None:
    head = teacher.model.head
    head.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.tensor(logits)})


class TestPrivateStep:
    @pytest.mark.parametrize(
        ("inter", "intra", "error"),
        [(0.0, 0.0, -1 / 2), (1.0, 0.0, -3 / 4), (0.0, 1.0, -1 / 4), (1.0, 1.0, -1 / 2), (2.0, 0.5, -7 / 8)],
    )
    def test_by_hand(self, inter, intra, error):
        """s = (1/2, 1/2), label 0: CE moves logit 0 by -1/2. The teachers are (3/4, 1/4) after the public steps and
        (1/4, 3/4) before all: KL moves it by 1/2 - 3/4 and by 1/2 - 1/4. x = (1, -1), lr = 1."""
        client = public_party(method := FCCL(inter=inter, intra=intra), [((1, -1), 0)], PUBLIC)
        set_teacher(client.state.taught, [LN3, 0.0])
        set_teacher(client.state.pretrained, [0.0, LN3])
        loss = method.step(client, whole(client))
        weight, bias = head_numbers(client)
        assert loss.item() == pytest.approx(math.log(2)), "the task loss is logged"
        assert bias == pytest.approx([-error, error])
        assert weight[0] + weight[1] == pytest.approx([-error, error, error, -error])

    def test_teachers_do_not_learn(self):
        client = public_party(method := FCCL(), [((1, -1), 0)], PUBLIC)
        set_teacher(client.state.taught, [LN3, 0.0])
        before = {name: value.clone() for name, value in client.state.state_dict().items()}
        method.step(client, whole(client))
        assert equal(before, dict(client.state.state_dict()))

    def test_teachers_stay_in_eval_mode(self):
        """Their statistics of batch norm stay, and the same row has the same logits in every batch."""
        parts = assemble_tiny("fccl", **TINY | {"models": "test_fccl.normed"})
        client = make_host(parts).client(0)
        client.begin(0, "enrol", {})
        parts.method.enrol(client)
        before = {name: value.clone() for name, value in client.state.pretrained.state_dict().items()}
        client.begin(0, 1, {})
        parts.method.collaborate_and_train(client)
        assert equal(before, dict(client.state.pretrained.state_dict()))
        assert client.model.training
        assert not any(module.training for module in client.state.pretrained.modules())


def normed(shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16), nn.BatchNorm1d(16), nn.ReLU())


class TestTeachers:
    def test_the_pretrained_model_is_that_of_enrolment(self):
        """p = (1/2, 1/2), two epochs of one step: teachers count only afterwards."""
        client = public_party(method := FCCL(pretrain_private=1), [((1, -1), 0)], PUBLIC)
        assert not method.enrol(client)
        assert head_numbers(client) == ([[0.5, -0.5], [-0.5, 0.5]], [0.5, -0.5])
        assert equal(dict(client.state.pretrained.model.state_dict()), dict(client.model.state_dict()))

    def test_the_other_is_that_of_the_last_public_step(self, monkeypatch):
        client = public_party(method := FCCL(), [((1, -1), 0)], PUBLIC)
        client.take(Message({"logits": torch.tensor([[1.0, -1.0], [-1.0, 1.0]])}))
        after_public = []
        fit = Client.fit

        def watched(client, step, *args, **how):
            taken = fit(client, step, *args, **how)
            after_public.append(client.model.head.weight.detach().clone())
            return taken

        monkeypatch.setattr(Client, "fit", watched)
        method.collaborate_and_train(client)
        first, last = after_public
        assert not torch.equal(first, last)
        assert torch.equal(client.state.taught.model.head.weight, first)
        assert not client.state.pretrained.model.head.weight.equal(first)


# ---- rounds --------------------------------------------------------------------------------------------------------


class TestRounds:
    def test_a_round_by_hand(self):
        """The mean of all logits goes down, and each client's logits come to correlate with it."""
        parts = assemble_tiny("fccl", **TINY)
        method, hand = parts.method, ByHand(parts)
        answers = hand.round(0, range(4))
        shown = [decode(answers[0, k], hand.host.wires(k)[0].up, "up").tensor("logits") for k in range(4)]
        mean = torch.stack(shown).mean(0)
        assert torch.equal(hand.server.state.consensus, mean)
        for k in range(4):
            assert answers[1, k] is None
            client = hand.host.client(k)
            client.begin(0, 1, {})
            before = method.show(client).tensor("logits")
            client.take(method.consensus(hand.server, k))
            client.fit(method.correlate, alignment(client, 12), opts=("public",), epochs=5)
            now = method.show(client).tensor("logits")
            assert correlation(now, mean).diagonal().sum() > correlation(before, mean).diagonal().sum()

    def test_traffic_is_what_the_page_says(self):
        result = run_tiny("fccl", **TINY | {"rounds": 3})
        for way in ("up", "down"):
            sent = result.ledger.by("tensor", way)
            assert sent.pop("(header)") > 0
            assert sent == {"logits": 4 * 12 * 10 * 3 * 4}


class TestRefusals:
    def test_no_public_data(self):
        with refused(MismatchError, "fccl", "public data", "--public-fraction 0.1"):
            assemble_tiny("fccl", public_fraction=0.0)

    def test_a_public_fraction_that_gives_nothing(self):
        with refused(PartitionError, "--public-fraction"):
            assemble_tiny("fccl", public_fraction=1e-9)

    @pytest.mark.parametrize(
        ("hyper", "facts"),
        [
            ({"align": 0}, ("--align", 1, 0)),
            ({"public_epochs": -1}, ("--public-epochs", 0, -1)),
            ({"public_batch": 1}, ("--public-batch", 2, 1)),
            ({"public_lr": 0.0}, ("--public-lr", 0)),
            ({"redundancy": -0.1}, ("--redundancy", 0, -0.1)),
            ({"inter": -1.0}, ("--inter", 0, -1.0)),
            ({"intra": -1.0}, ("--intra", 0, -1.0)),
            ({"pretrain_private": -1}, ("--pretrain-private", 0, -1)),
        ],
    )
    def test_numbers_that_make_no_sense(self, hyper, facts):
        with refused(RangeError, *facts):
            assemble_tiny("fccl", **hyper)
