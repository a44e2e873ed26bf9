"""FLoRA: the stack by hand, what clients fold, who gets what, and new adapters in every round."""

from __future__ import annotations

import pytest
import torch

from adapter_toys import LAYER, client_for, only, server_for, upload
from conftest import assemble_tiny, few_digits, new_folder, run_tiny
from kit import ByHand
from pluribus.errors import MismatchError, RangeError
from pluribus.message import Message
from pluribus.methods._adapters import Factors
from pluribus.methods.flora import FLoRA, most_stacked, stack
from pluribus.models.adapters import adapters_of
from refusals import refused

FEW = {"data": few_digits(160), "image_size": 16}
WIDE = {"inputs": 4, "outputs": 4}  # a stack of rank 1 is smaller than its product, and one of rank 2 is not


def factors(rank: int, seed: int, m: int = 6, n: int = 5) -> Factors:
    draw = torch.Generator().manual_seed(seed)
    return Factors(torch.randn(m, rank, generator=draw), torch.randn(rank, n, generator=draw))


class TestStack:
    def test_by_hand(self):
        """B = (1, 2 | 0, 1) and A = 1/4 (1, 0; and 3/4 of (0, 2), (1, 1))."""
        one = Factors(torch.tensor([[1.0], [0]]), torch.tensor([[1.0, 0]]))
        other = Factors(torch.tensor([[2.0, 0], [1, 1]]), torch.tensor([[0.0, 2], [1, 1]]))
        found = stack({0: one, 3: other}, {0: 0.25, 3: 0.75})
        assert found.b.tolist() == [[1, 2, 0], [0, 1, 1]]
        assert found.a.tolist() == [[0.25, 0], [0, 1.5], [0.75, 0.75]]
        assert found.product().tolist() == [[0.25, 3], [0.75, 2.25]]

    def test_its_product_is_the_sum_of_products(self):
        """Exactly what the mean of factors is not."""
        clients = {k: factors(rank, k) for k, rank in enumerate((3, 1, 2))}
        shares = {0: 0.5, 1: 0.2, 2: 0.3}
        expected = sum(one.product() * shares[k] for k, one in clients.items())
        torch.testing.assert_close(stack(clients, shares).product(), expected, rtol=1e-6, atol=1e-6)

    def test_with_one_client_it_is_its_product(self):
        one = factors(2, 0)
        torch.testing.assert_close(stack({0: one}, {0: 1.0}).product(), one.product())


class TestServer:
    def test_the_sum_by_hand(self):
        """alpha = 2: client 0 of rank 1 has the scale 2 and a share of 1/4, client 1 of rank 2 the scale 1 and 3/4.

        B A is (1, 1, 0; 0, 0, 0) and the identity: 1/2 (1, 1, 0; ...) + 3/4 (1, 0, 0; 0, 1, 0). The heads: 4 and 8.
        """
        method = FLoRA(lora_alpha=2.0)
        server = server_for(method, [1, 2], samples=[1, 3])
        sent = {0: upload([[1.0], [0]], [[1.0, 1, 0]], head=4.0)}
        sent[1] = upload([[1.0, 0], [0, 1]], [[1.0, 0, 0], [0, 1, 0]], head=8.0)
        method.aggregate(server, sent)
        assert server.state.sums[LAYER].tolist() == [[1.25, 0.5, 0], [0, 0.75, 0]]
        assert server.state.beside["head.bias"].tolist() == [7, 7]

    def test_sums_grow(self):
        server = server_for(method := FLoRA(lora_alpha=1.0, weighting="uniform"), [1])
        for _ in range(3):
            method.aggregate(server, {0: upload([[1.0], [2]], [[1.0, 0, 1]])})
        assert server.state.sums[LAYER].tolist() == [[3, 0, 3], [6, 0, 6]]

    def test_before_the_first_merge_only_the_head_is_sent(self):
        server = server_for(method := FLoRA(), [1])
        assert set(method.download(server, 0)) == {"version", "head.weight", "head.bias"}

    @pytest.mark.parametrize(("rank", "has_stack"), [(1, True), (2, False)])
    def test_a_stack_is_sent_if_it_is_smaller_and_the_client_has_the_rest(self, rank, has_stack):
        """4 x 4: r (4 + 4) < 16 holds for r = 1 alone."""
        server = server_for(method := FLoRA(), [rank, rank], **WIDE)
        method.aggregate(server, {0: upload([[1.0] * rank] * 4, [[1.0] * 4] * rank)})
        fields = {True: {f"A.{LAYER}", f"B.{LAYER}"}, False: {f"sum.{LAYER}"}}
        beside = {"version", "head.weight", "head.bias"}
        assert set(method.download(server, 0)) - beside == fields[has_stack]
        assert set(method.download(server, 1)) - beside == fields[False], "it was not there"

    @pytest.mark.parametrize(("m", "n", "most"), [(96, 32, 23), (4, 4, 1), (2, 2, 0), (1, 9, 0)])
    def test_the_largest_stack(self, m, n, most):
        assert most_stacked(m, n) == most
        assert most * (m + n) < m * n <= (most + 1) * (m + n)


