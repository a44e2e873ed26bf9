"""KT-pFL: soft predictions, the step of the coefficients and the step of a client by hand, and what stays uniform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conftest import assemble_tiny, few_digits, run_tiny
from kit import ByHand
from parties import equal, federation_of, head_numbers, public_party, run_through, server_of, task_of
from pluribus.errors import ConflictError, MismatchError, PartitionError, RangeError
from pluribus.message import Message, decode
from pluribus.methods._public import alignment
from pluribus.methods.fedmd import FedMD
from pluribus.methods.ktpfl import MOST_CLIENTS, KTpFL, mixed, projected
from pluribus.server import Server
from refusals import refused

LN2, LN3 = math.log(2), math.log(3)
A, B = [[0.75, 0.25]], [[0.25, 0.75]]  # of one public row
TINY = {"data": few_digits(160), "public_fraction": 0.2, "align": 12}


def soft(rows: Sequence[Sequence[float]]) -> Message:
    return Message({"soft": torch.tensor(rows)})


def server_for(method: KTpFL, samples: Sequence[int], rows: int = 1, classes: int = 2) -> Server:
    """A server before its first round, of clients with these numbers of samples."""
    task = replace(task_of(classes, 2, clients=len(samples)), public={0: rows})
    server = server_of(task, dict(enumerate(samples)))
    method.setup(server)
    return server


def random_soft(clients: int, rows: int, classes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(clients, rows, classes, generator=generator).mul(4).softmax(2)


# ---- server --------------------------------------------------------------------------------------------------------


class TestCoefficients:
    def test_a_step_by_hand(self):
        """Both mixes are (1/2, 1/2). Row 0 has ln t - ln s = (ln 2/3, ln 2), so its gradients differ by
        G_01 - G_00 = 1/2 ln 2 - 1/2 ln 2/3 = 1/2 ln 3. Row 1 is the mirror image.

        Client 0 has 3/4 of the samples: c_00 = 1/2 + eta_3 * 3/4 * (ln 3)/4, c_11 = 1/2 + eta_3 * (ln 3)/16.
        """
        method = KTpFL(coefficient_lr=0.4)
        server = server_for(method, [3, 1])
        method.mix(server, {0: soft(A), 1: soft(B)})
        c = 0.5 + 0.075 * LN3, 0.5 + 0.025 * LN3
        torch.testing.assert_close(server.state.c, torch.tensor([[c[0], 1 - c[0]], [1 - c[1], c[1]]]))
        mixes = [[0.25 + 0.5 * c[0], 0.75 - 0.5 * c[0]]], [[0.75 - 0.5 * c[1], 0.25 + 0.5 * c[1]]]
        for k, mix in enumerate(mixes):
            torch.testing.assert_close(method.teacher(server, k).tensor("soft"), torch.tensor(mix))
        assert server.notes["own_coefficient"] == {str(k): pytest.approx(c[k]) for k in range(2)}

    def test_the_weight_of_distillation_scales_the_gradient(self):
        server = server_for(method := KTpFL(coefficient_lr=0.4, transfer_weight=2.0), [1, 1])
        method.mix(server, {0: soft(A), 1: soft(B)})
        assert float(server.state.c[0, 0]) == pytest.approx(0.5 + 0.4 * 2 * 0.5 * LN3 / 4)

    def test_the_mean_over_rows(self):
        """A second row on which both agree halves the gradient."""
        server = server_for(method := KTpFL(coefficient_lr=0.4), [1, 1], rows=2)
        method.mix(server, {0: soft([*A, [0.5, 0.5]]), 1: soft([*B, [0.5, 0.5]])})
        assert float(server.state.c[0, 0]) == pytest.approx(0.5 + 0.4 * 0.5 * LN3 / 8)

    def test_who_agrees_is_pulled_to_uniform(self):
        """Equal predictions have no gradient: c - 1/N shrinks by 1 - 2 eta_3 rho = 1 - 2 * 0.4 * 0.7 = 0.44."""
        server = server_for(method := KTpFL(coefficient_lr=0.4, uniformity=0.7), [1, 1])
        server.state.c = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        method.mix(server, {0: soft(A), 1: soft(A)})
        torch.testing.assert_close(server.state.c, torch.tensor([[0.676, 0.324], [0.412, 0.588]]))

    def test_the_gradient_is_that_of_the_loss(self):
        """Against automatic differentiation, up to a constant in each row."""
        method, s = KTpFL(uniformity=0.0), random_soft(4, 5, 3, 1)
        c = torch.rand(4, 4, generator=torch.Generator().manual_seed(2)).softmax(1).requires_grad_()
        share = torch.tensor([0.1, 0.2, 0.3, 0.4])
        t = (c @ s.flatten(1)).view_as(s)
        (share * (t * (t.log() - s.log())).sum(2).mean(1)).sum().backward()
        moved = method.updated(c.detach(), s, share) - c.detach()
        expected = -0.1 * (c.grad - c.grad.mean(1, keepdim=True))
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)

    def test_one_step_makes_the_mix_resemble_the_client(self):
        method, s = KTpFL(coefficient_lr=0.5, uniformity=0.0), random_soft(4, 5, 3, 3)
        c = torch.full((4, 4), 0.25)
        after = method.updated(c, s, torch.full((4,), 0.25))
        assert (after.diagonal() > 0.25).all()

    @pytest.mark.parametrize("seed", range(5))
    def test_rows_sum_to_one_and_are_not_negative(self, seed):
        """Also with steps so long that coefficients reach 0, and with clients that are absent."""
        server = server_for(method := KTpFL(coefficient_lr=50.0, uniformity=0.0), [1, 2, 3, 4, 5], 4, 3)
        for t in range(6):
            s = random_soft(5, 4, 3, 10 * seed + t)
            method.mix(server, {k: soft(s[k].tolist()) for k in range(5) if k != t})
            torch.testing.assert_close(server.state.c.sum(1), torch.ones(5))
            assert (server.state.c >= 0).all()
        assert (server.state.c == 0).any()

    def test_coefficients_of_absent_clients_stay(self):
        server = server_for(method := KTpFL(coefficient_lr=0.4), [1, 1, 1])
        method.mix(server, {0: soft(A), 2: soft(B)})
        c = server.state.c
        assert c[1].tolist() == pytest.approx([1 / 3] * 3)
        assert c[:, 1].tolist() == pytest.approx([1 / 3] * 3)
        # N = 3, and each of two clients has half of the samples that answered: the gradients differ by (ln 3)/4
        assert float(c[0, 0]) == pytest.approx(1 / 3 + 0.4 * LN3 / 8)
        assert method.teacher(server, 1).tensor("soft").tolist() == [[0, 0]]
        # the mix is over those who answered, with coefficients that sum to 1
        own = (1 / 3 + 0.05 * LN3) * 1.5
        assert method.teacher(server, 0).tensor("soft")[0, 0].item() == pytest.approx(0.25 + 0.5 * own)

    def test_who_did_not_answer_gets_no_mix_of_another_round(self):
        server = server_for(method := KTpFL(), [1, 1])
        method.mix(server, {0: soft(A), 1: soft(B)})
        method.mix(server, {0: soft(A)})
        assert method.teacher(server, 0).tensor("soft").tolist() == A
        assert method.teacher(server, 1).tensor("soft").tolist() == [[0, 0]]

    def test_predictions_of_zero_are_finite(self):
        server = server_for(method := KTpFL(coefficient_lr=0.4), [1, 1])
        method.mix(server, {0: soft([[1.0, 0.0]]), 1: soft([[0.0, 1.0]])})
        assert server.state.c.isfinite().all()
        assert server.state.mixes.isfinite().all()


class TestUniform:
    """Without steps of the coefficients, everybody gets FedMD's mean."""

    def test_the_mean_of_all(self):
        s = random_soft(3, 4, 3, 0)
        server = server_for(method := KTpFL(coefficient_lr=0.0), [5, 1, 1], 4, 3)
        uploads = {k: soft(s[k].tolist()) for k in range(3)}
        method.mix(server, uploads)
        FedMD().setup(server)
        FedMD().agree(server, {k: Message({"logits": one.tensor("soft")}) for k, one in uploads.items()})
        for k in range(3):
            torch.testing.assert_close(method.teacher(server, k).tensor("soft"), server.state.consensus)

    def test_the_strongest_pull_leaves_one_step(self):
        """2 eta_3 rho = 1: c is 1/N minus the last gradient alone, so it tends to 1/N as rho grows."""
        apart = []
        for rho in (1e2, 1e4, 1e6):
            server = server_for(method := KTpFL(coefficient_lr=0.5 / rho, uniformity=rho), [1, 1])
            server.state.c = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
            method.mix(server, {0: soft(A), 1: soft(B)})
            apart.append(float((server.state.c - 0.5).abs().max()))
        assert apart[0] < 1e-2
        assert apart[2] < 1e-6

    def test_equal_over_a_run(self):
        federation = federation_of(assemble_tiny("kt-pfl", **TINY | {"coefficient_lr": 0.0, "rounds": 2}))
        run_through(federation)
        assert torch.equal(federation.server.state.c, torch.full((4, 4), 0.25))


