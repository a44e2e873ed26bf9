"""Whether a difference between two methods is more than noise.

Two methods ran on the same clients of the same seeds: what is compared is the difference per client and seed. Client 3
of one seed is not client 3 of another, so clients lie within seeds; and clients of one seed share a server, so what
happens to one of them happens to others too. A sign-flip test over all pairs does not know that, and finds too much
where seeds differ. The interval does: it draws seeds anew, then clients within them. A difference counts as shown only
where both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import permutation_test

from pluribus.draws import numpy_rng

LEVEL = 0.05
RESAMPLES = 9999  # sign flips are counted one by one where there are no more than this
BETTER, WORSE, NOT_SHOWN = "better", "worse", "no difference shown"

BySeed = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Difference:
    """A method's accuracy less that of the baseline, over clients and seeds."""

    mean: float
    """Over seeds, of the mean over clients."""
    low: float
    high: float
    """95 % interval."""
    p: float
    """Of the sign-flip test, two-sided."""
    pairs: int
    seeds: int

    def verdict(self, p: float) -> str:
        """In words, with the p-value as it is after correction for several methods."""
        if p >= LEVEL or self.low <= 0 <= self.high:
            return NOT_SHOWN
        return BETTER if self.mean > 0 else WORSE


def difference(by_seed: BySeed) -> Difference:
    """From the differences of each seed's clients.

    >>> one = difference([[0.1, 0.2, 0.3]])
    >>> round(one.mean, 3), one.p           # two of the eight ways to set three signs are as far from 0
    (0.2, 0.25)
    """
    low, high = interval(by_seed)
    return Difference(
        mean=float(np.mean([np.mean(values) for values in by_seed])),
        low=low,
        high=high,
        p=sign_flips(by_seed),
        pairs=sum(map(len, by_seed)),
        seeds=len(by_seed),
    )


def sign_flips(by_seed: BySeed) -> float:
    """How often the mean is as far from 0 when each pair's sign is a coin's: if nothing differs, it might as well be.

    Exact for few pairs. Every seed counts alike, and within it every client.
    """
    shares = np.concatenate([np.asarray(values, dtype=float) / (len(values) * len(by_seed)) for values in by_seed])
    if len(shares) == 1:
        return 1.0  # either sign is as far from 0
    found = permutation_test(
        (shares,),
        _sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=500,
        rng=numpy_rng("sign flips"),
    )
    return float(found.pvalue)


def _sum(values: np.ndarray, axis: int) -> np.ndarray:
    return np.sum(values, axis=axis)  # type: ignore[no-any-return]


def interval(by_seed: BySeed) -> tuple[float, float]:
    """95 % of the means that come of drawing seeds with replacement, and then clients of each.

    Of one seed only clients can be drawn: the interval then says nothing about other seeds.
    """
    rng = numpy_rng("interval")
    total = np.zeros(RESAMPLES)
    for _ in by_seed:
        drawn = rng.integers(len(by_seed), size=RESAMPLES)
        for number, values in enumerate(by_seed):
            chosen = np.flatnonzero(drawn == number)
            clients = rng.integers(len(values), size=(len(chosen), len(values)))
            total[chosen] += np.asarray(values, dtype=float)[clients].mean(axis=1)
    low, high = np.quantile(total / len(by_seed), (LEVEL / 2, 1 - LEVEL / 2))
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values as they are where several differences are tested at once (Holm, 1979).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[number] * (len(p_values) - rank)))
        corrected[number] = largest
    return corrected
