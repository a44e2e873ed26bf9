"""pluribus keys, serve and join: run federations of real sites."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pluribus.cli.flags import JSON, TRACK, flag, parse, parse_groups, word
from pluribus.cli.greeter import print_results
from pluribus.cli.interrupts import say_how_to_resume
from pluribus.errors import MissingSettingError

if TYPE_CHECKING:
    from rich.console import Console

ABOUT_KEYS = """\
Makes certificates and keys for a federation of real sites: your own CA, a certificate for the server, a key per site.

  pluribus keys keys --server fl.example.org,10.0.0.5 --sites berlin,paris

  keys/ca.crt, ca.key   the CA. ca.key signs the server's certificate and nothing else: keep it offline
  keys/server/          server.pem and server.key, for the server
  keys/sites/berlin/    berlin.key, berlin.pub and ca.crt: give this folder to the site over a channel you trust
  keys/sites.toml       the public key of each site, for the server: these sites may join

Existing files are kept. To add a site, run the command again with --sites rome. To renew the server's certificate, or
to change its names, remove keys/server first; the CA stays, and the sites need no change. To give a site a new key,
remove its folder and its line in keys/sites.toml first.
"""

ABOUT_SERVE = """\
Starts the server of a federation of real sites. It waits for all sites, runs the rounds, and shows their accuracies.

  pluribus serve fedgh --config federation.toml

federation.toml names the sites and the classes, and has the settings of training; docs/deployment.md shows one. The
same command resumes a stopped run. Sites connect over TLS to the address under 'listen' in federation.toml. Only sites
with a key in keys/sites.toml may join.
"""

ABOUT_JOIN = """\
Joins a federation as one site. The site trains its own model on its own data, and leaves when the federation ends.

  pluribus join --config site.toml --check
  pluribus join --config site.toml

site.toml has the name of this site, the paths of its data and keys, and the address of the server;
docs/deployment.md shows one. --check loads keys, data and model, trains for one step and evaluates, without the server.
The same command resumes after a crash: the state folder holds all that the site learned.
"""


def keys(args: list[str]) -> None:
    """pluribus keys: make certificates and keys."""
    import tyro

    reached = "Host names and IP addresses under which sites reach the server, comma-separated."
    flags: list[Any] = [
        ("folder", word(tyro.conf.Positional[str], "FOLDER", "Folder of the keys.", "(required)")),
        ("server", word(str, "NAMES", reached, "(needed once)"), ""),
        ("sites", word(str, "NAMES", "Sites to make a key for, comma-separated.", "(default: none)"), ""),
        ("days", word(int, "INT", "Days that a new server certificate is valid.", "(default: 825)"), 825),
    ]
    given = parse(dataclasses.make_dataclass("Keys", flags), "pluribus keys", ABOUT_KEYS, args)
    from pluribus.sites.keys import make_keys  # after the flags: --help needs no further packages

    server, sites = ([word.strip() for word in text.split(",") if text] for text in (given.server, given.sites))
    for item in make_keys(Path(given.folder), server, sites, given.days, datetime.now(UTC)):
        print(f"{'made' if item.made else 'kept'}  {item.path}  {item.about}".rstrip())


def serve(args: list[str]) -> None:
    """pluribus serve: start the server of a federation."""
    from rich.console import Console

    method, args = (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)
    agreed = "Settings that the server and the sites agree on."
    link = "A SuperLink that already runs."
    config = ("config", word(str, "FILE", agreed, "(default: federation.toml)"), "federation.toml")
    kept = "(default: that of the config, or 'federation' beside it)"
    out = ("out", word(str | None, "FOLDER", "Run folder.", kept), None)
    superlink = ("superlink", word(str | None, "HOST:PORT", link, "(default: start one)"), None)
    track = ("track", word(str, "TRACKERS", TRACK[-1], "(default: none)"), "")
    groups = {"server": [config, out, superlink, track, flag(*JSON)]}
    flags = parse_groups(groups, "pluribus serve METHOD", ABOUT_SERVE, args).server
    if method is None:
        raise MissingSettingError(
            "which method? pluribus serve fedgh --config federation.toml; pluribus list methods shows all."
        )
    from pluribus.sites.serve import serve
    from pluribus.track.lines import show_progress
    from pluribus.track.tracker import make_trackers

    trackers = make_trackers(flags.track)
    console, again = Console(stderr=flags.json), f"pluribus serve {method} --config {flags.config}"
    again += f" --superlink {flags.superlink}" if flags.superlink else ""
    new = f"{again} --out NEW-FOLDER"
    again += f" --out {flags.out}" if flags.out else ""
    again += f" --track {flags.track}" if flags.track else ""
    with say_how_to_resume(again), ExitStack() as stack, show_progress() as shown:
        tell = partial(print_with_time, console)
        observers = [*map(stack.enter_context, trackers), *([] if flags.json else [shown])]
        result = serve(method, flags.config, out=flags.out, superlink=flags.superlink, tell=tell, observers=observers)
    print_results([result], flags.json, console, new)


def join(args: list[str]) -> None:
    """pluribus join: join a federation as one site."""
    from rich.console import Console

    args = ["--config", *args] if args and not args[0].startswith("-") else args
    about = "Name, paths and server address of this site."
    config = ("config", word(str, "FILE", about, "(default: site.toml)"), "site.toml")
    check = flag(
        "check", bool, False, "Try keys, data and model with one training step, without any network, and exit."
    )
    given = parse_groups({"site": [config, check]}, "pluribus join", ABOUT_JOIN, args)
    if given.site.check:
        from pluribus.sites.check import check_site

        return check_site(
            given.site.config, tell=partial(Console().print, highlight=False, markup=False, soft_wrap=True)
        )
    from pluribus.sites.join import join

    with say_how_to_resume(f"pluribus join --config {given.site.config}"):
        join(given.site.config, tell=partial(print_with_time, Console()))


def print_with_time(console: Console, text: str) -> None:
    """Print a line that begins with the time."""
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)