class TestProjection:
    @pytest.mark.parametrize(
        ("row", "total", "expected"),
        [
            ([0.5, 0.5], 1.0, [0.5, 0.5]),
            ([0.75, 0.75], 1.0, [0.5, 0.5]),
            ([2.0, 0.0], 1.0, [1.0, 0.0]),  # tau = 1
            ([0.75, 0.5, -0.25], 1.0, [0.625, 0.375, 0.0]),  # tau = 1/8, of the two largest
            ([0.75, 0.5, -0.25], 0.25, [0.25, 0.0, 0.0]),
            ([1e30, 0.0, 0.0], 1.0, [1.0, 0.0, 0.0]),
            ([0.3, 0.2], 0.0, [0.0, 0.0]),
        ],
    )
    def test_by_hand(self, row, total, expected):
        found = projected(torch.tensor([row]), torch.tensor([total]))
        assert found[0].tolist() == pytest.approx(expected, abs=1e-7)

    def test_a_row_without_weight_on_those_who_answered_gets_their_mean(self):
        s = torch.tensor([A, B])
        assert mixed(torch.zeros(2, 2), s).tolist() == [[[0.5, 0.5]], [[0.5, 0.5]]]


# ---- client --------------------------------------------------------------------------------------------------------


class TestClient:
    PUBLIC = (((1, 1), 0), ((1, -1), 1))

    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    def test_trains_then_shows_soft_predictions(self, temperature):
        """p = (1/2, 1/2): one step of lr 1 on (1, -1) of class 0 gives W_0 = (1, -1)/2, b_0 = 1/2 and the opposite.

        Then the logits of (1, 1) are (1/2, -1/2), and those of (1, -1) are (3/2, -3/2).
        """
        method = KTpFL(temperature=temperature)
        client = public_party(method, [((1, -1), 0)], self.PUBLIC)
        found = method.train_and_show(client).tensor("soft")
        x, _ = alignment(client, 64).take(torch.arange(2))
        margins = [1.0 if x2 > 0 else 3.0 for _, x2 in x.flatten(1).tolist()]
        expected = [1 / (1 + math.exp(-margin / temperature)) for margin in margins]
        assert found[:, 0].tolist() == pytest.approx(expected)
        assert found.sum(1).tolist() == pytest.approx([1, 1])

    @pytest.mark.parametrize(("temperature", "weight", "move"), [(1.0, 1.0, 0.25), (2.0, 1.0, 0.125), (1.0, 3.0, 0.75)])
    def test_a_transfer_step_by_hand(self, temperature, weight, move):
        """Logits 0, so s = (1/2, 1/2). The gradient of KL(t || s) for logits is (s - t) / T = (-1/4, 1/4) / T.

        Both rows have t = (3/4, 1/4), so the second pixel cancels out.
        """
        method = KTpFL(temperature=temperature, transfer_weight=weight)
        client = public_party(method, [((1, 1), 0)], self.PUBLIC)
        client.take(soft([[0.75, 0.25]] * 2))
        method.transfer(client)
        assert client.steps == 1
        torch.testing.assert_close(head_numbers(client), ([[move, 0.0], [-move, 0.0]], [move, -move]))
        assert client.loss() == pytest.approx(weight * (0.75 * math.log(1.5) - 0.25 * LN2), rel=1e-5)

    def test_who_predicts_the_mix_learns_nothing(self):
        method = KTpFL(temperature=2.0)
        client = public_party(method, [((1, 1), 0)], self.PUBLIC)
        client.model.head.load_state_dict({"weight": torch.tensor([[1.0, 2.0], [0.0, -3.0]]), "bias": torch.ones(2)})
        before = client.model.head.weight.tolist()
        client.take(Message({"soft": client.sweep(method.soft, alignment(client, 64))}))
        method.transfer(client)
        torch.testing.assert_close(client.model.head.weight.tolist(), before)
        assert client.loss() == pytest.approx(0, abs=1e-6)

    def test_who_has_no_mix_learns_nothing(self):
        method = KTpFL()
        client = public_party(method, [((1, 1), 0)], self.PUBLIC)
        client.take(soft([[0.0, 0.0]] * 2))
        method.transfer(client)
        assert head_numbers(client) == ([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0])


