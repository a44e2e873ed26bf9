"""Addresses on the network: how they are written, and how they are opened. Nothing of Flower is needed here."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from pluribus.errors import ConfigError, DeviceError, FormatError
from pluribus.internal.digits import is_whole


def bind(listen: str) -> socket.socket:
    """Open the listening socket for sites. The address must be free."""
    host, port = parse_address("--listen", listen)
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with explain_errors(DeviceError, f"--listen {listen}"):
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=1024)
    # asyncio sets this option only for sockets that it creates; without it every answer takes 40 ms longer
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def parse_address(flag: str, text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not is_whole(port) or int(port) > 65535:
        raise FormatError(f"{flag} must be HOST:PORT, such as 127.0.0.1:9092 or [::1]:9092, not '{text}'.")
    return host, int(port)


@contextlib.contextmanager
def explain_errors(kind: type[ConfigError], what: str) -> Iterator[None]:
    """Raise what the system refuses as an error of this kind."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} cannot be used: {error.strerror or error}.") from error
