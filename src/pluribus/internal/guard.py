"""What a private run puts between a method and the rows of a client. Other runs have none of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from pluribus.client import Client
    from pluribus.data.federated import Data
    from pluribus.internal.batches import Batch
    from pluribus.internal.steps import RowStep, Step


class Guard(Protocol):
    """Bounds what training and messages tell about the rows of a client."""

    def protects(self, client: Client, data: Data) -> bool:
        """Whether some of these rows are private."""

    def fit(self, client: Client, step: Step, data: Data, batch: int, steps: int, augment: bool) -> None:
        """Take steps on private rows."""

    def add_rows(self, client: Client, step: RowStep, batch: Batch) -> None:
        """Add the clipped gradients of these rows to the sum of the batch."""

    def take_step(self, client: Client, step: RowStep) -> None:
        """Take a step with the noised sum of the batch."""

    def class_sums(self, client: Client, members: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums and counts per class, of rows that are clipped, with noise."""

    def class_counts(self, client: Client, members: Tensor) -> Tensor:
        """Counts per class, with noise."""


class Tape(Protocol):
    """Takes the place of a client's optimizers while the gradients of single rows are computed."""

    def descend(self, loss: Tensor, opts: tuple[str, ...]) -> None:
        """In place of `Client.descend`."""

    def grads(self, loss: Tensor, opt: str) -> dict[str, Tensor]:
        """In place of `Client.grads`."""

    def apply(self, grads: Mapping[str, Tensor], opt: str) -> None:
        """In place of `Client.apply`."""
