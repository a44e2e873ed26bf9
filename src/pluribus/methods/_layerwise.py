"""Single layers of different networks: which ones correspond, what they compute, how they are merged and inserted.

A `Pair` says which layers of a client and of the global model correspond; all else are functions of tensors and shapes,
but for a `GlobalLayer`, which learns. Tensors are *dense* where they are compared: a grouped convolution is written as
the plain one that computes the same, and the weight of a normalisation as one vector.
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
from pluribus.ops import blamed_on
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
        """Both as one vector."""
        return self.weight.flatten() if self.bias is None else torch.cat([self.weight.flatten(), self.bias.flatten()])

    def to(self, device: torch.device) -> Weights:
        """Both on a device."""
        return Weights(self.weight.to(device), None if self.bias is None else self.bias.to(device))

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Take over the first numbers of a vector."""
        size = self.weight.numel()
        self.weight.copy_(values[:size].view_as(self.weight))
        if self.bias is not None:
            self.bias.copy_(values[size : size + self.bias.numel()].view_as(self.bias))


_traced: dict[tuple[object, ...], tuple[Layer, ...]] = {}


def layers(task: Task, model: str) -> tuple[Layer, ...]:
    """`task.layers(model)`, found once: a deep network takes a second."""
    key = (model, task.shape, task.classes, task.width, task.projector)
    if key not in _traced:
        _traced[key] = task.layers(model)
    return _traced[key]


def weights_of(model: nn.Module, layer: Layer) -> Weights:
    """A layer's parameters, live, without their gradients' history."""
    bias = model.get_parameter(f"{layer.name}.bias").detach() if layer.bias else None
    return Weights(model.get_parameter(f"{layer.name}.weight").detach(), bias)


# ---- layers in messages, each under its number -----------------------------------------------------------------------


def fields_of(layers: Sequence[Layer], chosen: Collection[int]) -> dict[str, Field]:
    """The schema of messages with some of the chosen layers."""
    shapes = {f"{at}.weight": layers[at].weight for at in chosen}
    shapes |= {f"{at}.bias": bias for at in chosen if (bias := layers[at].bias)}
    return {name: Field(shape, kept=False, optional=True) for name, shape in shapes.items()}


def size(layer: Layer) -> int:
    """Bytes of a layer in a message."""
    return payload(fields_of([layer], [0]), 0, {})


def packed(layers: Mapping[int, Weights]) -> dict[str, Tensor]:
    """Layers as fields of a message."""
    named = {f"{at}.{name}": part for at, w in layers.items() for name, part in w._asdict().items()}
    return {name: part for name, part in named.items() if part is not None}


def unpacked(message: Message, chosen: Iterable[int]) -> dict[int, Weights]:
    """Those of the chosen layers that are in a message."""
    fields = message.part()
    return {at: Weights(fields[f"{at}.weight"], fields.get(f"{at}.bias")) for at in chosen if f"{at}.weight" in fields}


# ---- which layers correspond -----------------------------------------------------------------------------------------


def same_kind(layer: Layer, others: Sequence[Layer]) -> list[int]:
    """Which of the others may take the place of a layer: those of its kind, and for logits only what gives logits."""
    return [j for j, other in enumerate(others) if other.kind == layer.kind and (other.output or not layer.output)]


def kinds(layers: Sequence[Layer]) -> str:
    """The kinds of some layers, for a sentence."""
    return ", ".join(dict.fromkeys("output" if one.output else one.kind for one in layers)) or "no layers"


def match(mine: Sequence[Layer], theirs: Sequence[Layer]) -> dict[int, int]:
    """Each of my layers to the one of theirs of its kind at the nearest relative depth, the shallower on a tie.

    The i-th of n layers of a kind has relative depth (i + 1/2) / n. What gives logits goes with what gives logits and
    with nothing else. Layers without a counterpart are left out.
    """
    found: dict[int, int] = {}
    for at, layer in enumerate(mine):
        candidates = [j for j in same_kind(layer, theirs) if theirs[j].output == layer.output]
        if candidates:
            i, n = _rank(at, mine)
            found[at] = min(candidates, key=lambda j: (_apart(i, n, *_rank(j, theirs)), j))
    return found


