"""Tests whether a difference between two methods is more than noise.

Both methods ran on the same clients with the same seeds, so the test uses the difference per client and seed. Client 3
of one seed is not client 3 of another: clients are nested in seeds. Clients of one seed share a server, so their
results are correlated. A sign-flip test over all pairs ignores this correlation, and finds too many differences if
seeds differ. The interval respects it: the bootstrap draws seeds, then clients within each seed. A difference counts as
shown only if both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pluribus.draws import numpy_rng

LEVEL = 0.05
RESAMPLES = 9999  # up to this number, all sign flips are enumerated
BETTER, WORSE, NOT_SHOWN = "better", "worse", "no difference shown"

BySeed = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Difference:
    """A method's metric minus the baseline's, over clients and seeds."""

    mean: float  # mean over seeds of the mean over clients
    low: float  # of the 95 % interval, as `high`
    high: float
    p: float  # two-sided p-value of the sign-flip test
    pairs: int
    seeds: int

    def verdict(self, p: float, smaller: bool = False) -> str:
        """The result in words, for a p-value that is corrected for several methods.

        `smaller`: whether smaller values of the metric are better.
        """
        if p >= LEVEL or self.low <= 0 <= self.high:
            return NOT_SHOWN
        return BETTER if (self.mean < 0) == smaller else WORSE


def difference(by_seed: BySeed) -> Difference:
    """Test the differences of the clients of each seed.

    >>> one = difference([[0.1, 0.2, 0.3]])
    >>> round(one.mean, 3), one.p           # 2 of the 8 sign patterns have a mean as far from 0
    (0.2, 0.25)
    """
    mean = float(np.mean([np.mean(values) for values in by_seed]))
    return Difference(mean, *bootstrap_interval(by_seed), sign_flip_test(by_seed), sum(map(len, by_seed)), len(by_seed))


def sign_flip_test(by_seed: BySeed) -> float:
    """P-value: how often the mean is as far from 0 if the sign of each pair is random.

    It is exact for few pairs. All seeds have equal weight, and so have all clients of a seed.
    """
    from scipy.stats import permutation_test  # here, because its import takes half a second

    shares = np.concatenate([np.asarray(values, dtype=float) / (len(values) * len(by_seed)) for values in by_seed])
    if len(shares) == 1:
        return 1.0  # either sign is as far from 0
    rng = numpy_rng("sign flips")
    found = permutation_test(
        (shares,), np.sum, permutation_type="samples", vectorized=True, n_resamples=RESAMPLES, batch=500, rng=rng
    )
    return float(found.pvalue)


def bootstrap_interval(by_seed: BySeed) -> tuple[float, float]:
    """Bootstrap interval of 95 %: seeds are drawn with replacement, then clients of each seed.

    With one seed only clients are drawn, so the interval says nothing about other seeds.
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
    """Correct p-values for several tests (Holm, 1979).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[number] * (len(p_values) - rank)))
        corrected[number] = largest
    return corrected
