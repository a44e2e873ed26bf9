"""One batch of a fit or a sweep, as a recorded step reads it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pluribus.data.augment import Augment


class Visit(NamedTuple):
    """Rows of the store, their positions in the set, and the augmentation of the rows."""

    rows: Tensor
    positions: Tensor | None = None
    augment: Augment | None = None
