"""What server and clients agree on (Task), and what a client discloses when it joins (Card): no private data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from pluribus import draws
from pluribus.draws import Made
from pluribus.inputs import Input
from pluribus.internal.blame import at
from pluribus.message import Message
from pluribus.models import OwnModel, TwoPartModel, build, has_weights
from pluribus.models.capacity import Capacity, architecture_of, split_name
from pluribus.models.layers import Layer, layers_of
from pluribus.models.meta import without_numbers
from pluribus.models.unseen import Unseen
from pluribus.models.width import Cut, Part
from pluribus.targets import CLASSES, Target


@dataclass(frozen=True)
class Task:
    """What the server and all clients of a federation agree on.

    `width` is K, the width of the features that are sent, or None if every model keeps its own. `rounds` counts all
    rounds of the run; the first `warmup` of them train no model. `public` is the number of public rows by owner, and
    `exams` the number of test rows per domain. Only clients hold these rows, as `client.public` and `client.exams`.
    `classes` is the number of outputs of a model: of classes, of labels, or of numbers to predict, as `target` says.
    `weights` is the source of pretrained backbones. `own` has the models that were given as objects, and `split` names
    the layer where a user's classifier is split.
    """

    classes: int
    input: Input
    width: int | None
    projector: str
    clients: int
    rounds: int
    seed: int
    names: tuple[str, ...] = ()
    public: Mapping[int, int] = field(default_factory=dict)
    exams: Mapping[str, int] = field(default_factory=dict)
    domain_of: Mapping[int, int] = field(default_factory=dict)
    weights: str | None = None
    warmup: int = 0
    own: Mapping[str, OwnModel] = field(default_factory=dict, repr=False)
    split: str | None = None
    target: Target = CLASSES
    metrics: tuple[str, ...] = ("accuracy",)
    """What clients are evaluated by. The first is the headline, which selects rounds."""
    public_labels: bool = True
    """Whether the public rows have labels."""
    weights_of: Mapping[str, str] = field(default_factory=dict)
    """The source of pretrained weights of single models, where it is not `weights`."""
    unseen: Mapping[str, Unseen] = field(default_factory=dict, repr=False)
    """The models that only another machine can build, by name."""
    share_counts: bool = True
    """Whether clients tell how many rows they have. If not, no message may hold such a number."""

    @cached_property
    def _shapes(self) -> dict[str, TwoPartModel]:
        return {}

    @cached_property
    def _cuts(self) -> dict[str, Cut]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_shapes", "_cuts")}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row, as a model gets it."""
        return self.input.shape

    def draw(self, *key: draws.Key) -> torch.Generator:
        """A generator that is the same for the server and all clients, so nothing has to be sent."""
        return draws.generator(self.seed, "task", *key)

    def make(self, key: draws.Key, build: Callable[[], Made]) -> Made:
        """Return `build()`, initialized with the same numbers everywhere, so nothing has to be sent."""
        with draws.seeded(self.seed, key):
            return build()

    def build(self, model: str, *key: draws.Key) -> TwoPartModel:
        """Build a model of the zoo for this task. The key decides its initial weights."""
        with draws.seeded(self.seed, "build", *key):
            return self.construct(model)

    def construct(self, model: str) -> TwoPartModel:
        """Build a model of the zoo with weights from torch's global generator."""
        if model in self.unseen:
            return self.unseen[model].stand_in(model, self.classes)
        architecture, capacity = split_name(model)
        return build(
            self.own.get(architecture, architecture),
            shape=self.input,
            classes=self.classes,
            width=self.width,
            projector=self.projector,
            weights=self._weights(model),
            split=self.split,
            capacity=capacity,
        )

    def has_weights(self, model: str) -> bool:
        """Whether a model starts from pretrained weights."""
        if model in self.unseen:
            return False
        architecture = architecture_of(model)
        return has_weights(self.own.get(architecture, architecture), self._weights(model))

    def _weights(self, model: str) -> str | None:
        return self.weights_of.get(architecture_of(model), self.weights)

    def start(self, model: str, client: int | None = None) -> TwoPartModel:
        """The initial model of a client. Without a client, the one that all clients of an architecture may share."""
        return self.build(model, *self.start_key(model, client))

    def start_key(self, model: str, client: int | None = None) -> tuple[draws.Key, ...]:
        """The key of `build` for the initial model of a client."""
        return "client", model if client is None else client

    def seed_of(self, *key: draws.Key) -> int:
        """The seed of the weights that `build` draws for this key."""
        return draws.number(self.seed, "build", *key)

    def shape_of(self, model: str) -> TwoPartModel:
        """A model on the meta device: all names and shapes, no weights."""
        if model in self.unseen:
            with without_numbers():
                return self.construct(model)  # parts of it may not be looked at, and so not be copied
        return copy.deepcopy(self._shape(model))  # a copy takes a third of the time, and may be changed

    def _shape(self, model: str) -> TwoPartModel:
        """The model that `shape_of` copies."""
        if model not in self._shapes:
            with without_numbers():
                self._shapes[model] = self.build(model)
        return self._shapes[model]

    def head_of(self, model: str) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Feature width of a model, and the shapes of its head's weights."""
        built = self._shape(model)
        return built.width, tuple(tuple(p.shape) for p in built.head.parameters())

    def nbytes(self, model: str) -> int:
        """Size of the weights and buffers of a model in bytes."""
        return sum(value.nbytes for value in self._shape(model).state_dict().values())

    def smallest(self, models: Iterable[str]) -> str:
        """The model with the fewest parameters for this task; the first one if several are equal."""
        return min(models, key=lambda model: sum(p.numel() for p in self._shape(model).parameters()))

    def part_of(self, model: str, first: int = 0) -> Part:
        """Which numbers of the whole architecture a model with a share of its width holds: see `models.width`."""
        if model not in self._cuts:
            self._cuts[model] = Cut(self._shape(architecture_of(model)), self._shape(model), self.input)
        return self._cuts[model].part(first)

    def layers(self, model: str) -> tuple[Layer, ...]:
        """The layers of a model in forward order."""
        return layers_of(self.shape_of(model), self.input)


