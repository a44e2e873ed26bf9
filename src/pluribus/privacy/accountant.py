"""What releases cost: the Renyi accountant of Opacus, and the noise with which a budget lasts.

Neighbors differ by one row that is added or removed. Every release is a Gaussian mechanism: a sum in which one row has
a norm of at most C, with noise of the standard deviation `noise` times C. With `rate` below 1, each row is part of the
sum with that probability, independently of all others and anew in every release (Poisson sampling).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pluribus.errors import PackageError, RangeError
from pluribus.privacy.terms import MOST_NOISE

BETWEEN = (1.1, 1.2, 1.4, 1.6, 1.8, 2.3, 2.6, 3.5, 4.5)  # orders that matter for a large epsilon
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
def _orders(few: bool) -> tuple[float, ...]:
    """The orders of Opacus, or those of them that a search uses: whole ones, which are fast, and a few between."""
    from opacus.accountants import RDPAccountant

    orders = RDPAccountant.DEFAULT_ALPHAS
    return tuple(order for order in orders if not few or order == int(order) or order in BETWEEN)


@lru_cache(maxsize=4096)
def _divergence(noise: float, rate: float, few: bool) -> np.ndarray:
    """The Renyi divergence of one release, by order."""
    found = require_accountant().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=_orders(few))
    return np.asarray(found)


def epsilon_of(spends: Iterable[Spend], delta: float, few: bool = False) -> float:
    """The epsilon of all these releases together."""
    spends = [one for one in spends if one.times]
    if not spends:
        return 0.0
    rdp = require_accountant()
    total = sum(one.times * _divergence(one.noise, one.rate, few) for one in spends)
    if not np.isfinite(total).any():
        return math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an order at the end of the range is valid, only not the best
        found, _ = rdp.get_privacy_spent(orders=_orders(few), rdp=total, delta=delta)
    return float(found)


def find_noise(epsilon: float, delta: float, spends: Callable[[float], list[Spend]]) -> float:
    """The smallest noise multiplier with which these releases cost at most epsilon. `spends` gets the multiplier.

    Some orders are left out of the search: each order alone bounds epsilon, so the noise is only a little larger.
    """
    low, high = 0.0, 1.0
    while epsilon_of(spends(high), delta, few=True) > epsilon:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise RangeError(
                f"no noise keeps epsilon {epsilon:g} at delta {delta:g} for so many releases: use fewer --rounds or "
                f"--epochs, or a larger --dp-epsilon."
            )
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        enough = epsilon_of(spends(middle), delta, few=True) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return high
