"""pFedLA (Ma et al., CVPR 2022): each client gets its own mix of all models, with learned weights per layer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pluribus.client import Client, State
from pluribus.errors import DeviceError, RangeError
from pluribus.message import Message, Wire, schema_of
from pluribus.method import Method, Need, register
from pluribus.methods import _hypernetwork as hypernetwork
from pluribus.methods._hypernetwork import HyperNetwork
from pluribus.ops import sgd_step
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task

MOST_BYTES = 4 * 2**30  # memory of the server for the models and hypernetworks of all clients


@register("pfedla")
@dataclass(frozen=True)
class PFedLA(Method):
    """Mix all models for each client, with weights per layer from a hypernetwork on the server."""

    paper = "Ma et al., CVPR 2022"
    family = "one model"
    up = "the model"
    down = "the client's own mix of all models"
    needs = frozenset({Need.SAME_MODEL})
    views = ("before", "after")  # pFedLA trains the mix
    defenses = ("clip", "krum")  # the server mixes the models of single clients
    defaults = MappingProxyType({"models": "cnn-16"})

    hyper_lr: float = setting(5e-3, above=0, symbol="eta_h")
    """Learning rate of the hypernetworks and their embeddings."""
    keep_local: int = setting(0, at_least=0, symbol="k")
    """Number of layers that stay local: those with the largest weight on the client itself (HeurpFedLA)."""

    def check(self, task: Task, cards: Cards) -> None:
        model = task.shape_of(cards[0].model).state_dict()
        layers = len(_layers(model))
        if self.keep_local > layers:
            raise RangeError(
                f"--keep-local must be from 0 to {layers}, the number of layers of '{cards[0].model}', not "
                f"{self.keep_local}."
            )
        own = sum(value.nbytes for value in model.values()) + hypernetwork.size(layers, task.clients)
        if (needed := task.clients * own) > MOST_BYTES:
            raise DeviceError(
                f"pfedla keeps a model and a hypernetwork of every client on the server. {task.clients} clients with "
                f"'{cards[0].model}' need {needed / 2**30:.1f} GiB; the limit is {MOST_BYTES / 2**30:.0f} GiB. "
                f"Use fewer --clients or a smaller model."
            )

    def schema(self, task: Task, card: Card) -> Wire:
        model = schema_of(task.shape_of(card.model))
        return Wire(down={n: replace(f, optional=self.keep_local > 0) for n, f in model.items()}, up=model)

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        common = client.task.build(client.card.model, "global")  # one initial model for all: local layers need it
        client.model.load_state_dict(common.state_dict())

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(down.part(), strict=False)  # layers that were not sent do not change

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.model)  # mix + Delta: the server knows the mix

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        model = server.task.build(server.cards[0].model, "global").to(server.device)
        clients = len(server.cards)
        parameters, state = dict(model.named_parameters()), server.state
        stacked = {n: v.expand(clients, *v.shape).clone() for n, v in model.state_dict().items()}
        state.weights = {n: v for n, v in stacked.items() if n in parameters}  # theta_1 to theta_N
        state.statistics = {n: v for n, v in stacked.items() if n not in parameters}
        draws = [server.draw("hypernetwork", i) for i in range(clients)]
        layers = len(_layers(stacked))
        nets = (HyperNetwork(i, layers, clients, draw) for i, draw in enumerate(draws))
        state.nets = nn.ModuleList(nets).to(server.device)

    @torch.no_grad()
    def download(self, server: Server, client: int) -> Message:
        alpha = server.state.nets[client]()
        kept = self._local_layers(alpha, client).tolist()
        return Message({n: v for n, (layer, v) in _mix(server.state, alpha, client).items() if not kept[layer]})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, device = server.state, server.device
        trained = {i: {n: v.to(device) for n, v in upload.part().items()} for i, upload in uploads.items()}
        for i, theta in trained.items():
            # d mix / d alpha_j is theta_j, so this is a step along J^T Delta: it lowers 1/2 ||mix - theta_i||^2,
            # divided in each layer by ||Delta||^2
            alpha = state.nets[i]()
            along = self._project_on_delta(state, alpha.detach(), i, theta)
            sgd_step(state.nets[i], -(alpha * along).sum(), self.hyper_lr)
        for name, stack in {**state.weights, **state.statistics}.items():
            for i, theta in trained.items():
                stack[i] = theta[name]
        own = {str(i): float(state.nets[i]()[:, i].detach().mean()) for i in trained}  # alpha_ii, mean over layers
        server.notes |= {"own_weight": sum(own.values()) / len(own), "own_weights": own}

    def _project_on_delta(self, state: State, alpha: Tensor, i: int, theta: Mapping[str, Tensor]) -> Tensor:
        """(layers, clients): <theta_j^l, Delta^l> / ||Delta^l||^2, the projection of each client's layer on Delta."""
        product, length = torch.zeros_like(alpha), alpha.new_zeros(len(alpha), 1)
        for name, (layer, mix) in _mix(state, alpha, i).items():
            if name in state.weights:
                delta = (theta[name] - mix).flatten()
                product[layer] += state.weights[name].flatten(1) @ delta
                length[layer] += delta @ delta
        length[self._local_layers(alpha, i)] = 0  # a layer that was not mixed has no gradient for alpha
        return torch.where(length > 0, product / length.where(length > 0, 1.0), 0.0)

    def _local_layers(self, alpha: Tensor, client: int) -> Tensor:
        """Mask of the layers that stay local: those with the largest weight on the client itself."""
        order = alpha[:, client].argsort(descending=True, stable=True)
        return torch.zeros_like(order, dtype=torch.bool).index_fill(0, order[: self.keep_local], True)


def _layers(names: Iterable[str]) -> dict[str, int]:
    """Number the modules that hold tensors. All tensors of a module are mixed with the same weights."""
    return {layer: number for number, layer in enumerate(dict.fromkeys(name.rpartition(".")[0] for name in names))}


def _mix(state: State, alpha: Tensor, client: int) -> dict[str, tuple[int, Tensor]]:
    """sum_j alpha_ij^l theta_j^l by name, each with its layer l. Integers (counters) are the client's own."""
    stacks = {**state.weights, **state.statistics}
    layers, found = _layers(stacks), {}
    for name, stack in stacks.items():
        layer = layers[name.rpartition(".")[0]]
        found[name] = layer, torch.tensordot(alpha[layer], stack, 1) if stack.is_floating_point() else stack[client]
    return found
