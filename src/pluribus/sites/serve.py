"""`pluribus serve`: the server of a federation of real sites, from its config to its result."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pluribus.data.augment import check_augmentations, parse_augmentations
from pluribus.errors import (
    CertificateError,
    ConfigError,
    ConflictError,
    DamagedFileError,
    MessageError,
    MismatchError,
    OtherRunError,
    PluribusError,
)
from pluribus.experiment import SITES, Experiment, experiment, settings_of_sites
from pluribus.federation import Observer
from pluribus.method import Need, find, hyperparameters
from pluribus.result import Result
from pluribus.settings import check_names
from pluribus.sites.agreement import Agreement, metrics_of_sites
from pluribus.sites.config import LOOK, FederationFile, SiteFile, make_from, setting_names
from pluribus.sites.federate import SiteFacts, complete_agreement, dismiss, greet, make_federation
from pluribus.sites.flower.address import bind, parse_address
from pluribus.sites.flower.link import Endpoint, Link, Superlink
from pluribus.sites.flower.programs import flower
from pluribus.sites.form import read_form
from pluribus.sites.keys import check_authority, check_certificate, read_site_keys
from pluribus.storage.files import read_json, write_json
from pluribus.storage.folder import RunFolder, check_unchanged
from pluribus.storage.toml import read_toml
from pluribus.targets import Target

MEGABYTE = 10**6
Agreed = tuple[Agreement, dict[int, SiteFacts]]


def serve(
    method: str,
    config: str | Path,
    *,
    out: str | Path | None = None,
    superlink: str | None = None,
    tell: Callable[[str], None] = print,
    observers: Sequence[Observer] = (),
) -> Result:
    """Run a federation with the sites that `config` names. A stopped run is resumed.

    `superlink` is the address of a SuperLink that already runs, instead of the one in `config`.
    """
    flower("flower-superlink")
    file, described = read_federation(Path(config), method, superlink)
    keys, endpoint = _read_keys(file), _make_endpoint(file)
    run = Path(out or file.out).absolute()  # Flower needs absolute paths
    with closing(_open_folder(run, described, Path(config))) as folder:
        path, names = folder.path / "link", dict(enumerate(file.sites))
        path.mkdir(exist_ok=True)
        saved = _read_agreement(path / "agreement.json", file, described)
        with Link(path, endpoint, keys, names) as link:
            where = f"listening on {file.listen}" if file.superlink is None else f"using the SuperLink {file.superlink}"
            tell(f"{where} for {', '.join(file.sites)}")
            agreement, facts = saved or _agree(
                path / "agreement.json", file, described, lambda offer: greet(offer, names, link, file.wait, tell)
            )
            made = make_federation(
                described, agreement, names, facts, link, folder, file.deadline, observers, file.largest_norm
            )
            result = made.run()
            dismiss(agreement, names, link)
            link.leave()
            return result


def read_federation(path: Path, method: str, superlink: str | None = None) -> tuple[FederationFile, Experiment]:
    """Read federation.toml, and the experiment that it describes for this method."""
    written = read_toml(path) | ({} if superlink is None else {"superlink": superlink})
    if Need.PUBLIC_AT_SERVER in find(method).needs:
        raise MismatchError(
            f"the server of {method} trains on public rows, and a server of real sites has none. Use a method whose "
            f"clients train on them, such as fedmd, or simulate it: pluribus run {method}."
        )
    hyper, theirs = list(hyperparameters(find(method)())), settings_of_sites()
    own = {name: written.pop(name) for name in setting_names(FederationFile) if name in written}
    if simulated := [name for name in written if name in setting_names(Experiment) and name not in theirs]:
        name = simulated[0]
        if name in setting_names(SiteFile) and name != "test":
            raise ConflictError(f"'{name}' in {path} belongs in the site.toml of each site.")
        raise ConflictError(f"'{name}' in {path} is for simulations: sites bring their own data and models.")
    check_names(written, [*setting_names(FederationFile), *theirs, *hyper], f"setting in {path}:", LOOK)
    file = make_from(FederationFile, own, path)
    kind = read_form(file).input.kind
    check_augmentations(parse_augmentations(written.get("augment", "")), kind)
    described = experiment(method, data=SITES, clients=len(file.sites), checkpoint_every=1, **written)
    metrics_of_sites(described, file.label_kind)  # before there is a folder
    return file, described


def _read_keys(file: FederationFile) -> dict[str, str]:
    """The public keys of the sites that are to be registered."""
    unregistered = [site for site in file.sites if site not in (file.nodes or {})]
    keys = read_site_keys(file.keys / "sites.toml") if unregistered else {}
    if missing := [site for site in unregistered if site not in keys]:
        raise CertificateError(
            f"site '{missing[0]}' has no key in {file.keys / 'sites.toml'}: "
            f"pluribus keys {file.keys} --sites {missing[0]} makes one."
        )
    return {site: keys[site] for site in unregistered}


def _make_endpoint(file: FederationFile) -> Endpoint | Superlink:
    if file.superlink is not None:
        parse_address("'superlink'", file.superlink)
        ca = file.superlink_ca or file.keys / "ca.crt"
        check_authority(ca, datetime.now(UTC))
        return Superlink(file.superlink, ca, {site: int(node) for site, node in (file.nodes or {}).items()})
    certificate, key = file.keys / "server" / "server.pem", file.keys / "server" / "server.key"
    check_certificate(file.keys / "ca.crt", certificate, key, None, datetime.now(UTC))
    try:
        bind(file.listen).close()  # an early check: the gate binds only after the SuperLink has started
    except ConfigError as error:
        raise type(error)(f"'listen' in federation.toml: {error.sentence.removeprefix('--listen ')}") from error
    return Endpoint(file.listen, certificate, key, file.largest_message * MEGABYTE)


def _open_folder(out: Path, described: Experiment, config: Path) -> RunFolder:
    if not (out / "config.toml").exists():
        folder = RunFolder.create(str(out))
        folder.write_config(described.settings(), described.decisive())
        return folder
    folder = RunFolder.open(out)
    try:
        if folder.is_finished:
            raise OtherRunError(f"{out} holds a finished run. Give another folder with --out to start a new run.")
        check_unchanged(folder.path, described.decisive(), config)
    except PluribusError:
        folder.close()
        raise
    return folder


def _agree(
    path: Path, file: FederationFile, described: Experiment, greeted: Callable[[Agreement], dict[int, SiteFacts]]
) -> Agreed:
    """What all sites agree on before the first round, and what each site reports about itself."""
    offer = _offer(file, described, run=f"{described.method}-{secrets.token_hex(4)}")  # sites keep a folder per run
    facts = greeted(offer)
    agreement = complete_agreement(offer, facts, dict(enumerate(file.sites)))
    told = {k: asdict(one) for k, one in facts.items()}
    write_json(path, {"sites": file.sites, "agreement": agreement.facts(), "facts": told})
    return agreement, facts


def _read_agreement(path: Path, file: FederationFile, described: Experiment) -> Agreed | None:
    """Read the agreement of a run that has started. A setting that has changed since is refused."""
    if not path.exists():
        return None
    saved = read_json(path)
    try:
        run, before = saved["agreement"]["run"], {"sites": saved["sites"]} | saved["agreement"]
        _check_same({"sites": file.sites}, before, path)
        clients = len(file.sites)
        facts = {k: SiteFacts.of(saved["facts"][str(k)], k, clients) for k in range(clients)}
    except (AttributeError, LookupError, TypeError, ValueError, MessageError) as error:
        raise DamagedFileError(f"{path} is not what the server wrote. Start a new run with another --out.") from error
    agreement = complete_agreement(_offer(file, described, run=run), facts, dict(enumerate(file.sites)))
    _check_same(agreement.facts(), before, path)
    return agreement, facts


def _check_same(facts: dict[str, Any], before: dict[str, Any], path: Path) -> None:
    """Refuse facts that have changed since the run was started."""
    now = json.loads(json.dumps(facts))
    if changed := [name for name in now if now[name] != before.get(name)]:
        raise OtherRunError(
            f"'{changed[0]}' is {now[changed[0]]}, but was {before.get(changed[0])} when {path.parent.parent} was "
            f"started. Set it back, or start a new run with another --out."
        )


def _offer(file: FederationFile, described: Experiment, run: str) -> Agreement:
    target = Target(file.label_kind, described.loss)
    return Agreement.of_experiment(described, run, file.classes, read_form(file), target)
