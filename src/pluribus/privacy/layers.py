"""Gradients of single rows for linear layers and convolutions, kept as two factors, and for group normalization.

The gradient of a weight for row b is G_b^T X_b: a sum, over the positions in the row, of what the layer sent back times
what it was given. Clipping needs its norm, and the step needs the sum of scaled gradients. Both follow from the factors
(Goodfellow, arXiv 2015; Bu et al., NeurIPS 2022), and no gradient of a single row is written to memory.

Group normalization treats each row by itself, so all rows go through torch's own kernels as one batch. `vmap` alone
would compose it of thirty small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class Factors(NamedTuple):
    """Of all rows: what a layer was given, X (rows, positions, inputs), and what it sent back, G (..., outputs)."""

    x: Tensor
    g: Tensor

    def squared_norms(self) -> Tensor:
        """The squared norm of each row's gradient."""
        positions = self.x.shape[1]
        if positions == 1:
            return self.x.square().sum((1, 2)) * self.g.square().sum((1, 2))
        if positions**2 <= self.x.shape[2] * self.g.shape[2]:
            # |G^T X|^2 = <X X^T, G G^T>: small if the layer has few positions
            return ((self.x @ self.x.mT) * (self.g @ self.g.mT)).sum((1, 2))
        return self.gradients().square().sum((1, 2))

    def gradients(self) -> Tensor:
        """The gradient of each row (rows, outputs, inputs)."""
        return self.g.mT @ self.x

    def sum(self, factors: Tensor) -> Tensor:
        """The sum of gradients, each times the factor of its row."""
        return (self.g * factors[:, None, None]).flatten(0, 1).T @ self.x.flatten(0, 1)


class Uses:
    """The factors of all uses of a weight. An object of its own: torch copies lists that go through a function."""

    def __init__(self) -> None:
        self.found: list[Factors] = []


