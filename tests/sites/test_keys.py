"""Certificates and keys: what the command makes, what it leaves alone, and that TLS and Flower take it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import stat
import subprocess
import threading
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from pluribus.errors import (
    CertificateError,
    DamagedFileError,
    FileAccessError,
    FormatError,
    MissingSettingError,
    RangeError,
)
from pluribus.sites.keys import (
    check_authority,
    check_certificate,
    check_node_key,
    make_keys,
    read_public_key,
    read_site_keys,
)
from processes import start
from refusals import assert_facts, refused
from terminal import Terminal, python

NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)
NAMES = ["fl.example.org", "10.0.0.5", "localhost", "127.0.0.1", "::1"]
SITES = ["berlin", "paris.2"]

needs_openssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of keys as of now, which no test changes."""
    folder = tmp_path_factory.mktemp("federation") / "keys"
    make_keys(folder, NAMES, SITES, days=825, now=datetime.now(UTC))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


def extension(file: Path, kind: Any) -> Any:
    return x509.load_pem_x509_certificate(file.read_bytes()).extensions.get_extension_for_class(kind).value


# ---- what is made --------------------------------------------------------------------------------------------------


def test_the_command_makes_a_folder_per_party(terminal: Terminal, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    answer = terminal("keys", folder, "--server", "fl.example.org,10.0.0.5", "--sites", "berlin, paris.2")
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["made", f"{folder}/{name}"] for name in ("ca.crt", "server", "sites/berlin", "sites/paris.2")
    ]
    last = (datetime.now(UTC) + timedelta(days=825)).date()
    assert f"fl.example.org, 10.0.0.5; valid until {last}" in lines[1]
    assert sorted(content(folder)) == [
        "ca.crt",
        "ca.key",
        "server/server.key",
        "server/server.pem",
        "sites.toml",
        "sites/berlin/berlin.key",
        "sites/berlin/berlin.pub",
        "sites/berlin/ca.crt",
        "sites/paris.2/ca.crt",
        "sites/paris.2/paris.2.key",
        "sites/paris.2/paris.2.pub",
    ]
    assert (folder / "sites/berlin/ca.crt").read_bytes() == (folder / "ca.crt").read_bytes()


def test_certificates_say_what_they_are_for(keys: Path) -> None:
    ca, server = (
        x509.load_pem_x509_certificate((keys / name).read_bytes()) for name in ("ca.crt", "server/server.pem")
    )
    for certificate, days in ((ca, 3650), (server, 825)):
        assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
        assert certificate.public_key().curve.name == "secp384r1"
        assert certificate.signature_hash_algorithm.name == "sha384"
        assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == timedelta(days=days, hours=1)
    usage = extension(keys / "ca.crt", x509.KeyUsage)
    assert (usage.key_cert_sign, usage.digital_signature) == (True, False)
    assert extension(keys / "ca.crt", x509.BasicConstraints).ca
    usage = extension(keys / "server/server.pem", x509.KeyUsage)
    assert (usage.key_cert_sign, usage.digital_signature) == (False, True)
    assert not extension(keys / "server/server.pem", x509.BasicConstraints).ca
    assert list(extension(keys / "server/server.pem", x509.ExtendedKeyUsage)) == [x509.OID_SERVER_AUTH]
    names = extension(keys / "server/server.pem", x509.SubjectAlternativeName)
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "127.0.0.1", "::1"]


def test_no_name_is_added_to_those_given(tmp_path: Path) -> None:
    make_keys(tmp_path, ["FL.example.org", "fl.example.org"], [], 1, NOW)
    names = extension(tmp_path / "server/server.pem", x509.SubjectAlternativeName)
    assert list(names) == [x509.DNSName("fl.example.org")]


def test_sites_are_listed_with_their_public_keys(keys: Path) -> None:
    listed = read_site_keys(keys / "sites.toml")
    assert list(listed) == SITES
    assert tomllib.loads((keys / "sites.toml").read_text()) == listed
    for site, key in listed.items():
        place = keys / "sites" / site
        assert key == read_public_key(place / f"{site}.key")
        assert (place / f"{site}.pub").read_text() == f"{key} {site}\n"
        check_node_key(place / f"{site}.key")
    assert len(set(listed.values())) == 2


