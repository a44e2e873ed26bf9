"""HetLoRA: padding, truncation and weights by hand, the penalty of the tail, and when ranks are pruned."""

from __future__ import annotations

import math

import pytest
import torch

from adapter_toys import LAYER, client_for, only, parts, server_for, upload
from conftest import assemble_tiny, few_digits, run_tiny
from pluribus.client import Batch
from pluribus.errors import RangeError
from pluribus.message import Message
from pluribus.methods.hetlora import HetLoRA, pad, product_norm, truncate
from pluribus.ops import weighted_mean
from refusals import refused

FEW = {"data": few_digits(160), "image_size": 16}
B, A = f"B.{LAYER}", f"A.{LAYER}"
TWO = [[1.0, 2], [3, 4]], [[1.0, 0, 1], [0, 2, 0]]  # of rank 2


class TestPadding:
    def test_by_hand(self):
        padded = pad(parts(*TWO), 3)
        assert padded[B].tolist() == [[1, 2, 0], [3, 4, 0]]
        assert padded[A].tolist() == [[1, 0, 1], [0, 2, 0], [0, 0, 0]]
        assert padded["head.bias"].tolist() == [0, 0]

    @pytest.mark.parametrize("rank", [2, 5])
    def test_a_clients_own_product_stays(self, rank):
        padded = pad(parts(*TWO), rank)
        assert (padded[B] @ padded[A]).tolist() == (torch.tensor(TWO[0]) @ torch.tensor(TWO[1])).tolist()

    def test_truncation_undoes_it(self):
        restored = truncate(pad(parts(*TWO), 4), 2)
        assert all(torch.equal(value, restored[name]) for name, value in parts(*TWO).items())

    def test_the_norm_by_hand(self):
        """B A = (1, 4, 1; 3, 8, 3): 1 + 16 + 1 + 9 + 64 + 9 = 100. Padding adds nothing."""
        assert product_norm(parts(*TWO)) == pytest.approx(10)
        assert product_norm(pad(parts(*TWO), 4)) == pytest.approx(10)


class TestServer:
    def test_weights_by_hand(self):
        """Norms 10 and 30: the weights are 1/4 and 3/4. Client 1 of rank 1 has zeros in the second rank."""
        server = server_for(method := HetLoRA(), [2, 1])
        method.aggregate(server, {0: upload(*TWO, head=4.0), 1: upload([[30.0], [0]], [[1.0, 0, 0]], head=8.0)})
        shared = server.state.shared
        torch.testing.assert_close(shared[B], torch.tensor([[22.75, 0.5], [0.75, 1]]))
        torch.testing.assert_close(shared[A], torch.tensor([[1.0, 0, 0.25], [0, 0.5, 0]]))
        torch.testing.assert_close(shared["head.bias"], torch.tensor([7.0, 7]))

    @pytest.mark.parametrize(("weighting", "share"), [("uniform", 1 / 2), ("samples", 1 / 4)])
    def test_with_one_rank_it_is_fedavg_of_adapters(self, weighting, share):
        server = server_for(method := HetLoRA(weighting=weighting), [2, 2], samples=[1, 3])
        sent = {0: parts(*TWO), 1: parts([[5.0, 5], [5, 5]], [[2.0, 2, 2], [2, 2, 2]])}
        method.aggregate(server, {k: Message(one) for k, one in sent.items()})
        expected = weighted_mean(sent, {0: share, 1: 1 - share})
        assert all(torch.equal(value, expected[name]) for name, value in server.state.shared.items())

    def test_adapters_that_never_moved_count_equally(self):
        server = server_for(method := HetLoRA(), [1, 1])
        still = {k: upload([[0.0], [0]], [[1.0, 1, 1]], head=float(k)) for k in range(2)}
        method.aggregate(server, still)
        assert server.state.shared["head.bias"].tolist() == [0.5, 0.5]

    def test_clients_get_their_first_ranks(self):
        server = server_for(method := HetLoRA(), [2, 1])
        method.aggregate(server, {0: upload(*TWO)})
        one, other = (method.download(server, k) for k in range(2))
        assert one.tensor(B).tolist() == TWO[0]
        assert other.tensor(B).tolist() == [[1], [3]]
        assert other.tensor(A).tolist() == [[1, 0, 1]]

    def test_a_pruned_client_gets_fewer_from_then_on(self):
        server = server_for(method := HetLoRA(), [2, 2])
        method.aggregate(server, {0: upload([[1.0], [1]], [[1.0, 0, 0]]), 1: upload(*TWO)})
        assert [method.download(server, k).tensor(A).shape[0] for k in range(2)] == [1, 2]