class Layers(TorchFunctionMode):
    """Notes the factors of every weight that only linear layers and convolutions use. Active while a loss is built."""

    def __init__(self) -> None:
        super().__init__()
        self._at: dict[int, int] = {}
        self._uses: list[Uses] = []
        self.other_uses: set[int] = set()  # numbers of weights that something else uses, too

    def watch(self, leaves: Sequence[Tensor]) -> None:
        """Note the uses of these weights, by their number."""
        self._at = {id(leaf): number for number, leaf in enumerate(leaves)}
        self._uses = [Uses() for _ in leaves]

    def factors(self, number: int) -> Factors | None:
        """All uses of a weight together, as positions of each row. None: no layer uses it."""
        parts = self._uses[number].found
        if len(parts) < 2:
            return parts[0] if parts else None
        return Factors(*(torch.cat(some, 1) for some in zip(*parts, strict=True)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.group_norm and all(id(kwargs.get(name)) in self._at for name in ("weight", "bias")):
            given = (*args, kwargs["weight"], kwargs["bias"], kwargs["eps"])
            if _suits(func, args):
                return _GroupNorm.apply(*given)[0]  # type: ignore[no-untyped-call]
        if func in _KINDS and not kwargs and id(args[1]) in self._at and _suits(func, args):
            number = self._at[id(args[1])]
            return _KINDS[func].apply(*_padded(func, args), self._uses[number])
        self.other_uses |= {self._at[id(one)] for one in tree_leaves((args, kwargs)) if id(one) in self._at}
        return func(*args, **kwargs)


def _suits(func: Any, args: tuple[Any, ...]) -> bool:
    x = args[0]
    if torch.is_autocast_enabled(x.device.type):
        return False
    if func in (F.linear, F.group_norm):
        return bool(x.dim() > 1)
    groups = args[6] if len(args) > 6 else 1
    return groups == 1 and x.dim() == 4 and not isinstance(args[4] if len(args) > 4 else 0, str)


def _padded(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with all defaults."""
    if func is F.linear:
        return (*args, None)[:3]
    defaults = (None, None, None, 1, 0, 1)
    return (*args, *defaults[len(args) :])[:6]


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, uses: Uses) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.uses = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = g.flatten(0, -2)
        noted = _Note.apply(x.flatten(0, -2), rows, weight, ctx.uses)  # type: ignore[no-untyped-call]
        return g @ weight, noted, rows.sum(0) if ctx.biased else None, None


class _Conv2d(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, uses: Uses
    ) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.stride, ctx.padding, ctx.dilation, ctx.uses = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        geometry = {"dilation": ctx.dilation, "padding": ctx.padding, "stride": ctx.stride}
        seen = _patches(x, weight, **geometry).mT.flatten(0, 1)  # positions of all images, then inputs
        sent = g.flatten(2).mT.flatten(0, 1)
        noted = _Note.apply(seen, sent, weight, ctx.uses)  # type: ignore[no-untyped-call]
        back = conv2d_input(x.shape, weight, g, **geometry)  # type: ignore[no-untyped-call]
        return back, noted, g.sum((0, 2, 3)) if ctx.biased else None, None, None, None, None


def _patches(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """What each position of a convolution sees: (images, inputs, positions), as `F.unfold`, which on a GPU launches a
    kernel per image. Here all images are one copy."""
    (up, left), (down, right), (tall, wide) = _pair(padding), _pair(stride), _pair(dilation)
    x = F.pad(x, (left, left, up, up))
    high, broad = ((size - 1) * gap + 1 for size, gap in zip(weight.shape[2:], (tall, wide), strict=True))
    windows = x.unfold(2, high, down).unfold(3, broad, right)[..., ::tall, ::wide]
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class _Note(torch.autograd.Function):
    """Notes the factors of a weight's gradient, and gives zeros in its place, which take no memory."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, weight: Tensor, uses: Uses) -> Tensor:
        raise AssertionError("only rows have factors")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, g: Tensor, weight: Tensor, uses: Uses
    ) -> tuple[Tensor, int]:
        uses.found.append(Factors(*_rows_first(info, in_dims, x, g)))
        return weight.new_zeros(()).expand(info.batch_size, *weight.shape), 0


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        images, channels = x.shape[:2]
        return torch.native_group_norm(x, weight, bias, images, channels, x[0, 0].numel(), groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.groups, weight, *_ = inputs
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        back, by_weight, by_bias = _GroupNormBack.apply(g, x, mean, scale, weight, ctx.groups)  # type: ignore[no-untyped-call]
        return back, None, by_weight, by_bias, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Any, Any]:
        x = _rows_first(info, in_dims, x)[0]
        rows = x.flatten(0, 1).contiguous()  # torch's kernels want the channels of a row one after the other
        found = _GroupNorm.apply(rows, groups, weight, bias, eps)  # type: ignore[no-untyped-call]
        return tuple(one.view(*x.shape[:2], *one.shape[1:]) for one in found), (0, 0, 0)


class _GroupNormBack(torch.autograd.Function):
    """The gradients of group normalization: of its input, and of weight and bias for each row by itself."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, groups: int) -> Any:
        raise AssertionError("only rows have gradients of their own")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        g: Tensor,
        x: Tensor,
        mean: Tensor,
        scale: Tensor,
        weight: Tensor,
        groups: Any,
    ) -> tuple[Any, Any]:
        given = _rows_first(info, in_dims, g, x, mean, scale)
        g, x, mean, scale = (one.flatten(0, 1).contiguous() for one in given)
        images, channels = x.shape[:2]
        sizes = images, channels, x[0, 0].numel(), groups
        back, _, _ = torch.ops.aten.native_group_norm_backward(g, x, mean, scale, weight, *sizes, [True, False, False])
        each = channels // groups
        by_bias = g.flatten(2).sum(2)
        mean, scale = (one.repeat_interleave(each, 1) for one in (mean, scale))
        by_weight = ((g * x).flatten(2).sum(2) - mean * by_bias) * scale
        by_row = [one.view(info.batch_size, -1, channels).sum(1) for one in (by_weight, by_bias)]
        return (back.view(given[1].shape), *by_row), (0, 0, 0)


def _rows_first(info: Any, in_dims: tuple[Any, ...], *given: Tensor) -> list[Tensor]:
    """Tensors with a first dimension for rows."""
    return [
        one.expand(info.batch_size, *one.shape) if at is None else one.movedim(at, 0)
        for one, at in zip(given, in_dims, strict=False)
    ]


_KINDS: dict[Any, Any] = {F.linear: _Linear, F.conv2d: _Conv2d}
