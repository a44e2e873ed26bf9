"""pFedLA (Ma et al., CVPR 2022): every client gets its own mix of all models, layer by layer, by learnt weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pluribus.client import Client, State
from pluribus.errors import DeviceError, RangeError
from pluribus.message import Message, Wire, schema_of
from pluribus.method import Method, Need, register
from pluribus.ops import sgd_step
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Task

WIDTH, DEPTH = 100, 3  # of a hypernetwork: its embedding and hidden layers, and how many of these
MOST_BYTES = 4 * 2**30  # that the server may keep: a model and a hypernetwork of every client


class HyperNetwork(nn.Module):
    """From a client's embedding v to alpha: for each layer of its model a weight for each client, summing to 1."""

    def __init__(self, client: int, layers: int, clients: int, generator: torch.Generator) -> None:
        super().__init__()
        self.client = client
        self.embedding = nn.Parameter(torch.randn(WIDTH, generator=generator))
        # He's scale: numbers stay of order one through all layers with ReLU, so that a step can reach the scores
        self.hidden = nn.Parameter(torch.randn(DEPTH, WIDTH, WIDTH, generator=generator) * (2 / WIDTH) ** 0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(DEPTH, WIDTH))
        # scores begin at about 1, the bias: alpha begins near 1 / N
        self.weight = nn.Parameter((torch.rand(layers, clients, WIDTH, generator=generator) * 2 - 1) / WIDTH)
        self.bias = nn.Parameter(torch.ones(layers, clients))

    def scores(self) -> Tensor:
        """(layers, clients): what alpha is in proportion to."""
        x: Tensor = self.embedding
        for weight, bias in zip(self.hidden, self.hidden_bias, strict=True):
            x = (weight @ x + bias).relu()
        return (self.weight @ x + self.bias).relu()

    def forward(self) -> Tensor:
        """alpha (layers, clients). A layer without any weight is the client's own."""
        scores = self.scores()
        total = scores.sum(1, keepdim=True)
        own = torch.zeros_like(scores)
        own[:, self.client] = 1
        return torch.where(total > 0, scores / total.where(total > 0, 1.0), own)


