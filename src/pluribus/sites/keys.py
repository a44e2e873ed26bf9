"""Certificates and keys of a federation. They identify the server, and the sites that may join.

ca.crt         the CA that sites trust. ca.key signs the server's certificate and nothing else
server/        server.pem and server.key: certificate and private key of the server
sites/NAME/    NAME.key, NAME.pub and ca.crt: all that one site gets
sites.toml     the public key of each site that may join

Existing files are kept, and sites.toml only grows. This module does not import torch, so that the command is fast.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from pluribus.errors import (
    CertificateError,
    FileAccessError,
    FormatError,
    MissingSettingError,
    PackageError,
    RangeError,
)
from pluribus.internal.system import check_forks, sync, wait_for_folder
from pluribus.storage.toml import read_toml

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey as PrivateKey
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey as PublicKey
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise PackageError("keys and certificates need Flower's packages: pip install 'pluribus[flower]'.") from error

CA_DAYS = 3650
CLOCK_SKEW = timedelta(hours=1)  # certificates are valid from this long ago, for sites whose clock is behind
PRIVATE, PUBLIC, PRIVATE_FOLDER = 0o600, 0o644, 0o700
USES = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
USES += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
HEADING = "# The sites that may join, and their public keys."  # of sites.toml

SITE = re.compile("[A-Za-z0-9_]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9_-])?")
LABEL = re.compile("[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Item:
    """A file or folder that `pluribus keys` made or kept."""

    path: Path
    made: bool
    """False if it existed before. It is then unchanged."""
    about: str = ""


def make_keys(folder: Path, server: Sequence[str], sites: Sequence[str], days: int, now: datetime) -> list[Item]:
    """Make what is missing. `server` may be empty if the server already has a certificate."""
    check_forks()
    if days < 1:
        raise RangeError(f"--days must be at least 1, not {days}.")
    names = list(dict.fromkeys(_server_name(name) for name in server))
    _check_site_names(sites)
    _check_server(folder, names)
    try:
        with _lock(folder):
            known = read_site_keys(folder / "sites.toml") if (folder / "sites.toml").exists() else {}
            items = [_make_authority(folder, now), _make_server(folder, names, days, now)]
            return items + [_make_site(folder, site, known) for site in sites]
    except OSError as error:
        raise FileAccessError(f"cannot write to {folder}: {error.strerror}.") from error


def _server_name(name: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    labels = name.split(".")
    if len(name) > 253 or labels[-1].isdigit() or not all(LABEL.fullmatch(label) for label in labels):
        raise FormatError(
            f"{name!r} is not a valid name of the server: use host names such as fl.example.org, or IP addresses, "
            "without a port."
        )
    return x509.DNSName(name.lower())


def _check_site_names(sites: Sequence[str]) -> None:
    for site in sites:
        if not SITE.fullmatch(site):
            raise FormatError(
                f"{site!r} is not a valid name of a site: use up to 64 letters, digits, dashes and underscores, "
                "with dots only inside."
            )
        if sites.count(site) > 1:
            raise FormatError(f"site '{site}' is given twice.")


def _check_server(folder: Path, names: list[x509.GeneralName]) -> None:
    """Refuse names that differ from those in the certificate. Without a certificate, names are required."""
    server = folder / "server"
    if not server.exists():
        if not names:
            raise MissingSettingError("--server is missing: give the names or addresses of the server.")
        return
    certified = _names_of(_read_certificate(server / "server.pem"))
    if names and set(names) != set(certified):
        raise CertificateError(
            f"the certificate in {server} is for {_join_names(certified)}, not for {_join_names(names)}. "
            f"Remove {server} and run the command again: the same CA then issues a new certificate."
        )


def _make_authority(folder: Path, now: datetime) -> Item:
    file, key_file = folder / "ca.crt", folder / "ca.key"
    made = not file.exists()
    if made:
        if (folder / "server").exists() or (folder / "sites").exists():
            raise CertificateError(f"{folder} holds keys, but no ca.crt: restore ca.crt, or use another folder.")
        if not key_file.exists():
            _write(key_file, _pem(_generate_key(), PrivateFormat.PKCS8), PRIVATE)
        _write(file, _build_ca(_read_signing_key(key_file), now), PUBLIC)
    return Item(file, made, f"valid until {_read_certificate(file).not_valid_after_utc.date()}")


def _make_server(folder: Path, names: list[x509.GeneralName], days: int, now: datetime) -> Item:
    server = folder / "server"
    made = not server.exists()
    if made:
        key = _generate_key()
        signed = _certify(folder, names, key.public_key(), days, now)
        with _create_folder(server) as new:
            _write(new / "server.key", _pem(key, PrivateFormat.PKCS8), PRIVATE)
            _write(new / "server.pem", signed, PUBLIC)
    certificate = _read_certificate(server / "server.pem")
    about = f"{_join_names(_names_of(certificate))}; valid until {certificate.not_valid_after_utc.date()}"
    return Item(server, made, about)


def _make_site(folder: Path, site: str, known: dict[str, str]) -> Item:
    """Make a key if the site has none. A site in sites.toml has one, even if its folder was moved to the site."""
    own = folder / "sites" / site
    made = site not in known and not own.exists()
    if made:
        key = _generate_key()
        own.parent.mkdir(PRIVATE_FOLDER, exist_ok=True)
        with _create_folder(own) as new:
            _write(new / f"{site}.key", _pem(key, PrivateFormat.OpenSSH), PRIVATE)
            _write(new / f"{site}.pub", f"{_openssh(key.public_key())} {site}\n".encode(), PUBLIC)
            _write(new / "ca.crt", (folder / "ca.crt").read_bytes(), PUBLIC)
    if site not in known:
        file, public = folder / "sites.toml", read_public_key(own / f"{site}.key")
        before = file.read_text(encoding="utf-8").rstrip() if file.exists() else HEADING
        _write(file, f'{before}\n"{site}" = "{public}"\n'.encode(), PUBLIC)
    return Item(own, made)


def _build_ca(key: PrivateKey, now: datetime) -> bytes:
    builder = _begin("Pluribus CA", None, key.public_key(), now, CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    return builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM)


def _certify(folder: Path, names: list[x509.GeneralName], public: PublicKey, days: int, now: datetime) -> bytes:
    ca, ca_key = _read_certificate(folder / "ca.crt"), _read_signing_key(folder / "ca.key")
    _check_pair(ca, folder / "ca.crt", ca_key, folder / "ca.key")
    left = (ca.not_valid_after_utc - now).days
    if days > left:
        raise RangeError(
            f"--days {days} is too long: {folder / 'ca.crt'} is valid until {ca.not_valid_after_utc.date()}, "
            f"{left} days from now."
        )
    builder = _begin("Pluribus server", ca.subject, public, now, days)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage("digital_signature"), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(ca_key, hashes.SHA384()).public_bytes(Encoding.PEM)


def _begin(name: str, issuer: x509.Name | None, public: PublicKey, now: datetime, days: int) -> x509.CertificateBuilder:
    """Start a certificate. Without an issuer, it signs itself."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(issuer or subject, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCK_SKEW).not_valid_after(now + timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in allowed for use in USES})


