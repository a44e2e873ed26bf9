"""The engine of real sites: requests go out, and whoever answers by the deadline has answered.

Nothing that comes back is believed before it is checked. A site that answers nonsense is, for that round, one that did
not answer, and the reason is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from pluribus.errors import MessageError, SchemaError
from pluribus.host import Selected, Tensors
from pluribus.message import decode
from pluribus.method import Wires
from pluribus.request import Answer, Enrol, Evaluate, Learn, Measured, Reply, Request, Teach, Work
from pluribus.sites.agreement import Agreement, shown, whole
from pluribus.sites.envelope import Envelope, seal, unseal

# What a client measures, and between which bounds. There are no domains here.
FIGURES = {"val": (0.0, 1.0), "test": (0.0, 1.0), "test_loss": (0.0, math.inf)}

MOST_STEPS = 2**31  # of one site in one exchange


class Missing(NamedTuple):
    """Why there is no answer."""

    reason: str


class Transport(Protocol):
    """Carries blobs to sites and back."""

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> Mapping[int, bytes | Missing]:
        """Send each site its request, and wait for answers, but no longer than so many seconds."""


class Remote:
    """Lets real sites work. Their state stays with them, so there is nothing to save here."""

    room = math.inf

    def __init__(
        self,
        agreement: Agreement,
        names: Mapping[int, str],
        models: Mapping[int, str],
        views: tuple[str, ...],
        wires: Wires,
        transport: Transport,
        seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        self._agreement = agreement
        self._names = names
        self._models = models
        self._views = views
        self._wires = wires
        self._transport = transport
        self._seconds = seconds
        self._tell = tell
        self._enrolled: set[int] = set()  # since the last save

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Each client that answered with its answer, in the order of requests."""
        asked = {request.client: request for request in requests}
        answers = self._transport.exchange({k: self._sealed(one) for k, one in asked.items()}, self._seconds)
        for k, request in asked.items():
            answer = answers.get(k, Missing("no answer"))
            try:
                if isinstance(answer, Missing):
                    raise MessageError(answer.reason)
                yield k, self._opened(request, unseal(answer))
            except MessageError as error:
                when = "at enrolment" if isinstance(request, Enrol) else f"in round {request.t}"
                self._tell(f"site {self._names[k]} is missing {when}: {error}")

    def changed(self) -> dict[int, Tensors]:
        """Sites keep their own state; but whoever enrolled is to be noted, with its message."""
        enrolled, self._enrolled = self._enrolled, set()
        return {k: {} for k in sorted(enrolled)}

    def selected(self) -> dict[int, Selected]:
        """Sites keep their own models."""
        return {}

    def pending(self) -> int:
        """Nothing waits to be saved."""
        return 0

    def close(self) -> None:
        """Nothing to let go of."""

    # ---- what is sent, what is believed ------------------------------------------------------------------------------

    def _sealed(self, request: Request) -> bytes:
        said, parts = self._said(request)
        return seal(said | {"client": request.client, "agreement": self._agreement.facts()}, parts)

    def _said(self, request: Request) -> tuple[dict[str, Any], dict[str, bytes]]:
        """A request as facts and attachments."""
        match request:
            case Enrol():
                return {"verb": "enrol"}, {}
            case Work(_, t, stage, down):
                return {"verb": "work", "t": t, "stage": stage}, {} if down is None else {"down": down}
            case Teach(_, t):
                return {"verb": "teach", "t": t}, {}
            case Learn(_, t):
                parts = {str(j): data for j, data in request.messages().items()}
                models = {str(j): self._models[j] for j in request.inbox}  # what each may send depends on its model
                return {"verb": "learn", "t": t, "teachers": models}, parts
            case Evaluate(_, t, down, best):
                known = None if best is None else best._asdict()
                return {"verb": "evaluate", "t": t, "best": known}, {} if down is None else {"down": down}

    def _opened(self, request: Request, answer: Envelope) -> Answer:
        if "refused" in answer.head:
            raise MessageError(shown(answer.head["refused"]))
        if isinstance(request, Evaluate):
            return Measured(_figures(answer.head.get("figures"), self._views))
        k = request.client
        if isinstance(request, Enrol):
            up = answer.parts.get("up", b"")
            decode(up, self._wires(k)[0].once, "its enrolment")
            steps = _steps(answer.head.get("steps"))
            self._enrolled.add(k)
            return Reply(up, None, steps=steps)
        stage = request.stage if isinstance(request, Work) else 0
        sent = answer.parts.get("up")
        if sent is not None:
            decode(sent, self._wires(k)[stage].up, "its message")
        loss, *times = (_number(answer.head.get(name)) for name in ("loss", "compute", "communication"))
        compute, communication = (min(max(0.0, one or 0.0), self._seconds) for one in times)
        return Reply(sent, loss, compute, communication, _steps(answer.head.get("steps")))


def _figures(said: Any, views: tuple[str, ...]) -> dict[str, dict[str, float | None]]:
    """Of every view every figure, as means over clients need them."""
    if not isinstance(said, dict) or said.keys() != set(views):
        raise SchemaError("its figures cannot be read.")
    return {view: _row(said[view]) for view in views}


def _row(said: Any) -> dict[str, float | None]:
    if not isinstance(said, dict) or said.keys() != FIGURES.keys():
        raise SchemaError("its figures cannot be read.")
    row = {name: _number(said[name]) for name in FIGURES}
    for name, value in row.items():
        least, most = FIGURES[name]
        if value is not None and not least <= value <= most:
            raise SchemaError(f"its figure '{name}' cannot be {value}.")
    return row


def _steps(said: Any) -> int:
    try:
        return whole(said, 0, MOST_STEPS)
    except ValueError as error:
        raise SchemaError(f"its number of steps cannot be: {error}.") from error


def _number(value: Any) -> float | None:
    """A number or nothing. What is not finite does not get through an envelope."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
