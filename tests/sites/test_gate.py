"""The gate in front of a SuperLink: real sockets and processes, and at the end a real federation."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import http.client
import ipaddress
import os
import re
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from pluribus.sites.flower.gate import PATHS, main
from refusals import assert_facts

BIN = Path(sys.executable).parent
PATIENCE = 60  # seconds that a process or a socket gets before a test fails
PULL = "/v1/fleet/pull-messages"


# ---- certificates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """The files of a CA, and of a server that it vouches for."""

    ca: Path
    certificate: Path
    key: Path

    def client(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        return context

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_keys(folder: Path) -> Keys:
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = _builder("test CA", "test CA", ca_key)
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    server = _builder("test server", "test CA", server_key)
    server = server.add_extension(x509.SubjectAlternativeName(names), critical=False)
    keys = Keys(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    for path, builder in ((keys.ca, ca), (keys.certificate, server)):
        path.write_bytes(builder.sign(ca_key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
    keys.key.write_bytes(_private(server_key, serialization.PrivateFormat.PKCS8))
    return keys


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(hours=1),
        not_valid_after=now + datetime.timedelta(hours=1),
    )


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def make_node_key(path: Path) -> Path:
    """A SuperNode's key pair, as Flower wants it: PATH and PATH.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


# ---- what stands behind and in front ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request as it arrived behind the gate."""

    line: str
    headers: dict[str, str]
    size: int
    digest: str


@dataclass
class Back:
    """A server behind the gate that speaks just enough HTTP to write down what arrives."""

    port: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # request lines whose body never came whole
    answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 5\r\n\r\nhello"
    hang_up: bool = False

    def take(self, file: Any) -> bool:
        """Read one request; false if there is none."""
        lines = list(iter(lambda: file.readline().decode("latin-1").rstrip("\r\n"), ""))
        if not lines:
            return False
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        left, digest = int(headers.get("content-length", 0)), hashlib.sha256()
        while left:
            try:
                piece = file.read(min(left, 1 << 20))
            except ConnectionResetError:  # so ends what the gate hangs up on, since Python 3.13
                piece = b""
            if not piece:
                self.broken.append(lines[0])
                return False
            digest.update(piece)
            left -= len(piece)
        self.arrivals.append(Arrival(lines[0], headers, int(headers.get("content-length", 0)), digest.hexdigest()))
        return True


