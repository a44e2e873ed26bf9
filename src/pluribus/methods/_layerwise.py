"""The layers of FedFree: how layers of different networks are matched, compared, merged and replaced.

A `Pair` holds the layers of a client and of the global model and their match. A `GlobalLayer` learns. All else are
functions of tensors and shapes. Tensors are compared in *dense* form: a grouped convolution as the equivalent plain
convolution, and the weight of a normalization as one vector.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.errors import MismatchError, RangeError
from pluribus.message import Field, Message, Wire, payload
from pluribus.method import Traffic
from pluribus.models.layers import Kind, Layer
from pluribus.ops import blamed_on, double
from pluribus.task import Card, Cards, Task

LEAST_PROBES, PROBES_PER_INPUT = 256, 4
Entropy = Literal["shannon", "tsallis", "collision"]
Distribution = Literal["aligned", "any-depth"]
Projection = Literal["block_retain", "flat_retain", "flat_zero"]


class Weights(NamedTuple):
    """The tensors of one layer."""

    weight: Tensor
    bias: Tensor | None = None

    def flat(self) -> Tensor:
        """Weight and bias as one vector."""
        return self.weight.flatten() if self.bias is None else torch.cat([self.weight.flatten(), self.bias.flatten()])

    def to(self, device: torch.device) -> Weights:
        return Weights(self.weight.to(device), None if self.bias is None else self.bias.to(device))

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Copy the first numbers of a vector into weight and bias."""
        size = self.weight.numel()
        self.weight.copy_(values[:size].view_as(self.weight))
        if self.bias is not None:
            self.bias.copy_(values[size : size + self.bias.numel()].view_as(self.bias))


_traced: dict[tuple[object, ...], tuple[Layer, ...]] = {}


def layers(task: Task, model: str) -> tuple[Layer, ...]:
    """`task.layers(model)`, cached, because tracing a deep network takes a second."""
    key = (model, task.input, task.classes, task.width, task.projector)
    if key not in _traced:
        _traced[key] = task.layers(model)
    return _traced[key]


def weights_of(model: nn.Module, layer: Layer) -> Weights:
    """The parameters of a layer, detached; they share memory with the model."""
    bias = model.get_parameter(f"{layer.name}.bias").detach() if layer.bias else None
    return Weights(model.get_parameter(f"{layer.name}.weight").detach(), bias)


# ---- layers in messages, named by their numbers ----------------------------------------------------------------------


def fields_of(layers: Sequence[Layer], chosen: Collection[int]) -> dict[str, Field]:
    """The schema of a message that may hold any of the chosen layers."""
    shapes = {f"{at}.weight": layers[at].weight for at in chosen}
    shapes |= {f"{at}.bias": bias for at in chosen if (bias := layers[at].bias)}
    return {name: Field(shape, kept=False, optional=True, source="weights") for name, shape in shapes.items()}


def size(layer: Layer) -> int:
    """Number of bytes of a layer in a message."""
    return payload(fields_of([layer], [0]), 0, {})


def pack(layers: Mapping[int, Weights]) -> dict[str, Tensor]:
    """Write layers as fields of a message."""
    named = {f"{at}.{name}": part for at, w in layers.items() for name, part in w._asdict().items()}
    return {name: part for name, part in named.items() if part is not None}


def unpack(message: Message, chosen: Iterable[int]) -> dict[int, Weights]:
    """Read those of the chosen layers that are in a message."""
    fields = message.part()
    return {at: Weights(fields[f"{at}.weight"], fields.get(f"{at}.bias")) for at in chosen if f"{at}.weight" in fields}


# ---- matching layers -------------------------------------------------------------------------------------------------


def same_kind(layer: Layer, others: Sequence[Layer]) -> list[int]:
    """Indices of the others that may replace a layer: those of its kind, and only output layers for an output layer."""
    return [j for j, other in enumerate(others) if _are_alike(layer, other) and (other.output or not layer.output)]


def _are_alike(one: Layer, other: Layer) -> bool:
    """Whether two layers are of one kind. A convolution over time is not one over the plane."""
    return one.kind == other.kind and (one.kind == "norm" or len(one.weight) == len(other.weight))


def kinds(layers: Sequence[Layer]) -> str:
    """The kinds of these layers, for an error sentence."""
    return ", ".join(dict.fromkeys("output" if one.output else one.kind for one in layers)) or "no layers"


