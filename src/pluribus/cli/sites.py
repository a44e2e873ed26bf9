"""pluribus keys, serve and join: federations of real sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pluribus.cli.flags import JSON, flag, parse, parse_groups, word
from pluribus.cli.greeter import print_results
from pluribus.cli.interrupts import say_how_to_resume
from pluribus.errors import MissingSettingError

if TYPE_CHECKING:
    from rich.console import Console


ABOUT_KEYS = """\
Certificates and keys for a federation of real sites: a CA of your own, a certificate for the server, a key per site.

  pluribus keys keys --server fl.example.org,10.0.0.5 --sites berlin,paris

  keys/ca.crt, ca.key   the CA. ca.key signs the server's certificate: keep it offline, it is needed for nothing else
  keys/server/          server.pem and server.key, for the server
  keys/sites/berlin/    berlin.key, berlin.pub and ca.crt: hand this folder to the site, by a way that you trust
  keys/sites.toml       the public key of each site, for the server: who may join

What is there stays as it is. To add a site, run it again with --sites rome. To renew the server's certificate, or to
change its names, remove keys/server first: the CA stays, and sites notice nothing. To give a site a new key, remove its
folder and its line in keys/sites.toml first.
"""

ABOUT_SERVE = """\
The server of a federation of real sites: it waits for all of them, runs the rounds, and shows their accuracies.

  pluribus serve fedgh --config federation.toml

federation.toml says who the sites are, which classes there are and how training goes; docs/deployment.md shows one.
The same command goes on with a run that was stopped. Sites reach the address that federation.toml names under 'listen',
over TLS, and only those with a key in keys/sites.toml.
"""

ABOUT_JOIN = """\
One site of a federation: it trains its own model on its own images, and leaves when the federation has ended.

  pluribus join --config site.toml

site.toml says who this site is, where its images and its keys lie and how to reach the server; docs/deployment.md shows
one. The same command goes on after a crash: all that the site has learned lies in its state folder.
"""


def keys(args: list[str]) -> None:
    """pluribus keys: certificates and keys."""
    import dataclasses
    from datetime import UTC, datetime
    from pathlib import Path

    import tyro

    reached = "Host names and IP addresses by which sites reach the server."
    flags: list[Any] = [
        (
            "folder",
            word(tyro.conf.Positional[str], "FOLDER", "Where the keys are, or shall be.", "(required)"),
        ),
        ("server", word(str, "NAME[,NAME...]", reached, "(needed once)"), ""),
        ("sites", word(str, "NAME[,NAME...]", "Sites that shall have a key.", "(default: none)"), ""),
        (
            "days",
            word(int, "INT", "How long a new certificate of the server is valid.", "(default: 825)"),
            825,
        ),
    ]
    given = parse(dataclasses.make_dataclass("Keys", flags), "pluribus keys", ABOUT_KEYS, args)
    from pluribus.sites.keys import make_keys  # after the flags: --help needs no further packages

    server, sites = ([word.strip() for word in text.split(",") if text] for text in (given.server, given.sites))
    for item in make_keys(Path(given.folder), server, sites, given.days, datetime.now(UTC)):
        print(f"{'made' if item.made else 'kept'}  {item.path}  {item.about}".rstrip())


def serve(args: list[str]) -> None:
    """pluribus serve: the server of a federation."""
    from rich.console import Console

    method, args = (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)
    config = ("config", str, "federation.toml", "What server and sites agree on.")
    out = ("out", str | None, None, "Run folder. Unset: as the config says, or 'federation' beside it.")
    given = parse_groups(
        {"server": [flag(*one) for one in (config, out, JSON)]}, "pluribus serve METHOD", ABOUT_SERVE, args
    )
    if method is None:
        raise MissingSettingError(
            "which method? pluribus serve fedgh --config federation.toml; pluribus list methods shows all."
        )
    from pluribus.sites.serve import serve
    from pluribus.terminal import Progress

    flags = given.server
    console, again = Console(stderr=flags.json), f"pluribus serve {method} --config {flags.config}"
    again += f" --out {flags.out}" if flags.out else ""
    with say_how_to_resume(again), Progress() as bar:
        observers = [] if flags.json else [bar]
        result = serve(method, flags.config, out=flags.out, tell=make_teller(console), observers=observers)
    print_results([result], flags.json, console, f"pluribus serve {method} --config {flags.config} --out NEW-FOLDER")


def join(args: list[str]) -> None:
    """pluribus join: one site of a federation."""
    from rich.console import Console

    config = ("config", str, "site.toml", "Who this site is.")
    given = parse_groups({"site": [flag(*config)]}, "pluribus join", ABOUT_JOIN, args)
    from pluribus.sites.join import join

    with say_how_to_resume(f"pluribus join --config {given.site.config}"):
        join(given.site.config, tell=make_teller(Console()))


def make_teller(console: Console) -> Callable[[str], None]:
    """Says what happens, and when."""
    import time

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)

    return tell
