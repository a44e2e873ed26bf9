"""Low-rank factors: what they must keep, what they may cost, and that they come back from a message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pluribus.errors import SchemaError
from pluribus.message import Message, decode, encode
from pluribus.methods._lowrank import Shelf, factorize, fields, most_rank, packed, rank, truncate, unpacked
from refusals import refused

energies = st.floats(0.05, 1.0)
sizes = st.integers(1, 24)


@st.composite
def matrices(draw) -> Tensor:
    """Matrices of any form, some of low rank, some zero."""
    m, n, r = draw(sizes), draw(sizes), draw(st.integers(0, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    parts = torch.randn(m, r, generator=generator), torch.randn(r, n, generator=generator)
    return parts[0] @ parts[1] + draw(st.sampled_from([0.0, 0.01, 1.0])) * torch.randn(m, n, generator=generator)


def through(value: Tensor, energy: float, since: Tensor | None = None) -> tuple[Tensor, int]:
    """What arrives of a tensor, and how many numbers traveled."""
    base = {} if since is None else {"w": since}
    sent = Message(packed({"w": value}, energy, base))
    arrived = decode(encode(sent, fields({"w": value}), "here"), fields({"w": value}), "there")
    return unpacked(arrived, {"w": value}, base)["w"], sum(part.numel() for part in sent.part().values())


class TestRank:
    SIGMA = torch.tensor([4.0, 2.0, 1.0, 0.0])  # squares 16, 4, 1, 0: shares 16/21, 20/21, 1

    @pytest.mark.parametrize(("energy", "r"), [(0.01, 1), (16 / 21, 1), (0.77, 2), (20 / 21, 2), (0.953, 3), (1.0, 3)])
    def test_by_hand(self, energy, r):
        assert rank(self.SIGMA, energy) == r

    def test_equal_values_need_all(self):
        """Each holds a quarter: a search that stops below the full rank would find none at all."""
        assert rank(torch.ones(4), 0.95) == rank(torch.ones(4), 1.0) == 4
        assert rank(torch.ones(1), 1.0) == 1

    def test_nothing_still_has_rank_one(self):
        assert rank(torch.zeros(3), 0.95) == 1

    @given(matrices(), energies, energies)
    @settings(max_examples=40, deadline=None)
    def test_monotone_and_never_none(self, matrix, one, other):
        sigma = torch.linalg.svdvals(matrix.double())
        low, high = sorted((one, other))
        assert 1 <= rank(sigma, low) <= rank(sigma, high) <= len(sigma)


class TestSize:
    @pytest.mark.parametrize(
        ("shape", "most"),
        [((16, 9), 5), ((64, 256), 51), ((1, 50), 0), ((3, 2), 0), ((5,), 0), ((), 0), ((16, 1, 3, 3), 5), ((4, 0), 0)],
    )
    def test_the_most_that_pays(self, shape, most):
        """16 * 9 = 144 numbers; 5 factors take 5 * 26 = 130, 6 take 156."""
        assert most_rank(shape) == most

    @given(sizes, sizes)
    def test_one_more_would_not_pay(self, m, n):
        r = most_rank((m, n))
        assert r * (m + n + 1) < m * n or r == 0
        assert (r + 1) * (m + n + 1) >= m * n

    @given(matrices(), energies)
    @example(torch.eye(12), 0.9)
    @example(torch.zeros(12, 12), 0.9)
    @settings(max_examples=40, deadline=None)
    def test_never_more_than_the_matrix(self, matrix, energy):
        arrived, numbers = through(matrix, energy)
        assert numbers <= matrix.numel()
        if (factors := factorize(matrix, energy)) is not None:
            r = len(factors.s)
            assert numbers == r * (sum(matrix.shape) + 1) < matrix.numel()
            assert r == rank(torch.linalg.svdvals(matrix.double()), energy)
        else:
            assert torch.equal(arrived, matrix)


SHAPES = [(64, 147), (147, 64), (10, 128), (128, 10), (32, 25), (16, 288), (40, 40), (1, 30), (30, 1)]
SHARES = [0.3, 0.9, 0.95, 0.98, 0.9999, 1 - 1e-8]
KINDS = {
    "random": lambda x, low: x,
    "of low rank": lambda x, low: low,
    "nearly of low rank": lambda x, low: low + 1e-3 * x,
    "graded": lambda x, low: x * torch.logspace(0, -6, len(x))[:, None],
}


class TestGram:
    """Eigenvectors of the Gram matrix of the short side, against a singular value decomposition."""

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
    def test_the_same_ranks_and_products_as_an_svd(self, shape, make):
        m, n = shape
        low = torch.randn(m, 4, generator=_seeded()) @ torch.randn(4, n, generator=_seeded())
        matrix = make(torch.randn(m, n, generator=_seeded()), low).double()
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        for energy in SHARES:
            found, r = truncate(matrix, energy), rank(s, energy)
            assert [tuple(factor.shape) for factor in found] == [(m, r), (r,), (r, n)]
            torch.testing.assert_close(found.s, s[:r], rtol=1e-6, atol=0)
            best = (matrix - (u[:, :r] * s[:r]) @ v[:r]).norm()
            assert (matrix - found.matrix()).norm() <= best + 1e-12 * s[0]

    def test_all_energy_takes_no_more_factors_than_an_exact_matrix_has(self):
        """Whole numbers of rank 3: rounding of the Gram matrix would leave squares that are not quite 0."""
        one, other = (torch.randint(-3, 4, size, generator=_seeded()).double() for size in ((200, 3), (3, 300)))
        assert len(truncate(one @ other, 1.0).s) == 3

    @pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 4), (4, 1)], ids=str)
    @pytest.mark.parametrize("energy", [0.95, 1.0])
    def test_zeros_have_one_factor_of_zeros(self, shape, energy):
        found = truncate(torch.zeros(shape, dtype=torch.float64), energy)
        assert found.s.tolist() == [0]
        assert not found.matrix().any()
        assert all(factor.isfinite().all() for factor in found)


class TestError:
    @given(matrices(), energies)
    @settings(max_examples=40, deadline=None)
    def test_at_most_what_was_left_out(self, matrix, energy):
        arrived, _ = through(matrix, energy)
        left = (arrived.double() - matrix.double()).square().sum()
        whole = matrix.double().square().sum()
        assert left <= (1 - energy) * whole + 1e-11 * whole  # the factors are rounded to single precision

    @given(matrices())
    @settings(max_examples=40, deadline=None)
    def test_all_energy_loses_nothing(self, matrix):
        torch.testing.assert_close(through(matrix, 1.0)[0], matrix, rtol=0, atol=3e-6 * float(matrix.abs().max() + 1))

    @given(matrices(), energies)
    @settings(max_examples=40, deadline=None)
    def test_of_an_update_only_the_update_is_rounded(self, update, energy):
        start = torch.full_like(update, 100.0)
        arrived, _ = through(start + update, energy, start)
        moved = (start + update).double() - start.double()
        left = (arrived.double() - start.double() - moved).square().sum()
        assert left <= (1 - energy) * moved.square().sum() + 1e-9 * start.numel()  # 100 has seven digits

    def test_a_full_matrix_travels_as_it_is(self):
        """No bit is lost where every factor is needed: 1x1 convolutions, the identity."""
        for value in (torch.eye(12), torch.eye(16)[:, :, None, None], torch.randn(8, 8, generator=_seeded())):
            assert factorize(value, 1.0) is None
            assert torch.equal(through(value, 1.0)[0], value)
        assert torch.equal(through(torch.eye(12)[:, :, None, None], 0.98)[0], torch.eye(12)[:, :, None, None])

    def test_a_kernel_is_one_matrix(self):
        """One row per output channel: here all rows are multiples of one, so one factor has all."""
        kernel = torch.arange(1.0, 9.0)[:, None, None, None] * torch.arange(18.0).reshape(2, 3, 3)
        factors = factorize(kernel, 0.99)
        assert factors is not None
        assert [tuple(factor.shape) for factor in factors] == [(8, 1), (1,), (1, 18)]
        arrived, numbers = through(kernel, 0.99)
        assert numbers == 27
        torch.testing.assert_close(arrived, kernel)

    def test_by_hand(self):
        """diag(4, 2, 1, 0, ...) at a share of 20/21: the 1 is dropped, nothing else."""
        matrix = torch.diag(torch.tensor([4.0, 2.0, 1.0, 0, 0, 0, 0, 0]))
        arrived, numbers = through(matrix, 20 / 21)
        torch.testing.assert_close(arrived, torch.diag(torch.tensor([4.0, 2.0, 0, 0, 0, 0, 0, 0])))
        assert numbers == 2 * 17


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def model() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 16), nn.Linear(16, 3))
        return dict(net.state_dict())


class TestModels:
    def test_what_is_no_matrix_travels_whole(self):
        """Biases (one of length three, as many as there are factors), statistics and counters."""
        state = model()
        sent = packed(state, 0.5, {})
        vectors = [name for name, value in state.items() if value.dim() < 2]
        assert set(vectors) <= set(sent)
        assert any(name.endswith(".s") for name in sent)
        arrived = unpacked(Message(sent), state, {})
        assert list(arrived) == list(state)
        assert all(torch.equal(arrived[name], state[name]) for name in vectors)
        assert all(arrived[name].shape == state[name].shape for name in state)
        assert arrived["1.num_batches_tracked"].dtype == torch.int64

    def test_a_shelf_gives_back_what_was_put(self):
        state, shelf = model(), Shelf(model())
        assert shelf.get(state).keys() == state.keys(), "whole, as long as nothing was sent"
        for energy in (0.9, 0.3, 1.0):  # larger, smaller, none
            sent = packed(state, energy, {})
            shelf.put(sent)
            again = shelf.get(state)
            assert again.keys() == sent.keys()
            assert all(torch.equal(again[name], sent[name]) for name in sent)

    def test_numbers_that_are_none_are_left_to_the_message(self):
        broken = torch.randn(8, 8)
        broken[0, 0] = torch.nan
        assert packed({"w": broken}, 0.5, {}).keys() == {"w"}

    def test_a_message_without_a_tensor_is_refused(self):
        state = {"w": torch.zeros(8, 8)}
        with refused(SchemaError, "'w'", "'w.s'"):
            unpacked(Message({"w.u": torch.zeros(8, 1)}), state, {})
