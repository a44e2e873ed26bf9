"""The contract of methods. A method is a frozen dataclass of hyper-parameters and a few functions.

A simple method overrides `schema`, `setup`, `download`, `receive`, `local_update` and `aggregate`; see
`methods/fedgh.py`. A method does not know where its clients run.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_args

from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.errors import ConflictError, MismatchError, UserCodeError, unknown
from pluribus.inputs import KINDS, MANY, Kind
from pluribus.internal.blame import at
from pluribus.internal.defenses import DEFENSES
from pluribus.internal.fields import check_fields
from pluribus.internal.hooks import check_hooks, hooks_of, unused_names
from pluribus.internal.lookup import import_dotted
from pluribus.internal.registry import check_free
from pluribus.internal.views import SERVER_VIEWS
from pluribus.message import NOT_DECLARED, Inbox, Message, Wire, payload
from pluribus.models.capacity import CapacityKind
from pluribus.models.layers import batch_norms
from pluribus.optim import Opt, Rule
from pluribus.server import Server
from pluribus.settings import convert_fields, flag_name
from pluribus.targets import IN_WORDS, TARGETS, TargetKind
from pluribus.task import Card, Cards, Task

TELLS = {
    "statistic": "counts the rows of a client",
    "rows": "has something of each row, so that its size tells how many there are",
    NOT_DECLARED: "does not declare its source, so it may tell how many rows a client has",
}
FORMER_HOOKS = {"optimisers": "optimizers", "settled": "complete"}  # would be ignored otherwise

Family = Literal[
    "baseline",
    "one model",
    "sub-models",
    "layers",
    "second model",
    "knowledge",
    "ensembles",
    "adapters",
    "prompts",
    "own",
]
FAMILIES: dict[Family, str] = {
    "baseline": "clients send nothing",
    "one model": "all clients have one architecture, and share the model or a part of it",
    "sub-models": "clients train parts of one model, cut to their capacity",
    "layers": "models differ, and layers of equal shape are shared",
    "second model": "models differ, and a second, smaller model is shared",
    "knowledge": "models differ, and class means, logits, heads or other small messages are shared",
    "ensembles": "models differ, and the server distills all of them into new ones",
    "adapters": "clients train low-rank adapters of a frozen model",
    "prompts": "clients train prompts for a model",
    "own": "a method of your own that names no family",
}


class Need(Enum):
    """What a method needs from the clients. It is checked against their cards before round 0."""

    SAME_WIDTH = "features of one width"
    SAME_HEAD = "heads of one shape"
    SAME_MODEL = "one model for all"
    SAME_ARCHITECTURE = "one architecture for all"
    PUBLIC_DATA = "public data"
    PUBLIC_LABELS = "labels of public data"
    PUBLIC_AT_SERVER = "public data at the server"
    PRETRAINED = "a pretrained backbone"
    BATCH_NORM = "batch norm"
    PLAIN_SGD = "plain SGD"


class Exchange(NamedTuple):
    """One exchange: download, work, merge. Fields are names of the method's functions; None leaves a direction out."""

    down: str | None = "download"
    work: str = "local_update"
    merge: str | None = "aggregate"


PARAMETERS = {"down": ("server", "client"), "work": ("client",), "merge": ("server", "uploads")}  # of an Exchange


class ServerModel(NamedTuple):
    """A model that belongs to no client: its name, and its tensors by name."""

    model: str
    tensors: Mapping[str, Tensor]


class Functions(NamedTuple):
    """The functions of one exchange, bound to a method."""

    down: Callable[[Server, int], Message | None] | None
    work: Callable[[Client], Message | None]
    merge: Callable[[Server, Mapping[int, Message]], None] | None


class Sizes(NamedTuple):
    """What the size of a client's messages may depend on besides its model."""

    held: int  # classes that the client holds
    known: int  # classes that any client holds
    batch: int


class Traffic(NamedTuple):
    """Bytes that a client uploads and downloads in a round."""

    up: float
    down: float


