"""FedMD, by hand from its algorithm, the choice of public samples, and the protocol of FedH2L's comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conftest import assemble_tiny, few_digits, make_host, run_tiny
from kit import ByHand, kept
from parties import CPU, card_of, flat_split, head_numbers, public_party, server_of
from pluribus.client import Client, Local
from pluribus.data.federated import Data, Store
from pluribus.errors import MismatchError, PartitionError, RangeError
from pluribus.inputs import Input
from pluribus.message import Message, decode
from pluribus.methods._public import alignment
from pluribus.methods.fedmd import FedMD
from pluribus.optim import Rule
from pluribus.request import Work
from pluribus.task import Task
from refusals import refused

C = 10
TINY = {"data": few_digits(160), "public_fraction": 0.2, "pretrain_public": 1, "pretrain_private": 1, "align": 12}

# ---- which public samples ------------------------------------------------------------------------------------------


def pool_of(labels: Sequence[int], size: int, t: int = 0, seed: int = 0) -> list[int]:
    """Rows of the samples that are chosen from a pool with these labels."""
    store = Store(torch.zeros(len(labels), 1, 1, 2, dtype=torch.uint8), torch.tensor(labels), CPU)
    task = Task(max(labels) + 1, Input("image", (1, 1, 2)), 2, "pool", clients=1, rounds=9, seed=seed)
    client = Client(card_of(0, task), task, flat_split(2, 2), {}, Local(Rule(), 1, 10), CPU)
    client.data["pool"] = Data(store, torch.arange(len(labels)))
    client.begin(t, 1, {})
    return alignment(client, size).rows.tolist()


class TestAlignment:
    LABELS = [0] * 40 + [1] * 20 + [2] * 20

    def test_each_class_by_its_share(self):
        for t in range(5):
            chosen = pool_of(self.LABELS, 20, t)
            assert len(set(chosen)) == 20
            assert Counter(self.LABELS[i] for i in chosen) == {0: 10, 1: 5, 2: 5}

    def test_shares_that_are_no_whole_numbers_are_rounded(self):
        """11 of 80: 5.5, 2.75 and 2.75."""
        for t in range(5):
            found = Counter(self.LABELS[i] for i in pool_of(self.LABELS, 11, t))
            assert sum(found.values()) == 11
            assert all(abs(found[c] - share) <= 1 for c, share in enumerate((5.5, 2.75, 2.75)))

    def test_who_gets_the_remainder_is_drawn(self):
        """Three samples of ten equal classes: every class has its turn."""
        labels = [c for c in range(10) for _ in range(7)]
        got = Counter(labels[i] for t in range(100) for i in pool_of(labels, 3, t))
        assert all(10 < got[c] < 60 for c in range(10))

    def test_new_ones_every_round(self):
        rounds = [tuple(pool_of(self.LABELS, 20, t)) for t in range(4)]
        assert len({frozenset(chosen) for chosen in rounds}) == 4
        assert rounds[0] != tuple(pool_of(self.LABELS, 20, 0, seed=1))

    def test_all_there_are_if_that_is_less(self):
        assert sorted(pool_of([0, 0, 1], 64)) == [0, 1, 2]

    def test_everyone_derives_the_same_from_all_public_data(self):
        parts = assemble_tiny("fedmd", **TINY)
        host = make_host(parts)
        public = {row for data in parts.data.public.values() for row in data.rows.tolist()}
        private = {row for k in range(4) for row in parts.data.rows(k)["train"].tolist()}
        found = []
        for k in range(4):
            for exchange in (0, 1):  # shown and digested are the same samples
                client = host.client(k)
                client.begin(1, exchange, {})
                found.append(alignment(client, 12).rows.tolist())
        assert all(rows == found[0] for rows in found)
        assert set(found[0]) <= public
        assert not public & private


# ---- server --------------------------------------------------------------------------------------------------------


def agreed(*logits: list[list[float]], order: Sequence[int] | None = None) -> Tensor:
    """The mean after these uploads."""
    client = public_party(FedMD(), [((1, 1), 0)], [((1, 1), 0), ((1, -1), 1)])
    server = server_of(client.task, dict.fromkeys(range(len(logits)), 1) | {0: 1000})
    FedMD().setup(server)
    uploads = {k: Message({"logits": torch.tensor(logits[k])}) for k in order or range(len(logits))}
    FedMD().agree(server, uploads)
    return server.state.consensus


class TestAgree:
    A, B = [[1.0, 2.0], [3.0, 4.0]], [[5.0, -2.0], [1.0, 0.0]]

    def test_the_mean_whatever_the_sizes_of_clients(self):
        assert agreed(self.A, self.B).tolist() == [[3, 0], [2, 2]]

    def test_equal_parties_agree_on_what_they_think(self):
        assert agreed(self.A, self.A).tolist() == self.A

    def test_in_any_order(self):
        third = [[0.25, 8.0], [-1.0, 2.0]]
        assert torch.equal(agreed(self.A, self.B, third), agreed(self.A, self.B, third, order=(2, 0, 1)))

    def test_what_one_adds_counts_one_nth(self):
        moved = [[a + 4 for a in row] for row in self.A]
        assert (agreed(moved, self.B) - agreed(self.A, self.B)).tolist() == [[2, 2], [2, 2]]

    def test_only_who_answered_counts(self):
        client = public_party(FedMD(), [((1, 1), 0)], [((1, 1), 0), ((1, -1), 1)])
        server = server_of(client.task, {0: 1, 1: 1, 2: 1})
        FedMD().setup(server)
        FedMD().agree(server, {1: Message({"logits": torch.tensor(self.B)})})
        assert FedMD().consensus(server, 0).tensor("logits").tolist() == self.B


# ---- client --------------------------------------------------------------------------------------------------------

ONE = FedMD(digest_steps=1, revisit_steps=1, pretrain_public=1, pretrain_private=1)


class TestClient:
    def test_shows_logits_of_the_chosen_samples_in_their_order(self):
        client = public_party(ONE, [((1, 1), 0)], [((1, 1), 0), ((1, -1), 1), ((-1, -1), 0), ((-1, 1), 1)])
        client.model.head.load_state_dict({"weight": torch.tensor([[1.0, 2.0], [0.0, -3.0]]), "bias": torch.ones(2)})
        x, _ = alignment(client, 64).take(torch.arange(4))
        expected = [[1 + a + 2 * b, 1 - 3 * b] for a, b in x.flatten(1).tolist()]
        assert ONE.show(client).tensor("logits").tolist() == expected

    def test_a_digest_step_by_hand(self):
        """Mean of |o - Z| over 2 samples of 2 classes; o = 0, so the gradient of o is -sign(Z) / 4, and lr = 1.

        Samples (1, 1) with Z (2, -1) and (1, -1) with Z (1, 5): W_0 = (1, 1)/4 + (1, -1)/4, W_1 = (1, -1)/4 - (1, 1)/4.
        """
        client = public_party(ONE, [((1, 1), 0)], [((1, 1), 0), ((1, -1), 1)])
        chosen = alignment(client, 64)
        z = {(1.0, 1.0): [2.0, -1.0], (1.0, -1.0): [1.0, 5.0]}
        x, _ = chosen.take(torch.arange(2))
        client.take(Message({"logits": torch.tensor([z[tuple(row)] for row in x.flatten(1).tolist()])}))
        client.fit(ONE.digest, on=chosen, opts=("digest",), steps=1)
        assert head_numbers(client) == ([[0.5, 0.0], [0.0, -0.5]], [0.5, 0.0])
        assert client.loss() == pytest.approx(9 / 4)

    def test_who_thinks_what_all_think_learns_nothing_from_it(self):
        method = replace(ONE, digest_epochs=3, digest_steps=None)
        client = public_party(method, [((1, 1), 0)], [((1, 1), 0), ((1, -1), 1), ((-1, -1), 0)])
        client.model.head.load_state_dict({"weight": torch.tensor([[1.0, 2.0], [0.0, -3.0]]), "bias": torch.ones(2)})
        before = head_numbers(client)
        client.take(method.show(client))
        assert client.fit(method.digest, on=alignment(client, 64), opts=("digest",), epochs=3) == 3
        assert head_numbers(client) == before
        assert client.loss() == 0

    def test_revisit_is_cross_entropy_on_private_data(self):
        """Digest off. p = (1/2, 1/2): row 0 moves by (1, -1) / 2, lr = 1."""
        method = replace(ONE, digest_steps=0)
        client = public_party(method, [((1, -1), 0)], [((1, 1), 0), ((1, 1), 1)])
        assert not method.digest_and_revisit(client)
        assert head_numbers(client) == ([[0.5, -0.5], [-0.5, 0.5]], [0.5, -0.5])

    def test_pretraining_on_all_public_data_then_on_private_data(self, monkeypatch):
        fits: list[tuple[int, int | None]] = []
        fit = Client.fit

        def watched(client, step, on="train", **how):
            data = client.data[on] if isinstance(on, str) else on
            fits.append((len(data), how.get("epochs")))
            return fit(client, step, on, **how)

        monkeypatch.setattr(Client, "fit", watched)
        method = FedMD(pretrain_public=3, pretrain_private=2)
        client = public_party(method, [((1, -1), 0)], [((1, 1), 0), ((1, -1), 1), ((-1, -1), 0)])
        assert not method.enrol(client)
        assert fits == [(3, 3), (1, 2)]

    def test_public_pretraining_by_hand(self):
        """Public (1, 1) of class 0 alone, then private (1, 1) of class 1, lr = 1.

        W_0 = (1, 1)/2, b_0 = 1/2 and the opposite in row 1, so logits are (3/2, -3/2), p_0 = sigma(3) = 0.9525741.
        Row 0 then moves by -p_0: 1/2 - 0.9525741 = -0.4525741.
        """
        client = public_party(ONE, [((1, 1), 1)], [((1, 1), 0)])
        ONE.enrol(client)
        weight, bias = head_numbers(client)
        assert weight[0] == pytest.approx([-0.4525741] * 2, abs=1e-6)
        assert bias[0] == pytest.approx(-0.4525741, abs=1e-6)

    @pytest.mark.parametrize(
        ("hyper", "steps"),
        [
            ({}, (2, 2)),
            ({"digest_epochs": 2}, (4, 2)),
            ({"digest_steps": 1, "revisit_steps": 1}, (1, 1)),
            ({"digest_steps": 5, "revisit_steps": 7}, (5, 7)),
        ],
    )
    def test_epochs_or_steps(self, monkeypatch, hyper, steps):
        """5 of 6 public samples in batches of 2 and 3, and 4 private ones in batches of 2."""
        taken: list[int] = []
        fit = Client.fit
        monkeypatch.setattr(Client, "fit", lambda *args, **how: taken.append(fit(*args, **how)) or taken[-1])
        method = FedMD(align=5, **hyper)
        public = [((1, 1), 0), ((1, -1), 1), ((-1, -1), 0)] * 2
        client = public_party(method, [((1, 1), 0)] * 4, public, batch=2)
        method.digest_and_revisit(client)
        assert tuple(taken) == steps

    def test_both_optimizers_last_and_share_no_moments(self):
        result = run_tiny("fedmd", **TINY | {"rounds": 3, "optimizer": "adam", "digest_steps": 1, "revisit_steps": 1})
        saved = {n: v.item() for n, v in kept(result).items() if n.startswith("client 0") and n.endswith(".step")}
        digest = {v for n, v in saved.items() if ".digest." in n}
        assert digest == {3}
        assert {v for n, v in saved.items() if ".model." in n}.pop() > 3  # and those of pre-training


# ---- rounds --------------------------------------------------------------------------------------------------------


class TestRounds:
    def test_a_round_by_hand(self):
        """Show, mean, digest toward that mean: each client's logits have come nearer to it."""
        parts = assemble_tiny("fedmd", **TINY | {"revisit_steps": 0, "digest_epochs": 5})
        hand = ByHand(parts)
        answers = hand.round(0, range(4))
        shown = {k: decode(answers[0, k], hand.host.wires(k)[0].up, "up").tensor("logits") for k in range(4)}
        mean = torch.stack(list(shown.values())).mean(0)
        assert torch.equal(hand.server.state.consensus, mean)
        for k in range(4):
            client = hand.host.client(k)
            client.begin(0, 0, {})
            now = parts.method.show(client).tensor("logits")
            assert (now - mean).abs().mean() < (shown[k] - mean).abs().mean()
            assert answers[1, k] is None

    def test_identical_parties_have_nothing_to_digest(self):
        """Two clients in the same state: Z is what each thinks, and the loss is 0 up to rounding."""
        parts = assemble_tiny("fedmd", **TINY | {"clients": 2, "models": "mlp-64"})
        host, method = make_host(parts), parts.method
        for k in range(2):
            host.client(k).model.load_state_dict(host.client(0).model.state_dict())
        server = server_of(parts.task, {0: 1, 1: 1})
        method.setup(server)
        shown = {k: decode(host.answer(Work(k, 0)).up, host.wires(k)[0].up, "up") for k in range(2)}
        method.agree(server, shown)
        assert torch.equal(server.state.consensus, shown[0].tensor("logits"))
        client = host.client(1)
        client.begin(0, 1, {})
        client.take(method.consensus(server, 1))
        client.fit(method.digest, on=alignment(client, 12), steps=1)
        assert client.loss() < 1e-6

    def test_who_joins_late_pretrains_then(self):
        result = run_tiny("fedmd", **TINY | {"rounds": 4, "participation": 0.5})
        joined = {}
        for e in result.ledger.entries():
            if e.direction == "up" and e.tensor == "(header)":
                joined.setdefault(e.client, []).append(e.round)
        assert all(rounds[0] == rounds[1] for rounds in joined.values())  # enrolment and upload in one round
        assert {rounds[0] for rounds in joined.values()} != {0}

    def test_in_the_protocol_of_fedh2l(self):
        """Domains and their exams: one digest step and one private step a round, on 32 public samples."""
        steps = {"align": 32, "digest_steps": 1, "revisit_steps": 1, "pretrain_public": 1, "pretrain_private": 1}
        domains = {"data": "rotated-digits", "partition": "domain", "batch_size": 32, "test_fraction": 0.15}
        result = run_tiny("fedmd", rounds=2, optimizer="amsgrad", lr=1e-3, weight_decay=1e-4, **domains, **steps)
        for views in result.history[-1]["clients"].values():
            assert views["after"].keys() >= {"acc", "bwt", "fwt"}
            assert 0.2 < views["after"]["acc"] <= 1
        assert result.ledger.by("tensor", "up")["logits"] == 4 * 32 * C * 4 * 2


