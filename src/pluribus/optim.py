"""Optimizers of torch with fixed state: slots are allocated once and restored in place.

An optimizer with zeroed slots is bit-equal to a new one (momentum without dampening, Adam, AMSGrad). Its addresses stay
the same, as captured steps need.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from pluribus.errors import ConflictError, FormatError, MissingSettingError
from pluribus.internal.digits import is_whole

RuleName = Literal["sgd", "adam", "amsgrad", "adamw"]
Schedule = Literal["constant", "cosine", "steps"]
Life = Literal["round", "run"]


@dataclass(frozen=True)
class Rule:
    """An update rule. The experiment sets one for local training; a method may name another one in its `Opt`.

    The learning rate depends on the round alone, so a resumed run has the rates of an uninterrupted one.
    """

    name: RuleName = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: float = 1.0
    schedule: Schedule = "constant"
    steps: tuple[int, ...] = ()  # rounds after which the rate is multiplied by `factor`
    factor: float = 0.1
    warmup: int = 0  # first rounds, in which the rate rises
    rounds: int = 0  # of training, in all; a schedule needs it
    clip_norm: float | None = None  # largest norm of the gradient of an optimizer's parameters; None: any

    def __post_init__(self) -> None:
        """Refuse a schedule that means nothing."""
        if self.schedule == "steps" and not self.steps:
            raise MissingSettingError("--lr-schedule steps needs --lr-steps, such as 30,60.")
        if self.schedule != "steps" and (self.steps or self.factor != Rule.factor):
            raise ConflictError("--lr-steps and --lr-factor need --lr-schedule steps.")
        if (self.warmup or self.schedule != "constant") and self.warmup >= self.rounds:
            raise ConflictError(
                f"--lr-warmup must be below --rounds ({self.rounds}), not {self.warmup}: the learning rate would never "
                f"be that of --lr."
            )
        if self.steps and any(one >= other for one, other in pairwise((self.warmup, *self.steps, self.rounds))):
            raise ConflictError(
                f"--lr-steps must be increasing numbers of rounds, above --lr-warmup ({self.warmup}) and below "
                f"--rounds ({self.rounds}), not {','.join(map(str, self.steps))}."
            )

    def rate(self, t: int) -> float:
        """The learning rate in round t of training."""
        return self.lr * self.decay**t * self._share(t)

    def _share(self, t: int) -> float:
        """The share of the full rate that warm-up and schedule leave in round t."""
        if t < self.warmup:
            return (t + 1) / (self.warmup + 1)
        if self.schedule == "cosine":
            done = (t - self.warmup) / (self.rounds - self.warmup)
            return (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return self.factor ** sum(t >= step for step in self.steps)


def parse_steps(given: str | Sequence[int]) -> tuple[int, ...]:
    """Parse numbers of rounds from a list or from comma-separated text.

    >>> parse_steps("30, 60"), parse_steps("")
    ((30, 60), ())
    """
    words = [word.strip() for word in given.split(",")] if isinstance(given, str) else list(map(str, given))
    if words == [""]:
        return ()
    for word in words:
        if not is_whole(word):
            raise FormatError(f"--lr-steps must be numbers of rounds, comma-separated, such as 30,60, not {word!r}.")
    return tuple(map(int, words))


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
    """A torch optimizer whose slots exist from the start.

    With `stacked`, the first dimension of all parameters is that of clients, and gradients are clipped per client.
    """

    def __init__(self, opt: Opt, default: Rule, life: Life = "round", *, stacked: bool = False) -> None:
        self.life = opt.life or life
        self._stacked = stacked
        self.parameters = opt.named_parameters()
        self._values = list(self.parameters.values())
        self.rule = opt.rule or default
        self._torch = _make(self._values, self.rule)

    def apply(self, grads: Sequence[Tensor | None]) -> None:
        """Take one step with these gradients, in the order of `parameters`. They stay as they are."""
        if self.rule.clip_norm is not None:
            grads = clip_gradients(grads, self.rule.clip_norm, self._stacked)
        for p, g in zip(self._values, grads, strict=True):
            p.grad = _match_layout(p, g) if g is not None and p.is_cuda else g
        with torch.no_grad():
            self._torch.step()
        for p in self._values:
            p.grad = None  # gradients are as large as the weights

    def begin(self, t: int) -> None:
        """Set the learning rate of a round."""
        self._set_rate(self.rule.rate(t))

    def anneal(self, share: float) -> None:
        """Set the learning rate to this share of the rule's."""
        self._set_rate(self.rule.lr * share)

    def _set_rate(self, rate: float) -> None:
        for group in self._torch.param_groups:
            if isinstance(group["lr"], Tensor):  # in place, because captured steps read it there
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def slots(self) -> dict[str, Tensor]:
        """Momentum buffers, moments and step counters, by parameter."""
        slots = {name: self._torch.state[p] for name, p in self.parameters.items()}
        return {f"{name}.{slot}": value for name, those in slots.items() for slot, value in those.items()}

    def reset(self) -> None:
        """Make it equal to a new optimizer, in place."""
        for value in self.slots().values():
            value.zero_()


