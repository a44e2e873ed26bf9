"""Blobs over local sockets, between Flower's short-lived processes and our long-lived ones.

This module imports neither torch nor anything that imports torch: at a site Flower starts a process for each message.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

BLOB = "blob"  # key of the blob in a message of Flower
LENGTH = 8  # bytes of a blob's length, which precedes it
MOST_BYTES = 2**34  # more than any message has


def ask(path: str, blob: bytes) -> bytes:
    """Send a request to the worker behind a socket, and wait for its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        send(connection, blob)
        return receive(connection)


def serve(path: Path, answer: Callable[[bytes], bytes], done: Callable[[], bool]) -> None:
    """Answer requests one after the other until `done()`."""
    with listen(path) as listener:
        while not done():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the other side has disconnected, and will ask again
                send(connection, answer(receive(connection)))


def listen(path: Path) -> socket.socket:
    """Open a listening socket at this path. Only this user can connect."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen()
    return listener


def send(connection: socket.socket, blob: bytes) -> None:
    """Send one blob."""
    connection.sendall(len(blob).to_bytes(LENGTH, "big"))
    connection.sendall(blob)


def receive(connection: socket.socket) -> bytes:
    """Receive the next blob."""
    size = int.from_bytes(_read_exactly(connection, LENGTH), "big")
    if size > MOST_BYTES:
        raise OSError(f"a message cannot have {size} bytes")
    return _read_exactly(connection, size)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(1 << 20, size - len(found)))
        if not part:
            raise OSError("the connection was closed in the middle of a blob")
        found += part
    return bytes(found)
