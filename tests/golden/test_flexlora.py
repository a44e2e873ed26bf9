"""FlexLoRA: the mean product and its decomposition by hand, and what clients of each rank get."""

from __future__ import annotations

import pytest
import torch

from adapter_toys import LAYER, client_for, only, server_for, upload
from conftest import assemble_tiny, few_digits, run_tiny
from pluribus.errors import RangeError
from pluribus.internal.defenses import Defense
from pluribus.methods._adapters import Factors
from pluribus.methods.flexlora import FlexLoRA, decompose
from refusals import refused

FEW = {"data": few_digits(160), "image_size": 16}
IDENTITY = [[1.0, 0], [0, 1]], [[1.0, 0, 0], [0, 1, 0]]


class TestDecomposition:
    def test_by_hand(self):
        """diag(-2, 3): the second axis first. U = (0, 1; 1, 0) with positive entries, so the sign of -2 is in V."""
        b, a = decompose(torch.tensor([[-2.0, 0, 0], [0, 3, 0]]), 2)
        torch.testing.assert_close(b, torch.tensor([[0.0, 2], [3, 0]]))
        torch.testing.assert_close(a, torch.tensor([[0.0, 1, 0], [-1, 0, 0]]))

    def test_full_rank_restores_the_matrix(self):
        matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(decompose(matrix, 4).product().float(), matrix)

    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_no_other_matrix_of_this_rank_is_nearer(self, rank):
        """Eckart and Young: the squared distance is the sum of the squared singular values that are left out."""
        matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
        left = torch.linalg.svdvals(matrix)[rank:].square().sum()
        distance = (decompose(matrix, rank).product() - matrix).square().sum()
        torch.testing.assert_close(distance, left, rtol=1e-5, atol=1e-6)

    def test_signs_are_fixed(self):
        """Of a matrix and its rows in another order, the components are the same."""
        matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        one, other = decompose(matrix, 4), decompose(matrix.flip(0), 4)
        torch.testing.assert_close(one.a, other.a, rtol=1e-4, atol=1e-5)
        assert (one.b.gather(0, one.b.abs().argmax(0, keepdim=True)) > 0).all()


class TestServer:
    def test_the_mean_product_by_hand(self):
        """alpha = 2: 1/4 of 2 (1; 0) (1, 1, 0) and 3/4 of the identity are (1.25, 0.5, 0; 0, 0.75, 0)."""
        server = server_for(method := FlexLoRA(lora_alpha=2.0), [1, 2], samples=[1, 3])
        method.aggregate(server, {0: upload([[1.0], [0]], [[1.0, 1, 0]], 4.0), 1: upload(*IDENTITY, 8.0)})
        state = server.state
        product = Factors(state.factors[f"B.{LAYER}"], state.factors[f"A.{LAYER}"]).product()
        torch.testing.assert_close(product.float(), torch.tensor([[1.25, 0.5, 0], [0, 0.75, 0]]))
        assert state.beside["head.bias"].tolist() == [7, 7]

    @pytest.mark.parametrize("k", [0, 1])
    def test_clients_get_the_first_components(self, k):
        """Times its own scale, a client's product is the truncated mean: of rank 1 it is (0, 0, 0; 0, 3, 0)."""
        server = server_for(method := FlexLoRA(lora_alpha=4.0, weighting="uniform"), [1, 2])
        method.aggregate(server, {1: upload([[1.0, 0], [0, 1.5]], IDENTITY[1])})  # the scale is 2
        client = client_for(method, k + 1, [[1, 1, 1]], [0])
        method.receive(client, method.download(server, k))
        adapter = only(client.model)
        expected = [[[0.0, 0, 0], [0, 3, 0]], [[2.0, 0, 0], [0, 3, 0]]][k]
        torch.testing.assert_close((adapter.b * adapter.gain) @ adapter.a, torch.tensor(expected))

    def test_with_one_rank_and_a_common_a_it_averages_b(self):
        """FedAvg of adapters is exact if A does not move: mean(B_k) A."""
        server = server_for(method := FlexLoRA(lora_alpha=2.0, weighting="uniform"), [2, 2])
        method.aggregate(
            server, {0: upload([[1.0, 0], [0, 1]], IDENTITY[1]), 1: upload([[3.0, 2], [0, 5]], IDENTITY[1])}
        )
        down = method.download(server, 0)
        found = down.tensor(f"B.{LAYER}") @ down.tensor(f"A.{LAYER}")
        torch.testing.assert_close(found, torch.tensor([[2.0, 1, 0], [0, 3, 0]]))

    def test_products_are_defended(self):
        """Client 2 lies: the median product of three is that of the others, although their factors differ."""
        server = server_for(method := FlexLoRA(lora_alpha=1.0, weighting="uniform"), [1, 1, 1])
        server.defense = Defense("median")
        honest, same = upload([[1.0], [2]], [[1.0, 0, 0]]), upload([[-1.0], [-2]], [[-1.0, 0, 0]])
        method.aggregate(server, {0: honest, 1: same, 2: upload([[100.0], [100]], [[100.0, 100, 100]])})
        down = method.download(server, 0)
        found = down.tensor(f"B.{LAYER}") @ down.tensor(f"A.{LAYER}")
        torch.testing.assert_close(found, torch.tensor([[1.0, 0, 0], [2, 0, 0]]))


class TestRounds:
    def test_traffic_is_what_the_page_says(self):
        result = run_tiny("flexlora", **FEW, rounds=2)
        for way in ("up", "down"):
            sent = result.ledger.by("tensor", way)
            sent.pop("(header)")
            assert sum(sent.values()) == 2 * 4 * sum(4 * r * (96 + 32) + 330 for r in (8, 4, 2, 8))

    def test_alpha(self):
        with refused(RangeError, "--lora-alpha", 0):
            assemble_tiny("flexlora", **FEW, lora_alpha=0.0)
