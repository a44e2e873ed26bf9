"""FedFree (Du et al., NeurIPS 2025): clients and server exchange single layers. A global model learns what the clients'
most changed layers compute on Gaussian noise. Each client gets the global layer with the largest gain in entropy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, Self

import torch

from pluribus.client import Client
from pluribus.errors import RangeError
from pluribus.message import Message, Wire
from pluribus.method import Exchange, Method, Sizes, Traffic, register
from pluribus.methods import _layerwise as layerwise
from pluribus.methods._layerwise import GlobalLayer, Pair, Weights, layers, pack, unpack, weights_of
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task

NONE = -1  # no layer
GLOBAL_CNN = "fedfree-cnn"


@register("fedfree")
@dataclass(frozen=True)
class FedFree(Method):
    """Clients send their most changed layers and get one by Knowledge Gain Entropy; any mix of architectures."""

    paper = "Du et al., NeurIPS 2025"
    family = "layers"
    up = "the k layers that changed most"
    down = "one layer of the global model, if its entropy is higher"
    exchanges = (Exchange(None, "local_update", "aggregate"), Exchange("targeted_layer", "keep", None))
    views = ("after", "before")  # before: with the downloaded layer in place
    defenses = ()  # clients send different layers
    defaults = MappingProxyType({"image_size": 16})  # the global CNN needs at least 16 x 16 pixels

    top_k: int = setting(2, at_least=1, symbol="k")
    """Number of critical layers that a client sends."""
    select: Literal["change", "random"] = setting("change", symbol="L_i")
    """Send the layers that changed most (Eq. 2), or random ones (ablation, Fig. 4a)."""
    global_model: str = setting(GLOBAL_CNN, symbol="G")
    """Architecture of the global model. Default, if rows are no images: the client model with most layers."""
    server_lr: float = setting(0.4, above=0, symbol="alpha")
    """Learning rate of the global layers (Eq. 4 and 5), with Eq. 3 as a mean over the Gaussian inputs."""
    server_steps: int = setting(1, at_least=1)
    """Gradient steps on each global layer per round."""
    probes: int | None = setting(None, at_least=1, symbol="S")
    """Number of Gaussian inputs per global layer (X-hat). Default: 4 per input of the layer, at least 256."""
    merge: Literal["probe", "average"] = setting("probe", symbol="G^t")
    """Learn what the uploaded layers compute (Eq. 3), or average their weights (ablation, Fig. 4b)."""
    same_start: bool = True
    """Clients of one architecture start from the same weights; those of the global architecture start as G^0."""
    warm_start: bool = setting(False, symbol="G^0")
    """Initialize a global layer with the mean of the first layers that are sent for it, not at random."""
    entropy: Literal["shannon", "tsallis", "collision"] = setting("shannon", symbol="H")
    """Entropy of the quantized weights (Eq. 6, Table A3)."""
    tsallis_q: float = setting(2.0, above=0, symbol="q")
    """Order of the Tsallis entropy."""
    bins: int = setting(256, at_least=2)
    """Number of histogram bins for the entropy."""
    distribution: Literal["aligned", "any-depth"] = setting("aligned", symbol="j*")
    """Search only the global layer that matches the client's layer, or all layers of its type."""
    projection: Literal["block_retain", "flat_retain", "flat_zero"] = "block_retain"
    """Eq. 7: write blocks of channels, or flattened weights, and keep the rest; flat_zero sets the rest to zero."""

    def complete(self, task: Task, architectures: Iterable[str]) -> Self:
        if task.input.kind == "image" or self.global_model != GLOBAL_CNN:
            return self
        return replace(self, global_model=max(architectures, key=lambda model: len(layers(task, model))))

    def check(self, task: Task, cards: Cards) -> None:
        if self.tsallis_q == 1:
            raise RangeError("--tsallis-q must not be 1: that is --entropy shannon.")
        pairs = layerwise.pairs_of(task, cards, self.global_model)
        if self.merge == "probe":
            layerwise.check_step(pairs, self.server_lr, self.server_steps, self.probes)

    def schema(self, task: Task, card: Card) -> tuple[Wire, Wire]:
        return Pair.of(task, card, self.global_model).wires()

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        return Pair.of(task, card, self.global_model).traffic(self.top_k)

    # ---- knowledge extraction (Section 3.3) ------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        if self.same_start:
            client.model.load_state_dict(client.task.start(client.card.model).state_dict())
        # the downloaded layer waits until local training starts; the target is the layer that it replaces
        client.state.waiting = torch.zeros(Pair.of(client.task, client.card, self.global_model).largest())
        client.state.target = torch.tensor(NONE)

    def local_update(self, client: Client) -> Message:
        self.adapt(client, "before")
        own = Pair.of(client.task, client.card, self.global_model).weights(client.model)
        before = {at: layer.flat().clone() for at, layer in own.items()}  # theta^{t-1}
        client.fit(self.step)  # theta^t
        scores = torch.stack([layerwise.change(layer.flat(), before[at]) for at, layer in own.items()])  # Eq. 2
        if self.select == "random":
            scores = torch.rand(len(own), generator=client.draw("layers"))
        ranked = sorted(zip(scores.neg().tolist(), own, strict=True))
        return Message(pack({at: own[at] for _, at in ranked[: self.top_k]}))  # L_i^t

    # ---- knowledge sharing, local to global (Section 3.4) ----------------------------------------------------------

    def setup(self, server: Server) -> None:
        server.state.model = server.task.start(self.global_model)  # G^0
        server.state.begun = torch.zeros(len(layers(server.task, self.global_model)), dtype=torch.bool)
        server.state.targets = torch.full((server.task.clients, 3), NONE)  # l, j* and the round, per client

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        pairs = {k: Pair.of(server.task, server.cards[k], self.global_model) for k in uploads}
        sent = {k: unpack(upload, pairs[k].matched) for k, upload in uploads.items()}
        for j, critical in layerwise.by_global_layer(pairs, sent).items():
            own = GlobalLayer.of(server.state.model, layers(server.task, self.global_model)[j])
            if self.merge == "average" or (self.warm_start and not server.state.begun[j]):
                own.average(critical)
            else:  # Eq. 3 to 5
                own.imitate(critical, self.probes, self.server_lr, self.server_steps, server.draw("probe", j))
            server.state.begun[j] = True
        self._choose(server, pairs, sent)

    # ---- knowledge alignment, global to local (Section 3.5) --------------------------------------------------------

    def _choose(self, server: Server, pairs: Mapping[int, Pair], sent: Mapping[int, Mapping[int, Weights]]) -> None:
        """Choose each client's layer and global layer with the largest positive Knowledge Gain Entropy."""
        known = [self._entropy(weights_of(server.state.model, g)) for g in layers(server.task, self.global_model)]
        server.state.targets.fill_(NONE)
        notes = server.notes["layers"] = {}
        for k, pair in pairs.items():
            own = {at: self._entropy(layer) for at, layer in sent[k].items()}
            choices = [(NONE, NONE), *pair.choices(own, self.distribution)]
            gains = [0.0, *(known[j] - own[at] for at, j in choices[1:])]  # Eq. 6
            at, j = choices[gains.index(max(gains))]  # the first maximum: no layer if no gain is positive
            server.state.targets[k] = torch.tensor([at, j, server.t])
            notes[str(k)] = "none" if at == NONE else {**pair.names(at, j), "gain": max(gains)}

    def _entropy(self, layer: Weights) -> float:
        return layerwise.entropy(layer.weight, self.entropy, self.bins, self.tsallis_q)

    def targeted_layer(self, server: Server, client: int) -> Message | None:
        """g_{j*} and the number of the layer that it replaces. None: no gain is positive."""
        at, j, t = server.state.targets[client].tolist()
        if at == NONE or t != server.t:
            return None
        layer = weights_of(server.state.model, layers(server.task, self.global_model)[j])
        return Message({"target": torch.tensor(at, dtype=torch.int32), **pack({j: layer})})

    def receive(self, client: Client, down: Message) -> None:
        pair, at = Pair.of(client.task, client.card, self.global_model), int(down.tensor("target"))
        for j, given in unpack(down, range(len(pair.theirs))).items():
            fitted = pair.project(client.model, at, j, given.to(client.device), self.projection).flat()  # Eq. 7
            client.state.waiting[: len(fitted)] = fitted
        client.state.target.fill_(at)

    def keep(self, client: Client) -> Message:
        """Send an empty answer. The layer waits for the next training, so that both models can be evaluated."""
        return Message({})

    def adapt(self, client: Client, view: str) -> None:
        """theta_{i,l} <- g_{j*}."""
        at = int(client.state.target)
        if at != NONE:
            weights_of(client.model, layers(client.task, client.card.model)[at]).copy_(client.state.waiting)
            client.state.target.fill_(NONE)
