"""FjORD (Horvath et al., NeurIPS 2021): ordered dropout. Each step trains the first channels of a width it draws."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pluribus.client import Batch, Client
from pluribus.errors import MismatchError
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods._submodels import SubModels, layers_of, share_of
from pluribus.ops import kl
from pluribus.settings import setting
from pluribus.task import Cards, Task

DRAWS = 1024  # widths that are drawn for the steps of a round; later steps begin again
CUT = (nn.Conv1d, nn.Conv2d, nn.Linear, _BatchNorm)  # layers whose outputs are cut
MIXING = (nn.GroupNorm, nn.LayerNorm)


@register("fjord")
@dataclass(frozen=True)
class FjORD(SubModels):
    """Each step trains the first channels of a width that is drawn, and distills from the client's largest width."""

    paper = "Horvath et al., NeurIPS 2021"

    widths: int = setting(5, at_least=1)
    """Number of widths: the shares 1/X, 2/X and so on, of which a client draws those that it can hold."""
    distill: float = setting(1.0, at_least=0, symbol="alpha")
    """Weight of the distillation from the client's largest width."""

    def check(self, task: Task, cards: Cards) -> None:
        super().check(task, cards)
        model = cards[0].architecture
        if mixing := list(layers_of(task.shape_of(model), MIXING).values()):
            raise MismatchError(
                f"fjord cuts channels off in every step, but {model} has {type(mixing[0]).__name__}, which mixes "
                f"channels. Use a model without normalization or with batch norm, such as cnn-16-32."
            )

    def shares(self, client: Client) -> list[float]:
        """The shares of the whole model that a client draws, its own the last."""
        own = share_of(client)
        return [j / self.widths for j in range(1, self.widths + 1) if j / self.widths < own] + [own]

    def prepare(self, client: Client) -> None:
        client.state.drawn = torch.ones(DRAWS)
        client.state.step = torch.zeros(1, dtype=torch.int64)
        client.state.share = torch.ones(())  # of the whole model, in this pass
        whole = client.task.shape_of(client.card.architecture).features
        sizes = {name: _channels(layer) for name, layer in layers_of(whole, CUT).items()}
        for name, layer in layers_of(client.model.features, CUT).items():
            layer.register_forward_hook(partial(_cut_off, client, sizes[name]))

    def local_update(self, client: Client) -> Message:
        shares = torch.tensor(self.shares(client))
        drawn = torch.randint(len(shares), (DRAWS,), generator=client.draw("widths"))
        client.state.drawn.copy_(shares[drawn])
        client.state.step.zero_()
        client.fit(self.step)
        return Message.of(client.model)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        client.state.share.fill_(1.0)
        largest = client.model(batch.x)  # f_max, whose batches are the statistics that evaluation normalizes with
        client.state.share.copy_(client.state.drawn[client.state.step % DRAWS].squeeze(0))
        client.state.step.add_(1)
        with _statistics_kept(client.model):
            small = client.model(batch.x)  # f_p
        client.state.share.fill_(1.0)
        pull = kl(largest.detach(), small).mean()
        return client.task_loss(largest, batch.y) + client.task_loss(small, batch.y) + self.distill * pull


def _channels(layer: nn.Module) -> int:
    return int(next(layer.parameters()).shape[0])


def _cut_off(client: Client, size: int, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    """Keep the first ceil(p K) of K channels of the whole model. A narrow layer has none beyond its own."""
    if not layer.training:
        return None
    channels = torch.arange(output.shape[1], device=output.device)
    kept = channels < (client.state.share * size).ceil()
    cut: Tensor = output * kept.view(-1, *[1] * (output.dim() - 2))
    return cut


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Batch norm normalizes by the batch, but keeps its running statistics as they are."""
    norms: list[Any] = list(layers_of(model, (_BatchNorm,)).values())
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
