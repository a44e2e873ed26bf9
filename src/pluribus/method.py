"""The contract: what a paper writes. A method is a frozen dataclass of hyper-parameters and a few functions.

A simple method overrides `schema`, `setup`, `download`, `receive`, `local_update` and `aggregate`; see
`methods/fedgh.py`. Nothing in a method knows where its clients run.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.errors import ConflictError, MismatchError, UserCodeError, unknown
from pluribus.internal.blame import at
from pluribus.internal.lookup import imported
from pluribus.message import Inbox, Message, Wire, payload
from pluribus.models import has_weights
from pluribus.optim import Opt, Rule
from pluribus.server import Server
from pluribus.settings import fitted, flag_name
from pluribus.task import Card, Cards, Task


class Need(Enum):
    """What a method asks of the clients; checked against their cards before round 0."""

    SAME_WIDTH = "features of one width"
    SAME_HEAD = "heads of one shape"
    SAME_MODEL = "one model for all"
    PUBLIC_DATA = "public data"
    PRETRAINED = "a pretrained backbone"
    PLAIN_SGD = "plain SGD"


class Exchange(NamedTuple):
    """One barrier: server, sampled clients, server. The names of a method's functions; None leaves a direction out."""

    down: str | None = "download"
    work: str = "local_update"
    merge: str | None = "aggregate"


class Functions(NamedTuple):
    """The functions of one exchange, bound to a method."""

    down: Callable[[Server, int], Message | None] | None
    work: Callable[[Client], Message | None]
    merge: Callable[[Server, Mapping[int, Message]], None] | None


class Sizes(NamedTuple):
    """What the size of a client's messages may depend on besides its model: classes that it holds, classes that anyone
    holds, and the batch size."""

    held: int
    known: int
    batch: int


class Traffic(NamedTuple):
    """Bytes that a client sends and gets in a round."""

    up: float
    down: float


class Method:
    """Base of all methods with a server. Subclasses are frozen dataclasses: their fields are the hyper-parameters."""

    paper: ClassVar[str] = ""
    up: ClassVar[str] = "nothing"
    down: ClassVar[str] = "nothing"
    needs: ClassVar[frozenset[Need]] = frozenset()
    exchanges: ClassVar[tuple[Exchange, ...]] = (Exchange(),)
    enrols: ClassVar[bool] = False
    """Whether clients send `enrol`'s message when they first take part."""
    views: ClassVar[tuple[str, ...]] = ("after",)
    """Which models are evaluated, the headline first: `after` local training, `before` it (with the newest download
    received), or a name of the method's own that `adapt` knows."""
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings that fit the method, where the user gives none. A default never changes the user's data: what
    is in the group `data`, such as `image_size`, `clients` or `test_fraction`, holds only where the user names no
    `data`. Two things always hold: `public_fraction`, for methods that need public data, and the partition
    `auto`, which follows the data. A hyper-parameter of the method's own may stand here too, with a value that suits
    the embedded data and models: it holds only where the user names neither `data` nor `models`."""

    def __post_init__(self) -> None:
        """Refuse hyper-parameters of another type or outside of their range (`settings.setting`)."""
        for name, value in fitted(type(self), vars(self)).items():
            object.__setattr__(self, name, value)

    def settled(self, task: Task, architectures: Iterable[str]) -> Self:
        """The method with hyper-parameters filled in that are not set and depend on the clients' models."""
        return self

    def warmup_rounds(self) -> int:
        """Rounds before the experiment's own, in which no model trains, so nobody is evaluated in them."""
        return 0

    def schema(self, task: Task, card: Card) -> Wire | tuple[Wire, ...]:
        """What may travel: one Wire, or one per exchange. Equal for all clients with one model."""
        return Wire()

    def participants(self, task: Task, t: int) -> Sequence[int] | None:
        """Who takes part, where the method itself decides, as an asynchronous one; None: as the experiment samples."""
        return None

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        """Numbers that depend on the round; steps read them from `client.now`."""
        return {}

    def optimisers(self, client: Client) -> dict[str, Opt]:
        """The client's optimisers by name."""
        return {"model": Opt(client.model)}

    def prepare(self, client: Client) -> None:
        """When a client comes to life: freeze, attach, allocate `client.state`."""

    def enrol(self, client: Client) -> Message:
        """Once, when the client first takes part; the message stays on its card. For methods with `enrols`."""
        raise NotImplementedError

    def setup(self, server: Server) -> None:
        """Once: allocate `server.state`."""

    def download(self, server: Server, client: int) -> Message | None:
        """What the server sends to a client; None: nothing this time. Pure: evaluation and retries call it too."""
        return Message({})

    def receive(self, client: Client, down: Message) -> None:
        """Install what came down. Runs before the work of an exchange, and in evaluation of every view but `after`."""

    def local_update(self, client: Client) -> Message | None:
        """Train, and say what goes up; None: nothing this time."""
        client.fit(self.step)
        return Message({})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """What a step descends: cross-entropy unless the paper says otherwise."""
        return F.cross_entropy(client.model(batch.x), batch.y)

    def step(self, client: Client, batch: Batch) -> Tensor | None:
        """One training step, a pure tensor program; returns the loss to be logged."""
        loss = self.loss(client, batch)
        client.descend(loss)
        return loss

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Learn from the uploads of whoever answered, sorted by client; never empty."""

    def adapt(self, client: Client, view: str) -> None:
        """Before predictions of a view of the method's own; leaves no trace."""

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Scores per class."""
        return client.model(x)  # type: ignore[no-any-return]

    def predict_after(self, client: Client, x: Tensor) -> Tensor:
        """Scores per class in the view `after`: by `predict`, unless that asks for more than the client's own model."""
        return self.predict(client, x)

    def check(self, task: Task, cards: Cards) -> None:
        """Refuse what this method cannot serve, before round 0, beyond `needs`."""

    def warnings(self, task: Task, models: Iterable[str]) -> list[str]:
        """What a person should know before round 0 about these architectures; goes into the run's warnings."""
        return []

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        """Bytes per client and round at most, headers aside: what the schema allows, unless a method knows better."""
        wires, known = self.wires(task, card), {"batch": sizes.batch}
        up = sum(payload(wire.up, sizes.held, known) for wire in wires)
        return Traffic(up, sum(payload(wire.down, sizes.known, known) for wire in wires))

    def wires(self, task: Task, card: Card) -> tuple[Wire, ...]:
        """`schema`, always as one Wire per exchange."""
        wires = self.schema(task, card)
        return wires if isinstance(wires, tuple) else (wires,)

    def functions(self, stage: int) -> Functions:
        """The functions that an exchange names. They are looked up here, so that a subclass may override them."""
        down, work, merge = self.exchanges[stage]
        return Functions(
            down=None if down is None else getattr(self, down),
            work=getattr(self, work),
            merge=None if merge is None else getattr(self, merge),
        )