class TestClient:
    def down(self, version: int, **fields: list[list[float]]) -> Message:
        named = {name.replace("_", "."): torch.tensor(value) for name, value in fields.items()}
        head = {"head.weight": torch.ones(2, 2), "head.bias": torch.ones(2)}
        return Message({**head, **named, "version": torch.tensor(version, dtype=torch.int32)})

    def test_a_stack_is_folded_once(self):
        """(1; 2) (1, 0, 3) is added to what was folded before, and a repeated download changes nothing."""
        client = client_for(method := FLoRA(), 1, [[1, 1, 1]], [0])
        method.receive(client, self.down(1, sum_qkv=[[1.0, 1, 1], [0, 0, 0]]))
        for _ in range(2):
            method.receive(client, self.down(2, A_qkv=[[1.0, 0, 3]], B_qkv=[[1.0], [2]]))
        assert only(client.model).folded.tolist() == [[2, 1, 4], [2, 0, 6]]
        assert client.model.head.bias.tolist() == [1, 1]

    def test_its_own_product_is_dropped(self):
        """It is part of the sum."""
        client = client_for(method := FLoRA(), 1, [[1, 1, 1]], [0])
        only(client.model).b.data.fill_(5.0)
        method.receive(client, self.down(0))
        assert only(client.model).b.tolist() == [[0], [0]]

    def test_adapters_are_new_in_every_round(self):
        client = client_for(method := FLoRA(), 1, [[1, 1, 1]], [0], lr=0.0001)
        found = []
        for t in (0, 0, 1):
            client.begin(t, 0, {})
            method.receive(client, self.down(0))
            found.append(method.local_update(client).tensor("A.qkv"))
        assert torch.equal(found[0], found[1])
        assert not torch.allclose(found[0], found[2], atol=0.01)


class TestRounds:
    def test_all_clients_have_the_servers_model(self):
        """Those that fold stacks, and those that were away and get the sum."""
        parts = assemble_tiny("flora", **FEW)
        hand = ByHand(parts)
        for t, present in enumerate(((0, 1, 2, 3), (0, 1), (0, 1, 2, 3))):
            hand.round(t, present)
        sums = hand.server.state.sums
        hand.server.begin(3, {})
        for k in range(4):
            client = hand.host.client(k)
            client.begin(3, 0, {})
            parts.method.receive(client, parts.method.download(hand.server, k))
            for path, adapter in adapters_of(client.model).items():
                torch.testing.assert_close(adapter.folded, sums[path], rtol=1e-6, atol=1e-7)
        assert all(value.abs().max() > 0 for value in sums.values())

    def test_traffic_is_what_the_page_says(self):
        """Ranks 8, 4, 2, 8 in four layers of 96 x 32: stacks of rank 22, which are smaller than sums."""
        result = run_tiny("flora", out=new_folder(), **FEW, rounds=3)
        head = 4 * (32 * 10 + 10)
        for k, rank in enumerate((8, 4, 2, 8)):
            sent = [e for e in result.ledger.entries() if (e.client, e.round) == (k, 1) and e.tensor != "(header)"]
            assert sum(e.bytes for e in sent if e.direction == "up") == 4 * 4 * rank * (96 + 32) + head
            assert sum(e.bytes for e in sent if e.direction == "down") == 4 * 4 * 22 * (96 + 32) + head + 4

    @pytest.mark.parametrize("method", ["hetlora", "flora", "flexlora"])
    def test_alone_a_client_trains_and_sends_nothing(self, method):
        """Its adapters stay: nothing is folded, and no new ones are drawn."""
        parts = assemble_tiny(method, **FEW, alone=True)
        hand = ByHand(parts)
        adapter = next(iter(adapters_of(hand.host.client(0).model).values()))
        seen = []
        for t in range(2):
            answers = hand.round(t, range(4))
            seen.append((adapter.a.clone(), adapter.b.clone()))
        assert set(answers.values()) == {None}
        assert seen[0][1].abs().max() > 0
        torch.testing.assert_close(seen[0][0], seen[1][0], rtol=0, atol=0.2)


class TestRefusals:
    def test_alpha(self):
        with refused(RangeError, "--lora-alpha", 0):
            assemble_tiny("flora", **FEW, lora_alpha=0.0)

    def test_no_defense_suits_a_stack(self):
        with refused(MismatchError, "--defense clip", "flora"):
            assemble_tiny("flora", **FEW, defense="clip")
