"""Mistakes in the two files of a federation, and in what lies around it: one sentence each, before anything starts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from conftest import few_digits
from forks import SOURCE, start
from pluribus.errors import (
    CertificateError,
    ConflictError,
    DeviceError,
    FileAccessError,
    FormatError,
    MismatchError,
    MissingSettingError,
    OtherRunError,
    RangeError,
    UnknownNameError,
)
from pluribus.sites import trainer as worker
from pluribus.sites.config import read_site
from pluribus.sites.federate import SiteFacts
from pluribus.sites.flower.programs import free_port
from pluribus.sites.join import wait_for_server
from pluribus.sites.keys import make_keys
from pluribus.sites.serve import _agree, _read_agreement, read_federation
from pluribus.storage.folder import RunFolder
from pluribus.storage.toml import to_toml
from refusals import Kind, Refusal, assert_facts, refused
from terminal import Terminal

SERVER: dict[str, Any] = {"sites": ["north"], "classes": ["0", "1"], "image": [1, 8, 8]}
SITE: dict[str, Any] = {"name": "north", "keys": "keys/sites/north", "model": "mlp-64", "state": "state", "wait": 1.0}

forked = pytest.mark.xdist_group("network")  # whose process has the launcher of forks anyway


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    make_keys(folder, ["127.0.0.1"], ["north"], 30, datetime.now(UTC))
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A folder with good keys, to be spoiled."""
    shutil.copytree(made, tmp_path / "keys")
    return tmp_path


def serve(terminal: Terminal, place: Path, **settings: Any) -> Refusal:
    """What the server says of these settings; None takes one away."""
    given = SERVER | {"listen": f"127.0.0.1:{free_port()}"} | settings
    return terminal.refused("serve", "fedgh", "--config", write(place / "federation.toml", given))


def join(terminal: Terminal, place: Path, **settings: Any) -> Refusal:
    """What a site says of these settings; None takes one away."""
    return terminal.refused("join", "--config", write_site(place, **settings))


def write_site(place: Path, **settings: Any) -> Path:
    given = SITE | {"server": f"127.0.0.1:{free_port()}", "data": few_digits(160)} | settings
    return write(place / "site.toml", given)


def write(file: Path, given: dict[str, Any]) -> Path:
    file.write_text(to_toml({name: value for name, value in given.items() if value is not None}), encoding="utf-8")
    return file


def said(place: Path, *words: object) -> tuple[int, str, str]:
    """The status of one of our commands, and what it has printed."""
    out, err = place / "out", place / "err"
    status = start([sys.executable, "-m", "pluribus", *words], out, err, os.environ | SOURCE, cwd=place).wait(240)
    return status, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")


# ---- both files ----------------------------------------------------------------------------------------------------