def _generate_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: PrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, serialization.NoEncryption())


def _openssh(key: PublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def check_certificate(ca_file: Path, cert_file: Path, key_file: Path, name: str | None, now: datetime) -> None:
    """Refuse a server's certificate that sites would refuse. They reach the server by `name`. None: any name."""
    ca = check_authority(ca_file, now)
    certificate = _read_valid(cert_file, now)
    _check_pair(certificate, cert_file, _read_private_key(key_file), key_file)
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise CertificateError(f"{cert_file} is not signed by the CA of {ca_file}.") from error
    names = _names_of(certificate)
    if name is not None and _server_name(name) not in names:
        raise CertificateError(f"{cert_file} is for {_join_names(names) or 'no name'}, not for {name}.")


def check_authority(ca_file: Path, now: datetime) -> x509.Certificate:
    """Read the CA's certificate, and refuse it if it is not valid now."""
    return _read_valid(ca_file, now)


def check_node_key(file: Path) -> None:
    """Refuse a site's private key that Flower cannot use, or that other users can read."""
    _read_node_key(file)
    if file.stat().st_mode & 0o077:
        raise CertificateError(f"{file} is a private key, but other users can read it: run chmod 600 {file}.")
    public = file.with_suffix(".pub")
    if (
        public.exists()
        and _read_bytes(public).decode(errors="replace").split()[:2] != read_public_key(file).split()[:2]
    ):
        raise CertificateError(
            f"{file} is not the key of {public}: use the folder that pluribus keys made for this site."
        )


def read_public_key(private_key_file: Path) -> str:
    """The public half of a site's private key, in the format of sites.toml."""
    return _openssh(_read_node_key(private_key_file).public_key())


def read_site_keys(file: Path) -> dict[str, str]:
    """Read the public key of each site from sites.toml."""
    keys = read_toml(file)
    _check_site_names(list(keys))
    owners: dict[str, str] = {}
    for site, key in keys.items():
        if not isinstance(key, str) or not _is_public_key(key):
            raise CertificateError(f"the key of site '{site}' in {file} is not an ECDSA P-384 public key of OpenSSH.")
        first = owners.setdefault(" ".join(key.split()[:2]), site)  # without the comment
        if first != site:
            raise CertificateError(
                f"sites '{first}' and '{site}' have the same public key in {file}: each needs its own."
            )
    return keys


def _is_public_key(text: str) -> bool:
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        return False
    return isinstance(key, PublicKey) and isinstance(key.curve, ec.SECP384R1)


def _read_node_key(file: Path) -> PrivateKey:
    try:
        key = serialization.load_ssh_private_key(_read_bytes(file), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CertificateError(f"{file} is not an OpenSSH private key without a passphrase.") from error
    if not isinstance(key, PrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise CertificateError(f"{file} is not an ECDSA P-384 key: use a key that pluribus keys made.")
    return key


def _read_certificate(file: Path) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(_read_bytes(file))
        _ = certificate.extensions  # parsed at the first access, and may be damaged too
    except ValueError as error:
        raise CertificateError(f"{file} is not a certificate in PEM.") from error
    return certificate


def _read_private_key(file: Path) -> PrivateKeyTypes:
    try:
        return serialization.load_pem_private_key(_read_bytes(file), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CertificateError(f"{file} is not a private key in PEM without a passphrase.") from error


def _read_signing_key(file: Path) -> PrivateKey:
    key = _read_private_key(file)
    if not isinstance(key, PrivateKey):
        raise CertificateError(f"{file} is not an EC key: use a key that pluribus keys made.")
    return key


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise FileAccessError(f"cannot read {file}: {error.strerror}.") from error


def _read_valid(file: Path, now: datetime) -> x509.Certificate:
    certificate = _read_certificate(file)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise CertificateError(f"{file} expired on {end.date()}.")
    if now < begin:
        raise CertificateError(f"{file} is not valid before {begin.date()}; today is {now.date()} on this machine.")
    return certificate


def _check_pair(certificate: x509.Certificate, cert_file: Path, key: PrivateKeyTypes, key_file: Path) -> None:
    if key.public_key() != certificate.public_key():
        raise CertificateError(f"{key_file} is not the key of {cert_file}.")


def _names_of(certificate: x509.Certificate) -> list[x509.GeneralName]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [x509.DNSName(one.value.lower()) if isinstance(one, x509.DNSName) else one for one in names]


def _join_names(names: list[x509.GeneralName]) -> str:
    return ", ".join(str(name.value) for name in names)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the folder: two commands at once would each make a CA, or lose the other's site."""
    folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        wait_for_folder(handle)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _create_folder(path: Path) -> Iterator[Path]:
    """Create a folder under a temporary name. It gets its own name once all its files are written."""
    new = path.with_name(f".{path.name}.new")
    shutil.rmtree(new, ignore_errors=True)  # left by a command that was killed
    new.mkdir(PRIVATE_FOLDER)
    yield new
    new.rename(path)
    sync(path.parent)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically. Its permissions never exceed `mode`."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # left by a command that was killed
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    sync(path.parent)
