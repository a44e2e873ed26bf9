"""Tools of the conformance tests: steps checked for what a GPU can capture, and runs compared and taken apart.

A step must run on fake tensors, which have shapes but no numbers: whatever looks at a number stops. And a recording of
its tensor operations, made once and played back on other batches, must leave the same bits as the step itself: whatever
Python decides or computes on the side is frozen into the recording and shows.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from conftest import make_host
from pluribus import draws
from pluribus.assembly import Assembly
from pluribus.client import Batch, Client, Step
from pluribus.data.federated import Data
from pluribus.engines.observe import observe_step
from pluribus.federation import Federation
from pluribus.internal.ledger import Ledger
from pluribus.internal.steps import Descent
from pluribus.message import Inbox, Kept, Message, Rows, Value, decode, encode
from pluribus.method import Method, PeerMethod
from pluribus.optim import Optimizer, Rule
from pluribus.request import Enrol, Learn, Teach, Work
from pluribus.result import Result
from pluribus.server import Server
from pluribus.storage.checkpoint import Checkpoint

REPLAYS = 6
# Adam counts its steps on the host unless an engine says otherwise, so steps are checked under SGD, with momentum.
RULE = Rule("sgd", lr=0.05, momentum=0.9)


class StepError(AssertionError):
    """A step that could not be captured."""


def check_step(method: Method, client: Client, step: Step, data: Data, size: int) -> None:
    """Hold a step of a client, as it stands, to being a pure tensor program. Leaves no trace in the client."""
    optimizers, client.optimizers = client.optimizers, _optimizers(method, client)
    try:
        with _unchanged(client):
            batches = _some_batches(data, min(size, len(data)))
            _runs_on_fake_tensors(method, client, step, batches[0], len(data))
            _shows_no_obstacle(client, step, batches[0], len(data))
            _replays(method, client, step, batches, len(data))
    finally:
        client.optimizers = optimizers


def _optimizers(method: Method, client: Client) -> dict[str, Optimizer]:
    return {name: Optimizer(replace(opt, rule=RULE), RULE) for name, opt in method.optimizers(client).items()}


def _some_batches(data: Data, size: int) -> list[Batch]:
    batches = []
    for number in range(REPLAYS):
        positions = torch.randperm(len(data), generator=draws.generator("batch", number))[:size]
        x, y = data.take(positions)
        batches.append(Batch(x, y, positions, size))
    return batches


# ---- fake tensors --------------------------------------------------------------------------------------------------


def _runs_on_fake_tensors(method: Method, client: Client, step: Step, batch: Batch, samples: int) -> None:
    # What belongs to no client, such as a public set, may stay real: it is converted when it is used.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = copy.copy(client)
    fake.model, fake.state = _fake_module(client.model, mode), _fake_module(client.state, mode)
    fake.got, fake.now = Kept(_fake(client.got, mode)), _fake(client.now, mode)
    if client.inbox is not None:
        fake.inbox = Inbox(client.inbox.ids, _fake(client.inbox.got, mode))
    images, labels, positions = (mode.from_tensor(value) for value in batch[:3])
    try:
        with mode, fake._training(samples):
            fake.optimizers = _optimizers(method, fake)
            step(fake, Batch(images, labels, positions, batch.n))
    except Exception as error:
        raise StepError(f"{_name(step)} cannot run on tensors without numbers: {error}") from error


def _fake_module(module: nn.Module, mode: FakeTensorMode) -> Any:
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for tensors in (part._parameters, part._buffers):
            tensors.update({name: mode.from_tensor(value) for name, value in tensors.items() if value is not None})
    return twin


def _fake(values: Mapping[str, Any], mode: FakeTensorMode) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, Rows):
            return Rows(mode.from_tensor(value.value), mode.from_tensor(value.held))
        return mode.from_tensor(value)

    return {name: one(value) for name, value in values.items()}


# ---- under observation ---------------------------------------------------------------------------------------------


def _shows_no_obstacle(client: Client, step: Step, batch: Batch, samples: int) -> None:
    """What a GPU's engine looks for before it records a step."""
    with _unchanged(client), client._training(samples), observe_step(client) as watch:
        step(client, batch)
    if watch.reason:
        raise StepError(f"{_name(step)} would not be captured: {watch.reason}.")


# ---- record and replay ---------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One tensor operation: what it was given and what it gave, and how to call it again."""

    do: Callable[..., Any]
    given: list[Any]
    form: TreeSpec
    made: list[Any]


