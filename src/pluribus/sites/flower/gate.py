r"""The gate in front of a SuperLink: through it sites reach what they need of Flower, and nobody reaches the rest.

Flower 1.41 serves all its interfaces on one port, and the one that starts runs knows no login: whoever reaches it runs
code at every site. So the SuperLink listens on loopback, and the network sees this: TLS, POST, ten paths, and 404.

    python -m pluribus.sites.flower.gate --listen 0.0.0.0:9092 --to 127.0.0.1:9093 \
        --certificate server.pem --key server.key --ca ca.crt

It prints where it listens once it does, then a line for each request that it refuses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pluribus.errors import CertificateError, ConfigError, DeviceError, FormatError
from pluribus.sites.flower.programs import be_called

# What a SuperNode that has a key calls. One without a key would also register itself: that is for the server to do.
PATHS = frozenset(
    b"/v1/fleet/" + call
    for call in (
        b"activate-node",
        b"deactivate-node",
        b"send-node-heartbeat",
        b"pull-messages",
        b"push-messages",
        b"get-run",
        b"get-fab",
        b"push-object",
        b"pull-object",
        b"confirm-message-received",
    )
)

# With those that begin with flwr-. Others are of one connection only, or lie: the SuperLink believes x-forwarded-for.
HEADERS_IN = frozenset((b"accept", b"content-type", b"content-length"))
HEADERS_OUT = frozenset((b"content-type", b"content-length"))

LARGEST = 2 * 1024**3  # bytes of a body; protobuf allows no more
PATIENCE = 60  # seconds for the next piece of a request or of an answer
REUSE = 4  # seconds that a connection to the SuperLink is used again, which itself hangs up after 5


class RefusedError(Exception):
    """A request that gets a status and nothing more; the reason is for the log."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """The ASGI application that refuses or forwards one request."""

    def __init__(self, superlink: httpx.AsyncClient, largest: int = LARGEST) -> None:
        self._superlink = superlink
        self._largest = largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            self._check(scope)
            answer = await self._forward(scope, receive)
        except ConnectionError:
            return  # nobody is there to be answered
        except RefusedError as refusal:
            _log(refusal.status, scope["client"], f"{_request_line(scope)} {refusal}")
            await _refuse(refusal.status, send)
            return
        try:
            await _pass_back(answer, send)
        except (TimeoutError, httpx.HTTPError) as error:
            # its status has gone out: all that is left is to hang up, which uvicorn does if an answer is not whole
            _log(answer.status_code, scope["client"], f"{_request_line(scope)} broke off ({type(error).__name__})")
        finally:
            await answer.aclose()

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if scope["method"] != "POST" or scope["raw_path"] not in PATHS or scope["query_string"]:
            raise RefusedError(404)
        # a SuperNode always tells the length; with one way only to tell it, no request can hide in another
        if b"transfer-encoding" in headers or b"content-length" not in headers:
            raise RefusedError(411, "without a length")
        if int(headers[b"content-length"]) > self._largest:
            raise RefusedError(413, f"with {int(headers[b'content-length'])} bytes")

    async def _forward(self, scope: Scope, receive: Receive) -> httpx.Response:
        path = scope["raw_path"].decode("ascii")
        headers = [(name, value) for name, value in scope["headers"] if name in HEADERS_IN or name.startswith(b"flwr-")]
        request = self._superlink.build_request("POST", path, headers=headers, content=_body(receive))
        try:
            return await self._superlink.send(request, stream=True)
        except httpx.HTTPError as error:
            raise RefusedError(502, f"is not answered by the SuperLink: {_shown(str(error).encode())}") from error


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """A request's body as it arrives."""
    more = True
    while more:
        try:
            async with asyncio.timeout(PATIENCE):
                message = await receive()
        except TimeoutError as error:
            raise RefusedError(408, "stopped half way") from error
        if message["type"] == "http.disconnect":
            raise ConnectionError
        more = message["more_body"]
        yield message["body"]


async def _refuse(status: int, send: Send) -> None:
    # hang up, lest the rest of this request be taken for another one
    headers = [(b"connection", b"close"), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body"})


async def _pass_back(answer: httpx.Response, send: Send) -> None:
    headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() in HEADERS_OUT]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    async for piece in answer.aiter_raw():
        async with asyncio.timeout(PATIENCE):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


