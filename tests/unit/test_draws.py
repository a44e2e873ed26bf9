"""Keyed randomness. The numbers are written out: another derivation of keys would silently change every run."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pluribus import draws

keys = st.lists(st.one_of(st.integers(-(2**40), 2**40), st.text(max_size=8)), max_size=4).map(tuple)


class TestStable:
    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            ((), 5460801731388113703),
            ((0,), 7210762507766007076),
            ((0, "init", 3), 2633664251248616846),
            ((0, "client", 7, 2, 0, "shuffle", 1, 0), 6834194593353700254),
            (("ω",), 6240176738498450302),
        ],
    )
    def test_number(self, key, expected):
        assert draws.number(*key) == expected

    def test_generator(self):
        assert torch.randperm(8, generator=draws.generator(0, "shuffle")).tolist() == [7, 6, 2, 0, 4, 1, 5, 3]

    def test_numpy_rng(self):
        assert draws.numpy_rng(0, "partition").permutation(8).tolist() == [2, 7, 0, 1, 4, 3, 5, 6]

    def test_python_rng(self):
        assert draws.python_rng(0, "sample", 1).sample(range(100), 5) == [74, 63, 50, 65, 13]

    def test_seeded(self):
        with draws.seeded(0, "build"):
            assert torch.randint(0, 1000, (4,)).tolist() == [664, 102, 133, 458]


class TestKeys:
    @given(keys)
    def test_63_bits(self, key):
        assert 0 <= draws.number(*key) < 2**63

    @given(keys, keys)
    def test_equal_keys_and_only_those_give_equal_numbers(self, one, other):
        assert (draws.number(*one) == draws.number(*other)) == (one == other)

    @pytest.mark.parametrize(
        ("one", "other"),
        [((1, 2), (2, 1)), ((1, 2), (12,)), ((3,), ("3",)), (("a", "b"), ("ab",)), (("a",), ("a", ""))],
    )
    def test_order_type_and_borders_of_the_parts_count(self, one, other):
        assert draws.number(*one) != draws.number(*other)

    def test_ten_thousand_clients_draw_apart(self):
        assert len({draws.number(0, "client", k) for k in range(10_000)}) == 10_000

    def test_a_generator_is_fresh_every_time(self):
        first = draws.generator(0, "x")
        torch.rand(5, generator=first)
        assert torch.equal(
            torch.rand(3, generator=draws.generator(0, "x")), torch.rand(3, generator=draws.generator(0, "x"))
        )


class TestGlobalState:
    def test_seeded_gives_back_the_callers_state(self):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        with draws.seeded(0, "x"):
            torch.rand(100)
        assert torch.equal(torch.get_rng_state(), before)

    def test_also_after_an_error(self):
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError), draws.seeded(0, "x"):
            torch.rand(3) @ torch.rand(4)
        assert torch.equal(torch.get_rng_state(), before)

    def test_seeded_does_not_depend_on_the_callers_state(self):
        drawn = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            with draws.seeded(0, "x"):
                drawn.append(torch.rand(3))
        assert torch.equal(*drawn)

    def test_seeded_inside_seeded(self):
        with draws.seeded(0, "outer"):
            alone = torch.rand(2)
        with draws.seeded(0, "outer"):
            first = torch.rand(1)
            with draws.seeded(0, "inner"):
                torch.rand(7)
            assert torch.equal(torch.cat([first, torch.rand(1)]), alone)

    def test_draws_leave_the_global_generators_alone(self):
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        torch.rand(3, generator=draws.generator(0))
        draws.numpy_rng(0).random(3)
        draws.python_rng(0).random()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        assert random.getstate() == before[2]