@needs_openssh
def test_openssh_reads_a_site_key(keys: Path) -> None:
    file = keys / "sites/berlin/berlin.key"
    done = subprocess.run(["ssh-keygen", "-y", "-P", "", "-f", file], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == read_site_keys(keys / "sites.toml")["berlin"].split()


def test_private_keys_are_private_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the umask allows. Files are looked at whenever one of them is about to be made durable."""
    folder, seen, real = tmp_path / "keys", set[str](), os.fsync

    def fsync(handle: int) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and b"PRIVATE KEY" in path.read_bytes():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
                seen.add(path.name)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    before = os.umask(0)
    try:
        make_keys(folder, NAMES, SITES, 825, NOW)
    finally:
        os.umask(before)
    assert {".ca.key.new", "ca.key", ".server.key.new", ".berlin.key.new", "berlin.key"} <= seen
    assert modes(folder) == {
        ".": 0o700,
        "ca.crt": 0o644,
        "ca.key": 0o600,
        "server": 0o700,
        "server/server.key": 0o600,
        "server/server.pem": 0o644,
        "sites": 0o700,
        "sites.toml": 0o644,
        "sites/berlin": 0o700,
        "sites/berlin/berlin.key": 0o600,
        "sites/berlin/berlin.pub": 0o644,
        "sites/berlin/ca.crt": 0o644,
        "sites/paris.2": 0o700,
        "sites/paris.2/ca.crt": 0o644,
        "sites/paris.2/paris.2.key": 0o600,
        "sites/paris.2/paris.2.pub": 0o644,
    }


# ---- once more -----------------------------------------------------------------------------------------------------


def test_a_further_site_changes_nothing_else(terminal: Terminal, tmp_path: Path) -> None:
    make_keys(tmp_path, NAMES, SITES, 825, NOW)
    before = content(tmp_path)
    answer = terminal("keys", tmp_path, "--sites", "berlin,rome")
    assert answer.code == 0, answer.err
    assert [line.split()[0] for line in answer.out.splitlines()] == ["kept", "kept", "kept", "made"]
    after = content(tmp_path)
    listed = after.pop("sites.toml")
    assert listed.startswith(before.pop("sites.toml"))
    assert list(read_site_keys(tmp_path / "sites.toml")) == [*SITES, "rome"]
    new = [after.pop(f"sites/rome/{name}") for name in ("rome.key", "rome.pub", "ca.crt")]
    assert new[-1] == before["ca.crt"]
    assert after == before


def test_nothing_more_to_make_changes_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path, NAMES, SITES, 825, NOW)
    before = content(tmp_path)
    again = make_keys(tmp_path, [name.upper() for name in reversed(NAMES)], SITES, 90, NOW + timedelta(days=400))
    assert not any(item.made for item in again)
    assert content(tmp_path) == before


def test_a_site_that_was_handed_over_keeps_its_key(tmp_path: Path) -> None:
    make_keys(tmp_path, NAMES, SITES, 825, NOW)
    shutil.rmtree(tmp_path / "sites" / "berlin")
    (tmp_path / "ca.key").unlink()  # is offline, and sites do not need it
    before = content(tmp_path)
    make_keys(tmp_path, [], ["berlin"], 825, NOW)
    assert content(tmp_path) == before
    make_keys(tmp_path, [], ["rome"], 825, NOW)
    assert list(read_site_keys(tmp_path / "sites.toml")) == [*SITES, "rome"]


def test_a_new_certificate_comes_from_the_same_ca(terminal: Terminal, tmp_path: Path) -> None:
    make_keys(tmp_path, ["fl.example.org"], SITES, 30, NOW)
    before, place = content(tmp_path), tmp_path / "server"
    refusal = terminal.refused("keys", tmp_path, "--server", "fl.example.net,10.0.0.5")
    refusal.check(CertificateError, place, "fl.example.org", "fl.example.net, 10.0.0.5")
    assert content(tmp_path) == before
    shutil.rmtree(place)
    later = NOW + timedelta(days=60)
    make_keys(tmp_path, ["fl.example.net"], [], 30, later)
    check_certificate(tmp_path / "ca.crt", place / "server.pem", place / "server.key", "fl.example.net", later)
    after = content(tmp_path)
    for name in ("server.pem", "server.key"):
        assert after.pop(f"server/{name}") != before.pop(f"server/{name}")
    assert after == before


@pytest.mark.slow
def test_a_command_that_was_killed_can_be_given_again(tmp_path: Path) -> None:
    killed = 0
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        argv = ["keys", folder, "--server", "localhost", "--sites", "berlin"]
        if start(*argv, die_at_sync=moment).wait() == 0:
            break
        killed += 1
        before = {name: text for name, text in content(folder).items() if "/." not in f"/{name}"}
        make_keys(folder, ["localhost"], ["berlin"], 825, datetime.now(UTC))
        after = content(folder)
        assert before.items() <= after.items()
        assert not list(folder.rglob(".*"))
        server = folder / "server"
        check_certificate(
            folder / "ca.crt", server / "server.pem", server / "server.key", "localhost", datetime.now(UTC)
        )
        assert read_site_keys(folder / "sites.toml") == {"berlin": read_public_key(folder / "sites/berlin/berlin.key")}
        assert after["sites/berlin/ca.crt"] == after["ca.crt"]
    assert killed == 18  # two for each of eight files, one for each of two folders


def test_two_commands_at_once_agree_on_one_ca(tmp_path: Path) -> None:
    sites = [f"site-{number}" for number in range(8)]
    threads = [threading.Thread(target=make_keys, args=(tmp_path, NAMES, [site], 825, NOW)) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_site_keys(tmp_path / "sites.toml")) == sites
    ca = (tmp_path / "ca.crt").read_bytes()
    assert all((tmp_path / "sites" / site / "ca.crt").read_bytes() == ca for site in sites)
    server = tmp_path / "server"
    check_certificate(tmp_path / "ca.crt", server / "server.pem", server / "server.key", None, NOW)


# ---- what is refused -----------------------------------------------------------------------------------------------


BAD: dict[str, tuple[Any, ...]] = {
    "no server": (["--sites", "a"], MissingSettingError, "--server"),
    "twice": (["--server", "h", "--sites", "a,b,a"], FormatError, "'a'", "twice"),
    "days": (["--server", "h", "--days", "0"], RangeError, "--days", 1, 0),
    **{
        f"site {name!r}": (["--server", "h", f"--sites={name},b"], FormatError, repr(name), "site", 64)
        for name in ("", "..", "../a", "a/b", "/a", ".a", "a.", "-a", "a b", "a\nb", "ü", "a\x00", "a" * 65)
    },
    **{
        f"server {name!r}": ([f"--server={name}"], FormatError, repr(name), "fl.example.org", "port")
        for name in ("h:8000", "https://h", "a..b", "h.", "-h", "h h", "*.h", "10.0.0.300", "[::1]", "ü.org", "a" * 64)
    },
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_makes_nothing(terminal: Terminal, tmp_path: Path, case: str) -> None:
    argv, kind, *facts = BAD[case]
    terminal.refused("keys", tmp_path / "keys", *argv).check(kind, *facts)
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_cannot_outlive_its_ca(tmp_path: Path) -> None:
    with refused(RangeError, "--days 3651", tmp_path / "ca.crt", "2040-05-29", "3650 days"):
        make_keys(tmp_path, ["h"], [], 3651, NOW)
    assert not (tmp_path / "server").exists()
    make_keys(tmp_path, ["h"], [], 3650, NOW)


def test_what_was_lost_is_not_made_up(tmp_path: Path) -> None:
    make_keys(tmp_path, NAMES, SITES, 825, NOW)
    ca = (tmp_path / "ca.crt").read_bytes()
    (tmp_path / "ca.crt").unlink()
    with refused(CertificateError, tmp_path, "ca.crt"):
        make_keys(tmp_path, NAMES, ["rome"], 825, NOW)
    (tmp_path / "ca.crt").write_bytes(ca)
    shutil.rmtree(tmp_path / "server")
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.key").unlink()
    with refused(FileAccessError, tmp_path / "ca.key", "No such file"):
        make_keys(tmp_path, NAMES, [], 825, NOW)
    make_keys(tmp_path / "other", NAMES, [], 825, NOW)
    shutil.copy(tmp_path / "other" / "ca.key", tmp_path)
    with refused(CertificateError, tmp_path / "ca.key", tmp_path / "ca.crt"):
        make_keys(tmp_path, NAMES, [], 825, NOW)
    (tmp_path / "ca.key").write_bytes(key)
    make_keys(tmp_path, NAMES, [], 825, NOW)


def test_a_place_that_cannot_be_written_to_gets_a_sentence(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "keys"
    terminal.refused("keys", folder, "--server", "h").check(FileAccessError, folder, "Not a directory")


def test_help_says_what_goes_where(terminal: Terminal) -> None:
    answer = terminal("keys", "--help")
    assert answer.code == 0
    for word in ("FOLDER", "--server", "--sites", "--days", "ca.key", "sites.toml", "remove keys/server first"):
        assert word in " ".join(answer.out.split())
    assert "pluribus keys FOLDER" in terminal("--help").out


def test_without_cryptography_a_sentence_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None; from pluribus.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    answer = python("-c", program, "keys", tmp_path / "keys", "--server", "h")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert_facts(answer.err, "pip install 'pluribus[flower]'")
    assert python("-c", program, "keys", "--help").code == 0


def test_keys_are_made_without_torch(tmp_path: Path) -> None:
    check = "import sys; from pluribus.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    assert python("-c", check, "keys", tmp_path / "keys", "--server", "h").code == 0


# ---- what server and sites check -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of 30 days from NOW, those of another federation, and files that are neither."""
    folder = tmp_path_factory.mktemp("checked")
    make_keys(folder, ["fl.example.org", "10.0.0.5"], ["berlin", "paris"], 30, NOW)
    make_keys(folder / "other", ["fl.example.org"], ["berlin"], 30, NOW)
    (folder / "text").write_text("no key")
    damaged = (folder / "ca.crt").read_text().splitlines()
    (folder / "damaged.crt").write_text("\n".join(damaged[:3] + damaged[4:]))
    return folder


GOOD = {"ca": "ca.crt", "cert": "server/server.pem", "key": "server/server.key", "name": "fl.example.org", "now": NOW}
PEM = "server/server.pem"
WRONG: dict[str, tuple[Any, ...]] = {  # {} in a fact is the folder
    "no ca": ({"ca": "no.crt"}, FileAccessError, "{}/no.crt", "No such file"),
    "no certificate": ({"cert": "no.pem"}, FileAccessError, "{}/no.pem", "No such file"),
    "no key": ({"key": "no.key"}, FileAccessError, "{}/no.key", "No such file"),
    "folder": ({"cert": "server"}, FileAccessError, "{}/server", "Is a directory"),
    "ca text": ({"ca": "text"}, CertificateError, "{}/text", "certificate", "PEM"),
    "ca damaged": ({"ca": "damaged.crt"}, CertificateError, "{}/damaged.crt", "certificate", "PEM"),
    "certificate is a key": ({"cert": "ca.key"}, CertificateError, "{}/ca.key", "certificate", "PEM"),
    "key is a certificate": ({"key": "ca.crt"}, CertificateError, "{}/ca.crt", "private key", "PEM", "passphrase"),
    "expired": ({"now": NOW + timedelta(days=31)}, CertificateError, "{}/server/server.pem", "expired", "2030-07-01"),
    "ca expired": ({"now": NOW + timedelta(days=3651)}, CertificateError, "{}/ca.crt", "expired", "2040-05-29"),
    "early": ({"now": NOW - timedelta(days=2)}, CertificateError, "{}/ca.crt", "2030-06-01", "2030-05-30"),
    "other key": ({"key": "other/server/server.key"}, CertificateError, "{}/other/server/server.key", f"{{}}/{PEM}"),
    "other ca": ({"ca": "other/ca.crt"}, CertificateError, f"{{}}/{PEM}", "signed", "{}/other/ca.crt"),
    "no ca at all": ({"ca": PEM}, CertificateError, f"{{}}/{PEM}", "signed"),
    "name": ({"name": "localhost"}, CertificateError, f"{{}}/{PEM}", "fl.example.org, 10.0.0.5", "localhost"),
    "part of a name": ({"name": "example.org"}, CertificateError, f"{{}}/{PEM}", "10.0.0.5", " example.org"),
    "address": ({"name": "10.0.0.6"}, CertificateError, f"{{}}/{PEM}", "fl.example.org, 10.0.0.5", "10.0.0.6"),
    "ca as server": ({"cert": "ca.crt", "key": "ca.key"}, CertificateError, "{}/ca.crt", "fl.example.org"),
}


def check(folder: Path, **changes: Any) -> None:
    given = GOOD | changes
    files = (folder / given[name] for name in ("ca", "cert", "key"))
    check_certificate(*files, given["name"], given["now"])


def test_a_good_certificate_passes(some: Path) -> None:
    for name in ("fl.example.org", "FL.Example.ORG", "10.0.0.5", None):
        check(some, name=name)
    check(some, now=NOW - timedelta(minutes=59))
    check(some, now=NOW + timedelta(days=30))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_certificate_gets_a_sentence(some: Path, case: str) -> None:
    changes, kind, *facts = WRONG[case]
    with refused(kind, *(fact.replace("{}", str(some)) for fact in facts)):
        check(some, **changes)


def test_an_authority_alone_is_checked_too(some: Path) -> None:
    assert check_authority(some / "ca.crt", NOW).subject.rfc4514_string() == "CN=Pluribus CA"
    with refused(CertificateError, some / "ca.crt", "2040-05-29"):
        check_authority(some / "ca.crt", NOW + timedelta(days=3651))


def test_a_wrong_node_key_gets_a_sentence(some: Path, tmp_path: Path) -> None:
    file = tmp_path / "node.key"
    with refused(FileAccessError, file, "No such file"):
        check_node_key(file)
    for wrong in (some / "text", some / "sites/berlin/berlin.pub", some / "server/server.key"):
        with refused(CertificateError, wrong, "OpenSSH"):
            check_node_key(wrong)
    for key in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())):
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        with refused(CertificateError, file, "P-384", "pluribus keys"):
            read_public_key(file)


