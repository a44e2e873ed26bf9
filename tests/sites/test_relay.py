"""What the relay does with Flower's messages, beside a grid that loses some of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from pluribus.sites.flower import relay
from pluribus.sites.flower.wire import BLOB


class Forgetful:
    """A grid of nodes that answer with what they were asked, after some messages that were in vain."""

    def __init__(self, lost: dict[int, int] | None = None, failed: dict[int, int] | None = None) -> None:
        self.lost, self.failed = dict(lost or {}), dict(failed or {})
        self.asked: list[int] = []
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return [1, 2]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        self.asked.append(node)
        name = message.metadata.__dict__["_message_id"] = f"message {len(self.asked)}"
        if self.failed.get(node, 0):
            self.failed[node] -= 1
            self.replies[name] = Message(Error(code=0, reason="a crash"), reply_to=message)
        elif self.lost.get(node, 0):
            self.lost[node] -= 1
        else:
            blob = RecordDict({BLOB: ConfigRecord({BLOB: bytes(message.content[BLOB][BLOB])})})
            self.replies[name] = Message(blob, reply_to=message)
        return name

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in names if name in self.replies]


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):  # whom a message is from
        monkeypatch.setattr(TaskIdentity, name, 1)
    for name, seconds in (("POLL", 0.01), ("LOOK", 0.01), ("SILENCE", 0.05)):
        monkeypatch.setattr(relay, name, seconds)


def test_everyone_is_asked_once() -> None:
    grid = Forgetful()
    answers, _ = relay.exchange(grid, {1: b"one", 2: b"two"}, 5)  # type: ignore[arg-type]
    assert answers == {1: b"one", 2: b"two"}
    assert grid.asked == [1, 2]


def test_who_is_silent_is_asked_again() -> None:
    """A node whose server dies drops the answer that it cannot deliver."""
    grid = Forgetful(lost={2: 2})
    answers, _ = relay.exchange(grid, {1: b"one", 2: b"two"}, 5)  # type: ignore[arg-type]
    assert answers == {1: b"one", 2: b"two"}
    assert grid.asked == [1, 2, 2, 2]


def test_who_fails_is_asked_again() -> None:
    grid = Forgetful(failed={1: 1})
    answers, _ = relay.exchange(grid, {1: b"one", 2: b"two"}, 5)  # type: ignore[arg-type]
    assert answers == {1: b"one", 2: b"two"}
    assert grid.asked == [1, 2, 1]


class Late(Forgetful):
    """The first message fails when the second is on its way. The answer to the second comes afterwards."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        if self.asked:
            self.replies["message 1"] = Message(Error(code=5, reason="it was away"), reply_to=self.first)
        else:
            self.first = message
        return [self._push(message)]

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        names = list(names)
        return super().pull_messages(names[:1] if "message 1" in self.replies else names)


def test_who_was_asked_again_is_not_asked_for_an_older_failure() -> None:
    grid = Late(lost={1: 1})
    answers, _ = relay.exchange(grid, {1: b"one"}, 5)  # type: ignore[arg-type]
    assert answers == {1: b"one"}
    assert grid.asked == [1, 1]


def test_time_is_up_for_who_stays_silent_or_away() -> None:
    grid = Forgetful(lost={1: 1000})
    answers, reasons = relay.exchange(grid, {1: b"one", 3: b"three"}, 0.5)  # type: ignore[arg-type]
    assert answers == {}
    assert reasons == {1: "no answer by the deadline", 3: "it is not connected"}
    assert 2 <= len(grid.asked) <= 4, "ever longer silences between"