def _log(status: int, peer: tuple[str, int] | None, what: str) -> None:
    host = peer[0] if peer else "-"
    print(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {status} {host} {what.rstrip()}", file=sys.stderr, flush=True)


def _request_line(scope: Scope) -> str:
    return f"{_shown(scope['method'].encode(), 20)} {_shown(scope['raw_path'])}"


def _shown(text: bytes, longest: int = 100) -> str:
    """A stranger's text, fit for a log: one short line of ASCII."""
    rest = "..." if len(text) > longest else ""
    return ascii(text[:longest].decode("latin-1"))[1:-1] + rest


class _Connection(H11Protocol):
    """A connection that brings a whole request head in time, however slowly it trickles in, or is closed.

    Of uvicorn's two protocols, the other one takes the path out of an absolute target: POST https://elsewhere/v1/fleet.
    """

    _too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        _log(400, self.client, "not HTTP")
        super().send_400_response(msg)

    def _watch(self) -> None:
        between_requests = self.cycle is None or self.cycle.response_complete
        if not between_requests:
            self._wait_no_more()
        elif self._too_late is None:
            self._too_late = self.loop.call_later(PATIENCE, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None


def serve(listen: str, to: str, certificate: str, key: str, ca: str, largest: int = LARGEST) -> None:
    """Stand in front of the SuperLink at `to` until a signal comes.

    A SuperLink that checks the keys of its nodes insists on TLS, so that is how it is spoken to, though on loopback:
    its certificate must be signed by `ca` and hold the name or number in `to`.
    """
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _usable(CertificateError, f"the certificate {certificate} with the key {key}"):
        tls.load_cert_chain(certificate, key, password="")  # without one, OpenSSL may ask the terminal
    superlink = _superlink(to, ca)
    door = bind(listen)
    config = uvicorn.Config(
        Gate(superlink, largest),
        loop="asyncio",
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=PATIENCE,
        timeout_graceful_shutdown=5,
        ssl_context_factory=lambda config, default: tls,
    )
    host, _ = _address("--listen", listen)
    print(f"listening on {host}:{door.getsockname()[1]}", file=sys.stderr, flush=True)
    with door, contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[door])


def _superlink(to: str, ca: str) -> httpx.AsyncClient:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with _usable(CertificateError, f"the CA certificate {ca}"):
        tls.load_verify_locations(ca)
    host, port = _address("--to", to)
    return httpx.AsyncClient(
        base_url=f"https://{host}:{port}",
        headers={"accept-encoding": "identity"},
        verify=tls,
        timeout=PATIENCE,
        # slow sites hold connections: with a limit, they would keep others waiting
        limits=httpx.Limits(max_connections=None, keepalive_expiry=REUSE),
        trust_env=False,  # no proxy on the way to loopback
    )


def bind(listen: str) -> socket.socket:
    """A socket for sites at this address, which must be free."""
    host, port = _address("--listen", listen)
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with _usable(DeviceError, f"--listen {listen}"):
        door = socket.create_server((host.strip("[]"), port), family=family, backlog=1024)
    # asyncio does not do it for a socket that it has not made, and then every answer waits 40 ms for the kernel
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return door


def _address(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise FormatError(f"{flag} must be HOST:PORT, such as 127.0.0.1:9092 or [::1]:9092, not '{text}'.")
    return host, int(port)


@contextlib.contextmanager
def _usable(kind: type[ConfigError], what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(f"{what} cannot be used: {error.strerror or error}.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pluribus.sites.flower.gate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where sites connect; port 0: any free")
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="where the SuperLink listens")
    parser.add_argument("--certificate", required=True, metavar="FILE", help="what the gate shows to sites")
    parser.add_argument("--key", required=True, metavar="FILE", help="the certificate's private key")
    parser.add_argument("--ca", required=True, metavar="FILE", help="what has signed the SuperLink's certificate")
    parser.add_argument("--largest", type=int, default=LARGEST, metavar="BYTES", help="of one request (%(default)s)")
    try:
        serve(**vars(parser.parse_args(argv)))
        return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    be_called("pluribus-gate")
    sys.exit(main())