@register("pfedla")
@dataclass(frozen=True)
class PFedLA(Method):
    """A mix of all models for each client, with weights per layer from a hypernetwork on the server."""

    paper = "Ma et al., CVPR 2022"
    up = "the model"
    down = "the client's own mix of all models"
    needs = frozenset({Need.SAME_MODEL})
    views = ("before", "after")  # the mix is what pFedLA learns to make good
    defaults = MappingProxyType({"models": "cnn-16"})

    hyper_lr: float = setting(5e-3, above=0, symbol="eta_h")
    """Learning rate of the hypernetworks and their embeddings."""
    keep_local: int = setting(0, at_least=0, symbol="k")
    """Layers with the largest weight on the client itself that stay local and are not sent down (HeurpFedLA)."""

    def schema(self, task: Task, card: Card) -> Wire:
        model = schema_of(task.shape_of(card.model))
        return Wire(down={n: replace(f, optional=self.keep_local > 0) for n, f in model.items()}, up=model)

    def prepare(self, client: Client) -> None:
        common = client.task.build(client.card.model, "global")  # one initial model for all: layers kept local need it
        client.model.load_state_dict(common.state_dict())

    def setup(self, server: Server) -> None:
        model, clients = server.task.build(server.cards[0].model, "global"), len(server.cards)
        server.state.weights, server.state.statistics = State(), State()  # theta_1 to theta_N, stacked
        learnt = dict(model.named_parameters())
        for name, value in model.state_dict().items():
            part = server.state.weights if name in learnt else server.state.statistics
            setattr(part, name.replace(".", "/"), value.expand(clients, *value.shape).clone())
        layers = len(_layers(server.state))
        server.state.nets = nn.ModuleList(
            HyperNetwork(i, layers, clients, server.draw("hypernetwork", i)) for i in range(clients)
        )

    @torch.no_grad()
    def download(self, server: Server, client: int) -> Message:
        alpha = server.state.nets[client]()
        kept = self._kept(alpha, client)
        mix = _mix(server.state, alpha, client)
        return Message({n.replace("/", "."): v for n, (layer, v) in mix.items() if not kept[layer]})

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(down.part(), strict=False)  # layers that did not come stay as they are

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.model)  # mix + Delta: the server knows the mix

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, weights = server.state, dict(server.state.weights.named_buffers())
        trained = {i: {n.replace(".", "/"): v for n, v in upload.part().items()} for i, upload in uploads.items()}
        for i, theta in trained.items():
            net: HyperNetwork = state.nets[i]
            alpha = net()
            with torch.no_grad():
                towards, length = torch.zeros_like(alpha), alpha.new_zeros(len(alpha), 1)
                for name, (layer, mix) in _mix(state, alpha, i).items():
                    if name in weights:
                        delta = (theta[name] - mix).flatten()
                        towards[layer] += weights[name].flatten(1) @ delta  # <theta_j^l, Delta^l>
                        length[layer] += delta @ delta
                length[self._kept(alpha, i)] = 0  # a layer that was not mixed says nothing about alpha
                towards = torch.where(length > 0, towards / length.where(length > 0, 1.0), 0.0)
            # d mix / d alpha_j is theta_j, so this is a step along J^T Delta: down 1/2 ||mix - theta_i||^2, in each
            # layer as a share of ||Delta||^2
            sgd_step(net, -(alpha * towards).sum(), self.hyper_lr)
        for part in (state.weights, state.statistics):
            for name, stored in part.named_buffers():
                for i, theta in trained.items():
                    stored[i] = theta[name]
        own = {str(i): float(state.nets[i]()[:, i].detach().mean()) for i in trained}  # alpha_ii, mean over layers
        server.notes |= {"own_weight": sum(own.values()) / len(own), "own_weights": own}

    def check(self, task: Task, cards: Mapping[int, Card]) -> None:
        model = task.shape_of(cards[0].model).state_dict()
        layers = len({name.rpartition(".")[0] for name in model})
        if self.keep_local > layers:
            raise RangeError(
                f"--keep-local must be from 0 to {layers}, the layers of '{cards[0].model}', not {self.keep_local}."
            )
        hypernetwork = 4 * (WIDTH + DEPTH * (WIDTH + 1) * WIDTH + layers * (WIDTH + 1) * task.clients)
        needed = task.clients * (sum(value.nbytes for value in model.values()) + hypernetwork)
        if needed > MOST_BYTES:
            raise DeviceError(
                f"pfedla keeps a model and a hypernetwork of every client on the server, and {task.clients} of "
                f"'{cards[0].model}' would take {needed / 2**30:.1f} GiB, above {MOST_BYTES / 2**30:.0f}. "
                f"Use fewer --clients or a smaller model."
            )

    def _kept(self, alpha: Tensor, client: int) -> Tensor:
        """Which layers stay local: those that lean on the client itself most."""
        order = alpha[:, client].argsort(descending=True, stable=True)
        return torch.zeros(len(alpha), dtype=torch.bool).index_fill(0, order[: self.keep_local], True)


def _layers(state: State) -> dict[str, int]:
    """Modules that have tensors of their own, numbered: what is in one is mixed alike."""
    names = [name for part in (state.weights, state.statistics) for name, _ in part.named_buffers()]
    return {layer: number for number, layer in enumerate(dict.fromkeys(name.rpartition("/")[0] for name in names))}


def _mix(state: State, alpha: Tensor, client: int) -> dict[str, tuple[int, Tensor]]:
    """sum_j alpha_ij^l theta_j^l by name, each with its layer l. Whole numbers (counters) are the client's own."""
    layers = _layers(state)
    found = {}
    for part in (state.weights, state.statistics):
        for name, stack in part.named_buffers():
            layer = layers[name.rpartition("/")[0]]
            mixed = torch.tensordot(alpha[layer], stack, 1) if stack.is_floating_point() else stack[client]
            found[name] = layer, mixed
    return found