def pruning(rank: int = 2, **hyper):
    """A client of rank 2 whose tail is its second rank, with |B| = 5 and |A| = 2 there."""
    client = client_for(method := HetLoRA(**{"gamma": 0.5, **hyper}), rank, [[1, 1, 1]], [0], lr=0.1, momentum=0.9)
    method.receive(client, upload([[1.0, 3], [1, 4]], [[1.0, 0, 0], [0, 2, 0]]))
    return method, client


class TestPruning:
    def test_the_penalty_by_hand(self):
        """lambda |B_tail| |A_tail| = 0.1 * 5 * 2, beside the cross-entropy of zero logits."""
        method, client = pruning(penalty=0.1)
        x, y = client.data["train"].take(torch.arange(1))
        found = method.loss(client, Batch(x, y, torch.arange(1), 1))
        assert found.item() == pytest.approx(math.log(2) + 1.0)

    def test_a_step_by_hand(self):
        """The head is zero, so only the penalty moves adapters: B_tail by -lr lambda |A| B / |B| = -0.1 (0.6, 0.8)."""
        method, client = pruning(penalty=0.5)
        client.fit(method.step)
        adapter = only(client.model)
        torch.testing.assert_close(adapter.b.data, torch.tensor([[1.0, 2.94], [1, 3.92]]))
        torch.testing.assert_close(adapter.a.data, torch.tensor([[1.0, 0, 0], [0, 1.75, 0]]))

    @pytest.mark.parametrize(("penalty", "rank"), [(0.5, 1), (0.0, 2)])
    def test_a_tail_that_became_smaller_is_pruned(self, penalty, rank):
        """Without the penalty it stays what it was."""
        method, client = pruning(penalty=penalty)
        sent = method.local_update(client)
        assert sent.tensor(A).shape == (rank, 3)
        assert sent.tensor(B).shape == (2, rank)
        assert only(client.model).gain.tolist() == [1] * rank + [0] * (2 - rank)

    def test_pruned_ranks_are_not_used(self):
        """Even if an optimizer still moves them."""
        method, client = pruning(penalty=0.5)
        method.local_update(client)
        x = torch.ones(1, 1, 1, 3)
        before = client.model.features(x)
        only(client.model).b.data[:, 1] += 1
        assert torch.equal(client.model.features(x), before)

    @pytest.mark.parametrize(
        ("gamma", "rank", "after"), [(0.99, 8, 7), (0.5, 8, 4), (0.5, 1, 1), (0.1, 4, 1), (1.0, 3, 3)]
    )
    def test_ranks_after_pruning(self, gamma, rank, after):
        assert HetLoRA(gamma=gamma)._pruned(rank) == after

    def test_one_rank_stays(self):
        client = client_for(method := HetLoRA(penalty=1.0), 1, [[1, 1, 1]], [0], lr=0.1)
        for _ in range(3):
            method.receive(client, upload([[1.0], [1]], [[1.0, 0, 0]]))
            assert method.local_update(client).tensor(A).shape == (1, 3)

    def test_new_adapters_are_not_pruned(self):
        """B is zero at first, and a norm is not below zero."""
        result = run_tiny("hetlora", **FEW, rounds=1, penalty=10.0)
        head = 32 * 10 + 10
        sent = result.ledger.by("tensor", "up")
        sent.pop("(header)")
        assert sum(sent.values()) == 4 * sum(4 * r * (96 + 32) + head for r in (8, 4, 2, 8))

    def test_a_run_prunes_and_sends_less(self):
        up = []
        for penalty in (0.0, 3.0):
            result = run_tiny("hetlora", **FEW, rounds=4, penalty=penalty, gamma=0.5)
            up.append(sum(result.ledger.by("tensor", "up").values()))
        assert up[1] < up[0]


class TestRefusals:
    @pytest.mark.parametrize(
        ("hyper", "facts"),
        [
            ({"gamma": 0.0}, ("--gamma", 0)),
            ({"gamma": 1.5}, ("--gamma", 1.5)),
            ({"penalty": -1.0}, ("--penalty", -1.0)),
            ({"lora_scale": 0.0}, ("--lora-scale", 0)),
        ],
    )
    def test_numbers(self, hyper, facts):
        with refused(RangeError, *facts):
            assemble_tiny("hetlora", **FEW, **hyper)