def _rank(at: int, layers: Sequence[Layer]) -> tuple[int, int]:
    """Index among the layers of its kind, and their number."""
    kind = layers[at].kind
    return sum(layer.kind == kind for layer in layers[:at]), sum(layer.kind == kind for layer in layers)


def _apart(i: int, n: int, j: int, m: int) -> int:
    """|(i + 1/2) / n - (j + 1/2) / m|, times 2nm: a whole number, so that a tie is a tie."""
    return abs((2 * i + 1) * m - (2 * j + 1) * n)


class Pair(NamedTuple):
    """The layers of a client's model and of the global model, and which of them correspond."""

    mine: tuple[Layer, ...]
    theirs: tuple[Layer, ...]
    matched: dict[int, int]

    @classmethod
    def of(cls, task: Task, card: Card, global_model: str) -> Pair:
        """That of a client and the global model."""
        mine, theirs = layers(task, card.model), layers(task, global_model)
        return cls(mine, theirs, match(mine, theirs))

    def choices(self, sent: Iterable[int], distribution: Distribution) -> list[tuple[int, int]]:
        """The layers that a client sent, each with every global layer that may take its place."""
        if distribution == "aligned":
            return [(at, self.matched[at]) for at in sent]
        return [(at, j) for at in sent for j in same_kind(self.mine[at], self.theirs)]

    def project(self, model: nn.Module, at: int, j: int, given: Weights, mode: Projection) -> Weights:
        """Eq. 7: the client's layer with a global one in its place."""
        return project(weights_of(model, self.mine[at]), self.mine[at], given, self.theirs[j], mode)

    def names(self, at: int, j: int) -> dict[str, str]:
        """The names of a client's layer and of a global one, for the record."""
        return {"layer": self.mine[at].name, "global": self.theirs[j].name}

    def weights(self, model: nn.Module) -> dict[int, Weights]:
        """The client's layers that have a counterpart, live."""
        return {at: weights_of(model, self.mine[at]) for at in self.matched}

    def largest(self) -> int:
        """How many numbers the largest of them has."""
        shapes = [(self.mine[at].weight, self.mine[at].bias or (0,)) for at in self.matched]
        return max(math.prod(weight) + math.prod(bias) for weight, bias in shapes)

    def wires(self) -> tuple[Wire, Wire]:
        """Some of the client's layers up; then one global layer down, and the number of the one it replaces."""
        fitting = sorted({j for _, j in self.choices(self.matched, "any-depth")})
        down = {"target": Field((), torch.int32, kept=False), **fields_of(self.theirs, fitting)}
        return Wire(up=fields_of(self.mine, self.matched)), Wire(down=down)

    def traffic(self, top_k: int) -> Traffic:
        """The k largest layers up; down the largest one, and whose place it takes."""
        up = sorted(size(self.mine[at]) for at in self.matched)[-top_k:]
        down = max(size(self.theirs[j]) for _, j in self.choices(self.matched, "any-depth"))
        return Traffic(sum(up), torch.int32.itemsize + down)


def pairs_of(task: Task, cards: Cards, global_model: str) -> list[Pair]:
    """That of each architecture; one without a counterpart for any of its layers is refused."""
    with blamed_on("--global-model"):
        layers(task, global_model)
    found = []
    for card in cards.firsts():
        pair = Pair.of(task, card, global_model)
        if not pair.matched:
            raise MismatchError(
                f"fedfree exchanges layers of one kind, but client {card.id} ({card.model}) has {kinds(pair.mine)} and "
                f"the global model {global_model} {kinds(pair.theirs)}. Choose another --global-model."
            )
        found.append(pair)
    return found