class Wires:
    """What may travel to and from each client, worked out once per architecture."""

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
        """Student to teachers, among those present. All from all unless the paper says otherwise."""
        return {student: tuple(k for k in present if k != student) for student in present}

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        """What one teaches goes to all of its students."""
        up = super().traffic(task, card, sizes).up
        return Traffic(up, up * len(self.topology(task, 0, tuple(range(task.clients))).get(card.id, ())))

    def teach(self, client: Client) -> Message | None:
        """Local work, then what peers may see; None: no exchange this round."""
        raise NotImplementedError

    def learn(self, client: Client, inbox: Inbox) -> None:
        """Learn from the teachers' messages."""
        raise NotImplementedError


# ---- registry ------------------------------------------------------------------------------------------------------

_registry: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """Make a method known by a name, to the command line, to `pluribus.run` and to the conformance tests."""

    def add(cls: M) -> M:
        known = _registry.get(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):  # equal: a module reloaded
            raise UserCodeError(f"method '{name}' is registered already. Choose another name.")
        _registry[name] = cls
        return cls

    return add


def methods() -> dict[str, type[Method]]:
    """All registered methods by name."""
    import pluribus.methods as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_registry.items()))


def find(name: str) -> type[Method]:
    """The method of this name, or of this dotted path (`package.module.Class`)."""
    known = methods()
    if name in known:
        return known[name]
    if "." not in name:
        raise unknown("method", name, known, "pluribus list methods")
    found = imported(name, "method")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserCodeError(f"'{name}' is not a Method: derive the class from pluribus.Method or pluribus.PeerMethod.")
    return found


def name_of(cls: type[Method]) -> str:
    """The registered name of a method, or its dotted path."""
    for name, known in _registry.items():
        if known is cls:
            return name
    return f"{cls.__module__}.{cls.__qualname__}"


def hyperparameters(method: Method) -> dict[str, Any]:
    """A method's hyper-parameters by name."""
    return dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {}


def decided(given: Method, settled: Method) -> list[str]:
    """A sentence for each hyper-parameter that was not set and that `Method.settled` filled in."""
    before, name = hyperparameters(given), name_of(type(settled))
    found = {key: value for key, value in hyperparameters(settled).items() if value != before[key]}
    return [f"{flag_name(key)} is not set: {name} takes {value}." for key, value in found.items()]


def check_needs(method: Method, task: Task, cards: Cards, rule: Rule) -> None:
    """Compare what a method needs with what the clients have."""
    label = name_of(type(method))
    firsts = cards.firsts()
    one = firsts[0]
    for other in firsts[1:]:
        pair = f"clients {one.id} ({one.model}) and {other.id} ({other.model})"
        if Need.SAME_MODEL in method.needs:
            raise MismatchError(
                f"{label} averages whole models, but {pair} differ. Use one model (--models {one.model}) or a method "
                f"for mixed models, such as fedgh, fedproto or local: pluribus list methods shows all."
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
    if Need.PRETRAINED in method.needs:
        for card in firsts:
            if not has_weights(card.model, task.weights):
                own = "." in card.model  # no library has its weights
                raise MismatchError(
                    f"{label} needs pretrained backbones, but client {card.id} ({card.model}) has random weights. Say "
                    f"where its own come from (--weights {'' if own else 'timm, torchvision, or '}a folder with "
                    f"{card.model}.safetensors)"
                    + (", or set pretrained = True on a builder that loads them itself." if own else ".")
                )
    if Need.PUBLIC_DATA in method.needs and not task.public:
        raise MismatchError(
            f"{label} needs public data: give a share of each client's data with --public-fraction 0.1."
        )
    if Need.PLAIN_SGD in method.needs and (rule.name != "sgd" or rule.momentum):
        raise ConflictError(
            f"{label} takes the clients' progress for a sum of gradients, which it is under plain SGD alone: use "
            f"--optimizer sgd --momentum 0."
        )
    method.check(task, cards)