EQUAL = 1  # samples on the cards of clients that do not tell how many they have


@dataclass(frozen=True)
class Card:
    """What a client discloses when it joins: its model's name, number of training samples and feature width.

    If clients do not tell how many rows they have (`Task.share_counts`), `samples` is 1, so that all weigh the same.
    `enrolled` is the message of `Method.enrol`, if the method has one. `pretrained`: a real site says that its backbone
    has pretrained weights, which the server does not have.
    """

    id: int
    model: str
    samples: int
    width: int
    head: tuple[tuple[int, ...], ...]
    enrolled: Message | None = None
    pretrained: bool = False

    @property
    def architecture(self) -> str:
        """The name of its model without the capacity."""
        return architecture_of(self.model)

    @property
    def capacity(self) -> Capacity | None:
        """How much of the architecture the client has. None: all of it."""
        return split_name(self.model)[1]


class DataFacts(Protocol):
    """What a server knows about its clients' data: numbers, no rows. None: the client does not disclose it."""

    def samples(self, client: int) -> int | None:
        """Size of the client's training set, n_k."""

    def test_samples(self, client: int) -> int | None:
        """Size of the client's test set."""

    def counts(self, client: int) -> Sequence[int] | None:
        """Training samples per class."""


class Untold:
    """Facts about data that clients do not disclose."""

    def samples(self, client: int) -> None:
        return None

    def test_samples(self, client: int) -> None:
        return None

    def counts(self, client: int) -> None:
        return None


class Cards(Mapping[int, Card]):
    """The cards of all clients, made on demand: ten thousand of them cost nothing until they are read."""

    def __init__(
        self,
        task: Task,
        models: Mapping[int, str] | tuple[str, ...],
        data: DataFacts,
        pretrained: Container[int] = (),  # clients that declare it
    ) -> None:
        self._task, self._models, self._pretrained = task, models, pretrained
        self.told: DataFacts = data if task.share_counts else Untold()
        """What the server knows about the clients' data."""
        self._facts: dict[str, tuple[int, tuple[tuple[int, ...], ...]]] = dict(task.unseen)
        self._bytes: dict[str, int] = dict.fromkeys(task.unseen, 0)  # of models that are not here
        self.enrolled: dict[int, Message] = {}

    def __getitem__(self, client: int) -> Card:
        if not 0 <= client < self._task.clients:
            raise KeyError(client)
        model = self._models[client]
        with at(f"client {client}"):
            width, head = self.facts(model)
        samples, enrolled = self.told.samples(client), self.enrolled.get(client)
        return Card(
            client, model, EQUAL if samples is None else samples, width, head, enrolled, client in self._pretrained
        )

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._task.clients))

    def __len__(self) -> int:
        return self._task.clients

    def facts(self, model: str) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Feature width and head shapes of an architecture, computed on the meta device."""
        if model not in self._facts:
            self._facts[model] = self._task.head_of(model)
            self._bytes[model] = self._task.nbytes(model)
        return self._facts[model]

    def nbytes(self, client: int) -> int:
        """Size of the weights of a client's model in bytes."""
        self.facts(self._models[client])
        return self._bytes[self._models[client]]

    def architectures(self) -> dict[str, int]:
        """The architectures, each with the first client that has it."""
        first: dict[str, int] = {}
        for client in range(self._task.clients):
            first.setdefault(self._models[client], client)
        return first

    def firsts(self) -> list[Card]:
        """One card per architecture. The cards of other clients are not made."""
        return [self[client] for client in self.architectures().values()]