def match(mine: Sequence[Layer], theirs: Sequence[Layer]) -> dict[int, int]:
    """Match each of my layers with their layer of the same kind at the nearest relative depth, the shallower on a tie.

    Layer i of the n layers of a kind has relative depth (i + 1/2) / n. An output layer matches output layers only.
    Layers without a counterpart are left out.
    """
    found: dict[int, int] = {}
    for at, layer in enumerate(mine):
        candidates = [j for j in same_kind(layer, theirs) if theirs[j].output == layer.output]
        if candidates:
            i, n = _rank(at, mine)
            found[at] = min(candidates, key=lambda j: (_depth_gap(i, n, *_rank(j, theirs)), j))
    return found


def _rank(at: int, layers: Sequence[Layer]) -> tuple[int, int]:
    """Index among the layers of its kind, and their number."""
    kind = layers[at].kind
    return sum(layer.kind == kind for layer in layers[:at]), sum(layer.kind == kind for layer in layers)


def _depth_gap(i: int, n: int, j: int, m: int) -> int:
    """|(i + 1/2) / n - (j + 1/2) / m|, times 2nm: an integer, so that ties are exact."""
    return abs((2 * i + 1) * m - (2 * j + 1) * n)


class Pair(NamedTuple):
    """The layers of a client's model and of the global model, and their match."""

    mine: tuple[Layer, ...]
    theirs: tuple[Layer, ...]
    matched: dict[int, int]

    @classmethod
    def of(cls, task: Task, card: Card, global_model: str) -> Pair:
        mine, theirs = layers(task, card.model), layers(task, global_model)
        return cls(mine, theirs, match(mine, theirs))

    def choices(self, sent: Iterable[int], distribution: Distribution) -> list[tuple[int, int]]:
        """All pairs of a layer that the client sent and a global layer that may replace it."""
        if distribution == "aligned":
            return [(at, self.matched[at]) for at in sent]
        return [(at, j) for at in sent for j in same_kind(self.mine[at], self.theirs)]

    def project(self, model: nn.Module, at: int, j: int, given: Weights, mode: Projection) -> Weights:
        """Eq. 7: the client's layer after a global layer replaces it."""
        return project(weights_of(model, self.mine[at]), self.mine[at], given, self.theirs[j], mode)

    def names(self, at: int, j: int) -> dict[str, str]:
        """The names of a client's layer and of a global layer, for the record of the round."""
        return {"layer": self.mine[at].name, "global": self.theirs[j].name}

    def weights(self, model: nn.Module) -> dict[int, Weights]:
        """The client's layers that have a counterpart; they share memory with the model."""
        return {at: weights_of(model, self.mine[at]) for at in self.matched}

    def largest(self) -> int:
        """Number of parameters of the largest layer that has a counterpart."""
        shapes = [(self.mine[at].weight, self.mine[at].bias or (0,)) for at in self.matched]
        return max(math.prod(weight) + math.prod(bias) for weight, bias in shapes)

    def wires(self) -> tuple[Wire, Wire]:
        """Upload: some of the client's layers. Then download: a global layer and the number of the one it replaces."""
        fitting = sorted({j for _, j in self.choices(self.matched, "any-depth")})
        down = {"target": Field((), torch.int32, kept=False), **fields_of(self.theirs, fitting)}
        return Wire(up=fields_of(self.mine, self.matched)), Wire(down=down)

    def traffic(self, top_k: int) -> Traffic:
        """At most: the k largest layers up, the largest global layer and a number down."""
        up = sorted(size(self.mine[at]) for at in self.matched)[-top_k:]
        down = max(size(self.theirs[j]) for _, j in self.choices(self.matched, "any-depth"))
        return Traffic(sum(up), torch.int32.itemsize + down)


def pairs_of(task: Task, cards: Cards, global_model: str) -> list[Pair]:
    """The pair of each architecture. MismatchError: an architecture has no layer with a counterpart."""
    with blamed_on("--global-model"):
        layers(task, global_model)
    found = []
    for card in cards.firsts():
        pair = Pair.of(task, card, global_model)
        if not pair.matched:
            raise MismatchError(
                f"fedfree exchanges layers of one kind, but client {card.id} ({card.model}) has {kinds(pair.mine)} and "
                f"the global model {global_model} has {kinds(pair.theirs)}. Choose another --global-model."
            )
        found.append(pair)
    return found


