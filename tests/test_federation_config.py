"""Mistakes in the two files of a federation, and in what lies around it: one sentence each, before anything starts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from conftest import few_digits
from pluribus.flower import worker
from pluribus.flower.keys import make_keys
from pluribus.flower.programs import free_port
from pluribus.flower.serve import _agree, _agreed, read_federation
from pluribus.folder import RunFolder
from pluribus.toml import to_toml
from terminal import Terminal

SERVER: dict[str, Any] = {"sites": ["north"], "classes": ["0", "1"], "image": [1, 8, 8]}
SITE: dict[str, Any] = {"name": "north", "keys": "keys/sites/north", "model": "mlp-64", "state": "state", "wait": 1.0}


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


def serve(terminal: Terminal, place: Path, **settings: Any) -> str:
    """What the server says of these settings; None takes one away."""
    given = SERVER | {"listen": f"127.0.0.1:{free_port()}"} | settings
    return terminal.refused("serve", "fedgh", "--config", write(place / "federation.toml", given))


def join(terminal: Terminal, place: Path, **settings: Any) -> str:
    """What a site says of these settings; None takes one away."""
    return terminal.refused("join", "--config", write_site(place, **settings))


def write_site(place: Path, **settings: Any) -> Path:
    given = SITE | {"server": f"127.0.0.1:{free_port()}", "data": few_digits(160)} | settings
    return write(place / "site.toml", given)


def write(file: Path, given: dict[str, Any]) -> Path:
    file.write_text(to_toml({name: value for name, value in given.items() if value is not None}), encoding="utf-8")
    return file


# ---- both files ----------------------------------------------------------------------------------------------------

WRONG_FILES: dict[str, tuple[Callable[..., str], dict[str, Any], str]] = {
    "unknown at the server": (serve, {"dedline": 5.0}, "'dedline'. Did you mean 'deadline'?"),
    "another name at the server": (serve, {"learning_rate": 0.1}, "'learning_rate'. Did you mean 'lr'?"),
    "unknown at a site": (join, {"modle": "mlp-64"}, "'modle'. Did you mean 'model'?"),
    "for simulations": (serve, {"partition": "dirichlet"}, "'partition' in .*federation.toml is for simulations"),
    "common test set": (serve, {"test": "common"}, "'test' in .*federation.toml is for simulations"),
    "least share": (serve, {"min_share": 0.1}, "'min_share' in .*federation.toml is for simulations"),
    "missing at the server": (serve, {"classes": None}, "federation.toml does not say 'classes'"),
    "missing at a site": (join, {"model": None}, "site.toml does not say 'model'"),
    "no deadline": (serve, {"deadline": 0.0}, "'deadline' in federation.toml must be above 0, not 0.0"),
    "no sites": (serve, {"sites": []}, "federation.toml needs 'sites'"),
    "one class": (serve, {"classes": ["cat"]}, "federation.toml needs 'classes': at least two"),
    "one class in two spellings": (serve, {"classes": ["\u00e9", "e\u0301"]}, "federation.toml needs 'classes'"),
    "a flat image": (serve, {"image": [28, 28]}, "federation.toml needs 'image': channels, height and width"),
    "a site without a key": (
        serve,
        {"sites": ["north", "east"]},
        "site 'east' has no key in .*sites.toml: pluribus keys .* --sites east makes one",
    ),
    "no port": (join, {"server": "fl.example.org"}, "'server' in site.toml must be HOST:PORT"),
    "no port to listen at": (serve, {"listen": "9092"}, "must be HOST:PORT"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_setting_gets_a_sentence(terminal: Terminal, place: Path, case: str) -> None:
    command, settings, sentence = WRONG_FILES[case]
    assert_says(command(terminal, place, **settings), sentence)


def test_names_of_classes_are_composed(place: Path) -> None:
    file, _ = read_federation(write(place / "federation.toml", SERVER | {"classes": ["e\u0301", "b"]}), "fedgh")
    assert file.classes == ("\u00e9", "b")


def assert_says(found: str, sentence: str) -> None:
    assert re.search(sentence, found), found


def test_a_file_that_is_not_there(terminal: Terminal, tmp_path: Path) -> None:
    for command in (["serve", "fedgh"], ["join"]):
        assert_says(terminal.refused(*command, "--config", tmp_path / "none.toml"), "none.toml")


def test_a_run_goes_on_with_the_settings_that_it_began_with(terminal: Terminal, place: Path) -> None:
    file, described = read_federation(write(place / "federation.toml", SERVER | {"epochs": 1}), "fedgh")
    folder = RunFolder.create(str(place / "federation"), "fedgh")
    folder.write_config(described.settings(), {})
    facts = {0: {"model": "mlp-64", "samples": 10, "test": 5, "public": None}}
    (folder.path / "link").mkdir()
    _agree(folder.path / "link" / "agreement.json", file, described, lambda offer: facts)
    folder.close()
    assert_says(serve(terminal, place, epochs=3), "'epochs' is 3, but was 1 when .*federation was begun. Set it back")
    assert_says(serve(terminal, place, sites=["north", "north2"]), "site 'north2' has no key")


def test_the_model_that_all_share_is_agreed_on_once(place: Path) -> None:
    """The smallest that any site has: in agreement.json, and after a restart of the server too."""
    file, described = read_federation(write(place / "federation.toml", SERVER | {"sites": ["north", "south"]}), "fml")
    facts = {
        k: {"model": model, "samples": 10, "test": 5, "public": None} for k, model in enumerate(("cnn-16", "mlp-64"))
    }
    agreement, _ = _agree(place / "agreement.json", file, described, lambda offer: facts)
    assert agreement.hyper["aux_model"] == "mlp-64"
    assert json.loads((place / "agreement.json").read_text())["agreement"]["hyper"]["aux_model"] == "mlp-64"
    assert _agreed(place / "agreement.json", file, described) == (agreement, facts)


def test_a_run_goes_on_with_who_takes_part_as_it_began(terminal: Terminal, place: Path) -> None:
    """Which sites need not agree on."""
    _, described = read_federation(write(place / "federation.toml", SERVER), "fedgh")
    folder = RunFolder.create(str(place / "federation"), "fedgh")
    folder.write_config(described.settings(), described.decisive())
    folder.close()
    assert_says(
        serve(terminal, place, participation=0.5), r"'participation' is 0\.5, but was 1\.0 when .*federation was"
    )


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


WRONG_KEYS: dict[str, tuple[Callable[..., str], Callable[[Path], None], str]] = {
    "no certificate": (serve, without_certificate, "server.pem"),
    "no list of sites": (serve, without_list, "sites.toml"),
    "no CA": (join, without_authority, "ca.crt"),
    "no key": (join, without_key, "north.key"),
    "expired": (serve, expired, "expired"),
    "another CA": (serve, of_another_authority, "ca.crt"),
    "a key for all to read": (join, open_to_others, "north.key"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_a_wrong_key_gets_a_sentence(terminal: Terminal, place: Path, case: str) -> None:
    command, spoil, sentence = WRONG_KEYS[case]
    spoil(place / "keys")
    assert_says(command(terminal, place), sentence)


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
        assert_says(serve(terminal, place, listen=address), f"{address} cannot be used: Address already in use")


def test_a_server_that_is_not_there(terminal: Terminal, place: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert_says(join(terminal, place, server=address), f"cannot reach the server at {address}: Connection refused")


def test_a_site_joins_without_torch(place: Path) -> None:
    """Its worker has that."""
    check = "import sys; from pluribus.cli import main; sys.exit(main(sys.argv[1:]) != 2 or 'torch' in sys.modules)"
    file = write_site(place, server=f"127.0.0.1:{free_port()}")
    done = subprocess.run([sys.executable, "-c", check, "join", "--config", str(file)], stderr=subprocess.PIPE)
    assert_says(done.stderr.decode(), "cannot reach the server")
    assert done.returncode == 0


def test_a_service_that_is_stopped_says_how_to_go_on_and_leaves_nothing(place: Path, tmp_path: Path) -> None:
    file, scratch = write_site(place, wait=60.0), tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pluribus", "join", "--config", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(scratch)}
    ) as site:
        assert site.stdout is not None
        assert "cannot reach the server" in site.stdout.readline()
        site.terminate()
        said = site.communicate()[1]
    assert site.returncode == 130
    assert f"Go on with: pluribus join --config {file}" in said
    assert list(scratch.glob("pluribus-*")) == []


def test_a_server_of_another_authority(terminal: Terminal, place: Path) -> None:
    of_another_authority(place / "keys")
    with answering(place / "keys") as address:
        assert_says(join(terminal, place, server=address), f"{address} is not who .*ca.crt says: .*certificate")


def test_a_server_of_another_name(terminal: Terminal, place: Path) -> None:
    with answering(place / "keys") as address:
        called = address.replace("127.0.0.1", "localhost")
        assert_says(join(terminal, place, server=called), f"{called} is not who .*ca.crt says: .*'localhost'")


# ---- what a site brings --------------------------------------------------------------------------------------------


def test_a_site_joins_once(terminal: Terminal, place: Path) -> None:
    (place / "state").mkdir()
    with (place / "state" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_says(join(terminal, place), "state is in use by another process: this site has joined already")


WRONG_MEANS: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": "nowhere"}, "nowhere"),
    "no word of data": ({"data": None}, "site.toml names neither 'data' nor 'train'"),
    "an unknown model": ({"model": "mlp-46"}, "unknown model 'mlp-46'. Did you mean"),
    "an unknown device": ({"device": "gpu"}, "'device' in site.toml must be cpu, cuda or auto, not 'gpu'"),
}


@pytest.mark.parametrize("case", WRONG_MEANS)
def test_what_a_worker_cannot_use_gets_a_sentence(capsys: pytest.CaptureFixture[str], place: Path, case: str) -> None:
    settings, sentence = WRONG_MEANS[case]
    assert worker.main([str(write_site(place, **settings)), str(place / "socket")]) == 2
    assert_says(capsys.readouterr().err, f"^error: .*{sentence}")


def unreadable(place: Path) -> dict[str, Any]:
    (place / "images" / "0").mkdir(parents=True)
    (place / "images" / "0" / "one.png").write_text("no image")
    return {"data": "images"}


OWN_MISTAKES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "a wrong folder": (lambda place: {"data": "nowhere"}, "nowhere"),
    "an unknown model": (lambda place: {"model": "ResNet18"}, "'ResNet18'. Did you mean 'resnet18'"),
    "an unreadable image": (unreadable, "one.png cannot be read as an image"),
    "images too small for the model": (lambda place: {"model": "alexnet"}, "alexnet. cannot take 1x8x8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN_MISTAKES)
def test_a_site_finds_its_own_mistakes_before_it_looks_for_the_server(place: Path, case: str) -> None:
    """There is none."""
    settings, sentence = OWN_MISTAKES[case]
    file = write_site(place, **settings(place))
    command = [sys.executable, "-m", "pluribus", "join", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert_says(done.stderr, f"^error: .*{sentence}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.xdist_group("network")
def test_a_run_folder_may_be_relative(place: Path) -> None:
    """Flower is told of files in it, and wants to know exactly where they are."""
    write(place / "federation.toml", SERVER | {"listen": f"127.0.0.1:{free_port()}", "wait": 1.0})
    command = [sys.executable, "-m", "pluribus", "serve", "fedgh", "--out", "new"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240)
    assert "listening on" in done.stdout
    assert_says(done.stderr, "site north did not come within 1 s")
    assert (place / "new" / "config.toml").exists()
