"""Optimizers of torch with fixed state: slots are allocated once and restored in place.

An optimizer with zeroed slots is bit-equal to a new one (momentum without dampening, Adam, AMSGrad). Its addresses stay
the same, as captured steps need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

RuleName = Literal["sgd", "adam", "amsgrad", "adamw"]
Life = Literal["round", "run"]


@dataclass(frozen=True)
class Rule:
    """An update rule. The experiment sets one for local training; a method may name another one in its `Opt`."""

    name: RuleName = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: float = 1.0

    def rate(self, t: int) -> float:
        """The learning rate in round t."""
        return self.lr * self.decay**t


@dataclass(frozen=True)
class Opt:
    """One optimizer of a client: its parameters, its rule, and the lifetime of its slots.

    `rule=None` takes the experiment's local rule, and `life=None` its --optimizer-life. `"round"` resets the slots in
    every round; `"run"` keeps them, and checkpoints save them.
    """

    of: nn.Module | Sequence[nn.Parameter]
    rule: Rule | None = None
    life: Life | None = None

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        if isinstance(self.of, nn.Module):
            pairs = list(self.of.named_parameters())
        else:
            pairs = [(str(i), p) for i, p in enumerate(self.of)]
        return {name: p for name, p in pairs if p.requires_grad}


class Optimizer:
    """A torch optimizer whose slots exist from the start."""

    def __init__(self, opt: Opt, default: Rule, life: Life = "round") -> None:
        self.life = opt.life or life
        self.parameters = opt.named_parameters()
        self._values = list(self.parameters.values())
        self.rule = opt.rule or default
        self._torch = _make(self._values, self.rule)

    def apply(self, grads: Sequence[Tensor | None]) -> None:
        """Take one step with these gradients, in the order of `parameters`."""
        for p, g in zip(self._values, grads, strict=True):
            p.grad = _match_layout(p, g) if g is not None and p.is_cuda else g
        self._torch.step()
        for p in self._values:
            p.grad = None  # gradients are as large as the weights

    def begin(self, t: int) -> None:
        """Set the learning rate of a round."""
        for group in self._torch.param_groups:
            if isinstance(group["lr"], Tensor):  # in place, because captured steps read it there
                group["lr"].fill_(self.rule.rate(t))
            else:
                group["lr"] = self.rule.rate(t)

    def slots(self) -> dict[str, Tensor]:
        """Momentum buffers, moments and step counters, by parameter."""
        slots = {name: self._torch.state[p] for name, p in self.parameters.items()}
        return {f"{name}.{slot}": value for name, those in slots.items() for slot, value in those.items()}

    def reset(self) -> None:
        """Make it equal to a new optimizer, in place."""
        for value in self.slots().values():
            value.zero_()


def _match_layout(p: Tensor, g: Tensor) -> Tensor:
    """The fused kernels of a GPU need gradients in the memory layout of their weights."""
    return g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)


def _make(parameters: list[nn.Parameter], rule: Rule) -> torch.optim.Optimizer:
    """On a GPU, all inputs of a step are on the GPU, also learning rate and counters: the step can be captured."""
    device = parameters[0].device if parameters else torch.device("cpu")
    on_gpu = device.type == "cuda"
    lr = torch.tensor(rule.lr, device=device) if on_gpu else rule.lr
    if rule.name == "sgd":
        kind = {"fused": True} if on_gpu else {"foreach": True}
        sgd = torch.optim.SGD(parameters, lr=lr, momentum=rule.momentum, weight_decay=rule.weight_decay, **kind)
        if rule.momentum:
            for p in parameters:
                sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return sgd
    cls = torch.optim.AdamW if rule.name == "adamw" else torch.optim.Adam
    amsgrad = rule.name == "amsgrad"
    adam = cls(parameters, lr=lr, weight_decay=rule.weight_decay, amsgrad=amsgrad, foreach=True, capturable=on_gpu)
    moments = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
    for p in parameters:
        adam.state[p]["step"] = torch.zeros((), device=device)
        adam.state[p].update({moment: torch.zeros_like(p) for moment in moments})
    return adam