class Method:
    """Base of all methods with a server. Subclasses are frozen dataclasses whose fields are the hyper-parameters."""

    paper: ClassVar[str] = ""
    family: ClassVar[Family] = "own"
    """Which methods it is like: by what clients share, and whether their models may differ (`FAMILIES`)."""
    up: ClassVar[str] = "nothing"
    down: ClassVar[str] = "nothing"
    needs: ClassVar[frozenset[Need]] = frozenset()
    exchanges: ClassVar[tuple[Exchange, ...]] = (Exchange(),)
    unbounded: ClassVar[str] = ""
    """Why the method cannot run with differential privacy of rows, although its messages have sources that can be
    bounded: a sentence. Empty: it can."""
    capacity: ClassVar[CapacityKind] = "width"
    """What the setting `capacity` cuts: the width of models, their depth, or the rank of their adapters."""
    takes: ClassVar[tuple[Kind, ...]] = KINDS
    """The kinds of rows that the method can work with."""
    targets: ClassVar[tuple[TargetKind, ...]] = ("classes",)
    """What the models may predict: `classes`, several `labels` at once, or `numbers`."""
    enrols: ClassVar[bool] = False
    """Whether a client sends the message of `enrol` when it first takes part."""
    views: ClassVar[tuple[str, ...]] = ("after",)
    """The models that are evaluated, the headline first: `after` local training, `before` it (with the newest download
    received), or a name of the method's own that `adapt` handles. After the headline there may be models of the server:
    `global`, one for all, or `group`, one per architecture (`server_model`)."""
    defenses: ClassVar[tuple[str, ...]] = DEFENSES
    """The defenses against lying clients that suit what is sent. `median` and `trimmed-mean` give all clients the same
    numbers, so they do not suit a server that needs to tell clients apart, and `krum` compares whole messages."""
    defends_itself: ClassVar[bool] = False
    """Whether the method calls `server.defend`, because its uploads can only be compared once they are unpacked."""
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Defaults of settings that suit the method. They never change the user's data: a default in the group `data`, such
    as `image_size`, `clients` or `test_fraction`, holds only if the user names no `data`. There are two exceptions,
    which always hold: `public_fraction`, for methods that need public data, and the partition `auto`, which follows
    the data. A default `capacity` of depth holds only with the method's own default of `models`. A hyper-parameter of
    the method may be listed too, with a value that suits the embedded data and models. It holds only if the user names
    neither `data` nor `models`."""

    def __init_subclass__(cls) -> None:
        for former, now in FORMER_HOOKS.items():
            if former in vars(cls):
                raise UserCodeError(f"{cls.__qualname__}.{former} was renamed to {now}: rename it.")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters with a wrong type or outside of their range (`settings.setting`)."""
        for name, value in convert_fields(type(self), vars(self)).items():
            object.__setattr__(self, name, value)

    def complete(self, task: Task, architectures: Iterable[str]) -> Self:
        """Fill in hyper-parameters that are not set and depend on the clients' models. Returns the complete method."""
        return self

    def warmup_rounds(self) -> int:
        """Number of extra rounds before the experiment's own. No model trains in them, so no client is evaluated."""
        return 0

    def schema(self, task: Task, card: Card) -> Wire | tuple[Wire, ...]:
        """Declare the fields of messages: one Wire, or one per exchange. Equal for all clients with the same model."""
        return Wire()

    def participants(self, task: Task, t: int) -> Sequence[int] | None:
        """Clients of round t, if the method chooses them. None: sample as configured."""
        return None

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        """Numbers that depend on the round. Steps read them from `client.now`."""
        return {}

    def optimizers(self, client: Client) -> dict[str, Opt]:
        """The client's optimizers by name."""
        return {"model": Opt(client.model)}

    def prepare(self, client: Client) -> None:
        """Set up a new client: freeze layers, attach modules, allocate `client.state`."""

    def enrol(self, client: Client) -> Message:
        """Build the message of a client's first participation. It stays on its card. Needed if `enrols` is True."""
        raise NotImplementedError

    def setup(self, server: Server) -> None:
        """Set up the server before the first round: allocate `server.state`."""

    def download(self, server: Server, client: int) -> Message | None:
        """Build the message to a client. None: send nothing this time. Pure: evaluation and retries call it too."""
        return Message({})

    def receive(self, client: Client, down: Message) -> None:
        """Install a download. Runs before the work of an exchange, and in the evaluation of every view but `after`."""

    def local_update(self, client: Client) -> Message | None:
        """Train the client and build its upload. None: send nothing this time."""
        client.fit(self.step)
        return Message({})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """The loss that a training step minimizes. Default: the loss of the task, cross-entropy for classes."""
        return client.task_loss(client.model(batch.x), batch.y)

    def step(self, client: Client, batch: Batch) -> Tensor | None:
        """Run one training step, a pure tensor program. Returns the loss for the log."""
        loss = self.loss(client, batch)
        client.descend(loss)
        return loss

    def private_gradient(self, client: Client, batch: Batch) -> Mapping[str, Tensor]:
        """The fields of source `gradient` that these rows would give, differentiable in the rows.

        `pluribus audit` inverts them. Default: no field can be inverted.
        """
        return {}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Update the server from the uploads of the clients that answered, sorted by client. There is at least one."""

    def server_model(self, server: Server, view: str, client: int) -> ServerModel:
        """The server's model that this client's rows evaluate, in the views `global` and `group`. `predict` uses it as
        `client.model`."""
        raise NotImplementedError

    def adapt(self, client: Client, view: str) -> None:
        """Prepare the client for predictions in a view of the method's own, or of the server, where `client.model` is
        the server's. All changes are undone after them."""

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Scores per class."""
        return client.model(x)  # type: ignore[no-any-return]

    def predict_after(self, client: Client, x: Tensor) -> Tensor:
        """Scores per class in the view `after`. Override it if `predict` needs more than the client's own model."""
        return self.predict(client, x)

    def check(self, task: Task, cards: Cards) -> None:
        """Refuse, before round 0, tasks and clients that the method cannot serve although its `needs` are met."""

    def warnings(self, task: Task, models: Iterable[str]) -> list[str]:
        """Warnings to the user about these architectures, before round 0. They are saved with the run."""
        return []

    def why_unbounded(self) -> str:
        """Why these hyper-parameters cannot run with differential privacy of rows. Default: `unbounded`."""
        return self.unbounded

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        """Most bytes per client and round, without headers. Default: what the schema allows."""
        wires, known = self.wires(task, card), {"batch": sizes.batch}
        up = sum(payload(wire.up, sizes.held, known) for wire in wires)
        return Traffic(up, sum(payload(wire.down, sizes.known, known) for wire in wires))

    def wires(self, task: Task, card: Card) -> tuple[Wire, ...]:
        """The result of `schema`, always as one Wire per exchange."""
        wires = self.schema(task, card)
        return wires if isinstance(wires, tuple) else (wires,)

    def functions(self, stage: int) -> Functions:
        """The functions that an exchange names, looked up by name so that a subclass may override them."""
        found = (None if name is None else getattr(self, name) for name in self.exchanges[stage])
        return Functions(*found)  # type: ignore[arg-type]  # work is never None


