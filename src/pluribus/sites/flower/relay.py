"""What Flower runs at the server: it hands blobs on between the sites and the round loop, which is another process.

Blobs come and go over a local socket, so that the round loop outlives Flower's processes. No torch here.
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
POLL = 1.0  # seconds; Flower's own way of waiting sleeps for three, and ten looks a second keep a core busy
LOOK = 1.0  # seconds between looks at who is there
SILENCE = 30.0  # seconds until a node that says nothing is asked again, then twice as many, and so on
EXPIRED = 3  # how Flower calls a message whose time is up
LATE = "no answer by the deadline"


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Relay until the round loop hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(str(context.run_config["socket"]))
        while True:
            try:
                asked = unseal(receive(line))
            except OSError:
                return
            requests = {int(node): blob for node, blob in asked.parts.items()}
            answers, reasons = exchange(grid, requests, float(asked.head["seconds"]))
            missing = {str(node): reasons.get(node, "no answer") for node in requests if node not in answers}
            send(line, seal({"missing": missing}, {str(node): blob for node, blob in answers.items()}))


def exchange(grid: Grid, requests: Mapping[int, bytes], seconds: float) -> tuple[dict[int, bytes], dict[int, str]]:
    """Send each node its request as soon as it is there, again if it fails, and wait for answers until time is up.

    Nodes that did not answer may have said why. An answer that a node could not deliver is lost, so who is silent is
    asked again; a site does a request once, however often it comes.
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
            looked, there = now, sorted(due & set(grid.get_node_ids()))
            if there:  # known by message, not by sender: of a lost node, Flower itself is the sender
                messages = [_message(node, requests[node], end - now) for node in there]
                sent |= dict(zip(grid.push_messages(messages), there, strict=True))
                reasons |= dict.fromkeys(there, LATE)
                ask_at |= {node: now + silence[node] for node in there}
                silence |= {node: 2 * silence[node] for node in there}
        for reply in grid.pull_messages(list(sent)) if sent else ():
            node = sent.pop(reply.metadata.reply_to_message_id, None)
            if node not in ask_at:
                continue
            blob, reason = _read(reply)
            if blob is None:
                ask_at[node], reasons[node] = now, reason
            else:
                answers[node] = blob
                del ask_at[node]
        time.sleep(POLL)
    return answers, reasons


def _message(node: int, blob: bytes, seconds: float) -> Message:
    content = RecordDict({BLOB: ConfigRecord({BLOB: blob})})
    return Message(content, dst_node_id=node, message_type=QUERY, ttl=seconds)


def _read(reply: Message) -> tuple[bytes | None, str]:
    if reply.has_error():
        return None, LATE if reply.error.code == EXPIRED else f"its Flower node says: {reply.error.reason}"
    try:
        record: Any = reply.content[BLOB]
        return bytes(record[BLOB]), ""
    except (KeyError, TypeError) as error:
        return None, f"its answer has no blob ({error})"
