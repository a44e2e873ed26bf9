"""Mistakes in a user's own method are refused when it is found, each with a sentence that has the cure in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from examples.my_method import PrototypePull
from torch import Tensor, nn

import pluribus
import toys
from pluribus.client import Batch, Client
from pluribus.data.federated import Data
from pluribus.errors import UnknownNameError, UserCodeError
from pluribus.experiment import experiment
from pluribus.message import Inbox, Message
from pluribus.method import Exchange, Method, Need, PeerMethod, check_class, find, methods, register
from pluribus.methods.fedgh import FedGH
from pluribus.server import Server
from pluribus.task import Card
from refusals import assert_facts, refused
from terminal import Terminal, python

FROZEN = "@dataclass(frozen=True)"

# ---- hyper-parameters ------------------------------------------------------------------------------------------------


class Undecorated(Method):
    pull: float = 1.0


@dataclass
class Thawed(Method):
    pull: float = 1.0


class Extended(FedGH):
    pull: float = 1.0


class NewDefault(FedGH):
    server_lr = 0.5


@dataclass(frozen=True)
class BelowUndecorated(Undecorated):
    push: float = 1.0


class Constructed(Method):
    def __init__(self, pull: float = 1.0) -> None:
        self.pull = pull


@dataclass(frozen=True)
class NamedLikeAHook(Method):
    loss: str = "cosine"


# ---- class attributes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnnotatedNeeds(Method):
    needs: frozenset[Need] = frozenset({Need.SAME_WIDTH})  # type: ignore[misc]


class AnnotatedViews(Method):
    views: tuple[str, ...] = ("before",)  # type: ignore[misc]


class NeedWithoutS(Method):
    need = frozenset({Need.SAME_WIDTH})


class OneView(Method):
    views = "after"  # type: ignore[assignment]


class NoView(Method):
    views = ()


class NoSuchFamily(Method):
    family = "sub-model"  # type: ignore[assignment]


class NeedsInWords(Method):
    needs = frozenset({"same width"})  # type: ignore[arg-type]


class OneExchange(Method):
    exchanges = Exchange()  # type: ignore[assignment]


class NoSuchWork(Method):
    exchanges = (Exchange(work="train"),)


class EnrolsWithNothing(Method):
    enrols = True


class Teacher(PeerMethod):
    def teach(self, client: Client) -> Message:
        return Message({})


# ---- hooks -----------------------------------------------------------------------------------------------------------


class Aggregat(Method):
    def aggregat(self, server: Server, updates: Mapping[int, Message]) -> None: ...


class BelowFedGH(FedGH):
    def aggregat(self, server: Server, uploads: Mapping[int, Message]) -> None: ...


class LocalUpdate(Method):
    def localUpdate(self, client: Client) -> Message:
        return Message({})


class OnReceive(Method):
    def on_receive(self, client: Client, down: Message) -> None: ...


class Losses(Method):
    def losses(self, client: Client, batch: Batch) -> Tensor: ...


class NoPeer(Method):
    def teach(self, client: Client) -> Message: ...

    def learn(self, client: Client, inbox: Inbox) -> None: ...


class TooFew(Method):
    def aggregate(self, uploads: Mapping[int, Message]) -> None: ...  # type: ignore[override]


class TooMany(Method):
    def loss(self, client: Client, batch: Batch, weight: float) -> Tensor: ...  # type: ignore[override]


class Swapped(Method):
    def download(self, client: int, server: Server) -> Message: ...  # type: ignore[override]


class NoSelf(Method):
    @staticmethod
    def loss(self: Any, client: Client, batch: Batch) -> Tensor: ...  # type: ignore[override]


class WorkWithBatch(Method):
    exchanges = (Exchange(work="train"),)

    def train(self, client: Client, batch: Batch) -> Message: ...


class Async(Method):
    async def local_update(self, client: Client) -> Message: ...  # type: ignore[override]


class Yields(Method):
    def participants(self, task: Any, t: int) -> Any:
        yield 0


class LossModule(Method):
    loss = nn.CrossEntropyLoss()  # type: ignore[assignment]


class LossProperty(Method):
    @property
    def loss(self) -> Any: ...  # type: ignore[override]


MISTAKES: dict[type[Method], tuple[str, ...]] = {
    Undecorated: ("Undecorated.pull", FROZEN),
    Thawed: ("Thawed", "frozen", FROZEN),
    Extended: ("Extended.pull", FROZEN),
    NewDefault: ("NewDefault.server_lr", "server_lr: TYPE", FROZEN),
    BelowUndecorated: ("Undecorated.pull", FROZEN),
    Constructed: ("Constructed.__init__", "pull", FROZEN),
    NamedLikeAHook: ("NamedLikeAHook.loss", "hook", "Rename"),
    AnnotatedNeeds: ("AnnotatedNeeds.needs", "needs = ..."),
    AnnotatedViews: ("AnnotatedViews.views", "views = ..."),
    NeedWithoutS: ("NeedWithoutS.need ", "mean needs?"),
    OneView: ("OneView.views", "('after',)"),
    NoView: ("NoView.views", "('after',)"),
    NoSuchFamily: ("NoSuchFamily.family", "sub-models"),
    NeedsInWords: ("NeedsInWords.needs", "Need.SAME_WIDTH"),
    OneExchange: ("OneExchange.exchanges", "(Exchange(),)"),
    NoSuchWork: ("NoSuchWork.exchanges", "'train'", "(self, client)"),
    EnrolsWithNothing: ("EnrolsWithNothing", "enrol(self, client)"),
    Teacher: ("Teacher", "learn(self, client, inbox)"),
    Aggregat: ("Aggregat.aggregat ", "aggregate(self, server, uploads)"),
    BelowFedGH: ("BelowFedGH.aggregat ", "aggregate(self, server, uploads)"),
    LocalUpdate: ("LocalUpdate.localUpdate", "local_update(self, client)"),
    OnReceive: ("OnReceive.on_receive", "receive(self, client, down)"),
    Losses: ("Losses.losses", "loss(self, client, batch)"),
    NoPeer: ("NoPeer.teach", "PeerMethod"),
    TooFew: ("TooFew.aggregate(self, uploads", "aggregate(self, server, uploads)"),
    TooMany: ("TooMany.loss", "loss(self, client, batch)"),
    Swapped: ("Swapped.download(self, client", "download(self, server, client)"),
    NoSelf: ("NoSelf.loss", "loss(self, client, batch)"),
    WorkWithBatch: ("WorkWithBatch.train", "train(self, client)"),
    Async: ("Async.local_update", "async"),
    Yields: ("Yields.participants", "yield"),
    LossModule: ("LossModule.loss", "CrossEntropyLoss", "loss(self, client, batch)"),
    LossProperty: ("LossProperty.loss", "property", "loss(self, client, batch)"),
}


@pytest.mark.parametrize("cls", MISTAKES, ids=lambda cls: cls.__name__)
def test_a_mistake_is_refused(cls: type[Method]) -> None:
    with refused(UserCodeError, *MISTAKES[cls]):
        find(f"{__name__}.{cls.__name__}")


@pytest.mark.parametrize("method", [Aggregat, Aggregat(), f"{__name__}.Aggregat"], ids=["class", "object", "path"])
def test_nothing_is_written_for_a_refused_method(method: Any, tmp_path: Path) -> None:
    with refused(UserCodeError, "Aggregat.aggregat "):
        pluribus.run(method, out=str(tmp_path / "run"), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_refuses_it_too(terminal: Terminal) -> None:
    terminal.refused("run", "--method", f"{__name__}.Undecorated").check(UserCodeError, "Undecorated.pull", FROZEN)


def test_a_default_of_no_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrototypePull, "defaults", {"rouns": 3})
    with refused(UnknownNameError, "PrototypePull.defaults", "'rouns'", "'rounds'"):
        experiment(PrototypePull)


# ---- what is allowed -------------------------------------------------------------------------------------------------


class Abstract(Method):
    """A base of a user, which adds no field."""

    name: ClassVar[str] = "abstract"

    def merge(self, uploads: Mapping[int, Message]) -> None:
        """Only a subclass names it in its exchanges, and writes it again."""

    def losses(self, client: Client, batch: Batch) -> Tensor:
        """Almost a hook, but it has its use."""
        raise NotImplementedError

    def loss(self, client: Client, batch: Batch, weight: float = 1.0) -> Tensor:
        return weight * self.losses(client, batch)


class Hints:
    """A mixin that says which field it expects."""

    pull: float


@dataclass(frozen=True)
class Allowed(Hints, Abstract):
    """Helpers, other names of parameters, static functions and functions of an exchange."""

    exchanges = (Exchange(work="local_updates", merge="merge"),)

    pull: float = 1.0
    view: str = "a hyper-parameter of this name"

    @staticmethod
    def optimizers(client: Client) -> dict[str, Any]:  # type: ignore[override]
        return {}

    def local_updates(self, client: Client) -> Message:
        return Message({})

    def merge(self, server: Server, sent: Mapping[int, Message]) -> None: ...  # type: ignore[override]

    def aggregation(self, data: Data) -> None:
        """Neither a hook nor used here; it has other parameters than aggregate."""

    def received(self, client: Client, down: Message) -> None:
        """Beside receive, so it is no misspelling."""

    def receive(self, *everything: Any) -> None: ...

    def prepare(self, one: Client) -> None:
        [self.downloaded(one, 0) for _ in range(1)]

    def downloaded(self, server: Any, client: int) -> None: ...

    def schema(self, task: Any, card: Card, /) -> Any: ...


def test_own_helpers_and_bases_are_allowed() -> None:
    assert find(f"{__name__}.Allowed") is Allowed
    assert find(f"{__name__}.Abstract") is Abstract


def test_every_method_of_ours_is_allowed() -> None:
    examples = [value for value in vars(toys).values() if isinstance(value, type) and issubclass(value, Method)]
    for cls in [*methods().values(), PrototypePull, *examples]:
        if cls not in (Method, PeerMethod):
            check_class(cls)


# ---- names that are registered again ---------------------------------------------------------------------------------


def defined_in(module: str, **values: Any) -> type[Method]:
    """A method as a cell or a module defines it."""
    cls = dataclasses.make_dataclass("Mine", [(k, type(v), v) for k, v in values.items()], bases=(Method,), frozen=True)
    cls.__module__ = module
    return cls


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    methods()
    monkeypatch.setattr("pluribus.method._registry", dict(methods()))


@pytest.mark.usefixtures("registry")
def test_a_cell_that_runs_again_replaces_its_method() -> None:
    for pull in (1.0, 2.0):
        register("mine")(defined_in("__main__", pull=pull))
        assert experiment("mine").build_method().pull == pull  # type: ignore[attr-defined]


@pytest.mark.usefixtures("registry")
def test_another_cell_may_take_the_name() -> None:
    register("mine")(defined_in("__main__"))
    renamed = defined_in("__main__")
    renamed.__qualname__ = "Other"
    assert find("mine") is not register("mine")(renamed) is find("mine")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("first", ["fedgh", "mine"])
def test_other_code_may_not(first: str) -> None:
    if first == "mine":
        register(first)(defined_in("my_file"))
    before = find(first)
    with refused(UserCodeError, f"'{first}'", "built in" if first == "fedgh" else "my_file.Mine", "another name"):
        register(first)(defined_in("__main__"))
    assert find(first) is before


def test_a_built_in_name_is_taken_before_it_is_first_used() -> None:
    """Built-in methods are imported late. A user's class must not be there first."""
    program = "import pluribus; pluribus.register('fedgh')(type('Mine', (pluribus.Method,), {}))"
    assert_facts(python("-c", program).err, "'fedgh'", "built in")