class Wires:
    """The schemas of each client, computed once per architecture."""

    def __init__(self, method: Method, task: Task, cards: Mapping[int, Card]) -> None:
        self._method, self._task, self._cards = method, task, cards
        self._known: dict[str, tuple[Wire, ...]] = {}

    def __call__(self, client: int) -> tuple[Wire, ...]:
        """One Wire per exchange."""
        card = self._cards[client]
        if card.model not in self._known:
            with at(f"client {client}"):
                self._known[card.model] = self._method.wires(self._task, card)
        return self._known[card.model]


class PeerMethod(Method):
    """Base of methods without a server: every client teaches, then learns from its teachers."""

    exchanges: ClassVar[tuple[Exchange, ...]] = (Exchange(None, "teach", None), Exchange(None, "learn", None))

    def topology(self, task: Task, t: int, present: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
        """Map each student to its teachers, among the clients present. Default: all others."""
        return {student: tuple(k for k in present if k != student) for student in present}

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        """A client uploads its message once and downloads one from each of its teachers."""
        up = super().traffic(task, card, sizes).up
        return Traffic(up, up * len(self.topology(task, 0, tuple(range(task.clients))).get(card.id, ())))

    def teach(self, client: Client) -> Message | None:
        """Train the client and build the message to its students. None: send nothing this round."""
        raise NotImplementedError

    def learn(self, client: Client, inbox: Inbox) -> None:
        """Learn from the teachers' messages."""
        raise NotImplementedError


# ---- registry ------------------------------------------------------------------------------------------------------

_registry: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """Register a method by a name. A class that is defined again, as in a cell of a notebook, replaces itself."""

    def add(cls: M) -> M:
        known = _registry if cls.__module__.startswith("pluribus.") else methods()  # the built-in names come first
        check_free("method", name, known.get(name), cls)
        _registry[name] = cls
        return cls

    return add


def methods() -> dict[str, type[Method]]:
    """All registered methods by name."""
    _import_built_in()
    return dict(sorted(_registry.items()))


@cache
def _import_built_in() -> None:
    """Once: a list of the folder for each name that is looked up takes longer than the lookup."""
    import pluribus.methods as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def find(name: str) -> type[Method]:
    """Find a method by its name or its dotted path (`package.module.Class`)."""
    known = methods()
    if name in known:
        check_class(known[name])
        return known[name]
    if "." not in name:
        raise unknown("method", name, known, "pluribus list methods")
    found = import_dotted(name, "method")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserCodeError(f"'{name}' is not a Method: derive the class from pluribus.Method or pluribus.PeerMethod.")
    check_class(found)
    return found


_checked = set[type[Method]]()


def check_class(cls: type[Method]) -> None:
    """Refuse a class with a mistake that would otherwise be ignored, or would fail in the middle of a run."""
    if cls in _checked:
        return
    base = PeerMethod if issubclass(cls, PeerMethod) else Method
    check_fields(cls, base)
    _check_attributes(cls)
    hooks = _functions_of_exchanges(cls) | hooks_of(base)
    check_hooks(cls, base, hooks)
    for owner, name, _ in unused_names(cls, base):
        if name in hooks_of(PeerMethod) and name not in hooks:
            raise UserCodeError(f"{owner.__name__}.{name} is never called. Derive the class from pluribus.PeerMethod.")
    serves = any(view in SERVER_VIEWS for view in cls.views)
    wanted = {"enrol": cls.enrols, "teach": base is PeerMethod, "learn": base is PeerMethod, "server_model": serves}
    for name in (name for name, needed in wanted.items() if needed):
        if getattr(cls, name) is getattr(base, name):
            raise UserCodeError(f"{cls.__name__} has no function {name}(self, {', '.join(hooks[name])}). Write it.")
    _checked.add(cls)


def _check_attributes(cls: type[Method]) -> None:
    """Refuse a class attribute of another type, such as a text in place of a tuple of texts."""
    fits = {
        "paper": (isinstance(cls.paper, str), "text"),
        "family": (cls.family in get_args(Family), f"one of {', '.join(FAMILIES)}"),
        "up": (isinstance(cls.up, str), "text"),
        "down": (isinstance(cls.down, str), "text"),
        "takes": (
            _holds(cls.takes, tuple, str) and {*cls.takes} <= {*KINDS},
            f"a tuple with some of {', '.join(KINDS)}",
        ),
        "targets": (
            _holds(cls.targets, tuple, str) and {*cls.targets} <= {*TARGETS},
            f"a tuple with some of {', '.join(TARGETS)}",
        ),
        "unbounded": (isinstance(cls.unbounded, str), "text"),
        "enrols": (isinstance(cls.enrols, bool), "True or False"),
        "defenses": (
            _holds(cls.defenses, tuple, str) and {*cls.defenses} <= {*DEFENSES},
            f"a tuple with some of {', '.join(DEFENSES)}",
        ),
        "defends_itself": (isinstance(cls.defends_itself, bool), "True or False"),
        "defaults": (isinstance(cls.defaults, Mapping), "a dict of settings"),
        "needs": (_holds(cls.needs, Set, Need), "a set of needs, such as frozenset({Need.SAME_WIDTH})"),
        "views": (
            cls.views and _holds(cls.views, tuple, str) and cls.views[0] not in SERVER_VIEWS,
            "a tuple of names, such as ('after',), of which the first is a model of clients",
        ),
        "exchanges": (cls.exchanges and _holds(cls.exchanges, tuple, Exchange), "a tuple, such as (Exchange(),)"),
    }
    for name, (fitting, wanted) in fits.items():
        if not fitting:
            raise UserCodeError(f"{cls.__name__}.{name} must be {wanted}, not {getattr(cls, name)!r}.")


def _is_some_of(values: object, known: tuple[str, ...]) -> bool:
    return isinstance(values, tuple) and bool(values) and set(values) <= set(known)


def _holds(values: object, kind: Any, item: type) -> bool:
    return isinstance(values, kind) and all(isinstance(one, item) for one in values)


def _functions_of_exchanges(cls: type[Method]) -> dict[str, tuple[str, ...]]:
    """The functions that the exchanges name, with their parameters. A function that does not exist is refused."""
    found = {}
    for exchange in cls.exchanges:
        for way, parameters in PARAMETERS.items():
            name = getattr(exchange, way)
            if name is None and way != "work":
                continue
            if not callable(getattr(cls, str(name), None)):
                raise UserCodeError(
                    f"{cls.__name__}.exchanges names {name!r}, but {cls.__name__} has no such function. Write "
                    f"{way}={name!r} as a function of ({', '.join(('self', *parameters))}), or correct the name."
                )
            found[name] = parameters
    return found


def takes_one_model(cls: type[Method]) -> bool:
    """Whether all clients of a method must have one architecture."""
    return bool(cls.needs & {Need.SAME_MODEL, Need.SAME_ARCHITECTURE})


def name_of(cls: type[Method]) -> str:
    """The registered name of a method, or its dotted path."""
    dotted = f"{cls.__module__}.{cls.__qualname__}"
    return next((name for name, known in _registry.items() if known is cls), dotted)


def hyperparameters(method: Method) -> dict[str, Any]:
    """A method's hyper-parameters by name."""
    return dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {}


def describe_completed(given: Method, settled: Method) -> list[str]:
    """A note for each hyper-parameter that was not set and that `Method.complete` filled in."""
    before, name = hyperparameters(given), name_of(type(settled))
    found = {key: value for key, value in hyperparameters(settled).items() if value != before[key]}
    return [f"{flag_name(key)} is not set: {name} uses {value}." for key, value in found.items()]


def check_needs(method: Method, task: Task, cards: Cards, rule: Rule) -> None:
    """Refuse clients that do not have what a method needs."""
    label = name_of(type(method))
    if task.input.kind not in method.takes:
        kinds = " and ".join(MANY[kind] for kind in method.takes)
        raise MismatchError(
            f"{label} works with {kinds}, but the data are {MANY[task.input.kind]}. Use another method, such as fedgh, "
            f"fedproto or local."
        )
    if task.target.kind not in method.targets:
        kind, takes = task.target.kind, task.input.kind
        able = ", ".join(name for name, cls in methods().items() if kind in cls.targets and takes in cls.takes)
        raise MismatchError(
            f"{label} needs data with {' or '.join(IN_WORDS[kind] for kind in method.targets)}, but here "
            f"{IN_WORDS[task.target.kind]} are predicted. Use one of {able}."
        )
    one, *others = cards.firsts()
    for other in others:
        pair = f"clients {one.id} ({one.model}) and {other.id} ({other.model})"
        if Need.SAME_MODEL in method.needs:
            raise MismatchError(
                f"{label} averages whole models, but {pair} differ. Use one model (--models {one.model}) or a method "
                f"for mixed models, such as fedgh, fedproto or local: pluribus list methods shows all."
            )
        if Need.SAME_ARCHITECTURE in method.needs and one.architecture != other.architecture:
            raise MismatchError(
                f"{label} cuts one architecture to the capacity of each client, but {pair} differ. Use one model "
                f"(--models {one.architecture}), and --capacity for smaller clients."
            )
        if Need.SAME_WIDTH in method.needs and one.width != other.width:
            raise MismatchError(
                f"{label} needs features of one width, but {pair} have widths {one.width} and {other.width}. "
                f"Bring them to one width, for example --projector pool --width {min(one.width, other.width)}."
            )
        if Need.SAME_HEAD in method.needs and one.head != other.head:
            raise MismatchError(
                f"{label} shares the head, but the heads of {pair} differ in shape. "
                f"Use models with a linear head of one width, or a method that does not share heads."
            )
    for card in (one, *others):
        if Need.PRETRAINED in method.needs and not (card.pretrained or task.has_weights(card.model)):
            own = "." in card.architecture  # no library offers its weights
            raise MismatchError(
                f"{label} needs pretrained backbones, but client {card.id} ({card.model}) has random weights. Use "
                f"--weights with {'' if own else 'timm, torchvision, or '}a folder that has "
                f"{card.architecture}.safetensors"
                f"{', or set pretrained = True on a builder that loads them itself' if own else ''}."
            )
        if Need.BATCH_NORM in method.needs and not batch_norms(task.shape_of(card.model)):
            raise MismatchError(
                f"{label} needs a model with batch norm, but {card.model} has none. Use one, such as --models "
                f"cnn-16-32 for small images, or another method, such as fedavg."
            )
    if {Need.PUBLIC_DATA, Need.PUBLIC_AT_SERVER} & method.needs and not task.public:
        raise MismatchError(
            f"{label} needs public data: give a share of each client's data with --public-fraction 0.1, or other data "
            f"with --public-data."
        )
    if Need.PUBLIC_LABELS in method.needs and not task.public_labels:
        raise MismatchError(
            f"{label} trains on the labels of public rows, but those of --public-data are other classes than those of "
            f"--data. Use public data with the same classes, or a method that needs no labels, such as fedmd."
        )
    if Need.PLAIN_SGD in method.needs and (rule.name != "sgd" or rule.momentum):
        raise ConflictError(
            f"{label} treats the clients' progress as a sum of gradients, which holds for plain SGD only: use "
            f"--optimizer sgd --momentum 0."
        )
    if Need.PLAIN_SGD in method.needs and rule.clip_norm is not None:
        raise ConflictError(
            f"{label} treats the clients' progress as a sum of gradients, but clipped steps are shorter: leave out "
            f"--clip-norm."
        )
    method.check(task, cards)
    check_counts(method, task, cards.firsts())


def note_weights(method: Method, task: Task) -> list[str]:
    """A note for a method that would weigh clients by their rows, if clients do not tell how many they have."""
    if task.share_counts or hyperparameters(method).get("weighting") != "samples":
        return []
    return [
        f"{name_of(type(method))}: no client tells how many rows it has, so --weighting samples weighs all the same."
    ]


def check_counts(method: Method, task: Task, cards: Iterable[Card]) -> None:
    """Where clients do not tell how many rows they have, refuse a message that would: by a count, or row by row."""
    if task.share_counts:
        return
    for wire in (wire for card in cards for wire in method.wires(task, card)):
        for name, declared in {**wire.once, **wire.up}.items():
            counts = declared.source == "statistic" and not declared.dtype.is_floating_point
            if counts or declared.source in ("rows", None):
                raise MismatchError(
                    f"{name_of(type(method))} cannot run with --no-share-counts: '{name}' "
                    f"{TELLS[declared.source or NOT_DECLARED]}. Use another method, such as fedgh, or leave out "
                    f"--no-share-counts."
                )