def clip_gradients(grads: Sequence[Tensor | None], largest: float, stacked: bool = False) -> list[Tensor | None]:
    """Scale gradients so that their norm, taken of all together, is at most `largest`: torch's `clip_grad_norm_`.

    Nothing is read back to the CPU, so that a step can be captured. Gradients below the norm keep their bits.
    `stacked`: clients lie along the first dimension, and each has a norm of its own.
    """
    given = [g for g in grads if g is not None]
    if not given:
        return list(grads)
    if stacked:
        norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in given]
    else:
        norms = list(torch._foreach_norm(given))
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    if stacked:
        scaled = [g * scale.view(-1, *[1] * (g.dim() - 1)) for g in given]
    else:
        scaled = list(torch._foreach_mul(given, scale))
    remaining = iter(scaled)
    return [None if g is None else next(remaining) for g in grads]


def _match_layout(p: Tensor, g: Tensor) -> Tensor:
    """The fused kernels of a GPU need gradients in the memory layout of their weights."""
    return g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)


def _unwrap(cls: Any) -> Any:
    """The same optimizer, without what torch wraps around its functions for torch.compile.

    The first call of a wrapper imports the compiler, which takes as long as the import of torch.
    """
    functions = {name: inspect.unwrap(getattr(cls, name)) for name in ("add_param_group", "step")}
    return type(cls.__name__, (cls,), functions)


_SGD, _Adam, _AdamW = map(_unwrap, (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW))


def _make(parameters: list[nn.Parameter], rule: Rule) -> torch.optim.Optimizer:
    """On a GPU, all inputs of a step are on the GPU, also learning rate and counters: the step can be captured."""
    device = parameters[0].device if parameters else torch.device("cpu")
    on_gpu = device.type == "cuda"
    lr = torch.tensor(rule.lr, device=device) if on_gpu else rule.lr
    if rule.name == "sgd":
        kind = {"fused": True} if on_gpu else {"foreach": True}
        sgd = _SGD(parameters, lr=lr, momentum=rule.momentum, weight_decay=rule.weight_decay, **kind)
        if rule.momentum:
            for p in parameters:
                sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return cast(torch.optim.Optimizer, sgd)
    cls = _AdamW if rule.name == "adamw" else _Adam
    amsgrad = rule.name == "amsgrad"
    adam = cls(parameters, lr=lr, weight_decay=rule.weight_decay, amsgrad=amsgrad, foreach=True, capturable=on_gpu)
    moments = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
    for p in parameters:
        adam.state[p]["step"] = torch.zeros((), device=device)
        adam.state[p].update({moment: torch.zeros_like(p) for moment in moments})
    return cast(torch.optim.Optimizer, adam)
