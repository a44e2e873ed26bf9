"""What releases cost: the Renyi accountant of Opacus, and the noise with which a budget lasts.

Neighbors differ by one row that is added or removed. Every release is a Gaussian mechanism: a sum in which one row has
a norm of at most C, with noise of the standard deviation `noise` times C. With `rate` below 1, each row is part of the
sum with that probability, independently of all others and anew in every release (Poisson sampling).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pluribus.errors import PackageError, RangeError
from pluribus.privacy.terms import MOST_NOISE

BETWEEN = (1.1, 1.2, 1.4, 1.6, 1.8, 2.3, 2.6, 3.5, 4.5)  # orders that matter for a large epsilon
ROUNDING = 1e-6  # of a bound, relative
PRECISION = 0.002  # of the noise that is found, relative; it is rounded up


class Spend(NamedTuple):
    """So many releases with this noise multiplier and this sampling rate."""

    noise: float
    rate: float
    times: int


def require_accountant() -> Any:
    """The module of Opacus that computes Renyi divergences."""
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as error:
        raise PackageError("differential privacy needs Opacus: pip install 'pluribus[privacy]'.") from error
    return rdp


@lru_cache
def _orders() -> tuple[float, ...]:
    """The orders of Opacus."""
    from opacus.accountants import RDPAccountant

    return tuple(RDPAccountant.DEFAULT_ALPHAS)


@lru_cache
def _whole_orders() -> tuple[float, ...]:
    """Those of them whose divergence is a finite sum, which is fast."""
    return tuple(order for order in _orders() if order == int(order))


@lru_cache(maxsize=4096)
def _divergence(noise: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """The Renyi divergence of one release, by order."""
    return np.asarray(require_accountant().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders))


def _total(spends: Sequence[Spend], orders: tuple[float, ...]) -> np.ndarray:
    """The divergence of all these releases together, by order."""
    return np.asarray(sum(one.times * _divergence(one.noise, one.rate, orders) for one in spends))


def _epsilon(total: np.ndarray, orders: tuple[float, ...], delta: float) -> float:
    """The smallest epsilon that one of the orders proves."""
    if not np.isfinite(total).any():
        return math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an order at the end of the range is valid, only not the best
        found, _ = require_accountant().get_privacy_spent(orders=orders, rdp=total, delta=delta)
    return float(found)


def epsilon_of(spends: Iterable[Spend], delta: float) -> float:
    """The epsilon of all these releases together."""
    spends = [one for one in spends if one.times]
    return _epsilon(_total(spends, _orders()), _orders(), delta) if spends else 0.0


def costs_at_most(epsilon: float, spends: Iterable[Spend], delta: float) -> bool:
    """Whether a whole order or one of BETWEEN proves epsilon for all these releases together.

    Orders between whole ones take many times as long, and are tried only where they may decide.
    """
    spends = [one for one in spends if one.times]
    if not spends:
        return True
    total = _total(spends, _whole_orders())
    if _epsilon(total, _whole_orders(), delta) <= epsilon:
        return True
    maybe = ((order,) for order in BETWEEN if not _least_epsilon(total, order, delta) > epsilon * (1 + ROUNDING))
    return any(_epsilon(_total(spends, order), order, delta) <= epsilon for order in maybe)


def _least_epsilon(total: np.ndarray, order: float, delta: float) -> float:
    """A lower bound of the epsilon of an order, from the divergences of whole orders. NaN: none is known.

    (order - 1) * divergence is convex in the order, and 0 at order 1. So lines through its values at two whole orders
    on the same side lie below it.
    """
    values = np.concatenate([[0.0], total * (np.asarray(_whole_orders()) - 1)])  # at orders 1, 2, 3 and so on
    near = int(order) - 1
    below = values[near] + (order - int(order)) * (values[near] - values[near - 1]) if near else 0.0
    above = values[near + 1] - (int(order) + 1 - order) * (values[near + 2] - values[near + 1])
    least = np.maximum(below, above) / (order - 1)
    return _epsilon(np.array([least]), (order,), delta) if np.isfinite(least) else math.nan


def find_noise(epsilon: float, delta: float, spends: Callable[[float], list[Spend]]) -> float:
    """The smallest noise multiplier with which these releases cost at most epsilon. `spends` gets the multiplier.

    Some orders are left out of the search: each order alone bounds epsilon, so the noise is only a little larger.
    """
    low, high = 0.0, 1.0
    while not costs_at_most(epsilon, spends(high), delta):
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise RangeError(
                f"no noise keeps epsilon {epsilon:g} at delta {delta:g} for so many releases: use fewer --rounds or "
                f"--epochs, or a larger --dp-epsilon."
            )
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        enough = costs_at_most(epsilon, spends(middle), delta)
        low, high = (low, middle) if enough else (middle, high)
    return high
