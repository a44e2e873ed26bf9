"""The state folders of real sites and of their server, which somebody else wrote or a disk damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import documents, fuzzed, mutated
from test_fuzz_folders import forge, make_page, written
from test_parties import Direct, agreed, responder_of

import pluribus
from conftest import few_digits, new_folder
from pluribus.assembly import Assembly
from pluribus.data.scaling import Normalize
from pluribus.experiment import SITES, Experiment, experiment
from pluribus.federation import Federation
from pluribus.sites.config import FederationFile
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.federate import Absences, greet, make_federation
from pluribus.sites.flower.link import read_nodes, read_seen
from pluribus.sites.norms import LearnedNorms
from pluribus.sites.responder import Responder
from pluribus.sites.serve import _agree, _open_folder, _read_agreement
from pluribus.storage.files import append_lines, read_json, read_lines, write_json
from pluribus.storage.folder import check_unchanged

NAMES = {0: "north", 1: "south"}
METHODS = ("fedgh", "fedproto")  # the model of fedproto is saved when it is evaluated
ROWS = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
NODES = {name: {"key": "ecdsa-sha2-nistp384 AAAA", "node": "12345678901234567890"} for name in NAMES.values()}


class Keeping(Direct):
    """Carries blobs to responders in this process, and keeps the last request of each kind to site 0."""

    def __init__(self, responders: Mapping[int, Responder]) -> None:
        super().__init__(responders)
        self.requests: dict[str, bytes] = {}

    def carry(self, k: int, blob: bytes) -> Any:
        if k == 0:
            self.requests[unseal(blob).head["verb"]] = blob
        return super().carry(k, blob)


class Honest(NamedTuple):
    """A federation after its last round, as it is on disk: `server`, and a folder per site."""

    folder: Path
    parts: Assembly
    file: FederationFile
    described: Experiment
    requests: dict[str, bytes]  # of site 0


def site_of(parts: Assembly, k: int, folder: Path) -> Responder:
    """A site that normalizes its rows, so that its state tells how."""
    return Responder(replace(responder_of(parts, None, k, folder)._means, normalize=Normalize("client")))


@cache
def honest(method: str) -> Honest:
    folder = Path(new_folder())
    settings: dict[str, Any] = {"rounds": 2, "width": 8, "checkpoint_every": 1}
    parts, _, _ = agreed(method, data=few_digits(80, 3), clients=2, models="mlp-64", **settings)
    file = FederationFile(("north", "south"), parts.task.names, (1, 8, 8), largest_norm="learned")
    described = experiment(method, data=SITES, clients=2, **settings)
    transport = Keeping({k: site_of(parts, k, folder) for k in NAMES})
    made = Honest(folder, parts, file, described, transport.requests)
    with restarted(made, folder / "server", transport) as federation:
        federation.run()
    write_json(folder / "server" / "link" / "seen.json", {"north": "2026-11-18T09:07:17Z", "south": None})
    write_json(folder / "server" / "link" / "nodes.json", NODES)
    append_lines(folder / "server" / "missing.jsonl", ["site south is missing in round 1: no answer"])
    (folder / "server" / "result.json").unlink()
    return made


@contextmanager
def restarted(honest: Honest, server: Path, transport: Direct) -> Iterator[Federation]:
    """What `pluribus serve` does beside its network: from its run folder to the round loop."""
    with closing(_open_folder(server, honest.described, server / "federation.toml")) as folder:
        (server / "link").mkdir(exist_ok=True)
        path = server / "link" / "agreement.json"
        agreement, facts = _read_agreement(path, honest.file, honest.described) or _agree(
            path, honest.file, honest.described, lambda offer: greet(offer, NAMES, transport, 0)
        )
        yield make_federation(
            honest.described, agreement, NAMES, facts, transport, folder, 60, largest_norm=honest.file.largest_norm
        )


# The server -----------------------------------------------------------------------------------------------------------

FILES = ("link/agreement.json", "norms.json", "missing.jsonl", "link/seen.json", "link/nodes.json", "started.json")


@st.composite
def changed_texts(draw: st.DrawFn, names: Sequence[str] = FILES) -> tuple[str, bytes]:
    """A file of the server, with wrong values or changed bytes."""
    name = draw(st.sampled_from(names))
    path = honest("fedgh").folder / "server" / name
    if draw(st.integers(0, 3)):
        return name, written(name, draw(documents([read_lines(path) if name.endswith("l") else read_json(path)])))
    return name, draw(mutated([path.read_bytes()]))


def copy_server(folder: Path, name: str, data: bytes) -> Path:
    server = folder / "server"
    shutil.copytree(honest("fedgh").folder / "server", server)
    (server / name).write_bytes(data)
    return server


def read_again(name: str, path: Path) -> Any:
    """What a server that is started again reads of this file."""
    one = honest("fedgh")
    match name:
        case "link/agreement.json":
            agreement, facts = _read_agreement(path, one.file, one.described) or (None, {})
            assert agreement is not None
            assert set(facts) == set(NAMES)
        case "norms.json":
            LearnedNorms(path, 0).check(9, 0, 0, {"means": 1.0})
        case "missing.jsonl":
            assert all(isinstance(note, str) for note in Absences(path).notes)
        case "link/seen.json":
            assert all(time is None or isinstance(time, str) for time in read_seen(path).values())
        case "link/nodes.json":
            assert all(int(node["node"]) >= 0 for node in read_nodes(path).values())
        case "started.json":
            check_unchanged(path.parent, one.described.decisive(), path)


@fuzzed()
@given(changed_texts())
def test_the_files_of_a_server(file: tuple[str, bytes]) -> None:
    with scratch() as folder:
        path = folder / Path(file[0]).name
        path.write_bytes(file[1])
        survives(lambda: read_again(file[0], path), folder)


@fuzzed(0.1)
@given(changed_texts())
def test_the_live_page_of_a_server(file: tuple[str, bytes]) -> None:
    with scratch() as folder:
        server = copy_server(folder, *file)
        survives(lambda: make_page(server), folder)


@fuzzed(0.05)
@given(changed_texts() | changed_texts(["metrics.jsonl", "traffic.jsonl"]))
def test_a_server_that_is_restarted(file: tuple[str, bytes]) -> None:
    """Its last round is done again."""
    one = honest("fedgh")

    def run() -> None:
        with restarted(one, server, transport) as federation:
            federation.run()

    with scratch() as folder:
        server = copy_server(folder, *file)
        (server / "state" / "round-000001.safetensors").unlink()
        for k in NAMES:
            shutil.copytree(one.folder / str(k), folder / str(k))
        transport = Direct({k: site_of(one.parts, k, folder) for k in NAMES})
        survives(run, folder)


# A site ---------------------------------------------------------------------------------------------------------------


@cache
def states(method: str) -> list[str]:
    """The files of site 0."""
    folder = honest(method).folder / "0"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


@cache
def layout_of(method: str, name: str) -> tuple[Any, bytes]:
    """The header of such a file, and its tensors."""
    data = (honest(method).folder / "0" / name).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


@st.composite
def changed_states(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A file of a site, with wrong facts, a wrong header or changed bytes."""
    method = draw(st.sampled_from(METHODS))
    name = draw(st.sampled_from(states(method)))
    header, tensors = layout_of(method, name)
    match draw(st.sampled_from(["facts", "facts", "header", "bytes"])):
        case "bytes":
            return method, name, draw(mutated([(honest(method).folder / "0" / name).read_bytes()]))
        case "header":
            return method, name, forge(draw(documents([header])), tensors)
    known = header["__metadata__"]
    parsed = {key: json.loads(text) if text[:1] in ("{", "[") else text for key, text in sorted(known.items())}
    facts = draw(documents([parsed]))
    texts = {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    return method, name, forge(header | {"__metadata__": texts}, tensors)


def copy_site(folder: Path, method: str, name: str, data: bytes) -> Path:
    site = folder / "0"
    shutil.copytree(honest(method).folder / "0", site)
    (site / name).write_bytes(data)
    return site


@fuzzed(0.5)
@given(changed_states(), st.sampled_from(["selected", "last"]))
def test_the_model_of_a_site(state: tuple[str, str, bytes], round: Any) -> None:
    with scratch() as folder:
        site = copy_site(folder, *state)
        survives(lambda: pluribus.predict(site, ROWS, round=round), folder)


@fuzzed(0.5)
@given(changed_states(), st.sampled_from(["work", "evaluate"]))
def test_a_site_that_is_restarted(state: tuple[str, str, bytes], verb: str) -> None:
    """It gets its last request again."""
    with scratch() as folder:
        copy_site(folder, *state)
        responder = site_of(honest(state[0]).parts, 0, folder)
        survives(lambda: responder.answer(honest(state[0]).requests[verb]), folder)


@fuzzed(0.5)
@given(st.sampled_from(METHODS), st.sampled_from(["work", "evaluate", "hello"]), st.data())
def test_requests_of_a_server(method: str, verb: str, data: st.DataObject) -> None:
    with scratch() as folder:
        shutil.copytree(honest(method).folder / "0", folder / "0")
        responder = site_of(honest(method).parts, 0, folder)
        head, parts = unseal(honest(method).requests[verb])
        blob = seal(data.draw(documents([head])), parts)
        survives(lambda: responder.answer(blob), folder)