# ---- rounds --------------------------------------------------------------------------------------------------------


def test_a_round_by_hand():
    """Predictions go up, and each client comes nearer to its own mix of them."""
    parts = assemble_tiny("kt-pfl", **TINY | {"transfer_epochs": 5})
    hand = ByHand(parts)
    answers = hand.round(0, range(4))
    shown = torch.stack([decode(answers[0, k], hand.host.wires(k)[0].up, "up").tensor("soft") for k in range(4)])
    state, method = hand.server.state, parts.method
    torch.testing.assert_close(state.mixes, torch.einsum("nm,mak->nak", state.c, shown))
    assert (state.c.diagonal() > 0.25).all()
    for k in range(4):
        client = hand.host.client(k)
        client.begin(0, 1, {})
        now = client.sweep(method.soft, alignment(client, 12))
        apart, before = (torch.xlogy(state.mixes[k], state.mixes[k] / s).sum() for s in (now, shown[k]))
        assert apart < before
        assert answers[1, k] is None


def test_without_transfer_it_is_local_training():
    settings = {"data": TINY["data"], "public_fraction": 0.2, "rounds": 2}
    apart, alone = (
        federation_of(assemble_tiny(name, **settings, **hyper))
        for name, hyper in (("kt-pfl", {"transfer_epochs": 0}), ("local", {}))
    )
    run_through(apart)
    run_through(alone)
    for k in range(4):
        assert equal(*(dict(one.engine.host.client(k).model.state_dict()) for one in (apart, alone)))


