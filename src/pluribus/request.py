"""Requests to a host about one client, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pluribus.evaluate import Metrics, Selection
from pluribus.message import Parcel


@dataclass(frozen=True, slots=True)
class Enrol:
    """Send the message of enrolment, once, before the client's first round."""

    client: int


@dataclass(frozen=True, slots=True)
class Work:
    """One exchange with the server: receive the download, work, answer. Without `down` there is no download."""

    client: int
    t: int
    stage: int = 0
    down: bytes | None = None


@dataclass(frozen=True, slots=True)
class Teach:
    """The first exchange of a peer method: build the message to the students."""

    client: int
    t: int


@dataclass(frozen=True, slots=True)
class Learn:
    """The second exchange of a peer method: `inbox` has the messages of the teachers."""

    client: int
    t: int
    inbox: Mapping[int, bytes | Parcel]

    def messages(self) -> dict[int, bytes]:
        """The messages of the inbox. An engine that sends parcels opens them first."""
        found = {j: data for j, data in self.inbox.items() if isinstance(data, bytes)}
        assert len(found) == len(self.inbox), "the engine must open parcels first"
        return found


class Published(NamedTuple):
    """A model of the server: its name, and its tensors as a message."""

    model: str
    tensors: bytes


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate every view of a method. `best` is the best round of the client so far, `published` has the model of
    each view of the server."""

    client: int
    t: int
    down: bytes | None = None
    best: Selection | None = None
    published: Mapping[str, Published] = field(default_factory=dict)


Request = Enrol | Work | Teach | Learn | Evaluate


@dataclass(frozen=True, slots=True)
class Spent:
    """What a client has spent of its privacy budget, and whether another round is affordable."""

    epsilon: float
    affords_round: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of work."""

    up: bytes | Parcel | None  # the encoded message, or for a peer where it is stored; None: nothing to send
    loss: float | None  # the mean of training
    compute: float = 0.0  # seconds of work
    communication: float = 0.0  # seconds of decoding and encoding messages
    steps: int | None = 0  # of gradients; None: clients do not tell
    left_out: Mapping[int, str] = field(default_factory=dict)  # who sent what nobody can use, and why
    privacy: Spent | None = None  # of a private run


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of an evaluation: the metrics of every view."""

    figures: dict[str, Metrics]


Answer = Reply | Measured
