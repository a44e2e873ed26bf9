"""FedFree (Du et al., NeurIPS 2025): single layers travel. A global model learns from the clients' most changed layers
what they compute on Gaussian noise, and gives each client the layer that promises the most gain in entropy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from pluribus.client import Client
from pluribus.errors import ConfigError, MismatchError, RangeError
from pluribus.message import Field, Message, Wire
from pluribus.method import Exchange, Method, Sizes, Traffic, register
from pluribus.methods import _layerwise as layerwise
from pluribus.methods._layerwise import Weights, dense, layers, match, packed, same_kind, undense, unpacked, weights_of
from pluribus.models.layers import Layer
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Task

NONE = -1  # no layer is waiting


@register("fedfree")
@dataclass(frozen=True)
class FedFree(Method):
    """Layers up by how much they changed, one layer down by Knowledge Gain Entropy; any mix of architectures."""

    paper = "Du et al., NeurIPS 2025"
    up = "the k layers that changed most"
    down = "one layer of the global model, if its entropy is higher"
    exchanges = (Exchange(None, "local_update", "aggregate"), Exchange("targeted_layer", "keep", None))
    views = ("after", "before")  # before: with the layer that came down in its place
    defaults = MappingProxyType({"image_size": 16})  # the global CNN needs 16 pixels a side

    top_k: int = setting(2, at_least=1, symbol="k")
    """Critical layers that a client sends."""
    select: Literal["change", "random"] = setting("change", symbol="L_i")
    """Send the layers that changed most (Eq. 2), or random ones (ablation, Fig. 4a)."""
    global_model: str = setting("fedfree-cnn", symbol="G")
    """Architecture of the global model."""
    server_lr: float = setting(0.4, above=0, symbol="alpha")
    """Learning rate of the global layers (Eq. 4 and 5), where Eq. 3 is a mean over the Gaussian inputs."""
    server_steps: int = setting(1, at_least=1)
    """Gradient steps on each global layer per round."""
    probes: int | None = setting(None, at_least=1, symbol="S")
    """Number of Gaussian inputs per global layer (X-hat). Default: 4 for each input of the layer, at least 256."""
    merge: Literal["probe", "average"] = setting("probe", symbol="G^t")
    """Learn what the uploaded layers compute (Eq. 3), or average their weights (ablation, Fig. 4b)."""
    same_start: bool = True
    """Clients of one architecture start from the same weights; those of the global architecture start as G^0."""
    warm_start: bool = setting(False, symbol="G^0")
    """A global layer begins as the mean of the first layers that are sent for it, not at random."""
    entropy: Literal["shannon", "tsallis", "collision"] = setting("shannon", symbol="H")
    """Entropy of the quantised weights (Eq. 6, Table A3)."""
    tsallis_q: float = setting(2.0, above=0, symbol="q")
    """Order of the Tsallis entropy."""
    bins: int = setting(256, at_least=2)
    """Bins of the entropy's histogram."""
    distribution: Literal["aligned", "any-depth"] = setting("aligned", symbol="j*")
    """Search only the global layer that the client's layer was matched with, or all of its type."""
    projection: Literal["block_retain", "flat_retain", "flat_zero"] = "block_retain"
    """Eq. 7: write blocks of channels, or flattened weights, and keep the rest; flat_zero sets the rest to zero."""

    def check(self, task: Task, cards: Mapping[int, Card]) -> None:
        if self.tsallis_q == 1:
            raise RangeError("--tsallis-q must not be 1: that is --entropy shannon.")
        try:
            theirs = layers(task, self.global_model)
        except ConfigError as error:
            hint = " Enlarge them, for example --image-size 32." if "cannot take" in str(error) else ""
            raise type(error)(f"--global-model: {error}{hint}") from error
        first: dict[str, int] = {}
        for k, card in cards.items():
            first.setdefault(card.model, k)
        shapes: dict[int, set[tuple[int, ...]]] = {}  # of the clients' layers, by global layer
        for model, k in first.items():
            mine = layers(task, model)
            matched = match(mine, theirs)
            for at, j in matched.items():
                shapes.setdefault(j, set()).add(layerwise.dense_shape(mine[at]))
            if not matched:
                raise MismatchError(
                    f"fedfree exchanges layers of one kind, but client {k} ({model}) has {layerwise.kinds(mine)} and "
                    f"the global model {self.global_model} {layerwise.kinds(theirs)}. Choose another --global-model."
                )
        self._check_step(theirs, shapes)

    def _check_step(self, theirs: Sequence[Layer], shapes: Mapping[int, Iterable[tuple[int, ...]]]) -> None:
        """Too large a step on too few probes makes a global layer grow without bounds, after some rounds."""
        if self.merge == "average":
            return
        for j, sent in shapes.items():
            seen = layerwise.inputs(theirs[j].kind, layerwise.dense_shape(theirs[j]), sent)
            probes = self.probes or layerwise.enough_probes(seen)
            if not layerwise.settles(self.server_lr, self.server_steps, seen, probes):
                raise RangeError(
                    f"--server-lr {self.server_lr} diverges on {theirs[j].name} of the global model, which has {seen} "
                    f"inputs to learn from {probes} --probes: use a smaller --server-lr or more --probes."
                )

    def schema(self, task: Task, card: Card) -> tuple[Wire, Wire]:
        mine, theirs = layers(task, card.model), layers(task, self.global_model)
        shared = match(mine, theirs)
        fitting = {j for at in shared for j in same_kind(mine[at], theirs)}
        down = {"target": Field((), torch.int32, kept=False), **layerwise.fields_of(theirs, sorted(fitting))}
        return Wire(up=layerwise.fields_of(mine, shared)), Wire(down=down)

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        """The k largest layers up; down the largest one, and whose place it takes."""
        mine, theirs = layers(task, card.model), layers(task, self.global_model)
        shared = match(mine, theirs)
        up = sorted(layerwise.size(mine[at]) for at in shared)[-self.top_k :]
        return Traffic(
            sum(up), 4 + max(layerwise.size(theirs[j]) for at in shared for j in same_kind(mine[at], theirs))
        )

    # ---- knowledge extraction (Section 3.3) ------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        if self.same_start:
            client.model.load_state_dict(client.task.start(client.card.model).state_dict())
        mine = layers(client.task, client.card.model)
        shared = match(mine, layers(client.task, self.global_model))
        sizes = [len(weights_of(client.model, mine[at]).flat()) for at in shared]
        client.state.waiting = torch.zeros(max(sizes))  # the layer that came down, until local training starts
        client.state.target = torch.tensor(NONE)

    def local_update(self, client: Client) -> Message:
        self._replace(client)
        client.state.target.fill_(NONE)
        mine = layers(client.task, client.card.model)
        own = {at: weights_of(client.model, mine[at]) for at in match(mine, layers(client.task, self.global_model))}
        before = {at: part.apart().flat().clone() for at, part in own.items()}  # theta^{t-1}
        client.fit(self.step)  # theta^t
        scores = torch.stack([layerwise.change(part.apart().flat(), before[at]) for at, part in own.items()])  # Eq. 2
        if self.select == "random":
            scores = torch.rand(len(own), generator=client.draw("layers"))
        ranked = sorted(zip(scores.neg().tolist(), own, strict=True))
        return Message(packed({at: own[at] for _, at in ranked[: self.top_k]}))  # L_i^t

    # ---- knowledge sharing, local to global (Section 3.4) ----------------------------------------------------------

    def setup(self, server: Server) -> None:
        server.state.model = server.task.start(self.global_model)  # G^0
        server.state.begun = torch.zeros(len(layers(server.task, self.global_model)), dtype=torch.bool)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        theirs = layers(server.task, self.global_model)
        critical: dict[int, list[Weights]] = {}  # by global layer
        for k, upload in uploads.items():
            mine = layers(server.task, server.cards[k].model)
            matched = match(mine, theirs)
            for at, sent in unpacked(upload, matched).items():
                critical.setdefault(matched[at], []).append(dense(sent, mine[at]))
        for j in sorted(critical):
            self._learn(server, j, critical[j])
        self._decide(server, uploads)

    def _learn(self, server: Server, j: int, critical: Sequence[Weights]) -> None:
        layer = layers(server.task, self.global_model)[j]
        parameters = weights_of(server.state.model, layer)
        own = dense(parameters.apart(), layer)
        if self.merge == "average" or (self.warm_start and not server.state.begun[j]):
            own = layerwise.average(own, critical)
        else:
            x = layerwise.gaussian_probe(layer.kind, own, critical, self.probes, server.draw("probe", j))
            own = layerwise.imitate(layer.kind, own, critical, x, self.server_lr, self.server_steps)  # Eq. 3 to 5
        server.state.begun[j] = True
        parameters.copy_(Weights(undense(own.weight, layer), own.bias).flat())

    # ---- knowledge alignment, global to local (Section 3.5) --------------------------------------------------------

    def _decide(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """For each client its layer and the global one with the largest Knowledge Gain Entropy, if that is positive."""
        theirs = layers(server.task, self.global_model)
        known = [self._entropy(weights_of(server.state.model, layer)) for layer in theirs]
        said = server.notes["layers"] = {}  # of this round alone
        for k, upload in uploads.items():
            mine = layers(server.task, server.cards[k].model)
            matched = match(mine, theirs)
            gains = {
                (at, j): known[j] - self._entropy(sent)  # Eq. 6
                for at, sent in unpacked(upload, matched).items()
                for j in ([matched[at]] if self.distribution == "aligned" else same_kind(mine[at], theirs))
            }
            at, j = max(gains, key=lambda pair: gains[pair], default=(NONE, NONE))
            if gains.get((at, j), 0) > 0:
                said[str(k)] = {"layer": mine[at].name, "global": theirs[j].name, "gain": gains[at, j]}
            else:
                said[str(k)] = "none"

    def _entropy(self, layer: Weights) -> float:
        return layerwise.entropy(layer.weight, self.entropy, self.bins, self.tsallis_q)

    def targeted_layer(self, server: Server, client: int) -> Message | None:
        """g_{j*} and the number of the layer whose place it takes; nothing where there is no gain."""
        said = server.notes.get("layers", {}).get(str(client), "none")
        if said == "none":
            return None
        mine, theirs = layers(server.task, server.cards[client].model), layers(server.task, self.global_model)
        (at,) = (at for at, layer in enumerate(mine) if layer.name == said["layer"])
        (j,) = (j for j, layer in enumerate(theirs) if layer.name == said["global"])
        target = torch.tensor(at, dtype=torch.int32)
        return Message({"target": target, **packed({j: weights_of(server.state.model, theirs[j])})})

    def receive(self, client: Client, down: Message) -> None:
        theirs, at = layers(client.task, self.global_model), int(down.tensor("target"))
        layer = layers(client.task, client.card.model)[at]
        own = weights_of(client.model, layer)
        for j, given in unpacked(down, range(len(theirs))).items():
            fitted = layerwise.project(own.apart(), layer, given.to(client.device), theirs[j], self.projection)  # Eq. 7
            client.state.waiting[: len(fitted.flat())] = fitted.flat()
        client.state.target.fill_(at)

    def keep(self, client: Client) -> Message:
        """Answers nothing. The layer waits for the next local training: models without and with it can be measured."""
        return Message({})

    def adapt(self, client: Client, view: str) -> None:
        self._replace(client)

    def _replace(self, client: Client) -> None:
        """theta_{i,l} <- g_{j*}."""
        at = int(client.state.target)
        if at != NONE:
            weights_of(client.model, layers(client.task, client.card.model)[at]).copy_(client.state.waiting)