@contextlib.contextmanager
def behind(keys: Keys, port: int = 0) -> Iterator[Back]:
    notes, tls = Back(), keys.server()

    class Handler(socketserver.StreamRequestHandler):
        def setup(self) -> None:
            self.request = tls.wrap_socket(self.request, server_side=True)
            super().setup()

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                while notes.take(self.rfile):
                    self.wfile.write(notes.answer)
                    if notes.hang_up:
                        return

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 200

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A handshake that fails is what some tests are about."""

    with Server(("127.0.0.1", port), Handler) as server:
        notes.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        try:
            yield notes
        finally:
            server.shutdown()


@pytest.fixture
def back(keys: Keys) -> Iterator[Back]:
    with behind(keys) as notes:
        yield notes


@contextlib.contextmanager
def running(command: list[object], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the test."""
    with log.open("wb") as file:
        words = [str(word) for word in command]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until(what: Callable[[], Any], why: Callable[[], object] = lambda: "") -> Any:
    """Ask until the answer is yes."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(why())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@dataclass(frozen=True)
class Front:
    """A gate in a process of its own."""

    port: int
    pid: int
    log: Path
    keys: Keys

    def connect(self) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        return self.keys.client().wrap_socket(raw, server_hostname="localhost")

    def raw(self, request: bytes) -> bytes:
        """Everything that is answered to bytes on a socket, until the gate hangs up."""
        with self.connect() as connection:
            answer = b""
            with contextlib.suppress(ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
                connection.sendall(request)
                while piece := connection.recv(65536):
                    answer += piece
            return answer

    def ask(self, method: str, path: str, body: Any = b"x", **headers: str) -> tuple[int, dict[str, str], bytes]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPSConnection(
            "localhost", self.port, timeout=PATIENCE, context=self.keys.client(), blocksize=1 << 20
        )
        with contextlib.closing(connection):
            connection.request(method, path, body, names)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

    def lines(self) -> list[str]:
        """The log without its times and its first line."""
        return [line.partition(" ")[2] for line in self.log.read_text().splitlines()[1:]]


@contextlib.contextmanager
def standing(keys: Keys, to: int, log: Path, *flags: object) -> Iterator[Front]:
    files = ["--certificate", keys.certificate, "--key", keys.key, "--ca", keys.ca]
    addresses = ["--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{to}"]
    command = [sys.executable, "-m", "pluribus.sites.flower.gate", *addresses, *files, *flags]
    with running(command, log) as process:
        found = until(lambda: re.search(r"listening on 127.0.0.1:(\d+)\n", log.read_text()), log.read_text)
        yield Front(int(found[1]), process.pid, log, keys)


@pytest.fixture
def gate(keys: Keys, back: Back, tmp_path: Path) -> Iterator[Front]:
    with standing(keys, back.port, tmp_path / "gate.log", "--largest", 400 << 20) as front:
        yield front


# ---- what goes through -----------------------------------------------------------------------------------------------


def test_every_call_of_a_site_goes_through(gate: Front, back: Back) -> None:
    for path in sorted(PATHS):
        status, headers, body = gate.ask("POST", path.decode(), b"question", content_type="application/x-protobuf")
        assert (status, body) == (200, b"hello")
        assert headers == {"content-type": "application/x-protobuf", "content-length": "5"}
    assert [one.line for one in back.arrivals] == [f"POST {path.decode()} HTTP/1.1" for path in sorted(PATHS)]
    assert {one.digest for one in back.arrivals} == {hashlib.sha256(b"question").hexdigest()}
    assert gate.lines() == []


def test_the_paths_are_those_that_this_flower_has() -> None:
    from flwr.superlink.routers.fleet.router import router

    known = {route.path.encode() for route in router.routes}  # type: ignore[attr-defined]
    assert known - PATHS == {b"/v1/fleet/register-node", b"/v1/fleet/unregister-node"}
    assert known >= PATHS


def test_only_the_headers_of_the_api_go_through(gate: Front, back: Back) -> None:
    ours = {"accept": "a/b", "flwr_public_key": "key", "flwr_timestamp": "now", "content_type": "c/d"}
    others = {
        "x_forwarded_for": "1.2.3.4",
        "forwarded": "for=1.2.3.4",
        "connection": "close, flwr-timestamp",
        "keep_alive": "timeout=9",
        "proxy_authorization": "secret",
        "te": "trailers",
        "upgrade": "websocket",
        "authorization": "Bearer me",
        "cookie": "a=b",
        "accept_encoding": "gzip",
        "expect": "100-continue",
        "x_flwr_client": "me",
    }
    assert gate.ask("POST", PULL, **ours, **others)[0] == 200
    (arrival,) = back.arrivals
    for name, value in ours.items():
        assert arrival.headers[name.replace("_", "-")] == value
    by_the_gate = {"host", "connection", "user-agent", "accept-encoding", "content-length"}
    assert set(arrival.headers) == {name.replace("_", "-") for name in ours} | by_the_gate
    assert arrival.headers["connection"] == "keep-alive"
    assert arrival.headers["accept-encoding"] == "identity"


def test_answers_say_nothing_of_what_is_behind(gate: Front, back: Back) -> None:
    head = b"HTTP/1.1 401 Unauthorized\r\nserver: behind\r\nx-secret: 1\r\nlocation: https://127.0.0.1:9/\r\n"
    back.answer = head + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    status, headers, body = gate.ask("POST", PULL)
    assert (status, body) == (401, b"{}")
    assert headers == {"content-type": "application/json", "transfer-encoding": "chunked"}


def test_a_connection_serves_many_requests(gate: Front, back: Back) -> None:
    request = f"POST {PULL} HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx".encode()
    last = request.replace(b"host: a", b"host: a\r\nconnection: close")
    assert gate.raw(request * 3 + last).count(b"200 OK") == 4
    assert len(back.arrivals) == 4


# ---- what does not ---------------------------------------------------------------------------------------------------

ELSEWHERE = [
    "/",
    "/health",
    "/docs",
    "/openapi.json",
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/v1/fleet",
    "/v1/fleet/",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages?a=b",
    "/v1/fleet/pull-messages/../../control/start-run",
    "/v1/fleet/pull-messages;/../../control/start-run",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/./pull-messages",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol%2fstart-run",
    "/v1/fleet%2Fpull-messages",
    "/v1/fleet/pull%2dmessages",
    "/v1/fleet\\pull-messages",
    "//v1/fleet/pull-messages",
    "/v1//fleet/pull-messages",
    "/v1/control/../fleet/pull-messages",
    "/V1/FLEET/PULL-MESSAGES",
    "/v1/fleet/Pull-Messages",
    "https://localhost/v1/fleet/pull-messages",
    "https://localhost/v1/control/start-run",
    "v1/fleet/pull-messages",
    "*",
    "localhost:443",
]


def test_other_paths_are_not_found(gate: Front, back: Back) -> None:
    for path in ELSEWHERE:
        answer = gate.raw(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\nx".encode())
        assert answer == b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", path
    assert gate.lines() == [f"404 127.0.0.1 POST {shown(path)}" for path in ELSEWHERE]
    assert back.arrivals == []


def shown(path: str) -> str:
    return path.partition("?")[0].replace("\\", "\\\\")


def test_other_methods_are_not_found(gate: Front, back: Back) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "post", "PRI", "BREW"):
        answer = gate.raw(f"{method} {PULL} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n"), method
    assert gate.raw(f"HEAD {PULL} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()).startswith(b"HTTP/1.1 404 ")
    upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: a\r\nsec-websocket-version: 13"
    assert gate.raw(f"GET {PULL} HTTP/1.1\r\nhost: a\r\n{upgrade}\r\n\r\n".encode()).startswith(b"HTTP/1.1 404 ")
    assert back.arrivals == []


HIDDEN = b"POST /v1/control/start-run HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\nx"
CHUNKED = b"0\r\n\r\n" + HIDDEN
ODD = {
    "length and chunks": (b"content-length: %d\r\ntransfer-encoding: chunked" % len(CHUNKED), CHUNKED, 411),
    "short length and chunks": (b"content-length: 5\r\ntransfer-encoding: chunked", CHUNKED, 411),
    "chunks": (b"transfer-encoding: chunked", CHUNKED, 411),
    "odd chunks": (b"transfer-encoding: xchunked\r\ncontent-length: 5", CHUNKED, 400),
    "chunks, twice": (b"transfer-encoding: chunked, identity\r\ncontent-length: 5", CHUNKED, 400),
    "chunks after a space": (b"transfer-encoding : chunked\r\ncontent-length: 5", CHUNKED, 400),
    "chunks after a tab": (b"transfer-encoding:\tchunked\r\ncontent-length: 5", CHUNKED, 411),
    "chunks on a folded line": (b"content-length: 5\r\na: b\r\n transfer-encoding: chunked", CHUNKED, 200),
    "two lengths": (b"content-length: 0\r\ncontent-length: 5", CHUNKED, 400),
    "two lengths in one": (b"content-length: 0, 5", CHUNKED, 400),
    "negative length": (b"content-length: -1", CHUNKED, 400),
    "signed length": (b"content-length: +5", CHUNKED, 400),
    "hexadecimal length": (b"content-length: 0x5", CHUNKED, 400),
    "endless length": (b"content-length: " + b"9" * 400, CHUNKED, 400),
    "no length": (b"a: b", HIDDEN, 411),
    "bare line feeds": (b"a: b\ncontent-length: 5", CHUNKED, 200),
    "carriage return": (b"a: b\rtransfer-encoding: chunked\r\ncontent-length: 5", CHUNKED, 400),
    "zero byte": (b"a: \0\r\ncontent-length: 5", CHUNKED, 400),
    "too much": (b"content-length: %d" % (401 << 20), b"", 413),
}


def test_no_request_hides_in_another(gate: Front, back: Back) -> None:
    for odd, (headers, body, status) in ODD.items():
        back.arrivals.clear()
        request = f"POST {PULL} HTTP/1.1\r\nhost: a\r\n".encode() + headers + b"\r\n\r\n" + body
        answers = re.findall(rb"HTTP/1.1 (\d+)", gate.raw(request))
        # what is refused ends the connection; what is forwarded has five bytes, and the hidden request is seen, too
        assert answers == ([b"200", b"404"] if status == 200 else [b"%d" % status]), odd
        assert [(one.line, one.size) for one in back.arrivals] == [(f"POST {PULL} HTTP/1.1", 5)] * (status == 200), odd
        assert all("transfer-encoding" not in one.headers for one in back.arrivals), odd


def test_what_is_refused_is_one_short_line_each(gate: Front, back: Back) -> None:
    gate.raw(b"POST /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: a\r\n\r\n")
    gate.raw(b"B" * 5000 + b" / HTTP/1.1\r\nhost: a\r\n\r\n")
    gate.raw(b"POST /\x1b[31m\x00\n HTTP/1.1\r\nhost: a\r\n\r\n")
    gate.raw(b"POST /" + b"a" * 100_000)
    gate.raw(b"\x16\x03\x01\x00\xff\r\n\r\n")
    assert gate.lines() == [
        "404 127.0.0.1 POST /" + "a" * 99 + "...",
        "404 127.0.0.1 " + "B" * 20 + "... /",
        *["400 127.0.0.1 not HTTP"] * 3,
    ]
    assert re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ [ -~]{,200}\n){5}", gate.log.read_text().partition("\n")[2])
    assert back.arrivals == []


def test_a_forged_address_does_not_get_into_the_log(gate: Front) -> None:
    assert gate.ask("POST", "/", x_forwarded_for="9.9.9.9", forwarded="for=9.9.9.9")[0] == 404
    assert gate.lines() == ["404 127.0.0.1 POST /"]


def test_only_tls_that_the_ca_vouches_for(gate: Front, back: Back, tmp_path: Path) -> None:
    with socket.create_connection(("127.0.0.1", gate.port), timeout=PATIENCE) as plain:
        plain.sendall(f"POST {PULL} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n".encode())
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(65536)
    stranger = make_keys(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        Front(gate.port, gate.pid, gate.log, stranger).connect()
    with standing(Keys(stranger.ca, gate.keys.certificate, gate.keys.key), back.port, tmp_path / "log") as distrustful:
        assert Front(distrustful.port, distrustful.pid, distrustful.log, gate.keys).ask("POST", PULL)[0] == 502
        assert "certificate verify failed" in distrustful.lines()[0]
    assert back.arrivals == []


# ---- large, slow, gone -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_large_body_is_not_held_in_memory(gate: Front, back: Back) -> None:
    def peak() -> int:
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{gate.pid}/status").read_text())[0]) << 10

    gate.ask("POST", PULL)
    before, body = peak(), os.urandom(1 << 20) * 100
    assert gate.ask("POST", PULL, body)[0] == 200
    assert back.arrivals[-1].size == len(body)
    assert back.arrivals[-1].digest == hashlib.sha256(body).hexdigest()
    back.answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    assert gate.ask("POST", PULL)[2] == body
    assert peak() - before < 50 << 20


def test_slow_sites_do_not_keep_others_waiting(gate: Front, back: Back) -> None:
    head = f"POST {PULL} HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n".encode()
    with contextlib.ExitStack() as slow:
        for begun in (b"", head, head + b"\r\n", head + b"\r\nhalf a body") * 30:
            slow.enter_context(gate.connect()).sendall(begun)
        assert gate.ask("POST", PULL)[0] == 200
        assert len(back.arrivals) == 1
    until(lambda: len(back.broken) == 60, lambda: back.broken)  # behind, too, nothing waits for those who left
    assert gate.ask("POST", PULL)[0] == 200
    assert len(back.arrivals) == 2
    assert gate.lines() == []


IMPATIENT = "import sys; from pluribus.sites.flower import gate; gate.PATIENCE = 1; sys.exit(gate.main())"


HALF = {
    "nothing": "",
    "half a head": f"POST {PULL} HTTP/1.1\r\nhost",
    "half a body": f"POST {PULL} HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nhalf",
}


@pytest.mark.parametrize("half", HALF)
def test_who_stops_half_way_is_cut_off(keys: Keys, back: Back, tmp_path: Path, half: str) -> None:
    log = tmp_path / "gate.log"
    files = ["--certificate", keys.certificate, "--key", keys.key, "--ca", keys.ca]
    addresses = ["--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{back.port}"]
    with running([sys.executable, "-c", IMPATIENT, *addresses, *files], log) as process:
        found = until(lambda: re.search(r"listening on 127.0.0.1:(\d+)\n", log.read_text()), log.read_text)
        front = Front(int(found[1]), process.pid, log, keys)
        answer = front.raw(HALF[half].encode())
        told = half == "half a body"
        assert answer[:13] == b"HTTP/1.1 408 " * told
        assert front.lines() == [f"408 127.0.0.1 POST {PULL} timed out"] * told
    assert back.arrivals == []


def test_a_superlink_that_is_gone_and_comes_back(keys: Keys, tmp_path: Path) -> None:
    port = free_port()
    with standing(keys, port, tmp_path / "log") as gate:
        assert gate.ask("POST", PULL)[0] == 502
        gone = f"502 127.0.0.1 POST {PULL} got no answer from the SuperLink: All connection attempts failed"
        assert gate.lines() == [gone]
        with behind(keys, port):
            assert gate.ask("POST", PULL)[0] == 200


def test_an_answer_that_breaks_off_is_not_passed_for_a_whole_one(gate: Front, back: Back) -> None:
    back.answer, back.hang_up = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", True
    with pytest.raises(http.client.IncompleteRead):
        gate.ask("POST", PULL)
    back.answer = b""
    assert gate.ask("POST", PULL)[0] == 502
    assert f"200 127.0.0.1 POST {PULL} answer cut off (RemoteProtocolError)" in gate.lines()


# ---- starting it -----------------------------------------------------------------------------------------------------


def test_it_starts_without_anything_heavy() -> None:
    heavy = "{'torch', 'numpy', 'flwr', 'fastapi', 'cryptography', 'pluribus.storage.files'}"
    code = f"import sys, pluribus.sites.flower.gate; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


BAD = {
    "no port": (["--listen", "localhost"], "--listen", "HOST:PORT", "'localhost'"),
    "no host": (["--listen", ":9092"], "--listen", "HOST:PORT", "':9092'"),
    "odd port": (["--to", "127.0.0.1:99999"], "--to", "HOST:PORT", "'127.0.0.1:99999'"),
    "taken": (["--listen", "127.0.0.1:{taken}"], "--listen", "127.0.0.1:{taken}", "already in use"),
    "no certificate": (["--certificate", "no.pem"], "no.pem", "{key}", "No such file"),
    "another's key": (["--key", "{other}"], "{certificate}", "{other}"),
    "locked key": (["--key", "{locked}"], "{certificate}", "{locked}"),
    "no CA": (["--ca", "{key}"], "CA", "{key}"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_work_is_one_sentence(
    bad: str, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, *facts = BAD[bad]
    other = ec.generate_private_key(ec.SECP384R1())
    (tmp_path / "other").write_bytes(_private(other, serialization.PrivateFormat.PKCS8))
    lock = serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "locked").write_bytes(
        other.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = vars(keys) | {name: tmp_path / name for name in ("other", "locked")}
        known["taken"] = taken.getsockname()[1]
        files = ["--certificate", str(keys.certificate), "--key", str(keys.key), "--ca", str(keys.ca)]
        addresses = ["--listen", "127.0.0.1:0", "--to", "127.0.0.1:9"]
        assert main([*addresses, *files, *(flag.format(**known) for flag in flags)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert_facts(err, *(fact.format(**known) for fact in facts))
    assert err.count("\n") == 1
