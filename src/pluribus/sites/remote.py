"""The engine of real sites: it sends requests, and takes the answers that arrive by the deadline.

It checks every answer before it uses it. A site with an invalid answer counts as missing in that round, and the reason
is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from pluribus.errors import MessageError, SchemaError
from pluribus.host import Selected, Tensors
from pluribus.internal.metrics import METRICS, keys_of, range_of
from pluribus.internal.safe_merge import sizes_in
from pluribus.message import LARGEST, Rows, Schema, Value, decode
from pluribus.method import Wires
from pluribus.request import Answer, Enrol, Evaluate, Learn, Measured, Reply, Request, Spent, Teach, Work
from pluribus.sites.agreement import Agreement, check_integer, sanitize
from pluribus.sites.envelope import Envelope, seal, unseal
from pluribus.sites.norms import LearnedNorms

MOST_STEPS = 2**31  # of a site in one exchange


class Missing(NamedTuple):
    """The reason why a site did not answer."""

    reason: str


class Transport(Protocol):
    """Sends blobs to sites, and returns their answers."""

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> Mapping[int, bytes | Missing]:
        """Send each site its request, and wait at most `seconds` for the answers."""


@dataclass(eq=False)
class Remote:
    """Asks real sites to work. Their state stays at the sites, so there is nothing to save here."""

    agreement: Agreement
    names: Mapping[int, str]
    models: Mapping[int, str | dict[str, Any]]  # names, or facts about models that only their sites can build
    views: tuple[str, ...]
    wires: Wires
    transport: Transport
    seconds: float
    tell: Callable[[str], None]
    largest_norm: float | None = None
    """Of a field in a message. None: any."""
    norms: LearnedNorms | None = None
    """Bounds of norms that are learned from the first rounds. None: none are."""
    room: ClassVar[float] = math.inf
    can_lose: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._enrolled: set[int] = set()  # since the last save

    def expect(self, clients: Iterable[int]) -> None:
        pass

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        by_client = {request.client: request for request in requests}
        answers = self.transport.exchange({k: self._seal(one) for k, one in by_client.items()}, self.seconds)
        for k, request in by_client.items():
            answer = answers.get(k, Missing("no answer"))
            try:
                if isinstance(answer, Missing):
                    raise MessageError(answer.reason)
                yield k, self._open_answer(request, unseal(answer))
            except MessageError as error:
                when = "at enrolment" if isinstance(request, Enrol) else f"in round {request.t}"
                self.tell(f"site {self.names[k]} is missing {when}: {error.sentence}")

    def take_changed(self) -> dict[int, Tensors]:
        """Empty states of the sites that enrolled: the server must record them. Sites keep their own state."""
        enrolled, self._enrolled = self._enrolled, set()
        return {k: {} for k in sorted(enrolled)}

    def take_selected(self) -> dict[int, Selected]:
        return {}

    def pending(self) -> int:
        return 0

    def is_full(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _seal(self, request: Request) -> bytes:
        head, parts = self._encode(request)
        return seal(head | {"client": request.client, "agreement": self.agreement.facts()}, parts)

    def _encode(self, request: Request) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Encode a request as a head and attachments."""
        match request:
            case Enrol():
                return {"verb": "enrol"}, {}
            case Work(_, t, stage, down):
                return {"verb": "work", "t": t, "stage": stage}, {} if down is None else {"down": down}
            case Teach(_, t):
                return {"verb": "teach", "t": t}, {}
            case Learn(_, t):
                parts = {str(j): data for j, data in request.messages().items()}
                models = {str(j): self.models[j] for j in request.inbox}  # they determine the schemas
                return {"verb": "learn", "t": t, "teachers": models}, parts
            case Evaluate(_, t, down, best, published):
                head = {"verb": "evaluate", "t": t, "best": None if best is None else best._asdict()}
                parts = {} if down is None else {"down": down}
                if published:
                    head["models"] = {view: one.model for view, one in published.items()}
                return head, parts | {view: one.tensors for view, one in published.items()}

    def _open_answer(self, request: Request, answer: Envelope) -> Answer:
        if "refused" in answer.head:
            raise MessageError(sanitize(answer.head["refused"]))
        if isinstance(request, Evaluate):
            return Measured(_read_metrics(answer.head.get("figures"), self.views, self.agreement.metrics))
        k = request.client
        if isinstance(request, Enrol):
            up = answer.parts.get("up", b"")
            self._check_message(up, self.wires(k)[0].once, "its enrolment")  # once, so no bound can be learned
            steps = self._steps_of(answer)
            self._enrolled.add(k)
            return Reply(up, None, steps=steps, privacy=_read_spent(answer.head.get("privacy")))
        stage = request.stage if isinstance(request, Work) else 0
        sent = answer.parts.get("up")
        if sent is not None:
            norms = self._check_message(sent, self.wires(k)[stage].up, "its message")
            if self.norms is not None:
                self.norms.check(request.t, stage, k, norms)
        loss, *times = (_number_or_none(answer.head.get(name)) for name in ("loss", "compute", "communication"))
        compute, communication = (min(max(0.0, one or 0.0), self.seconds) for one in times)
        steps, left_out = self._steps_of(answer), _read_left_out(answer.head.get("left_out"), request)
        spent = _read_spent(answer.head.get("privacy"))
        return Reply(sent, loss, compute, communication, steps, left_out, spent)

    def _steps_of(self, answer: Envelope) -> int | None:
        """The number of gradient steps. None: sites do not tell, because it depends on how many rows they have."""
        return _read_steps(answer.head.get("steps")) if self.agreement.share_counts else None

    def _check_message(self, data: bytes, schema: Schema, who: str) -> dict[str, float]:
        """Refuse a message that does not match its schema, or with numbers that nobody can compute with. Returns the
        norms of its fields.

        The server would leave such a site out by itself. But other sites that get its message, as peers do, would not.
        """
        message = decode(data, schema, who)
        norms: dict[str, float] = {}
        for name, size in sizes_in(message).items():
            if size > LARGEST:
                raise SchemaError(f"{who}: '{name}' holds {size:.2g}, and {LARGEST:.2g} is the most that it may hold.")
            norms[name] = _norm(message[name])
            if self.largest_norm is not None and norms[name] > self.largest_norm:
                raise SchemaError(
                    f"{who}: '{name}' has norm {norms[name]:.3g}, and 'largest_norm' is {self.largest_norm:g}."
                )
        return norms


