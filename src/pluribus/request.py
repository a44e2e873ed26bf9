"""What a host is asked to do with a client, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pluribus.evaluate import Figures, Selection
from pluribus.message import Parcel

# ---- requests ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enrol:
    """Send the one message of joining, before the first round of the client."""

    client: int


@dataclass(frozen=True, slots=True)
class Work:
    """One exchange with the server: receive, work, answer. Without a `down` there is nothing to receive."""

    client: int
    t: int
    stage: int = 0
    down: bytes | None = None


@dataclass(frozen=True, slots=True)
class Teach:
    """The first exchange of a peer method."""

    client: int
    t: int


@dataclass(frozen=True, slots=True)
class Learn:
    """The second exchange of a peer method: `inbox` has the messages of the teachers."""

    client: int
    t: int
    inbox: Mapping[int, bytes | Parcel]

    def messages(self) -> dict[int, bytes]:
        """The inbox for whoever reads it. An engine that makes parcels opens them before."""
        found = {j: data for j, data in self.inbox.items() if isinstance(data, bytes)}
        assert len(found) == len(self.inbox), "a parcel was not opened"
        return found


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure every view of a method. `best` is the best round of the client so far."""

    client: int
    t: int
    down: bytes | None = None
    best: Selection | None = None


Request = Enrol | Work | Teach | Learn | Evaluate


# ---- answers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """What comes of work: the encoded message (None: nothing to send), the mean training loss, the seconds of work, the
    seconds of reading and writing messages, and the number of gradient steps.

    The message of a peer may lie elsewhere, as a Parcel.
    """

    up: bytes | Parcel | None
    loss: float | None
    compute: float = 0.0
    communication: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What comes of an evaluation: the figures of every view."""

    figures: dict[str, Figures]


Answer = Reply | Measured
