"""Folders of keys and certificates that a disk damaged, or that other programs made."""

from __future__ import annotations

import base64
import shutil
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import fuzzed, mutated

from conftest import new_folder
from pluribus.errors import PluribusError
from pluribus.sites.keys import check_certificate, check_node_key, make_keys, read_public_key, read_site_keys

NOW = datetime.now(UTC)
FILES = ("ca.crt", "ca.key", "server/server.pem", "server/server.key", "sites.toml", "sites/north/north.key")
FILES += ("sites/north/north.pub", "sites/north/ca.crt")


@cache
def honest() -> Path:
    folder = Path(new_folder()) / "keys"
    make_keys(folder, ["localhost", "127.0.0.1"], ["north", "south"], 30, NOW)
    return folder


@cache
def others() -> list[bytes]:
    """Keys of kinds that are not used here."""
    kinds = (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1()))
    forms = (PrivateFormat.PKCS8, PrivateFormat.OpenSSH)
    return [key.private_bytes(Encoding.PEM, form, NoEncryption()) for key in kinds for form in forms] + [
        key.public_key().public_bytes(Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) for key in kinds
    ]


@st.composite
def changed_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of the folder with changed bytes, or with changed bytes inside of its PEM block, or of another kind."""
    name = draw(st.sampled_from(FILES))
    valid = (honest() / name).read_bytes()
    match draw(st.sampled_from(["bytes", "block", "block", "other"])):
        case "bytes":
            return name, draw(mutated([valid]))
        case "other":
            return name, draw(st.sampled_from([*others(), *((honest() / one).read_bytes() for one in FILES)]))
    lines = valid.split(b"\n")
    if not lines[0].startswith(b"-----BEGIN"):
        return name, draw(mutated([valid], most=1))
    inside = draw(mutated([base64.b64decode(b"".join(lines[1:-2]))]))
    return name, b"\n".join([lines[0], base64.b64encode(inside), *lines[-2:]])


@fuzzed()
@given(changed_files())
def test_folders_of_keys(file: tuple[str, bytes]) -> None:
    with scratch() as folder:
        keys = folder / "keys"
        shutil.copytree(honest(), keys)
        (keys / file[0]).write_bytes(file[1])
        server, site = keys / "server", keys / "sites" / "north"
        survives(
            lambda: check_certificate(keys / "ca.crt", server / "server.pem", server / "server.key", None, NOW), folder
        )
        survives(
            lambda: check_certificate(site / "ca.crt", server / "server.pem", server / "server.key", "localhost", NOW),
            folder,
        )
        survives(lambda: check_node_key(site / "north.key"), folder)
        found = survives(lambda: read_public_key(site / "north.key"), folder)
        assert isinstance(found, PluribusError) or found.startswith("ecdsa-sha2-nistp384 ")
        survives(lambda: read_site_keys(keys / "sites.toml"), folder)


@fuzzed(0.1)
@given(changed_files(), st.sampled_from([["west"], ["north", "west"], []]), st.booleans())
def test_folders_of_keys_that_grow(file: tuple[str, bytes], sites: list[str], renew: bool) -> None:
    with scratch() as folder:
        keys = folder / "keys"
        shutil.copytree(honest(), keys)
        (keys / file[0]).write_bytes(file[1])
        if renew:
            shutil.rmtree(keys / "server")
        survives(lambda: make_keys(keys, ["localhost"] if renew else [], sites, 10, NOW), folder)