def _norm(value: Value) -> float:
    return float((value.value if isinstance(value, Rows) else value).double().norm())


def _read_metrics(sent: Any, views: tuple[str, ...], names: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Check the metrics of every view. All must be there, because the server averages them over clients."""
    if not isinstance(sent, dict) or sent.keys() != set(views):
        raise SchemaError("its metrics cannot be read.")
    return {view: _read_view(sent[view], names) for view in views}


def _read_view(sent: Any, names: Sequence[str]) -> dict[str, float | None]:
    """Check the metrics of a view: the keys of these names, each in its range. Real sites have no domains."""
    keys = keys_of(names)
    if not isinstance(sent, dict) or sent.keys() != set(keys):
        raise SchemaError("its metrics cannot be read.")
    metrics = {name: _number_or_none(sent[name]) for name in keys}
    for name, value in metrics.items():
        least, most = range_of(name, METRICS[names[0]])
        if value is not None and not least <= value <= most:
            raise SchemaError(f"its metric '{name}' cannot be {value}.")
    return metrics


def _read_left_out(sent: Any, request: Request) -> dict[int, str]:
    """Check what a student says about teachers that it could not learn from."""
    if sent is None:
        return {}
    teachers = {str(j): j for j in request.inbox} if isinstance(request, Learn) else {}
    if not isinstance(sent, dict) or not sent.keys() <= teachers.keys():
        raise SchemaError("its reasons against teachers cannot be read.")
    return {teachers[name]: sanitize(reason) for name, reason in sent.items()}


def _read_steps(sent: Any) -> int:
    try:
        return check_integer(sent, 0, MOST_STEPS)
    except ValueError as error:
        raise SchemaError(f"its number of steps is invalid: {error}.") from error


def _read_spent(sent: Any) -> Spent | None:
    """What a site says of its privacy budget. Only the site can know it."""
    if sent is None:
        return None
    epsilon = _number_or_none(sent.get("epsilon")) if isinstance(sent, dict) else None
    if epsilon is None or epsilon < 0 or not isinstance(sent.get("affords_round"), bool):
        raise SchemaError("what it says of its privacy budget cannot be read.")
    return Spent(epsilon, sent["affords_round"])


def _number_or_none(value: Any) -> float | None:
    """A number, or None for anything else. Envelopes refuse NaN and infinity."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
