"""Blobs to sites and back over Flower's Grid: one record a message, which lives as long as the round may last."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from pluribus.flower.remote import Missing

BLOB, SITE = "blob", "site"
QUERY = "query"
POLL = 0.1  # seconds; Flower's own way of waiting sleeps for three


class FlowerTransport:
    """Knows sites by their names; the numbers of Flower's nodes may change."""

    def __init__(self, grid: Grid, names: Mapping[int, str]) -> None:
        self._grid = grid
        self._names = names
        self._nodes: dict[str, int] = {}  # site -> node

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> dict[int, bytes | Missing]:
        """Send each site its request, and wait for answers, but no longer than so many seconds."""
        end = time.monotonic() + seconds
        self._look_around(requests, end)
        there = {k: self._nodes[self._names[k]] for k in requests if self._names[k] in self._nodes}
        replies = self._ask({node: requests[k] for k, node in there.items()}, end)
        found: dict[int, bytes | Missing] = {}
        for k in requests:
            reply = replies.get(there[k], Missing("no answer by the deadline")) if k in there else Missing("not there")
            if isinstance(reply, Missing):
                self._nodes.pop(self._names[k], None)  # it may come back as another node
                found[k] = reply
            else:
                found[k] = reply[0]
        return found

    def _look_around(self, wanted: Iterable[int], end: float) -> None:
        """Ask nodes that are not known yet who they are."""
        while time.monotonic() < end:
            known = set(self._nodes.values())
            new = [node for node in self._grid.get_node_ids() if node not in known]
            if new:
                for node, reply in self._ask(dict.fromkeys(new, b""), end).items():
                    if not isinstance(reply, Missing) and reply[1] in self._names.values():
                        self._nodes[reply[1]] = node
            if all(self._names[k] in self._nodes for k in wanted):
                return
            time.sleep(1.0)

    def _ask(self, requests: Mapping[int, bytes], end: float) -> dict[int, tuple[bytes, str] | Missing]:
        left = max(1.0, end - time.monotonic())
        messages = [_message(node, blob, left) for node, blob in requests.items()]
        if not messages:
            return {}
        sent = dict(zip(self._grid.push_messages(messages), requests, strict=True))  # by message, not by sender
        replies: dict[int, tuple[bytes, str] | Missing] = {}
        while sent and time.monotonic() < end:
            for reply in self._grid.pull_messages(list(sent)):
                node = sent.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    replies[node] = _read(reply)
            time.sleep(POLL)
        return replies


def _message(node: int, blob: bytes, seconds: float) -> Message:
    content = RecordDict({BLOB: ConfigRecord({BLOB: blob})})
    return Message(content, dst_node_id=node, message_type=QUERY, ttl=seconds)


def _read(reply: Message) -> tuple[bytes, str] | Missing:
    if reply.has_error():
        return Missing(f"its Flower node says: {reply.error.reason}")
    try:
        record: Any = reply.content[BLOB]
        return bytes(record[BLOB]), str(record[SITE])
    except (KeyError, TypeError) as error:
        return Missing(f"its answer has no blob ({error})")