# ---- dense tensors ---------------------------------------------------------------------------------------------------


def dense(own: Weights, layer: Layer) -> Weights:
    """A layer's tensors in the form in which layers of a kind can be compared."""
    if layer.kind == "norm":
        return Weights(own.weight.flatten(), own.bias if own.bias is None else own.bias.flatten())
    if layer.groups == 1:
        return own
    inputs = own.weight.shape[1]
    padded = [
        F.pad(block, (0, 0, 0, 0, inputs * at, inputs * (layer.groups - 1 - at)))
        for at, block in enumerate(own.weight.chunk(layer.groups))
    ]
    return Weights(torch.cat(padded), own.bias)


def dense_shape(layer: Layer) -> tuple[int, ...]:
    """That of a layer's weight in dense form."""
    if layer.kind == "norm":
        return (math.prod(layer.weight),)
    outputs, inputs, *kernel = layer.weight
    return (outputs, inputs * layer.groups, *kernel)


def undense(weight: Tensor, layer: Layer) -> Tensor:
    """The layer's own weight tensor out of its dense form."""
    if layer.groups > 1:
        inputs = layer.weight[1]
        blocks = enumerate(weight.chunk(layer.groups))
        weight = torch.cat([block[:, inputs * at : inputs * (at + 1)] for at, block in blocks])
    return weight.reshape(layer.weight)