def test_traffic_is_what_the_page_says():
    result = run_tiny("kt-pfl", **TINY | {"rounds": 3})
    for way in ("up", "down"):
        sent = result.ledger.by("tensor", way)
        assert sent.pop("(header)") > 0
        assert sent == {"soft": 4 * 12 * 10 * 3 * 4}


class TestRefusals:
    def test_no_public_data(self):
        with refused(MismatchError, "kt-pfl", "public data", "--public-fraction 0.1"):
            assemble_tiny("kt-pfl", public_fraction=0.0)

    def test_a_public_fraction_that_gives_nothing(self):
        with refused(PartitionError, "--public-fraction"):
            assemble_tiny("kt-pfl", public_fraction=1e-9)

    def test_too_many_clients(self):
        parts = assemble_tiny("kt-pfl", **TINY)
        parts.method.check(replace(parts.task, clients=MOST_CLIENTS), parts.cards)
        with refused(MismatchError, "kt-pfl", MOST_CLIENTS, MOST_CLIENTS + 1, "--clients"):
            parts.method.check(replace(parts.task, clients=MOST_CLIENTS + 1), parts.cards)

    def test_a_pull_that_jumps_over_its_goal(self):
        with refused(ConflictError, "--coefficient-lr 0.3", "--uniformity 2.0", 0.5):
            assemble_tiny("kt-pfl", **TINY, coefficient_lr=0.3, uniformity=2.0)
        assemble_tiny("kt-pfl", **TINY, coefficient_lr=0.25, uniformity=2.0)

    @pytest.mark.parametrize(
        ("hyper", "facts"),
        [
            ({"align": 0}, ("--align", 1, 0)),
            ({"temperature": 0.0}, ("--temperature", 0)),
            ({"transfer_epochs": -1}, ("--transfer-epochs", 0, -1)),
            ({"transfer_weight": -1.0}, ("--transfer-weight", 0, -1.0)),
            ({"coefficient_lr": -0.1}, ("--coefficient-lr", 0, -0.1)),
            ({"uniformity": -0.5}, ("--uniformity", 0, -0.5)),
        ],
    )
    def test_numbers_that_make_no_sense(self, hyper, facts):
        with refused(RangeError, *facts):
            assemble_tiny("kt-pfl", **hyper)