WRONG_FILES: dict[str, tuple[Any, ...]] = {
    "unknown at the server": (serve, {"dedline": 5.0}, UnknownNameError, "'dedline'", "'deadline'"),
    "another name at the server": (serve, {"learning_rate": 0.1}, UnknownNameError, "'learning_rate'", "'lr'"),
    "unknown at a site": (join, {"modle": "mlp-64"}, UnknownNameError, "'modle'", "'model'"),
    "for simulations": (serve, {"partition": "dirichlet"}, ConflictError, "'partition'", "federation.toml"),
    "common test set": (serve, {"test": "common"}, ConflictError, "'test'", "federation.toml"),
    "least share": (serve, {"min_share": 0.1}, ConflictError, "'min_share'", "federation.toml"),
    "missing at the server": (serve, {"classes": None}, MissingSettingError, "federation.toml", "'classes'"),
    "missing at a site": (join, {"model": None}, MissingSettingError, "site.toml", "'model'"),
    "no deadline": (serve, {"deadline": 0.0}, RangeError, "deadline", "federation.toml", "above 0", 0.0),
    "no sites": (serve, {"sites": []}, FormatError, "federation.toml", "'sites'"),
    "one class": (serve, {"classes": ["cat"]}, FormatError, "federation.toml", "'classes'", "two"),
    "one class in two spellings": (serve, {"classes": ["\u00e9", "e\u0301"]}, FormatError, "'classes'", "once"),
    "a flat image": (serve, {"image": [28, 28]}, FormatError, "federation.toml", "'image'", "[3, 32, 32]"),
    "a word for a number": (serve, {"deadline": "soon"}, FormatError, "federation.toml", "deadline", "'soon'"),
    "a site without a key": (
        serve,
        {"sites": ["north", "east"]},
        *(CertificateError, "'east'", "sites.toml", "pluribus keys", "--sites east"),
    ),
    "no port": (join, {"server": "fl.example.org"}, FormatError, "'server'", "site.toml", "HOST:PORT"),
    "no port to listen at": (serve, {"listen": "9092"}, FormatError, "'listen'", "HOST:PORT", "'9092'"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_setting_gets_a_sentence(terminal: Terminal, place: Path, case: str) -> None:
    command, settings, kind, *facts = WRONG_FILES[case]
    command(terminal, place, **settings).check(kind, *facts)


def test_names_of_classes_are_composed(place: Path) -> None:
    file, _ = read_federation(write(place / "federation.toml", SERVER | {"classes": ["e\u0301", "b"]}), "fedgh")
    assert file.classes == ("\u00e9", "b")


def test_a_method_whose_server_needs_rows_is_refused_at_once(terminal: Terminal, place: Path) -> None:
    """Before there is a folder, and before any site is asked."""
    config = write(place / "federation.toml", SERVER)
    terminal.refused("serve", "feddf", "--config", config).check(MismatchError, "feddf", "public rows", "pluribus run")
    assert not (place / "federation").exists()


def test_a_file_that_is_not_there(terminal: Terminal, tmp_path: Path) -> None:
    for command in (["serve", "fedgh"], ["join"]):
        terminal.refused(*command, "--config", tmp_path / "none.toml").check(FileAccessError, tmp_path / "none.toml")


def test_a_run_goes_on_with_the_settings_that_it_began_with(terminal: Terminal, place: Path) -> None:
    file, described = read_federation(write(place / "federation.toml", SERVER | {"epochs": 1}), "fedgh")
    folder = RunFolder.create(str(place / "federation"))
    folder.write_config(described.settings(), {})
    facts = {0: SiteFacts("mlp-64", samples=10, test=5, public=None)}
    (folder.path / "link").mkdir()
    _agree(folder.path / "link" / "agreement.json", file, described, lambda offer: facts)
    folder.close()
    serve(terminal, place, epochs=3).check(OtherRunError, "'epochs'", 3, 1, place / "federation", "--out")
    serve(terminal, place, sites=["north", "north2"]).check(CertificateError, "'north2'")


def test_the_model_that_all_share_is_agreed_on_once(place: Path) -> None:
    """The smallest that any site has: in agreement.json, and after a restart of the server too."""
    file, described = read_federation(write(place / "federation.toml", SERVER | {"sites": ["north", "south"]}), "fml")
    public = (3, 4), "f" * 64
    facts = {0: SiteFacts("cnn-16", 10, 5, public), 1: SiteFacts("mlp-64", 8, 5, public)}
    agreement, _ = _agree(place / "agreement.json", file, described, lambda offer: facts)
    assert agreement.hyper["aux_model"] == "mlp-64"
    assert json.loads((place / "agreement.json").read_text())["agreement"]["hyper"]["aux_model"] == "mlp-64"
    assert _read_agreement(place / "agreement.json", file, described) == (agreement, facts)


def test_a_run_goes_on_with_who_takes_part_as_it_began(terminal: Terminal, place: Path) -> None:
    """Which sites need not agree on."""
    _, described = read_federation(write(place / "federation.toml", SERVER), "fedgh")
    folder = RunFolder.create(str(place / "federation"))
    folder.write_config(described.settings(), described.decisive())
    folder.close()
    refusal = serve(terminal, place, participation=0.5)
    refusal.check(OtherRunError, "'participation'", 0.5, 1.0, place / "federation")


# ---- keys and certificates -----------------------------------------------------------------------------------------


def without_certificate(keys: Path) -> None:
    (keys / "server" / "server.pem").unlink()


def without_authority(keys: Path) -> None:
    (keys / "sites" / "north" / "ca.crt").unlink()


def without_key(keys: Path) -> None:
    (keys / "sites" / "north" / "north.key").unlink()


def without_list(keys: Path) -> None:
    (keys / "sites.toml").unlink()


def expired(keys: Path) -> None:
    shutil.rmtree(keys)
    make_keys(keys, ["127.0.0.1"], ["north"], 30, datetime.now(UTC) - timedelta(days=60))


def of_another_authority(keys: Path) -> None:
    other = keys.parent / "other"
    make_keys(other, ["127.0.0.1"], [], 30, datetime.now(UTC))
    shutil.rmtree(keys / "server")
    shutil.copytree(other / "server", keys / "server")


def open_to_others(keys: Path) -> None:
    (keys / "sites" / "north" / "north.key").chmod(0o644)


WRONG_KEYS: dict[str, tuple[Any, ...]] = {
    "no certificate": (serve, without_certificate, FileAccessError, "server.pem"),
    "no list of sites": (serve, without_list, FileAccessError, "sites.toml"),
    "no CA": (join, without_authority, FileAccessError, "ca.crt"),
    "no key": (join, without_key, FileAccessError, "north.key"),
    "expired": (serve, expired, CertificateError, "server.pem", "expired"),
    "another CA": (serve, of_another_authority, CertificateError, "server.pem", "ca.crt"),
    "a key for all to read": (join, open_to_others, CertificateError, "north.key", "chmod 600"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_a_wrong_key_gets_a_sentence(terminal: Terminal, place: Path, case: str) -> None:
    command, spoil, kind, *facts = WRONG_KEYS[case]
    spoil(place / "keys")
    command(terminal, place).check(kind, *facts)


# ---- the network ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(keys: Path) -> Iterator[str]:
    """A server that shows a certificate, and no more. Its address."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(keys / "server" / "server.pem", keys / "server" / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as door:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = door.accept()
                    with contextlib.suppress(OSError):
                        tls.wrap_socket(line, server_side=True).close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{door.getsockname()[1]}"
        door.shutdown(socket.SHUT_RDWR)


def test_a_port_in_use(terminal: Terminal, place: Path) -> None:
    with answering(place / "keys") as address:
        serve(terminal, place, listen=address).check(DeviceError, "'listen'", address, "already in use")


def check_that_it_ends(place: Path, server: str, kind: Kind, *facts: str) -> None:
    """A site with such a server: the kind of its error, and what its process says when it ends."""
    file = write_site(place, server=server)
    site = read_site(file)
    with refused(kind, *facts):
        wait_for_server(site, site.ca_file(), lambda text: None)
    status, _, err = said(place, "join", "--config", file)
    assert status == 2
    assert err.startswith("error: ")
    assert_facts(err, *facts)
    assert err.count("\n") == 1


@forked
def test_a_server_that_is_not_there(place: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    check_that_it_ends(place, address, DeviceError, address, "Connection refused")


def test_a_site_joins_without_torch(place: Path) -> None:
    """Its worker has that."""
    check = "import sys; from pluribus.cli import main; sys.exit(main(sys.argv[1:]) != 2 or 'torch' in sys.modules)"
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", check, "join", "--config", str(write_site(place, server=address))]
    done = subprocess.run(command, stderr=subprocess.PIPE)
    assert_facts(done.stderr.decode(), address, "Connection refused")
    assert done.returncode == 0


@forked
def test_a_service_that_is_stopped_says_how_to_go_on_and_leaves_nothing(place: Path) -> None:
    address, scratch, out, err = f"127.0.0.1:{free_port()}", place / "scratch", place / "out", place / "err"
    file = write_site(place, server=address, wait=60.0)
    scratch.mkdir()
    command = [sys.executable, "-m", "pluribus", "join", "--config", file]
    site = start(command, out, err, os.environ | SOURCE | {"TMPDIR": str(scratch)})
    while address not in out.read_text(encoding="utf-8"):
        assert site.poll() is None
        time.sleep(0.05)
    assert list(scratch.glob("pluribus-*")) != []
    os.kill(site.pid, signal.SIGTERM)
    assert site.wait(60) == 130
    assert f"pluribus join --config {file}" in err.read_text(encoding="utf-8")
    assert list(scratch.glob("pluribus-*")) == []


@forked
def test_a_server_of_another_authority(place: Path) -> None:
    of_another_authority(place / "keys")
    with answering(place / "keys") as address:
        check_that_it_ends(place, address, CertificateError, address, "ca.crt", "certificate")


@forked
def test_a_server_of_another_name(place: Path) -> None:
    with answering(place / "keys") as address:
        called = address.replace("127.0.0.1", "localhost")
        check_that_it_ends(place, called, CertificateError, called, "ca.crt", "'localhost'")


# ---- what a site brings --------------------------------------------------------------------------------------------


def test_a_site_joins_once(terminal: Terminal, place: Path) -> None:
    (place / "state").mkdir()
    with (place / "state" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        join(terminal, place).check(OtherRunError, place / "state", "in use")


WRONG_MEANS: dict[str, tuple[Any, ...]] = {
    "no data": ({"data": "nowhere"}, "nowhere"),
    "no word of data": ({"data": None}, "site.toml", "'data'", "'train'"),
    "an unknown model": ({"model": "mlp-46"}, "'mlp-46'", "'mlp-64'"),
    "an unknown device": ({"device": "gpu"}, "'device'", "site.toml", "cuda", "'gpu'"),
}


@pytest.mark.parametrize("case", WRONG_MEANS)
def test_what_a_worker_cannot_use_gets_a_sentence(capsys: pytest.CaptureFixture[str], place: Path, case: str) -> None:
    settings, *facts = WRONG_MEANS[case]
    assert worker.main([str(write_site(place, **settings)), str(place / "socket")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert_facts(said, *facts)


def unreadable(place: Path) -> dict[str, Any]:
    (place / "images" / "0").mkdir(parents=True)
    (place / "images" / "0" / "one.png").write_text("no image")
    return {"data": "images"}


OWN_MISTAKES: dict[str, tuple[Any, ...]] = {
    "a wrong folder": (lambda place: {"data": "nowhere"}, "nowhere"),
    "an unknown model": (lambda place: {"model": "ResNet18"}, "'ResNet18'", "'resnet18'"),
    "an unreadable image": (unreadable, "one.png"),
    "images too small for the model": (lambda place: {"model": "alexnet"}, "alexnet", "1x8x8"),
}


@forked
@pytest.mark.slow
@pytest.mark.parametrize("case", OWN_MISTAKES)
def test_a_site_finds_its_own_mistakes_before_it_looks_for_the_server(place: Path, case: str) -> None:
    """There is none."""
    settings, *facts = OWN_MISTAKES[case]
    file = write_site(place, **settings(place))
    status, out, err = said(place, "join", "--config", file)
    assert status == 2
    assert err.startswith("error: ")
    assert_facts(err, *facts)
    assert err.count("\n") == 1
    assert out == ""


@forked
@pytest.mark.slow
@pytest.mark.network
def test_a_run_folder_may_be_relative(place: Path) -> None:
    """Flower is told of files in it, and wants to know exactly where they are."""
    write(place / "federation.toml", SERVER | {"listen": f"127.0.0.1:{free_port()}", "wait": 1.0})
    _, out, err = said(place, "serve", "fedgh", "--out", "new")
    assert "listening on" in out
    assert_facts(err, "north", "1 s")
    assert (place / "new" / "config.toml").exists()
