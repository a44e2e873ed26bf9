"""The paired test: small cases counted by hand, and how often it finds something where nothing is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pluribus.study.significance import (
    BETTER,
    NOT_SHOWN,
    WORSE,
    Difference,
    bootstrap_interval,
    difference,
    holm,
    sign_flip_test,
)


@pytest.mark.parametrize(
    ("by_seed", "p"),
    [
        ([[0.5]], 1.0),  # one pair can show nothing
        ([[1.0, 2.0, 3.0]], 2 / 8),  # +++ and ---
        ([[1.0, 2.0], [3.0, 4.0]], 2 / 16),
        ([[1.0, -1.0]], 1.0),  # the mean is 0, and nothing is nearer
        ([[3.0, -1.0, 1.0]], 6 / 8),  # 3 +- 1 +- 1 is 3 or more but once, and so is its opposite
        ([[0.0, 0.0, 0.0]], 1.0),
        ([[0.1] * 10], 2 / 1024),
    ],
)
def test_few_pairs_are_counted(by_seed: list[list[float]], p: float) -> None:
    assert sign_flip_test(by_seed) == pytest.approx(p)


def test_every_seed_counts_alike_whatever_its_number_of_clients() -> None:
    """Shares of 1/2 x 4 = 2, and 1/4 x (1, -3): of the eight sums, 1.5 or more is 2 +- 0.25 +- 0.75 but for 1."""
    assert difference([[4.0], [1.0, -3.0]]).mean == pytest.approx((4.0 + -1.0) / 2)
    shares = (2.0, 0.25, -0.75)
    sums = [sum(s * x for s, x in zip(signs, shares, strict=True)) for signs in itertools.product((1, -1), repeat=3)]
    expected = sum(abs(one) >= 1.5 - 1e-9 for one in sums) / 8
    assert expected == 6 / 8
    assert sign_flip_test([[4.0], [1.0, -3.0]]) == pytest.approx(expected)


def test_many_pairs_are_sampled_and_come_near_what_counting_gives() -> None:
    """Of 16 equal pairs the mean is as far from 0 if 13 or more signs agree: 2 x (1 + 16 + 120 + 560) / 2^16."""
    values = [0.1] * 13 + [-0.1] * 3
    assert sign_flip_test([values]) == pytest.approx(2 * 697 / 2**16, abs=0.005)
    assert sign_flip_test([values]) == sign_flip_test([values])  # its draws have a key


def test_swapping_the_methods_flips_the_sign_and_nothing_else() -> None:
    by_seed = [[0.02, 0.05, -0.01, 0.03], [0.04, 0.01, 0.02, 0.06], [0.01, 0.03, 0.05, 0.02]]
    one, other = difference(by_seed), difference([[-value for value in values] for values in by_seed])
    assert other.mean == -one.mean
    assert other.p == one.p
    assert (other.low, other.high) == pytest.approx((-one.high, -one.low))
    assert (one.verdict(one.p), other.verdict(other.p)) == (BETTER, WORSE)


def test_the_order_of_clients_does_not_matter_to_the_test() -> None:
    assert sign_flip_test([[0.3, 0.1, -0.2]]) == sign_flip_test([[-0.2, 0.3, 0.1]])


def test_the_interval_of_equal_clients_comes_from_seeds_alone() -> None:
    """Two seeds of 0 and 1: drawn anew they give 0, 1/2 and 1, the outer ones a quarter of the time each."""
    assert bootstrap_interval([[0.0, 0.0], [1.0, 1.0]]) == (0.0, 1.0)
    assert bootstrap_interval([[0.5, 0.5, 0.5]]) == (0.5, 0.5)


def test_the_interval_of_one_seed_is_that_of_its_clients() -> None:
    """A mean of n draws with replacement has the variance of the values over n."""
    values = np.linspace(-1, 1, 50)
    low, high = bootstrap_interval([values.tolist()])
    expected = 1.96 * values.std() / np.sqrt(50)
    assert (low, high) == pytest.approx((-expected, expected), rel=0.05)


def test_a_difference_is_shown_only_where_test_and_interval_agree() -> None:
    sure = Difference(0.1, 0.05, 0.15, 0.001, 30, 3)
    assert sure.verdict(0.001) == BETTER
    assert sure.verdict(0.06) == NOT_SHOWN  # after correction
    assert Difference(0.1, -0.01, 0.2, 0.001, 30, 3).verdict(0.001) == NOT_SHOWN
    assert Difference(-0.1, -0.15, -0.05, 0.001, 30, 3).verdict(0.001) == WORSE
    assert Difference(0.0, 0.0, 0.0, 1.0, 30, 3).verdict(1.0) == NOT_SHOWN


def test_holm_by_hand() -> None:
    assert holm([0.02]) == [0.02]
    assert holm([0.01, 0.02, 0.03]) == pytest.approx([0.03, 0.04, 0.04])
    assert holm([0.5, 0.9, 0.01]) == pytest.approx([1.0, 1.0, 0.03])
    assert holm([]) == []


def found(effect: float, seed_effect: float, runs: int = 40, seeds: int = 3, clients: int = 8) -> float:
    """How often a difference is shown between methods that differ by so much, on clients that vary by 0.05."""
    rng = np.random.default_rng(0)
    shown = 0
    for _ in range(runs):
        drawn = effect + 0.05 * rng.normal(size=(seeds, clients)) + seed_effect * rng.normal(size=(seeds, 1))
        one = difference(drawn.tolist())
        shown += one.verdict(one.p) != NOT_SHOWN
    return shown / runs


def test_noise_is_seldom_taken_for_progress_and_progress_is_seen() -> None:
    assert found(0.0, 0.0) <= 0.05
    assert found(0.0, 0.02, seeds=5) <= 0.1  # where seeds differ, it takes some of them
    assert found(0.05, 0.0, runs=10) >= 0.9
