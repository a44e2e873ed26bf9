"""The app that Flower runs at the server. It relays blobs between the sites and the round loop.

The round loop is another process behind a local socket, so that it survives when Flower's processes die. This module
does not import torch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from pluribus.sites.envelope import seal, unseal
from pluribus.sites.flower.wire import BLOB, receive, send

app = ServerApp()
QUERY = "query"
POLL = 1.0  # seconds between polls for answers. Flower's own loop sleeps for 3 s; 0.1 s would keep a core busy
LOOK = 1.0  # seconds between checks which nodes are connected
SILENCE = 30.0  # seconds until a silent node is asked again, then twice as long, and so on
EXPIRED = 3  # Flower's error code for an expired message
LATE = "no answer by the deadline"


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Relay until the round loop closes the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(context.run_config["socket"]))
        while True:
            try:
                request = unseal(receive(connection))
            except OSError:
                return
            requests = {int(node): blob for node, blob in request.parts.items()}
            answers, reasons = exchange(grid, requests, float(request.head["seconds"]))
            missing = {str(node): reasons.get(node, "no answer") for node in requests if node not in answers}
            send(connection, seal({"missing": missing}, {str(node): blob for node, blob in answers.items()}))


def exchange(grid: Grid, requests: Mapping[int, bytes], seconds: float) -> tuple[dict[int, bytes], dict[int, str]]:
    """Send each node its request once it is connected, and wait for the answers. Returns answers and reasons.

    A request that fails is sent again. So is a request without an answer, because an answer that a node cannot deliver
    is lost. A site processes a request only once, even if it arrives several times.
    """
    end = time.monotonic() + seconds
    sent: dict[str, int] = {}
    answers: dict[int, bytes] = {}
    reasons = dict.fromkeys(requests, "it is not connected")
    silence = dict.fromkeys(requests, SILENCE)
    ask_at = dict.fromkeys(requests, float("-inf"))
    looked = float("-inf")
    while ask_at and (now := time.monotonic()) < end:
        due = {node for node, at in ask_at.items() if at <= now}
        if due and now - looked > LOOK:
            looked, connected = now, sorted(due & set(grid.get_node_ids()))
            if connected:  # replies are matched by message: for a lost node, Flower itself is the sender
                messages = [_make_message(node, requests[node], end - now) for node in connected]
                sent |= dict(zip(grid.push_messages(messages), connected, strict=True))
                reasons |= dict.fromkeys(connected, LATE)
                ask_at |= {node: now + silence[node] for node in connected}
                silence |= {node: 2 * silence[node] for node in connected}
        for reply in grid.pull_messages(list(sent)) if sent else ():
            node = sent.pop(reply.metadata.reply_to_message_id, None)
            if node not in ask_at:
                continue
            blob, reason = _read_reply(reply)
            if blob is None and node not in sent.values():  # otherwise a newer message is on its way
                ask_at[node], reasons[node] = now, reason
            elif blob is not None:
                answers[node] = blob
                del ask_at[node]
        time.sleep(POLL)
    return answers, reasons


def _make_message(node: int, blob: bytes, seconds: float) -> Message:
    content = RecordDict({BLOB: ConfigRecord({BLOB: blob})})
    return Message(content, dst_node_id=node, message_type=QUERY, ttl=seconds)


def _read_reply(reply: Message) -> tuple[bytes | None, str]:
    if reply.has_error():
        return None, LATE if reply.error.code == EXPIRED else f"its Flower node reports: {reply.error.reason}"
    try:
        record: Any = reply.content[BLOB]
        return bytes(record[BLOB]), ""
    except (KeyError, TypeError) as error:
        return None, f"its answer has no blob ({error})"
