"""FedMRL (Yi et al., NeurIPS 2024): clients fuse the features of a small shared model and of a private model. The
private head uses all fused features, the shared head uses the first ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pluribus.client import Batch, Client
from pluribus.errors import MismatchError
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods._auxiliary import Auxiliary
from pluribus.models import TwoPartModel
from pluribus.ops import Weighting, average_uploads
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.targets import TARGETS
from pluribus.task import Cards, Task


@register("fedmrl")
@dataclass(frozen=True)
class FedMRL(Auxiliary):
    """Nested representations: private features are fused with those of a small shared model."""

    paper = "Yi et al., NeurIPS 2024"
    up = "the small model"
    down = "the mean small model"
    targets = TARGETS
    views = ("after", "before")
    defaults = MappingProxyType({"lr": 0.05})  # on digits, 0.01 takes more than 20 rounds

    small_width: int | None = setting(None, at_least=1, symbol="d_1")
    """Width of the small model's features after pooling; at most a client's width. Default: its own width."""
    small_weight: float = setting(1.0, at_least=0)
    """Weight of the small head's loss; 0 removes it."""
    weighting: Weighting = "samples"
    """Weights of clients in the mean: their training samples, or equal."""

    def auxiliary(self, task: Task) -> TwoPartModel:
        if self.small_width is not None:
            task = replace(task, width=self.small_width, projector="pool")
        return super().auxiliary(task)

    def check(self, task: Task, cards: Cards) -> None:
        super().check(task, cards)
        width = self.auxiliary_shape(task).width
        narrowest = min(cards.firsts(), key=lambda card: card.width)
        if width > narrowest.width:
            raise MismatchError(
                f"fedmrl needs clients with at least the {width} features of the small model, but client "
                f"{narrowest.id} ({narrowest.model}) has {narrowest.width}. "
                f"Use --small-width {narrowest.width} or less."
            )

    def prepare(self, client: Client) -> None:
        super().prepare(client)
        small, own = client.state.shared.width, client.card.width
        client.state.projector = client.make("projector", lambda: nn.Linear(small + own, own))  # A

    def optimizers(self, client: Client) -> dict[str, Opt]:
        state = client.state
        return {"model": Opt(client.model), "small": Opt(state.shared), "projector": Opt(state.projector)}

    def fused(self, client: Client, x: Tensor) -> Tensor:
        """u = A [phi_g(x), phi(x)]."""
        both = torch.cat([client.state.shared.features(x), client.features(x)], 1)
        return client.state.projector(both)  # type: ignore[no-any-return]

    def step(self, client: Client, batch: Batch) -> Tensor:
        u, small = self.fused(client, batch.x), client.state.shared
        task_loss = client.task_loss(client.model.head(u), batch.y)
        small_loss = client.task_loss(small.head(u[:, : small.width]), batch.y)
        client.descend(task_loss + self.small_weight * small_loss, "model", "small", "projector")
        return task_loss

    def predict(self, client: Client, x: Tensor) -> Tensor:
        return client.model.head(self.fused(client, x))  # type: ignore[no-any-return]

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.shared.load_state_dict(average_uploads(server, uploads, weighting=self.weighting))
