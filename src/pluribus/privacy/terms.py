"""The terms of a private run: what is protected, by how much, and with which bounds."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

Level = Literal["row", "client", "client-central"]
# a noise multiplier below promises nothing, and one above cannot be kept in practice
LEAST_NOISE, MOST_NOISE = 0.01, 1e6
MOST_CLIP = 1e30  # a norm that float32 holds, with noise


class Terms(NamedTuple):
    """What a client promises: everything that it sends is (epsilon, delta)-differentially private."""

    epsilon: float
    delta: float = 1e-5
    clip: float = 1.0
    """Largest norm of the gradient of one row, or of a whole message of a client."""
    sums_clip: float = 1.0
    """Largest norm of the vector of one row in a class sum."""
    share: float = 0.5
    """Share of epsilon that class sums and counts may use, accounted alone."""
    noise: float | None = None
    """Noise multiplier of training, or of messages. None: the smallest with which the budget lasts for all rounds."""
    secure: bool = False
    """Draw noise and batches from the generator of the operating system."""
    level: Level = "row"
    """What neighbors differ by: one row of a client, or all rows of a client. Central: a trusted server adds noise."""

    def problem(self) -> str | None:
        """What is wrong with terms that came from another machine."""
        numbers = [self.epsilon, self.delta, self.clip, self.sums_clip, self.share]
        numbers += [] if self.noise is None else [self.noise]
        if not all(isinstance(one, int | float) and 0 < one < math.inf for one in numbers):
            return "all numbers must be above 0 and finite"
        if max(self.clip, self.sums_clip) > MOST_CLIP:
            return f"the norms must be at most {MOST_CLIP:g}"
        if self.noise is not None and not LEAST_NOISE <= self.noise <= MOST_NOISE:
            return f"the noise must be from {LEAST_NOISE:g} to {MOST_NOISE:g}"
        if self.level not in get_args(Level):
            return f"the level must be one of {', '.join(get_args(Level))}"
        if self.level == "client-central":
            return "the level client-central would trust the server: use client"
        return None if max(self.delta, self.share) < 1 else "delta and share must be below 1"

    @property
    def transparent(self) -> bool:
        """Whether nothing is bounded and no noise is added: then a run has the bits of one without privacy."""
        return self.noise == 0 and self.clip == math.inf and self.sums_clip == math.inf
