r"""The gate: a reverse proxy in front of a SuperLink. It forwards what sites need from Flower, and refuses the rest.

Flower 1.41 serves all its interfaces on one port. The interface that starts runs has no login: anyone who reaches it
can run code at every site. So the SuperLink listens on loopback, and only the gate is open to the network. It accepts
TLS, POST and ten paths, and answers 404 to everything else.

    python -m pluribus.sites.flower.gate --listen 0.0.0.0:9092 --to 127.0.0.1:9093 \
        --certificate server.pem --key server.key --ca ca.crt

It prints its address when it is ready, then a line for each request that it refuses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pluribus.errors import CertificateError, ConfigError
from pluribus.sites.flower.address import bind, explain_errors, parse_address
from pluribus.sites.flower.programs import set_process_name

# The calls of a SuperNode with a key. The call that registers a node is missing: the server registers the sites.
CALLS = (
    b"activate-node deactivate-node send-node-heartbeat get-run get-fab "
    b"pull-messages push-messages confirm-message-received push-object pull-object"
)
PATHS = frozenset(b"/v1/fleet/" + call for call in CALLS.split())

# Headers that are forwarded, with those that begin with flwr-. Others belong to one connection, or can be forged: the
# SuperLink trusts x-forwarded-for.
HEADERS_IN = frozenset((b"accept", b"content-type", b"content-length"))
HEADERS_OUT = frozenset((b"content-type", b"content-length"))

LARGEST = 2 * 1024**3  # bytes of a body: the limit of protobuf
PATIENCE = 60  # seconds to wait for the next chunk of a request or of an answer
REUSE = 4  # seconds that an idle connection to the SuperLink stays open; the SuperLink closes it after 5


class RefusedError(Exception):
    """A refused request. The answer is only a status; the reason goes to the log."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """The ASGI application that refuses or forwards one request."""

    def __init__(self, superlink: httpx.AsyncClient, largest: int = LARGEST) -> None:
        self._superlink = superlink
        self._largest = largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            answer = await self._forward(scope, receive)
        except ConnectionError:
            return  # the client has disconnected
        except RefusedError as refusal:
            _log(refusal.status, scope["client"], f"{_request_line(scope)} {refusal}")
            await _refuse(refusal.status, send)
            return
        try:
            await _send_answer(answer, send)
        except (TimeoutError, httpx.HTTPError) as error:
            # the status is already sent, so the connection must be closed: uvicorn does so after an incomplete answer
            _log(answer.status_code, scope["client"], f"{_request_line(scope)} answer cut off ({type(error).__name__})")
        finally:
            await answer.aclose()

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if scope["method"] != "POST" or scope["raw_path"] not in PATHS or scope["query_string"]:
            raise RefusedError(404)
        # a SuperNode always sends content-length; without a second way to give a length, requests cannot be smuggled
        if b"transfer-encoding" in headers or b"content-length" not in headers:
            raise RefusedError(411, "has no content-length")
        if int(headers[b"content-length"]) > self._largest:
            raise RefusedError(413, f"has {int(headers[b'content-length'])} bytes")

    async def _forward(self, scope: Scope, receive: Receive) -> httpx.Response:
        path = scope["raw_path"].decode("ascii")
        headers = [(name, value) for name, value in scope["headers"] if name in HEADERS_IN or name.startswith(b"flwr-")]
        request = self._superlink.build_request("POST", path, headers=headers, content=_read_body(receive))
        try:
            return await self._superlink.send(request, stream=True)
        except httpx.HTTPError as error:
            raise RefusedError(502, f"got no answer from the SuperLink: {_shown(str(error).encode())}") from error


async def _read_body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        try:
            async with asyncio.timeout(PATIENCE):
                message = await receive()
        except TimeoutError as error:
            raise RefusedError(408, "timed out") from error
        if message["type"] == "http.disconnect":
            raise ConnectionError
        more = message["more_body"]
        yield message["body"]


async def _refuse(status: int, send: Send) -> None:
    # close the connection, so that the rest of this request is not read as another request
    headers = [(b"connection", b"close"), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body"})


async def _send_answer(answer: httpx.Response, send: Send) -> None:
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
    """Untrusted text as one short line of ASCII, safe for a log."""
    rest = "..." if len(text) > longest else ""
    return ascii(text[:longest].decode("latin-1"))[1:-1] + rest


class _Connection(H11Protocol):
    """A connection that is closed if a complete request head does not arrive in time.

    uvicorn's other protocol, httptools, cannot be used: from an absolute URL, as in POST https://elsewhere/v1/fleet, it
    takes the path.
    """

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_timeout()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timeout()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        _log(400, self.client, "not HTTP")
        super().send_400_response(msg)

    def _update_timeout(self) -> None:
        between_requests = self.cycle is None or self.cycle.response_complete
        if not between_requests:
            self._cancel_timeout()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(PATIENCE, self.transport.close)

    def _cancel_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None


def serve(listen: str, to: str, certificate: str, key: str, ca: str, largest: int = LARGEST) -> None:
    """Serve as the gate of the SuperLink at `to` until a signal arrives. `ca` has signed its certificate for `to`."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with explain_errors(CertificateError, f"the certificate {certificate} with the key {key}"):
        tls.load_cert_chain(certificate, key, password="")  # without a password, OpenSSL may prompt for one
    superlink = _make_client(to, ca)
    listener = bind(listen)
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
    host, _ = parse_address("--listen", listen)
    print(f"listening on {host}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    with listener, contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _make_client(to: str, ca: str) -> httpx.AsyncClient:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with explain_errors(CertificateError, f"the CA certificate {ca}"):
        tls.load_verify_locations(ca)
    host, port = parse_address("--to", to)
    return httpx.AsyncClient(
        base_url=f"https://{host}:{port}",
        headers={"accept-encoding": "identity"},
        verify=tls,
        timeout=PATIENCE,
        # slow sites hold connections: with a limit, other sites would have to wait
        limits=httpx.Limits(max_connections=None, keepalive_expiry=REUSE),
        trust_env=False,  # no proxy on the way to loopback
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m pluribus.sites.flower.gate", description=about)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address for sites; port 0: any free port")
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="address of the SuperLink")
    parser.add_argument("--certificate", required=True, metavar="FILE", help="certificate of the gate, shown to sites")
    parser.add_argument("--key", required=True, metavar="FILE", help="private key of the certificate")
    parser.add_argument("--ca", required=True, metavar="FILE", help="CA of the SuperLink's certificate")
    parser.add_argument("--largest", type=int, default=LARGEST, metavar="BYTES", help="largest request (%(default)s)")
    try:
        serve(**vars(parser.parse_args(argv)))
        return 0
    except ConfigError as error:
        print(f"error: {error.sentence}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    set_process_name("pluribus-gate")
    sys.exit(main())