def test_traffic_is_what_the_sheet_says():
    """N_a C numbers up and as many down; of enrolment nothing but the header of an empty message."""
    result = run_tiny("fedmd", **TINY | {"rounds": 3})
    up, down = (result.ledger.by("tensor", way) for way in ("up", "down"))
    for sent in (up, down):
        assert sent.pop("(header)") > 0
        assert sent == {"logits": 4 * 12 * C * 3 * 4}
    assert result.bytes["evaluation"] == 0


def test_fewer_public_samples_than_asked_for():
    result = run_tiny("fedmd", **TINY | {"rounds": 1, "align": 10_000})
    public = sum(assemble_tiny("fedmd", **TINY).task.public.values())
    assert result.ledger.by("tensor", "up")["logits"] == 4 * public * C * 4


class TestRefusals:
    def test_no_public_data(self):
        with refused(MismatchError, "fedmd", "public data", "--public-fraction 0.1"):
            assemble_tiny("fedmd", public_fraction=0.0)

    def test_a_public_fraction_that_gives_nothing(self):
        with refused(PartitionError, "--public-fraction"):
            assemble_tiny("fedmd", public_fraction=1e-9)

    @pytest.mark.parametrize(
        ("hyper", "facts"),
        [
            ({"align": 0}, ("--align", 1, 0)),
            ({"digest_epochs": -1}, ("--digest-epochs", 0, -1)),
            ({"digest_steps": -1}, ("--digest-steps", 0, -1)),
            ({"revisit_steps": -1}, ("--revisit-steps", 0, -1)),
            ({"pretrain_public": -1}, ("--pretrain-public", 0, -1)),
            ({"pretrain_private": -1}, ("--pretrain-private", 0, -1)),
        ],
    )
    def test_numbers_that_make_no_sense(self, hyper, facts):
        with refused(RangeError, *facts):
            assemble_tiny("fedmd", **hyper)