# ---- dense tensors ---------------------------------------------------------------------------------------------------


def dense(own: Weights, layer: Layer) -> Weights:
    """Convert a layer's tensors to dense form, in which layers of one kind can be compared."""
    if layer.kind == "norm":
        return Weights(own.weight.flatten(), own.bias if own.bias is None else own.bias.flatten())
    if layer.groups == 1:
        return own
    inputs = own.weight.shape[1]
    padded = [
        F.pad(block, (*[0, 0] * (block.dim() - 2), inputs * at, inputs * (layer.groups - 1 - at)))
        for at, block in enumerate(own.weight.chunk(layer.groups))
    ]
    return Weights(torch.cat(padded), own.bias)


def dense_shape(layer: Layer) -> tuple[int, ...]:
    """The shape of a layer's weight in dense form."""
    if layer.kind == "norm":
        return (math.prod(layer.weight),)
    outputs, inputs, *kernel = layer.weight
    return (outputs, inputs * layer.groups, *kernel)


def undense(weight: Tensor, layer: Layer) -> Tensor:
    """Convert a weight from dense form to the layer's own shape."""
    if layer.groups > 1:
        inputs = layer.weight[1]
        blocks = enumerate(weight.chunk(layer.groups))
        weight = torch.cat([block[:, inputs * at : inputs * (at + 1)] for at, block in blocks])
    return weight.reshape(layer.weight)