def overlap(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The entries that two weights or biases have in common, as views: first outputs, first inputs, kernels centred."""
    for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)):
        size = min(a, b)
        one = one.narrow(dim, (a - size) // 2 if dim >= 2 else 0, size)
        other = other.narrow(dim, (b - size) // 2 if dim >= 2 else 0, size)
    return one, other


# ---- what layers compute (Eq. 3 to 5 of FedFree) ---------------------------------------------------------------------


def inputs(kind: Kind, own: Sequence[int], others: Iterable[Sequence[int]]) -> int:
    """Most numbers that an output of a layer sees when it is compared with others, by the shapes of dense weights."""
    return 1 if kind == "norm" else max(min(own[1], other[1]) for other in others) * math.prod(own[2:])


def enough_probes(seen: int) -> int:
    """Gaussian inputs for a layer whose outputs see so many numbers: a step of rate 0.4 then shrinks every error.

    The Gram matrix of S probes of d numbers has eigenvalues up to (1 + sqrt(d / S))^2, here 2.25, and a step multiplies
    an error along one of them by 1 - 2 * 0.4 * eigenvalue.
    """
    return max(LEAST_PROBES, PROBES_PER_INPUT * seen)


def settles(lr: float, steps: int, seen: int, probes: int) -> bool:
    """Whether steps of Eq. 4 bring a layer nearer to what it imitates: one step in the mean, several in any case."""
    largest = (1 + math.sqrt(seen / probes)) ** 2 if steps > 1 else 1 + (seen + 1) / probes
    return lr * largest < 1


def check_step(pairs: Sequence[Pair], lr: float, steps: int, probes: int | None) -> None:
    """Too large a step on too few probes makes a global layer grow without bounds, after some rounds."""
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
                f"--server-lr {lr} diverges on {layer.name} of the global model, which has {seen} inputs to learn "
                f"from {shown} --probes: use a smaller --server-lr or more --probes."
            )


def by_global_layer(pairs: Mapping[int, Pair], sent: Mapping[int, Mapping[int, Weights]]) -> dict[int, list[Weights]]:
    """The layers that clients sent, in dense form, by the global layer that they correspond to."""
    found: dict[int, list[Weights]] = {}
    for k, pair in pairs.items():
        for at, own in sent[k].items():
            found.setdefault(pair.matched[at], []).append(dense(own, pair.mine[at]))
    return dict(sorted(found.items()))


def gaussian_probe(
    kind: Kind, layer: Weights, others: Sequence[Weights], probes: int | None, draw: torch.Generator
) -> Tensor:
    """X-hat ~ N(0, I): inputs of a layer, for a convolution patches as large as the largest kernel among all.

    Channels that none of the others has are left out. Without a number of probes there are enough.
    """
    shapes = [other.weight.shape for other in others]
    if probes is None:
        probes = enough_probes(inputs(kind, layer.weight.shape, shapes))
    channels = max(_channels(kind, layer, other) for other in others)
    patch = tuple(max(sizes) for sizes in zip(*(shape[2:] for shape in (layer.weight.shape, *shapes)), strict=True))
    return torch.randn(probes, channels, *patch, generator=draw)


def probe_loss(kind: Kind, layer: Weights, others: Sequence[Weights], x: Tensor) -> Tensor:
    """Eq. 3: how far a layer's outputs are from those of others on the same inputs.

    Mean over layers and probes, summed over outputs. Two layers are compared on the outputs that both have; inputs that
    only one has are zero. A convolution is seen at one position, so that stride and padding play no part.
    """
    return torch.stack([_distance(kind, layer, other, x) for other in others]).mean()


def _distance(kind: Kind, layer: Weights, other: Weights, x: Tensor) -> Tensor:
    outputs = min(layer.weight.shape[0], other.weight.shape[0])
    seen = x[:, : _channels(kind, layer, other)]
    gap = _answer(kind, layer, seen, outputs) - _answer(kind, other, seen, outputs)
    return gap.square().sum(1).mean()


def _channels(kind: Kind, layer: Weights, other: Weights) -> int:
    """Input channels that two layers have in common."""
    return min(w.weight.shape[1 if kind in ("conv", "linear") else 0] for w in (layer, other))


def _answer(kind: Kind, layer: Weights, x: Tensor, outputs: int) -> Tensor:
    """The first outputs of a layer for inputs (S, channels, ...)."""
    weight = layer.weight[:outputs]
    if kind in ("conv", "dwconv"):
        weight = _embedded(weight, x.shape[2:])
    if kind in ("conv", "linear"):
        y = x.flatten(1) @ weight[:, : x.shape[1]].flatten(1).T
    else:  # each channel sees itself alone
        y = (x.flatten(2) * weight.flatten(1)).sum(2) if kind == "dwconv" else x * weight
    return y if layer.bias is None else y + layer.bias[:outputs]


def _embedded(weight: Tensor, patch: torch.Size) -> Tensor:
    """A kernel in the middle of a larger one of zeros."""
    height, width = (large - small for large, small in zip(patch, weight.shape[2:], strict=True))
    return F.pad(weight, (width // 2, width - width // 2, height // 2, height - height // 2))


def imitate(kind: Kind, layer: Weights, others: Sequence[Weights], x: Tensor, lr: float, steps: int) -> Weights:
    """Eq. 4 and 5: the layer after gradient steps on Eq. 3. Layers of one shape pull as their mean does."""
    pulls = _by_shape(others)
    for _ in range(steps):
        own = [part.detach().requires_grad_() for part in layer if part is not None]
        loss = torch.stack([share * _distance(kind, Weights(*own), mean, x) for mean, share in pulls]).sum()
        grads = torch.autograd.grad(loss, own)
        layer = Weights(*(part.detach() - lr * grad for part, grad in zip(own, grads, strict=True)))
    return layer


def _by_shape(layers: Sequence[Weights]) -> list[tuple[Weights, float]]:
    """The mean of all layers of a shape, and their share of all layers."""
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
    """Every entry that others have too becomes their mean; the rest stays."""
    weight = _mean(layer.weight, [other.weight for other in others])
    biases = [other.bias for other in others if other.bias is not None]
    return Weights(weight, layer.bias if layer.bias is None else _mean(layer.bias, biases))


def _mean(own: Tensor, others: Sequence[Tensor]) -> Tensor:
    total, count = torch.zeros_like(own), torch.zeros_like(own)
    for other in others:
        mine, theirs = overlap(total, other)
        mine.add_(theirs)
        overlap(count, other)[0].add_(1)
    return torch.where(count > 0, total / count.clamp(min=1), own)


class GlobalLayer(NamedTuple):
    """A layer of the global model, live, that learns from critical layers in dense form."""

    own: Weights
    layer: Layer

    @classmethod
    def of(cls, model: nn.Module, layer: Layer) -> GlobalLayer:
        """That of a model."""
        return cls(weights_of(model, layer), layer)

    def imitate(
        self, critical: Sequence[Weights], probes: int | None, lr: float, steps: int, draw: torch.Generator
    ) -> None:
        """Eq. 3 to 5: learn what the critical layers compute on Gaussian inputs."""
        own, kind = dense(self.own, self.layer), self.layer.kind
        self._put(imitate(kind, own, critical, gaussian_probe(kind, own, critical, probes, draw), lr, steps))

    def average(self, critical: Sequence[Weights]) -> None:
        """Become the mean of the critical layers, as far as they reach."""
        self._put(average(dense(self.own, self.layer), critical))

    def _put(self, learned: Weights) -> None:
        self.own.copy_(Weights(undense(learned.weight, self.layer), learned.bias).flat())


# ---- what is worth sending (Eq. 2 and 6) -----------------------------------------------------------------------------


def change(now: Tensor, before: Tensor) -> Tensor:
    """Eq. 2: squared change of a layer's parameters, relative to their squared norm before."""
    return (now - before).square().sum() / (before.square().sum() + 1e-12)


def entropy(weight: Tensor, measure: Entropy = "shannon", bins: int = 256, q: float = 2.0) -> float:
    """H of Eq. 6, in bits: of the weights, quantised into bins between their smallest and their largest.

    >>> round(entropy(torch.tensor([0.0, 0.0, 0.0, 1.0]), bins=4), 4)
    0.8113
    """
    counts = torch.histc(weight.detach().double().flatten(), bins)
    p = counts[counts > 0] / weight.numel()
    if measure == "shannon":
        return abs(float((p * p.log2()).sum()))  # abs: one full bin is 0, not -0
    if measure == "tsallis":
        return float((1 - (p**q).sum()) / (q - 1))
    return abs(float((p * p).sum().log2()))


# ---- what takes the place of what (Eq. 7) ----------------------------------------------------------------------------


def project(own: Weights, layer: Layer, given: Weights, given_layer: Layer, mode: Projection) -> Weights:
    """The client's layer with a given one of any size in its place, in the client's own shapes.

    `block_retain` writes the entries in common and keeps the others; `flat_retain` writes the flattened tensors from
    the front and keeps the rest; `flat_zero` is Eq. 7 as printed: the rest is zero. A bias that is not given stays.
    """
    if mode == "block_retain":
        mine, theirs = dense(own, layer), dense(given, given_layer)
        weight = undense(_block(mine.weight, theirs.weight), layer)
        bias = own.bias if own.bias is None or theirs.bias is None else _block(own.bias.flatten(), theirs.bias)
    else:
        weight = _flat(own.weight, given.weight, zero=mode == "flat_zero")
        bias = own.bias if own.bias is None or given.bias is None else _flat(own.bias, given.bias, mode == "flat_zero")
    return Weights(weight, bias if bias is None else bias.reshape(layer.bias or ()))


def _block(own: Tensor, given: Tensor) -> Tensor:
    result = own.clone()
    mine, theirs = overlap(result, given)
    mine.copy_(theirs)
    return result


def _flat(own: Tensor, given: Tensor, zero: bool) -> Tensor:
    size = min(own.numel(), given.numel())
    rest = own.flatten()[size:]
    return torch.cat([given.flatten()[:size], torch.zeros_like(rest) if zero else rest]).view_as(own)
