"""Blobs over local sockets, between Flower's processes and ours, which stay warm beside them.

No torch here, and nothing that imports it: at a site Flower starts a process for every message.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

BLOB = "blob"  # what holds it in a message of Flower
LENGTH = 8  # bytes of the number before a blob
MOST_BYTES = 2**34  # beyond any message


def ask(path: str, blob: bytes) -> bytes:
    """Send a request to the worker behind a socket, and wait for its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(path)
        send(line, blob)
        return receive(line)


def serve(path: Path, answer: Callable[[bytes], bytes], done: Callable[[], bool]) -> None:
    """Answer one request after the other, until it is done."""
    with listen(path) as door:
        while not done():
            line, _ = door.accept()
            with line:
                try:
                    send(line, answer(receive(line)))
                except OSError:
                    continue  # whoever asked is gone, and will ask again


def listen(path: Path) -> socket.socket:
    """A door at this place. Only this user may come."""
    path.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        door.bind(str(path))
    finally:
        os.umask(mask)
    door.listen()
    return door


def send(line: socket.socket, blob: bytes) -> None:
    """One blob."""
    line.sendall(len(blob).to_bytes(LENGTH, "big"))
    line.sendall(blob)


def receive(line: socket.socket) -> bytes:
    """The next blob."""
    size = int.from_bytes(_exactly(line, LENGTH), "big")
    if size > MOST_BYTES:
        raise OSError("a blob of that size is no message")
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = line.recv(min(1 << 20, size - len(found)))
        if not part:
            raise OSError("the line was closed in the middle of a blob")
        found += part
    return bytes(found)