class Recording(TorchDispatchMode):
    """The tensor operations of a program, in their order. Called with other inputs it does the same to those.

    What torch.fx records is a graph, and that takes most of the time of a check.
    """

    def __init__(self, program: Callable[..., Any], *inputs: Tensor) -> None:
        super().__init__()
        self._inputs = inputs
        self._operations: list[Operation] = []  # they keep their tensors alive, so that no two have the same id
        with self:
            self._result = program(*inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append(Operation(func, *tree_flatten((args, kwargs or {})), tree_leaves(result)))
        return result

    def __call__(self, *inputs: Tensor) -> Any:
        now = {id(then): value for then, value in zip(self._inputs, inputs, strict=True)}
        for operation in self._operations:
            args, kwargs = tree_unflatten([now.get(id(then), then) for then in operation.given], operation.form)
            made = zip(operation.made, tree_leaves(operation.do(*args, **kwargs)), strict=True)
            now |= {id(then): value for then, value in made if isinstance(then, Tensor)}
        return now.get(id(self._result), self._result)


def _replays(method: Method, client: Client, step: Step, batches: Sequence[Batch], samples: int) -> None:
    size = batches[0].n

    def bare(x: Tensor, y: Tensor, i: Tensor) -> Any:
        return step(client, Batch(x, y, i, size))

    with client._training(samples):
        try:
            with _unchanged(client):
                recorded = Recording(bare, *batches[0][:3])
        except Exception as error:
            raise StepError(f"{_name(step)} cannot be recorded: {error}") from error
        with torch.no_grad():
            replayed = _outcome(method, client, recorded, batches)
        stepped = _outcome(method, client, bare, batches)
    differ = [name for name in stepped if not same_bits(stepped[name], replayed[name])]
    if differ:
        raise StepError(f"{_name(step)} does something besides tensor operations: a replay differs in {differ}.")


def _outcome(
    method: Method, client: Client, run: Callable[..., Any], batches: Sequence[Batch]
) -> dict[str, Tensor | None]:
    """All tensors and losses after some batches, between which time passes."""
    found: dict[str, Tensor | None] = {}
    with _unchanged(client), draws.seeded("dropout"):
        for number, batch in enumerate(batches):
            client._round = number
            for name, value in method.schedule(number, len(batches)).items():
                client.now[name].fill_(value)
            loss = run(*batch[:3])
            found[f"loss {number}"] = None if loss is None else loss.detach().clone()
        return found | {name: value.clone() for name, value in everything(client).items()}


def everything(client: Client) -> dict[str, Tensor]:
    """All tensors of a client, live, also those that need not be kept between rounds."""
    slots = {
        f"slots.{key}.{name}": value
        for key, optimizer in client.optimizers.items()
        for name, value in optimizer.slots().items()
    }
    return client.tensors() | slots | {f"now.{name}": value for name, value in client.now.items()}


@contextmanager
def _unchanged(client: Client) -> Iterator[None]:
    live, t = everything(client), client._round
    saved = {name: value.detach().clone() for name, value in live.items()}
    try:
        yield
    finally:
        client._round = t
        with torch.no_grad():
            for name, value in live.items():
                value.copy_(saved[name])


def bits(value: Tensor) -> bytes:
    return value.detach().contiguous().numpy().tobytes()


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal in shape, dtype and every bit: -0 is not 0, and NaN is NaN."""
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bits(one) == bits(other)


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors are not the same to the bit, or that only one has."""
    return [n for n in one.keys() | other.keys() if n not in one or n not in other or not same_bits(one[n], other[n])]


def _name(step: Step) -> str:
    return getattr(step, "__qualname__", repr(step))


@contextmanager
def checked_steps(method: Method) -> Iterator[list[str]]:
    """Check every step where it is used: on client 0 up to round 0, on client 1 in round 1, when messages came down.

    Gives the names of the checked steps.
    """
    checked: list[str] = []
    seen: set[tuple[Any, ...]] = set()
    fit = Client.fit

    def watched(client: Client, step: Step, on: str | Data = "train", **how: Any) -> int:
        key = getattr(step, "__func__", step), how.get("opts"), client.card.id
        if client.card.id == max(0, client.t) and key not in seen:
            seen.add(key)
            data = client.data[on] if isinstance(on, str) else on
            taken = Descent(step, how["opts"]) if how.get("opts") else step
            check_step(method, client, taken, data, how.get("batch") or client.local.batch)
            checked.append(_name(step))
        return fit(client, step, on, **how)

    Client.fit = watched  # type: ignore[method-assign, assignment]
    try:
        yield checked
    finally:
        Client.fit = fit  # type: ignore[method-assign]


# ---- memory ----------------------------------------------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, as long as they live; `peak` is the most at one time."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes = {value.untyped_storage()._cdata: 0 for value in known}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, which: int) -> None:
        self._now -= self._sizes.pop(which)


# ---- runs, compared and taken apart ----------------------------------------------------------------------------------


def numbers(result: Result) -> list[dict[str, Any]]:
    """The history without the clock."""
    return [timeless(record) for record in result.history]


def timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    """A round's record without what depends on the machine's speed."""
    return {name: value for name, value in record.items() if name not in ("seconds", "spans")}


def kept(result: Result) -> dict[str, Tensor]:
    """All tensors of the server and the clients, as the last checkpoint has them."""
    saved = Checkpoint(result.folder / "state")
    found = {f"server {name}": value for name, value in saved.server().items()}
    for k in range(len(result.clients)):
        found |= {f"client {k} {name}": value for name, value in (saved.client(k) or {}).items()}
    return found


def selected(result: Result) -> dict[str, Tensor]:
    """What clients were measured with in the rounds that validation selects."""
    saved = Checkpoint(result.folder / "state")
    chosen = {k: saved.selected(k, one.selected_round) or {} for k, one in result.per_client().items()}
    return {f"client {k} {name}": value for k, state in chosen.items() for name, value in state.items()}


def tested(result: Result) -> dict[str, Tensor]:
    """What clients predicted for their test rows in those rounds."""
    saved, chosen = Checkpoint(result.folder / "state"), result.per_client().items()
    return {f"client {k} {n}": v for k, one in chosen for n, v in saved.tested(k, one.selected_round).items()}


def assert_same(one: Result, other: Result) -> None:
    """Equal metrics, traffic, weights and predictions, to the bit."""
    assert numbers(one) == numbers(other)
    assert list(one.ledger.entries()) == list(other.ledger.entries())
    assert differing(kept(one), kept(other)) == []
    assert differing(selected(one), selected(other)) == []
    assert selected(one)
    assert differing(tested(one), tested(other)) == []
    assert tested(one)


class StoppedError(Exception):
    """The run was stopped on purpose."""


class StopAfter:
    """An observer that stops a run once a round is saved."""

    def __init__(self, t: int) -> None:
        self.t = t

    def start(self, federation: Federation) -> None: ...

    def round(self, record: dict[str, Any], ledger: Ledger) -> None:
        if record["round"] == self.t:
            raise StoppedError

    def finish(self, result: Result) -> None: ...


class Read(Message):
    """A message that notes which of its fields are looked at."""

    def __init__(self, message: Message, where: Any, read: set[tuple[Any, str]]) -> None:
        super().__init__(message)
        self._where, self._read = where, read

    def __getitem__(self, name: str) -> Value:
        self._read.add((self._where, name))
        return super().__getitem__(name)

    def tensor(self, name: str) -> Tensor:
        self._read.add((self._where, name))
        return super().tensor(name)

    def rows(self, name: str) -> Rows:
        self._read.add((self._where, name))
        return super().rows(name)

    def part(self, prefix: str = "") -> dict[str, Tensor]:
        found = super().part(prefix)
        seen = {id(value) for value in found.values()}
        self._read.update((self._where, name) for name, value in self._fields.items() if id(value) in seen)
        return found


def with_other(message: Message, name: str) -> Message:
    """The same message with other numbers in one field, wherever it has any."""
    value = message[name]
    other = Rows(_other(value.value), value.held) if isinstance(value, Rows) else _other(value)
    return Message({**message, name: other})


def _other(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return ~value
    if not value.is_floating_point():
        return value + (1 + torch.arange(value.numel()) % 3).to(value.dtype).reshape(value.shape)
    noise = torch.randn(value.shape, generator=draws.generator("other numbers"))
    return value + ((0.5 + value.abs()) * noise).to(value.dtype)


class ByHand:
    """The parts of a federation without the loop, to be worked in any order.

    In a `listening` round each field of what comes down is tried with other numbers, on clients that are put back.
    `sent` has all that traveled, by exchange, direction and field; `heeded` what made a difference to a client, or was
    looked at by the server.
    """

    def __init__(self, parts: Assembly, listening: int | None = None) -> None:
        self.parts, self.method, self.host = parts, parts.method, make_host(parts)
        self.server = Server(parts.task, parts.cards)
        self.method.setup(self.server)
        self._listening = listening
        self.sent: set[tuple[Any, str]] = set()
        self.heeded: set[tuple[Any, str]] = set()

    def ignored(self, direction: str) -> list[str]:
        """Fields that traveled this way and that nobody heeded."""
        return sorted(name for (way, _), name in self.sent - self.heeded if way == direction)

    def round(self, t: int, order: Iterable[int]) -> dict[tuple[int, int], bytes | None]:
        """One round; who answered what in which exchange."""
        order = list(order)
        self.server.begin(t, self.method.schedule(t, self.parts.task.rounds))
        if self.method.enrols and t == 0:
            for k in order:
                once = self.host.wires(k)[0].once
                message = decode(self.host.answer(Enrol(k)).up, once, "enrolment")
                self.parts.cards.enrolled[k] = self._watched(message, "enrol")
        return self._peers(self.method, t, order) if isinstance(self.method, PeerMethod) else self._server(t, order)

    def _server(self, t: int, order: list[int]) -> dict[tuple[int, int], bytes | None]:
        answers: dict[tuple[int, int], bytes | None] = {}
        for stage, exchange in enumerate(self.method.exchanges):
            uploads = {}
            for k in order:
                down, wire = self.download(stage, k), self.host.wires(k)[stage]
                if down is not None and t == self._listening:
                    self._listen(t, stage, k, decode(down, wire.down, "download"))
                up = self.host.answer(Work(k, t, stage, down)).up
                answers[stage, k] = up
                if up is not None:
                    uploads[k] = self._watched(decode(up, wire.up, "upload"), stage)
            if uploads and exchange.merge:
                self.method.functions(stage).merge(self.server, dict(sorted(uploads.items())))
        return answers

    def _peers(self, method: PeerMethod, t: int, order: list[int]) -> dict[tuple[int, int], bytes | None]:
        sent = {k: self.host.answer(Teach(k, t)).up for k in order}
        teachers = method.topology(self.parts.task, t, tuple(sorted(order)))
        for k in order:
            inbox = {j: data for j in teachers.get(k, ()) if (data := sent[j]) is not None}
            if inbox and t == self._listening:
                self._listen_to_peers(t, k, inbox)
            if inbox:
                self.host.answer(Learn(k, t, inbox))
        return {(0, k): data for k, data in sent.items()}

    def download(self, stage: int, k: int) -> bytes | None:
        download, schema = self.method.functions(stage).down, self.host.wires(k)[stage].down
        message = download(self.server, k) if download and schema else None
        return None if message is None else encode(message, schema, "download")

    def _watched(self, upload: Message, stage: int | str) -> Message:
        self.sent.update((("up", stage), name) for name in upload)
        return Read(upload, ("up", stage), self.heeded)

    def _listen(self, t: int, stage: int, k: int, down: Message) -> None:
        schema = self.host.wires(k)[stage].down

        def work(message: Message) -> Any:
            return self.host.answer(Work(k, t, stage, encode(message, schema, "download"))).up

        self._try_others(("down", stage), k, list(down), lambda name: work(with_other(down, name) if name else down))

    def _listen_to_peers(self, t: int, k: int, inbox: Mapping[int, bytes]) -> None:
        schemas = {j: self.host.wires(j)[0].up for j in inbox}
        messages = {j: decode(data, schemas[j], "peer") for j, data in inbox.items()}

        def learn(name: str | None) -> Any:
            heard = {j: with_other(m, name) if name else m for j, m in messages.items()}
            return self.host.answer(Learn(k, t, {j: encode(m, schemas[j], "peer") for j, m in heard.items()})).up

        self._try_others(("down", 0), k, list(messages[min(messages)]), learn)

    def _try_others(self, where: Any, k: int, names: list[str], work: Callable[[str | None], Any]) -> None:
        """Which fields make a difference to what a client becomes, answers and predicts. `work(None)` changes none."""
        self.sent.update((where, name) for name in names)
        new = [name for name in names if (where, name) not in self.heeded]
        if not new:
            return
        usual, again = (self._outcome(k, lambda: work(None)) for _ in range(2))
        assert usual == again, "the same message twice leaves the same client, or nothing could be told from others"
        self.heeded.update((where, name) for name in new if self._outcome(k, lambda n=name: work(n)) != usual)

    def _outcome(self, k: int, work: Callable[[], Any]) -> Any:
        client = self.host.client(k)
        with _unchanged(client):
            try:
                answer = work()
                scores = client.sweep(self.method.predict)
            except Exception as error:  # numbers that it cannot work with have been looked at
                return repr(error)
            # what came down lies in `got` without anyone's doing
            became = {name: value for name, value in everything(client).items() if not name.startswith("got.")}
            return answer, {name: bits(value) for name, value in (became | {"scores": scores}).items()}

    def classes_predicted(self, t: int) -> int:
        """How many classes a client finds among all images: the most over clients and views.

        After two rounds a global model may know hardly two; over all views there is room to a false alarm.
        """
        return max(self._classes(t, k, view) for k in self.parts.cards for view in self.method.views)

    def _classes(self, t: int, k: int, view: str) -> int:
        with self.host.open_view(t, k, view, self.download(0, k)) as client:
            whole = Data(client.data["train"].store, torch.arange(len(self.parts.dataset.y)))
            return len(client.sweep(self.method.predict, whole).argmax(1).unique())

    def tensors(self) -> dict[str, Tensor]:
        found = {f"server {name}": value.clone() for name, value in self.server.state.state_dict().items()}
        for k in self.parts.cards:
            found |= {f"client {k} {name}": value.clone() for name, value in self.host.client(k).tensors().items()}
        return found