def overlap(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the entries that both weights or biases have: first outputs, first inputs, centers of kernels."""
    for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)):
        size = min(a, b)
        one = one.narrow(dim, (a - size) // 2 if dim >= 2 else 0, size)
        other = other.narrow(dim, (b - size) // 2 if dim >= 2 else 0, size)
    return one, other


# ---- learning what layers compute (Eq. 3 to 5) -----------------------------------------------------------------------


def inputs(kind: Kind, own: Sequence[int], others: Iterable[Sequence[int]]) -> int:
    """Most inputs of one output when a layer is compared with others, from the shapes of dense weights."""
    return 1 if kind == "norm" else max(min(own[1], other[1]) for other in others) * math.prod(own[2:])


def enough_probes(seen: int) -> int:
    """Number of probes for outputs with `seen` inputs: so many that a step at rate 0.4 reduces every error.

    The Gram matrix of S probes of d numbers has eigenvalues up to (1 + sqrt(d / S))^2, here 2.25, and a step multiplies
    an error along one of them by 1 - 2 * 0.4 * eigenvalue.
    """
    return max(LEAST_PROBES, PROBES_PER_INPUT * seen)


def settles(lr: float, steps: int, seen: int, probes: int) -> bool:
    """Whether Eq. 4 converges: one step reduces the error on average, several steps reduce it in every direction."""
    largest = (1 + math.sqrt(seen / probes)) ** 2 if steps > 1 else 1 + (seen + 1) / probes
    return lr * largest < 1


def check_step(pairs: Sequence[Pair], lr: float, steps: int, probes: int | None) -> None:
    """Refuse a step so large, or probes so few, that a global layer would diverge after some rounds."""
    shapes: dict[int, set[tuple[int, ...]]] = {}  # of the clients' layers, by global layer
    for pair in pairs:
        for at, j in pair.matched.items():
            shapes.setdefault(j, set()).add(dense_shape(pair.mine[at]))
    for j, sent in shapes.items():
        layer = pairs[0].theirs[j]
        seen = inputs(layer.kind, dense_shape(layer), sent)
        shown = probes or enough_probes(seen)
        if not settles(lr, steps, seen, shown):
            raise RangeError(
                f"--server-lr {lr} diverges on {layer.name} of the global model, which learns {seen} inputs from "
                f"{shown} probes: use a smaller --server-lr or more --probes."
            )


def by_global_layer(pairs: Mapping[int, Pair], sent: Mapping[int, Mapping[int, Weights]]) -> dict[int, list[Weights]]:
    """Group the layers that clients sent, in dense form, by the matched global layer."""
    found: dict[int, list[Weights]] = {}
    for k, pair in pairs.items():
        for at, own in sent[k].items():
            found.setdefault(pair.matched[at], []).append(dense(own, pair.mine[at]))
    return dict(sorted(found.items()))


def gaussian_probe(
    kind: Kind, layer: Weights, others: Sequence[Weights], probes: int | None, draw: torch.Generator
) -> Tensor:
    """X-hat ~ N(0, I): inputs of a layer. A convolution gets patches of the size of the largest kernel.

    Channels that no other layer has are left out. Default number of probes: `enough_probes`.
    """
    shapes = [other.weight.shape for other in others]
    if probes is None:
        probes = enough_probes(inputs(kind, layer.weight.shape, shapes))
    channels = max(_channels(kind, layer, other) for other in others)
    patch = tuple(max(sizes) for sizes in zip(*(shape[2:] for shape in (layer.weight.shape, *shapes)), strict=True))
    return torch.randn(probes, channels, *patch, generator=draw)


def probe_loss(kind: Kind, layer: Weights, others: Sequence[Weights], x: Tensor) -> Tensor:
    """Eq. 3: the squared distance between a layer's outputs and those of the others on the same inputs.

    Mean over layers and probes, sum over outputs. Two layers are compared on the outputs that both have. Inputs that
    only one of them has are zero. A convolution is applied at one position, so stride and padding do not matter.
    """
    return torch.stack([_distance(kind, layer, other, x) for other in others]).mean()


def _distance(kind: Kind, layer: Weights, other: Weights, x: Tensor) -> Tensor:
    outputs = min(layer.weight.shape[0], other.weight.shape[0])
    seen = x[:, : _channels(kind, layer, other)]
    gap = _outputs(kind, layer, seen, outputs) - _outputs(kind, other, seen, outputs)
    return gap.square().sum(1).mean()


def _channels(kind: Kind, layer: Weights, other: Weights) -> int:
    """Number of input channels that both layers have."""
    return min(w.weight.shape[1 if kind in ("conv", "linear") else 0] for w in (layer, other))


def _outputs(kind: Kind, layer: Weights, x: Tensor, outputs: int) -> Tensor:
    """The first outputs of a layer for inputs (S, channels, ...)."""
    weight = layer.weight[:outputs]
    if kind in ("conv", "dwconv"):
        weight = _pad_kernel(weight, x.shape[2:])
    if kind in ("conv", "linear"):
        y = x.flatten(1) @ weight[:, : x.shape[1]].flatten(1).T
    else:  # each output depends on its own channel only
        y = (x.flatten(2) * weight.flatten(1)).sum(2) if kind == "dwconv" else x * weight
    return y if layer.bias is None else y + layer.bias[:outputs]


def _pad_kernel(weight: Tensor, patch: torch.Size) -> Tensor:
    """Pad a kernel with zeros to the size of a patch."""
    missing = [large - small for large, small in zip(patch, weight.shape[2:], strict=True)]
    return F.pad(weight, [side for size in reversed(missing) for side in (size // 2, size - size // 2)])


def imitate(kind: Kind, layer: Weights, others: Sequence[Weights], x: Tensor, lr: float, steps: int) -> Weights:
    """Eq. 4 and 5: the layer after gradient steps on Eq. 3. Layers of one shape have the gradient of their mean."""
    means = _means_by_shape(others)
    for _ in range(steps):
        own = [part.detach().requires_grad_() for part in layer if part is not None]
        loss = torch.stack([share * _distance(kind, Weights(*own), mean, x) for mean, share in means]).sum()
        grads = torch.autograd.grad(loss, own)
        layer = Weights(*(part.detach() - lr * grad for part, grad in zip(own, grads, strict=True)))
    return layer


def _means_by_shape(layers: Sequence[Weights]) -> list[tuple[Weights, float]]:
    """The mean of the layers of each shape, and their share of all layers."""
    groups: dict[tuple[object, ...], list[Weights]] = {}
    for one in layers:
        groups.setdefault((one.weight.shape, one.bias is None), []).append(one)
    found = []
    for some in groups.values():
        biases = [one.bias for one in some if one.bias is not None]
        mean = torch.stack([one.weight for one in some]).mean(0), torch.stack(biases).mean(0) if biases else None
        found.append((Weights(*mean), len(some) / len(layers)))
    return found


def average(layer: Weights, others: Sequence[Weights]) -> Weights:
    """Replace every entry that others have too by their mean, and keep the rest."""
    weight = _mean_entries(layer.weight, [other.weight for other in others])
    biases = [other.bias for other in others if other.bias is not None]
    return Weights(weight, layer.bias if layer.bias is None else _mean_entries(layer.bias, biases))


def _mean_entries(own: Tensor, others: Sequence[Tensor]) -> Tensor:
    total, count = torch.zeros_like(own), torch.zeros_like(own)
    for other in others:
        mine, theirs = overlap(total, other)
        mine.add_(theirs)
        overlap(count, other)[0].add_(1)
    return torch.where(count > 0, total / count.clamp(min=1), own)


class GlobalLayer(NamedTuple):
    """A layer of the global model, which learns in place from critical layers in dense form."""

    own: Weights
    layer: Layer

    @classmethod
    def of(cls, model: nn.Module, layer: Layer) -> GlobalLayer:
        return cls(weights_of(model, layer), layer)

    def imitate(
        self, critical: Sequence[Weights], probes: int | None, lr: float, steps: int, draw: torch.Generator
    ) -> None:
        """Eq. 3 to 5: learn what the critical layers compute on Gaussian inputs."""
        own, kind = dense(self.own, self.layer), self.layer.kind
        self._write(imitate(kind, own, critical, gaussian_probe(kind, own, critical, probes, draw), lr, steps))

    def average(self, critical: Sequence[Weights]) -> None:
        """Take the mean of the critical layers where they have entries."""
        self._write(average(dense(self.own, self.layer), critical))

    def _write(self, learned: Weights) -> None:
        self.own.copy_(Weights(undense(learned.weight, self.layer), learned.bias).flat())


# ---- scores of layers (Eq. 2 and 6) ----------------------------------------------------------------------------------


def change(now: Tensor, before: Tensor) -> Tensor:
    """Eq. 2: squared change of a layer's parameters, relative to their squared norm before."""
    return (now - before).square().sum() / (before.square().sum() + 1e-12)


def entropy(weight: Tensor, measure: Entropy = "shannon", bins: int = 256, q: float = 2.0) -> float:
    """H of Eq. 6, in bits, of the weights, quantized into bins between their minimum and maximum.

    >>> round(entropy(torch.tensor([0.0, 0.0, 0.0, 1.0]), bins=4), 4)
    0.8113
    """
    counts = torch.histc(double(weight.detach()).flatten(), bins)
    p = counts[counts > 0] / weight.numel()
    if measure == "shannon":
        return abs(float((p * p.log2()).sum()))  # abs: one full bin is 0, not -0
    if measure == "tsallis":
        return float((1 - (p**q).sum()) / (q - 1))
    return abs(float((p * p).sum().log2()))


# ---- replacing layers (Eq. 7) ----------------------------------------------------------------------------------------


def project(own: Weights, layer: Layer, given: Weights, given_layer: Layer, mode: Projection) -> Weights:
    """The client's layer, in its own shape, after a given layer of any size replaces it.

    `block_retain` writes the entries that both have and keeps the others. `flat_retain` writes the flattened tensors
    from the front and keeps the rest. `flat_zero` is Eq. 7 as printed: the rest is zero. Without a given bias, the own
    bias does not change.
    """
    if mode == "block_retain":
        mine, theirs = dense(own, layer), dense(given, given_layer)
        weight = undense(_write_block(mine.weight, theirs.weight), layer)
        bias = own.bias if own.bias is None or theirs.bias is None else _write_block(own.bias.flatten(), theirs.bias)
    else:
        zero = mode == "flat_zero"
        weight = _write_flat(own.weight, given.weight, zero)
        bias = own.bias if own.bias is None or given.bias is None else _write_flat(own.bias, given.bias, zero)
    return Weights(weight, bias if bias is None else bias.reshape(layer.bias or ()))


def _write_block(own: Tensor, given: Tensor) -> Tensor:
    result = own.clone()
    mine, theirs = overlap(result, given)
    mine.copy_(theirs)
    return result


def _write_flat(own: Tensor, given: Tensor, zero: bool) -> Tensor:
    size = min(own.numel(), given.numel())
    rest = own.flatten()[size:]
    return torch.cat([given.flatten()[:size], torch.zeros_like(rest) if zero else rest]).view_as(own)