@needs_openssh
def test_a_passphrase_gets_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "node.key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "a secret", "-f", file], check=True)
    with refused(CertificateError, file, "passphrase"):
        check_node_key(file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_node_key_that_is_open_to_others_is_refused(some: Path, tmp_path: Path, mode: int) -> None:
    file = tmp_path / "node.key"
    shutil.copy(some / "sites/berlin/berlin.key", file)
    file.chmod(mode)
    with refused(CertificateError, f"chmod 600 {file}"):
        check_node_key(file)
    file.chmod(0o400)
    check_node_key(file)


def test_a_wrong_list_of_sites_gets_a_sentence(some: Path, tmp_path: Path) -> None:
    file, key = tmp_path / "sites.toml", read_site_keys(some / "sites.toml")["berlin"]
    wrong: dict[str, tuple[Any, ...]] = {
        "a = ": (DamagedFileError, file, "TOML"),
        "a = 5": (CertificateError, file, "'a'", "P-384"),
        'a = "text"': (CertificateError, file, "'a'", "P-384"),
        f'a = "{key[:-9]}"': (CertificateError, file, "'a'", "P-384"),
        f'"../a" = "{key}"': (FormatError, "'../a'"),
        f'a = "{key} one"\nb = "{key} two"': (CertificateError, file, "'a'", "'b'", "same"),
    }
    for text, (kind, *facts) in wrong.items():
        file.write_text(text)
        with refused(kind, *facts):
            read_site_keys(file)
    with refused(FileAccessError, tmp_path / "no.toml", "No such file"):
        read_site_keys(tmp_path / "no.toml")


# ---- the real thing ------------------------------------------------------------------------------------------------


def handshake(folder: Path, name: str, trust: Path) -> None:
    """A server with its certificate and a client who knows the CA, both as strict as OpenSSL can be."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server/server.pem", folder / "server/server.key")
    client = ssl.create_default_context(cafile=trust)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(30)

    def serve() -> None:
        with contextlib.suppress(ssl.SSLError, OSError), server.wrap_socket(ends[0], server_side=True) as secure:
            secure.sendall(b"hello")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ends[1], server_hostname=name) as secure:
            assert secure.recv(5) == b"hello"
    finally:
        for end in ends:
            end.close()
        thread.join()


@pytest.mark.parametrize("name", NAMES)
def test_tls_takes_the_certificate_for_each_of_its_names(keys: Path, name: str) -> None:
    handshake(keys, name, keys / "sites/berlin/ca.crt")


def test_tls_refuses_another_name_and_another_ca(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path, NAMES, [], 825, datetime.now(UTC))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(keys, "example.org", keys / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        handshake(keys, "localhost", tmp_path / "ca.crt")


TIME_LIMIT = 90  # seconds for any step with Flower before the test fails
