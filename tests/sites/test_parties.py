"""Real sites, without a network yet: the same bits as a simulation, whoever crashes, falls back or lies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given as given_any
from hypothesis import strategies as st
from PIL import Image
from test_images import sides

import pluribus
from conftest import few_digits, make_host, new_folder, suiting
from kit import StopAfter, StoppedError, differing, numbers
from parties import CPU
from pluribus.assembly import Assembly, assemble
from pluribus.data import Dataset
from pluribus.data.datasets import write_npz
from pluribus.errors import (
    AgreementError,
    BudgetError,
    ConflictError,
    DamagedDataError,
    DamagedFileError,
    DataError,
    FileAccessError,
    FormatError,
    MismatchError,
    OtherRunError,
    PluribusError,
    SchemaError,
    UnknownNameError,
    UnreadableMessageError,
    WorkerError,
)
from pluribus.experiment import SITES, Experiment, experiment
from pluribus.federation import Federation, Observer
from pluribus.inputs import Input
from pluribus.message import decode, encode
from pluribus.optim import Rule
from pluribus.privacy.terms import Terms
from pluribus.result import Result
from pluribus.server import Server
from pluribus.sites import remote
from pluribus.sites.agreement import Agreement, Form
from pluribus.sites.config import SiteFile
from pluribus.sites.envelope import MAGIC, seal, unseal
from pluribus.sites.federate import complete_agreement, greet, make_federation
from pluribus.sites.holdings import OWN, Public, relabel, take_part
from pluribus.sites.remote import Missing, Transport
from pluribus.sites.responder import Responder, SiteResources
from pluribus.sites.trainer import RequestHandler, load_resources
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.files import read_lines
from pluribus.storage.folder import RunFolder
from pluribus.task import Card
from refusals import Kind, assert_facts, refused

SETTINGS: dict[str, Any] = {"data": few_digits(160), "clients": 3, "rounds": 3, "models": "small", "threads": 1}
NAMES = {0: "north", 1: "south", 2: "west"}
MOST = torch.finfo(torch.float32).max


def agreed(method: str, **settings: Any) -> tuple[Assembly, Agreement, Public | None]:
    """A simulation, and what a federation of real sites must agree on to do the same."""
    parts = assemble(experiment(method, **SETTINGS | suiting(method, **settings)))
    task, local, given = parts.task, parts.local, public_of(parts)
    facts = {
        name: getattr(task, name)
        for name in ("input", "target", "width", "projector", "clients", "warmup", "seed", "metrics", "share_counts")
    }
    how = {name: getattr(local, name) for name in ("rule", "epochs", "batch", "augment")}
    how |= {"optimizer_life": local.life, "rounds": parts.experiment.rounds}
    return parts, Agreement("run", method, dataclasses.asdict(parts.method), task.names, **how, **facts), given


def federated(
    experiment: Experiment,
    agreement: Agreement,
    names: Mapping[int, str],
    transport: Transport,
    folder: RunFolder,
    seconds: float,
    observers: Sequence[Observer] = (),
) -> Federation:
    """From the hello to the round loop."""
    facts = greet(agreement, names, transport, seconds=0)
    agreed = complete_agreement(agreement, facts, names)
    return make_federation(experiment, agreed, names, facts, transport, folder, seconds, observers)


def some(parts: Assembly, rows: torch.Tensor) -> Dataset:
    return take_part(parts.dataset, rows.numpy(), "some")


def public_of(parts: Assembly) -> Public | None:
    public = parts.data.public
    if not public:
        return None
    owner = torch.cat([torch.full((len(data),), k) for k, data in public.items()])
    return Public(some(parts, torch.cat([data.rows for data in public.values()])), owner)


def responder_of(parts: Assembly, given: Public | None, k: int, folder: Path) -> Responder:
    """A site that has the images which the simulation gives to client k, and nothing else."""
    own = {name: some(parts, parts.data.rows(k)[name]) for name in ("train", "val", "test")}
    return Responder(SiteResources(own, given, parts.cards[k].model, folder / str(k), torch.device("cpu")))


class Direct:
    """Carries blobs to responders in this process. A refusal is an answer too."""

    def __init__(self, responders: Mapping[int, Responder]) -> None:
        self.responders = dict(responders)

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> dict[int, bytes | Missing]:
        return {k: self.carry(k, blob) for k, blob in requests.items()}

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        try:
            return self.responders[k].answer(blob)
        except PluribusError as error:
            return seal({"refused": self.responders[k].explain(error)}, {})


def states(transport: Direct) -> dict[str, torch.Tensor]:
    return {
        f"{k} {name}": value.clone()
        for k, responder in transport.responders.items()
        for name, value in responder._get_host(k).client(k).tensors().items()
    }


RUNS: dict[str, dict[str, Any]] = {
    "fedgh": {"augment": "crop,flip,erase"},
    "fedl2g-f": {"warmup": 2},
    "fedfree": {"momentum": 0.9},
    "fedgen": {"lr_schedule": "steps", "lr_steps": "1,2", "clip_norm": 0.5},
    "local": {"models": "mlp-64", "momentum": 0.9, "optimizer_life": "run"},
    "fedh2l": {"partition": "dirichlet", "val_fraction": 0.1, "public_fraction": 0.2, "evaluate_every": 1},
    "fedmd": {"public_fraction": 0.2, "pretrain_public": 1, "pretrain_private": 1},
    "kt-pfl": {"public_fraction": 0.2},
    "heterofl": {"models": "cnn-16", "capacity": "1,0.5", "evaluate_every": 1},
}


@pytest.mark.parametrize("method", RUNS)
def test_the_same_bits_as_a_simulation(method: str, tmp_path: Path) -> None:
    run_as_simulated(*agreed(method, **RUNS[method]), tmp_path)


def run_as_simulated(
    parts: Assembly, agreement: Agreement, given: Public | None, tmp_path: Path
) -> tuple[pluribus.Result, Direct]:
    """Run a federation, and compare it with a simulation of the same experiment."""
    simulated = pluribus.run(dataclasses.replace(parts.experiment, out=new_folder()), progress=False)
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    folder = RunFolder.create(new_folder())
    result = federated(parts.experiment, agreement, NAMES, transport, folder, seconds=60).run()
    assert result.bytes == simulated.bytes
    assert numbers(result) == numbers(simulated)
    saved = Checkpoint(simulated.folder / "state")
    expected = {f"{k} {name}": value for k in NAMES for name, value in (saved.client(k) or {}).items()}
    assert differing(expected, states(transport)) == []
    return result, transport


def test_sites_measure_and_select_as_a_simulation_does(tmp_path: Path) -> None:
    parts, agreement, given = agreed("local", metrics="ece,f1,accuracy")
    simulated = pluribus.run(dataclasses.replace(parts.experiment, out=new_folder()), progress=False)
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    folder = RunFolder.create(new_folder())
    result = federated(parts.experiment, agreement, NAMES, transport, folder, seconds=60).run()
    assert numbers(result) == numbers(simulated)
    assert (result.metric, result.accuracy) == ("ece", simulated.accuracy)
    chosen = {k: one.selected_round for k, one in simulated.per_client().items()}
    kept = {k: {int(path.stem[-7:]) for path in (tmp_path / str(k)).rglob("*selected*")} for k in NAMES}
    assert all(chosen[k] in kept[k] for k in NAMES), (chosen, kept)


def test_sites_keep_what_a_confusion_matrix_needs() -> None:
    with refused(ConflictError, "confusion", "--metrics"):
        Agreement.of_experiment(
            experiment("local", metrics="auto,confusion"), "run", ("a", "b"), Form(Input("image", (1, 8, 8)))
        )


@pytest.mark.parametrize("method", ["fedh2l", "fedmd", "local"])
def test_a_server_knows_the_task_of_a_simulation_and_no_rows(method: str, tmp_path: Path) -> None:
    parts, agreement, given = agreed(method, **RUNS[method])
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    folder = RunFolder.create(new_folder())
    made = federated(parts.experiment, agreement, NAMES, transport, folder, seconds=60)
    assert made.parts.task == parts.task
    assert dict(made.parts.cards) == dict(parts.cards)
    assert not isinstance(made.parts, Assembly)
    for k in NAMES:
        assert made.parts.data.test_samples(k) == len(parts.data.rows(k)["test"])
        assert made.parts.data.counts(k) is None


@pytest.mark.parametrize("method", ["fml", "fedkd", "fedmrl"])
def test_the_server_says_which_model_is_the_smallest(method: str, tmp_path: Path) -> None:
    """Clients have cnn-16, mlp-128-64 and mlp-64; no site knows the models of the others."""
    parts, agreement, given = agreed(method, models="cnn-16,mlp-128-64,mlp-64", rounds=1)
    simulated = pluribus.run(dataclasses.replace(parts.experiment, out=new_folder()), progress=False)
    offer = dataclasses.replace(agreement, hyper={**agreement.hyper, "aux_model": None})
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    facts = greet(offer, NAMES, transport, seconds=0)
    assert complete_agreement(offer, facts, NAMES).hyper["aux_model"] == "mlp-64"
    folder = RunFolder.create(new_folder())
    result = federated(parts.experiment, offer, NAMES, transport, folder, seconds=60).run()
    assert numbers(result) == numbers(simulated)
    assert result.bytes == simulated.bytes
    assert result.warnings == simulated.warnings != []


def test_the_table_calls_sites_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = started("fedgh", tmp_path)[0].run()
    result.table()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["client", "model", "train", "fedgh"]
    assert [line.split()[0] for line in lines[1:4]] == ["north", "south", "west"]
    assert result.to_json()["clients"][0]["name"] == "north"


def test_only_serve_goes_on_with_a_run_of_sites(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path / "run"))
    folder.write_config(experiment("fedgh", data=SITES, clients=3).settings(), {})
    folder.close()
    with refused(OtherRunError, tmp_path / "run", "pluribus serve", "pluribus predict"):
        pluribus.resume(tmp_path / "run", progress=False)


# ---- privacy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["row", "client"])
def test_a_private_site_keeps_its_own_account(level: str, tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh", dp_epsilon=8.0, dp_level=level, models="mlp-64,cnn-16", width=64)
    terms = parts.local.privacy
    assert terms is not None
    agreement = dataclasses.replace(agreement, privacy=terms._replace(secure=True))
    assert Agreement.of(json.loads(json.dumps(agreement.facts()))).privacy == agreement.privacy
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    made = federated(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder()), seconds=60)
    result = made.run()
    spent = [record["privacy"]["epsilon"] for record in result.history]
    assert all(set(one) == {"0", "1", "2"} for one in spent)
    assert spent[0]["0"] < spent[1]["0"] < spent[2]["0"] <= 8.0
    assert all(record["loss"] is None for record in result.history)


PRIVATE: dict[str, Any] = {"models": "mlp-64", "dp_epsilon": 8.0, "dp_noise": 2.0, "rounds": 4}


def private_site(folder: Path, **settings: Any) -> tuple[Responder, Agreement]:
    parts, agreement, given = agreed("local", **PRIVATE | settings)
    terms = parts.local.privacy
    assert terms is not None
    return responder_of(parts, given, 0, folder), dataclasses.replace(agreement, privacy=terms._replace(secure=True))


def spent_by(site: Responder, agreement: Agreement, t: int, **more: Any) -> float:
    """What a site says after a round that it has spent."""
    head = unseal(site.answer(request(agreement, t=t, **more))).head
    return float(head["privacy"]["epsilon"])


def test_a_private_site_that_starts_again_remembers_what_it_has_spent(tmp_path: Path) -> None:
    """Whether it is killed between rounds or not, and whether it answers once or twice."""
    whole, agreement = private_site(tmp_path / "whole")
    killed, _ = private_site(tmp_path / "killed")
    expected = [spent_by(whole, agreement, t) for t in range(3)]
    assert expected[0] < expected[1] < expected[2]
    for t in range(3):
        assert spent_by(Responder(killed._means), agreement, t) == expected[t]
        assert spent_by(Responder(killed._means), agreement, t) == expected[t]


def test_a_server_that_falls_back_does_not_refund_what_was_spent(tmp_path: Path) -> None:
    """It asks for rounds 0 and 1 again, otherwise than before: a site that goes back has sent messages all the same."""
    straight_on, agreement = private_site(tmp_path / "straight")
    expected = [spent_by(straight_on, agreement, t) for t in range(4)]
    site, _ = private_site(tmp_path / "back")
    spent_by(site, agreement, 0)
    spent_by(site, agreement, 1)
    assert spent_by(site, agreement, 0, again=1) == expected[2]
    assert spent_by(Responder(site._means), agreement, 0, again=2) == expected[3]


def test_a_site_that_cannot_read_its_account_says_so(tmp_path: Path) -> None:
    site, agreement = private_site(tmp_path)
    spent_by(site, agreement, 0)
    spent_by(site, agreement, 0, again=1)
    (file,) = tmp_path.rglob("spent.safetensors")
    file.write_bytes(file.read_bytes()[:20])
    with refused(DamagedFileError, file, "budget"):
        spent_by(Responder(site._means), agreement, 1)


def test_it_is_not_refunded_if_the_site_crashes_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the state of the later round is gone, and before that of the new one is there."""
    straight_on, agreement = private_site(tmp_path / "straight")
    expected = [spent_by(straight_on, agreement, t) for t in range(4)]
    site, _ = private_site(tmp_path / "back")
    spent_by(site, agreement, 0)
    spent_by(site, agreement, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Responder, "_save", Crashing._crash)
        with pytest.raises(CrashedError):
            site.answer(request(agreement, t=1, again=1))
    assert spent_by(Responder(site._means), agreement, 1, again=1) == expected[2]


def test_a_server_cannot_ask_for_the_same_round_until_all_is_told(tmp_path: Path) -> None:
    """A private site ends when its budget does, whatever rounds it is asked for."""
    site, agreement = private_site(tmp_path, dp_noise=1.0)
    with refused(BudgetError, "budget"):
        for again in range(100):
            spent_by(site, agreement, 0, again=again)


def test_a_method_that_nothing_bounds_is_refused_by_the_server(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedl2g-l", models="mlp-64", warmup=1)
    agreement = dataclasses.replace(agreement, privacy=Terms(8.0, secure=True))
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    with refused(MismatchError, "fedl2g-l"):
        federated(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder()), seconds=60)


def test_a_server_that_sites_would_have_to_trust_is_refused() -> None:
    described = experiment("fedgh", dp_epsilon=8.0, dp_level="client-central")
    with refused(ConflictError, "client-central"):
        Agreement.of_experiment(described, "run", ("x", "y"), Form(Input("image", (1, 8, 8))))


NUMBERS: list[dict[str, Any]] = [{"epsilon": -1.0}, {"delta": 2.0}, {"clip": "one"}, {"noise": 0.0}]


@pytest.mark.parametrize("change", [*NUMBERS, {"level": "all"}, {"level": "client-central"}])
def test_terms_of_privacy_are_checked(change: dict[str, Any]) -> None:
    _, agreement, _ = agreed("fedgh")
    facts = agreement.facts() | {"privacy": Terms(8.0)._asdict() | change}
    with refused(SchemaError, "privacy"):
        Agreement.of(json.loads(json.dumps(facts)))


# ---- numbers of rows -----------------------------------------------------------------------------------------------


class Overheard(Direct):
    """Keeps the head of every answer."""

    def __init__(self, responders: Mapping[int, Responder]) -> None:
        super().__init__(responders)
        self.heads: list[dict[str, Any]] = []

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        answer = super().carry(k, blob)
        assert isinstance(answer, bytes)
        self.heads.append(unseal(answer).head)
        return answer


@pytest.mark.parametrize("method", ["fedavg", "fedmd", "fedh2l"])
def test_sites_need_not_tell_how_many_rows_they_have(method: str, tmp_path: Path) -> None:
    """No answer holds a number of rows or of steps. All else is as in a simulation, to the bit."""
    more = {"models": "cnn-16"} if method == "fedavg" else RUNS[method]
    parts, agreement, given = agreed(method, share_counts=False, **more)
    assert Agreement.of(json.loads(json.dumps(agreement.facts()))) == agreement
    transport = Overheard({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    simulated = pluribus.run(dataclasses.replace(parts.experiment, out=new_folder()), progress=False)
    made = federated(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder()), seconds=60)
    assert dict(made.parts.cards) == dict(parts.cards)
    result = made.run()
    assert numbers(result) == numbers(simulated)
    assert result.bytes == simulated.bytes
    assert [one.train for one in result.clients.values()] == [None] * 3
    assert [transport.responders[k]._get_host(k).cards[k].samples for k in NAMES] == [1] * 3
    known = {"model", "pretrained", "public", "loss", "compute", "communication", "figures"}
    assert {name for head in transport.heads for name in head} == known
    assert not {"samples", "test", "steps"} & known


def test_a_server_ignores_a_number_that_was_not_to_be_told(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh", share_counts=False)
    responders = {k: responder_of(parts, given, k, tmp_path) for k in NAMES}
    transport = Liar(responders, "hello", lambda head: head | {"samples": 7, "test": "many"})
    facts = greet(agreement, NAMES, transport, seconds=0)
    assert [(one.samples, one.test) for one in facts.values()] == [(None, None)] * 3


def test_a_site_may_refuse_to_tell(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh")
    shy = responder_of(parts, given, 0, tmp_path)
    shy._means = dataclasses.replace(shy._means, share_counts=False)
    with refused(AgreementError, "share_counts"):
        shy.answer(hello(agreement))
    shy.answer(hello(dataclasses.replace(agreement, share_counts=False)))


def hello(agreement: Agreement) -> bytes:
    return seal({"verb": "hello", "client": 0, "agreement": agreement.facts()}, {})


def test_site_toml_says_whether_it_tells(tmp_path: Path) -> None:
    where: dict[str, Any] = {"server": "localhost:1", "keys": tmp_path, "state": tmp_path / "state"}
    sites = [SiteFile("north", model="mlp-64", **where, data="digits", share_counts=told) for told in (True, False)]
    assert [load_resources(site).share_counts for site in sites] == [True, False]


def test_a_method_that_counts_rows_is_refused_by_server_and_site(tmp_path: Path) -> None:
    """A site does not rely on its server for that."""
    parts, agreement, given = agreed("fedgen")
    agreement = dataclasses.replace(agreement, share_counts=False)
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    with refused(MismatchError, "fedgen", "counts"):
        federated(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder()), seconds=60)
    with refused(MismatchError, "fedgen", "counts"):
        transport.responders[0].answer(seal({"verb": "enrol", "client": 0, "agreement": agreement.facts()}, {}))


def test_what_is_agreed_about_counts_is_yes_or_no() -> None:
    _, agreement, _ = agreed("fedgh")
    with refused(SchemaError, "share_counts"):
        Agreement.of(agreement.facts() | {"share_counts": "no"})


# ---- crashes -------------------------------------------------------------------------------------------------------


def started(method: str, folder: Path, transport: Direct | None = None, **settings: Any) -> tuple[Federation, Direct]:
    """A federation of fresh sites, or of those given."""
    parts, agreement, given = agreed(method, **RUNS[method] | settings)
    transport = transport or Direct({k: responder_of(parts, given, k, folder) for k in NAMES})
    run = RunFolder.create(new_folder())
    return federated(parts.experiment, agreement, NAMES, transport, run, seconds=60), transport


@cache
def straight(method: str, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    made, transport = started(method, Path(new_folder()), **settings)
    return numbers(made.run()), states(transport)


class Forgetful(Direct):
    """Every site is a new process for every request: all it knows is what lies in its folder."""

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        self.responders[k] = Responder(self.responders[k]._means)
        return super().carry(k, blob)


@pytest.mark.parametrize("method", ["fedfree", "fedh2l", "fedmd"])
def test_a_site_is_what_lies_in_its_folder(method: str, tmp_path: Path) -> None:
    parts, _, given = agreed(method, **RUNS[method])
    made, transport = started(method, tmp_path, Forgetful({k: responder_of(parts, given, k, tmp_path) for k in NAMES}))
    assert numbers(made.run()) == straight(method)[0]
    assert differing(straight(method)[1], states(transport)) == []


class Stuttering(Direct):
    """Every request comes twice; the second answer is the one that arrives."""

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        first, second = super().carry(k, blob), super().carry(k, blob)
        if b'"verb": "evaluate"' not in blob:
            assert first == second
        return second


def test_what_is_asked_twice_is_done_once(tmp_path: Path) -> None:
    parts, _, given = agreed("fedfree", **RUNS["fedfree"])
    made, transport = started(
        "fedfree", tmp_path, Stuttering({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    )
    assert numbers(made.run()) == straight("fedfree")[0]
    assert differing(straight("fedfree")[1], states(transport)) == []


class CrashedError(Exception):
    pass


class Crashing(Direct):
    """Sites die in the middle of writing, again and again, and come back."""

    def __init__(self, responders: Mapping[int, Responder], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(responders)
        self._patch = monkeypatch
        self.crashes = 0

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        with self._patch.context() as patch:
            patch.setattr("os.replace", self._crash)
            try:
                return super().carry(k, blob)
            except CrashedError:
                self.crashes += 1
        self.responders[k] = Responder(self.responders[k]._means)
        return super().carry(k, blob)

    @staticmethod
    def _crash(*args: Any) -> None:
        raise CrashedError


def selections(result: Result, k: int) -> int:
    """How often validation data preferred a round to all before it: then a site writes its model."""
    vals = [record["clients"][str(k)]["after"]["val"] for record in result.history]
    return sum(all(val > before for before in vals[:t]) for t, val in enumerate(vals))


def test_a_crash_before_the_rename_is_as_if_nothing_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, _, given = agreed("fedh2l", **RUNS["fedh2l"])
    crashing = Crashing({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, monkeypatch)
    made, transport = started("fedh2l", tmp_path, crashing)
    result = made.run()
    assert numbers(result) == straight("fedh2l")[0]
    assert crashing.crashes == 3 * 2 * 3 + sum(selections(result, k) for k in NAMES)
    assert differing(straight("fedh2l")[1], states(transport)) == []


@pytest.mark.parametrize("method", ["fedgh", "fedfree", "fedgen"])
def test_a_server_that_falls_back_finds_its_sites_as_they_were(method: str, tmp_path: Path) -> None:
    """It is stopped after three rounds, of which it has saved two."""
    settings = {"rounds": 4, "checkpoint_every": 2}
    parts, agreement, given = agreed(method, **RUNS[method] | settings)
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    folder = RunFolder.create(new_folder())
    with pytest.raises(StoppedError):
        federated(parts.experiment, agreement, NAMES, transport, folder, 60, [StopAfter(2)]).run()
    result = federated(parts.experiment, agreement, NAMES, transport, folder, 60).run()
    assert numbers(result) == straight(method, **settings)[0]
    assert differing(straight(method, **settings)[1], states(transport)) == []


def request(agreement: Agreement, /, **head: Any) -> bytes:
    return seal({"verb": "work", "client": 0, "t": 0, "stage": 0, "agreement": agreement.facts()} | head, {})


def test_what_could_not_be_saved_was_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for a moment; the site lives on and is asked again."""
    parts, agreement, _ = agreed("local", momentum=0.9)
    lucky, unlucky = (responder_of(parts, None, 0, tmp_path / name) for name in ("lucky", "unlucky"))
    for t in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("pluribus.storage.files.sync", full_disk)
            with refused(FileAccessError, "No space left"):
                unlucky.answer(request(agreement, t=t))
        for responder in (lucky, unlucky):
            responder.answer(request(agreement, t=t))
    expected, found = (states(Direct({0: responder})) for responder in (lucky, unlucky))
    assert differing(expected, found) == []


def full_disk(path: Path) -> None:
    raise OSError(28, "No space left on device")


def test_a_site_never_falls_back_beyond_what_it_kept(tmp_path: Path) -> None:
    parts, agreement, _ = agreed("local", rounds=10)
    responder = responder_of(parts, None, 0, tmp_path)
    for t in range(10):
        responder.answer(request(agreement, t=t))
    responder.answer(request(agreement, t=7, again=True))  # it kept rounds 2 to 9, and now 2 to 7
    with refused(AgreementError, "round 0"):
        responder.answer(request(agreement, t=0))


def test_a_folder_of_another_model_is_not_taken_for_this_one(tmp_path: Path) -> None:
    parts, agreement, _ = agreed("local")
    responder = responder_of(parts, None, 0, tmp_path)
    assert responder._means.model == "mlp-64"
    responder.answer(request(agreement))
    other = Responder(dataclasses.replace(responder._means, model="cnn-16"))
    with refused(OtherRunError, tmp_path / "0" / "run"):
        other.answer(request(agreement, t=1))


# ---- sites that are late, wrong or lying ---------------------------------------------------------------------------


class Lying(Direct):
    """One site answers the work of round 1 in its own way."""

    def __init__(self, responders: Mapping[int, Responder], lie: Callable[[bytes], bytes | Missing]) -> None:
        super().__init__(responders)
        self._lie = lie

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        answer, head = super().carry(k, blob), unseal(blob).head
        assert isinstance(answer, bytes)
        return self._lie(answer) if (k, head["verb"], head.get("t")) == (1, "work", 1) else answer


def _with(answer: bytes, change: Callable[[dict[str, torch.Tensor]], Any]) -> bytes:
    head, parts = unseal(answer)
    tensors = safetensors.torch.load(parts["up"])
    change(tensors)
    return seal(head, {"up": safetensors.torch.save(tensors)})


LIES: dict[str, tuple[Any, ...]] = {
    "late": (lambda answer: Missing("no answer by the deadline"), "no answer by the deadline"),
    "cut off": (lambda answer: answer[:-7], "length"),
    "not ours": (lambda answer: b"GET / HTTP/1.1", "Pluribus", "version"),
    "NaN": (lambda answer: _with(answer, lambda t: t["means"].fill_(torch.nan)), "'means'", "NaN"),
    "the largest float": (lambda answer: _with(answer, lambda t: t["means"].fill_(MOST)), "'means'", "3.4e+38"),
    "a wrong shape": (
        lambda answer: _with(answer, lambda t: t.update(means=t["means"][:, :3].contiguous())),
        "'means'",
    ),
    "a field too many": (lambda answer: _with(answer, lambda t: t.update(secret=torch.ones(1))), "'secret'"),
    "a broken part": (lambda answer: seal(unseal(answer).head, {"up": b"\x00" * 20}), "its message"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_site_that_lies_is_a_site_that_did_not_answer(name: str, tmp_path: Path) -> None:
    lie, *facts = LIES[name]
    parts, _, given = agreed("fedgh")
    lying = Lying({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, lie)
    result = started("fedgh", tmp_path, lying)[0].run()
    assert [(record["present"], record["answered"]) for record in result.history] == [(3, 3), (3, 2), (3, 3)]
    (told,) = result.warnings
    assert_facts(told, "site south", "round 1", *facts)


class LyingOnce(Direct):
    """The site south changes the tensors of its first answers to one verb."""

    def __init__(self, responders: Mapping[int, Responder], verb: str, name: str, number: float) -> None:
        super().__init__(responders)
        self._verb, self._name, self._number, self._left = verb, name, number, 1

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        answer = super().carry(k, blob)
        assert isinstance(answer, bytes)
        if (k, unseal(blob).head["verb"]) != (1, self._verb) or not self._left:
            return answer
        self._left -= 1
        return _with(answer, lambda tensors: tensors[self._name].fill_(self._number))


@pytest.mark.parametrize(
    ("method", "verb", "field", "number", "when"),
    [
        ("fedgen", "enrol", "counts", -1, "at enrolment"),
        ("fedgen", "work", "head.weight", MOST, "round 0"),
        ("fedh2l", "teach", "posterior", MOST, "round 0"),
        ("fedh2l", "teach", "posterior", 1e15, "round 0"),
        ("fedh2l", "teach", "accuracy", 1e15, "round 0"),
    ],
)
def test_a_lie_is_told_and_all_others_go_on(
    method: str, verb: str, field: str, number: float, when: str, tmp_path: Path
) -> None:
    parts, _, given = agreed(method, **RUNS[method])
    lying = LyingOnce({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, verb, field, number)
    made, transport = started(method, tmp_path, lying)
    result = made.run()
    assert [record["answered"] for record in result.history] == [2, 3, 3]
    assert_facts(result.warnings[0], "site south", when)
    assert read_lines(made.folder.path / "missing.jsonl") == result.warnings  # type: ignore[operator]
    assert all(value.isfinite().all() for value in states(transport).values())


def test_a_site_whose_numbers_spoil_the_server_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its message is not refused. The server finds out that it cannot go on with it."""
    monkeypatch.setattr(remote, "LARGEST", math.inf)
    parts, _, given = agreed("fedgh", **RUNS["fedgh"])
    lying = LyingOnce({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, "work", "means", MOST)
    made, _ = started("fedgh", tmp_path, lying)
    result = made.run()
    assert [record["answered"] for record in result.history] == [2, 3, 3]
    assert list(result.history[0]["left_out"]) == ["1"]
    assert_facts(result.warnings[0], "site south", "missing", "round 0", "of the server", "NaN")
    assert read_lines(made.folder.path / "missing.jsonl") == result.warnings  # type: ignore[operator]


def test_a_field_above_the_largest_norm_is_refused(tmp_path: Path) -> None:
    parts, _, given = agreed("fedgh", **RUNS["fedgh"])
    lying = LyingOnce({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, "work", "means", 1000.0)
    made, _ = started("fedgh", tmp_path, lying)
    made.engine.largest_norm = 500.0  # type: ignore[attr-defined]
    result = made.run()
    assert [record["answered"] for record in result.history] == [2, 3, 3]
    assert_facts(result.warnings[0], "site south", "round 0", "'means'", "largest_norm", 500)


class LyingLate(LyingOnce):
    """The site south tells its lie in a later round."""

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        if unseal(blob).head.get("t") != 4:
            return Direct.carry(self, k, blob)
        return super().carry(k, blob)


def test_largest_norms_are_learned_from_the_first_rounds(tmp_path: Path) -> None:
    """After three rounds, ten times the usual norm is too much. A server that is started again knows the norms."""
    parts, agreement, given = agreed("fedgh", **RUNS["fedgh"], rounds=5)
    lying = LyingLate({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, "work", "means", 1000.0)
    described = experiment("fedgh", data=SITES, clients=3, rounds=5, checkpoint_every=1)
    facts = greet(agreement, NAMES, lying, seconds=0)
    whole = complete_agreement(agreement, facts, NAMES)
    folder = RunFolder.create(str(tmp_path / "run"))
    how = described, whole, NAMES, facts, lying, folder, 1.0
    with pytest.raises(StoppedError):
        make_federation(*how, observers=[StopAfter(3)], largest_norm="learned").run()
    result = make_federation(*how, largest_norm="learned").run()
    assert [record["answered"] for record in result.history] == [3, 3, 3, 3, 2]
    assert_facts(result.warnings[0], "site south", "round 4", "'means'", "first rounds")
    assert read_lines(folder.path / "missing.jsonl") == result.warnings


def test_a_defense_needs_a_server(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedh2l", **RUNS["fedh2l"])
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    described = experiment("fedh2l", data=SITES, clients=3, defense="clip")
    with refused(MismatchError, "fedh2l", "'defense'"):
        federated(described, agreement, NAMES, transport, RunFolder.create(str(tmp_path / "run")), 1.0)


def test_the_server_defends_real_sites(tmp_path: Path) -> None:
    """One of three sites sends large numbers, and the median takes no notice of them."""
    parts, agreement, given = agreed("fedgh", **RUNS["fedgh"])
    lying = LyingOnce({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, "work", "means", 1000.0)
    described = experiment("fedgh", data=SITES, clients=3, rounds=3, checkpoint_every=1, defense="median")
    made = federated(described, agreement, NAMES, lying, RunFolder.create(str(tmp_path / "run")), 1.0)
    made.run()
    assert all(float(value.abs().max()) < 10 for value in made.half.state().values())


ROW: dict[str, Any] = {"val": 0.5, "test": 0.5, "test_loss": 1.0}


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        ({"val": -1.5}, ["'val'", -1.5]),
        ({"test_mae": -0.5}, ["'test_mae'", -0.5]),
        ({"val_r2": 1.5}, ["'val_r2'", 1.5]),
        ({"val_f1": 0.5}, ["metrics"]),
    ],
)
def test_every_metric_is_believed_in_its_own_range(said: dict[str, Any], facts: list[Any]) -> None:
    more = {"val_mae": 3.0, "test_mae": 4.0, "val_r2": -7.0, "test_r2": None}
    names = ("rmse", "mae", "r2")
    told = ROW | {"val": 70.0, "test": 50.0} | more
    assert remote._read_view(told, names) == told
    with refused(SchemaError, *facts):
        remote._read_view(told | said, names)


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        ({}, ["metrics"]),
        ({"figures": None}, ["metrics"]),
        ({"figures": {}}, ["metrics"]),
        ({"figures": {"after": 1}}, ["metrics"]),
        ({"figures": {"before": ROW}}, ["metrics"]),
        ({"figures": {"before": ROW, "after": {"val": 1.0}}}, ["metrics"]),
        ({"figures": {"before": ROW, "after": ROW, "later": ROW}}, ["metrics"]),
        ({"figures": {"before": ROW, "after": ROW | {"test": 7.5}}}, ["'test'", 7.5]),
        ({"figures": {"before": ROW, "after": ROW | {"test_loss": -1}}}, ["'test_loss'", -1.0]),
        ({"figures": {"before": ROW, "after": ROW | {"val": 10**400}}}, ["head", "ValueError"]),
        ({"figures": {"before": ROW, "after": ROW | {"val": float("nan")}}}, ["head", "ValueError"]),
        ({"refused": "no\x1b[2J\nsite north has gone mad"}, ["no [2J site north has gone mad"]),
    ],
)
def test_figures_are_believed_only_if_they_can_be(said: dict[str, Any], facts: list[Any], tmp_path: Path) -> None:
    parts, _, given = agreed("fedgh")
    lying = Liar({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, "evaluate", lambda head: said)
    result = started("fedgh", tmp_path, lying)[0].run()
    assert all(list(record["clients"]) == ["0", "2"] for record in result.history)
    assert len(result.warnings) == 3
    assert_facts(result.warnings[0], "site south", "round 0", *facts)


@pytest.mark.parametrize("steps", [None, -1, 1.5, True, "7", 2**40])
def test_steps_are_believed_only_if_they_can_be(steps: Any, tmp_path: Path) -> None:
    parts, _, given = agreed("fedgh")
    responders = {k: responder_of(parts, given, k, tmp_path) for k in NAMES}
    result = started("fedgh", tmp_path, Liar(responders, "work", lambda head: head | {"steps": steps}))[0].run()
    assert [list(record["steps"]) for record in result.history] == [["0", "2"]] * 3
    assert_facts(result.warnings[0], "site south", "round 0", "steps", steps)


def test_nobody_works_longer_than_a_round_may_last(tmp_path: Path) -> None:
    parts, _, given = agreed("fedgh")
    boast = {"compute": 1e308, "communication": 1e308, "loss": True}
    responders = {k: responder_of(parts, given, k, tmp_path) for k in NAMES}
    result = started("fedgh", tmp_path, Liar(responders, "work", lambda head: head | boast))[0].run()
    assert result.warnings == []
    assert all(0 < record["spans"]["compute"] <= record["seconds"] for record in result.history)


class Liar(Direct):
    """Site south answers one verb with a head of its own making, always."""

    def __init__(
        self, responders: Mapping[int, Responder], verb: str, lie: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        super().__init__(responders)
        self._verb, self._lie = verb, lie

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        answer = super().carry(k, blob)
        assert isinstance(answer, bytes)
        if (k, unseal(blob).head["verb"]) != (1, self._verb):
            return answer
        head, parts = unseal(answer)
        return seal(self._lie(head), parts)


DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("lie", "kind", "facts"),
    [
        ({"samples": 0}, DataError, []),
        ({"samples": "9"}, SchemaError, ["'9'"]),
        ({"samples": 1e9}, SchemaError, ["'1000000000.0'"]),
        ({"test": 2**62}, SchemaError, [2**62, "range"]),
        ({"test": True}, SchemaError, ["'True'"]),
        ({"model": "antigravity.fly"}, AgreementError, ["'antigravity.fly'", "pluribus list models"]),
        ({"model": ["cnn-16"]}, AgreementError, ["'['cnn-16']'"]),
        ({"public": 5}, SchemaError, []),
        ({"public": {"sizes": [1, 2, 3]}}, SchemaError, ["'digest'"]),
        ({"public": {"sizes": 3, "digest": DIGEST}}, SchemaError, []),
        ({"public": {"sizes": [1, 2], "digest": DIGEST}}, SchemaError, ["public rows"]),
        ({"public": {"sizes": [1, -2, 3], "digest": DIGEST}}, SchemaError, [-2]),
        ({"public": {"sizes": [1, 2**62, 3], "digest": DIGEST}}, SchemaError, [2**62]),
        ({"public": {"sizes": [0, 0, 0], "digest": DIGEST}}, SchemaError, ["public rows"]),
        ({"public": {"sizes": [1, 2, 3], "digest": 7}}, SchemaError, ["public rows"]),
        ({"public": {"sizes": [1, 2, 3], "digest": "x"}}, SchemaError, ["public rows"]),
        ({"public": {"sizes": [1, 2, 3], "digest": DIGEST}}, AgreementError, ["site north", "'public'", "site.toml"]),
    ],
)
def test_a_site_that_lies_of_itself_is_one_sentence_at_the_start(
    lie: dict[str, Any], kind: Kind, facts: list[Any], tmp_path: Path
) -> None:
    parts, _, given = agreed("fedgh")
    lying = Liar({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, "hello", lambda head: head | lie)
    with refused(kind, "site south", *facts):
        started("fedgh", tmp_path, lying)
    assert "antigravity" not in sys.modules


def test_a_site_that_is_not_there_at_the_start(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh")
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    transport.exchange = lambda requests, seconds: {0: transport.carry(0, requests[0])}  # type: ignore[method-assign]
    with refused(WorkerError, "site south", "0 s", "no answer"):
        federated(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder()), 60)


def test_a_site_that_answers_noise_at_the_start(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh")
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    transport.exchange = lambda requests, seconds: dict.fromkeys(requests, b"noise")  # type: ignore[method-assign]
    with refused(UnreadableMessageError, "site north"):
        federated(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder()), 60)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"classes": tuple("abcdefghij")}, ["a, b, c", "0, 1, 2"]),
        ({"input": Input("image", (3, 8, 8))}, ["3x8x8", "1x8x8"]),
        ({"version": "9.9"}, ["9.9", pluribus.__version__]),
        ({"width": "wide"}, ["wide"]),
        ({"optimizer_life": "week"}, ["week"]),
        ({"rule": Rule(clip_norm=-1.0)}, ["norm"]),
    ],
    ids=["labels", "images", "version", "nonsense", "life", "rule"],
)
def test_what_does_not_fit_is_one_sentence_at_the_start(
    change: dict[str, Any], facts: list[str], tmp_path: Path
) -> None:
    parts, agreement, given = agreed("fedgh")
    transport = Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    other = dataclasses.replace(agreement, **change)
    with refused(AgreementError, "site north", *facts):
        federated(parts.experiment, other, NAMES, transport, RunFolder.create(new_folder()), 60)


def test_a_site_may_lack_classes(tmp_path: Path) -> None:
    """It has images of three classes, in an order of its own: the same bits as with labels of the federation."""
    parts, agreement, _ = agreed("fedgh")
    own = {name: some(parts, parts.data.rows(0)[name]) for name in ("train", "val", "test")}
    few = {name: chosen(dataset, ("7", "3", "0")) for name, dataset in own.items()}
    renamed = {name: relabel(dataset, agreement.classes) for name, dataset in few.items()}
    answers = [
        unseal(
            Responder(SiteResources(sets, None, "mlp-64", tmp_path / which, torch.device("cpu"))).answer(
                request(agreement)
            )
        )
        for which, sets in (("few", few), ("renamed", renamed))
    ]
    assert answers[0].parts == answers[1].parts
    assert set(renamed["train"].y.tolist()) == {7, 3, 0}


def test_a_site_may_hold_a_single_class(tmp_path: Path) -> None:
    """Its folder has one folder in it. It trains, and is measured, as a client of a federation of ten classes."""
    paint = np.random.default_rng(0)
    (tmp_path / "images" / "7").mkdir(parents=True)
    for number in range(20):
        pixels = paint.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "7" / f"{number}.png")
    where = Path("keys"), "mlp-64", tmp_path / "state", str(tmp_path / "images")
    site = SiteFile("north", "localhost:1", *where, image_size=8, device="cpu")
    agreement = dataclasses.replace(agreed("fedgh")[1], input=Input("image", (3, 8, 8)))
    responder, task = Responder(load_resources(site)), agreement.task()
    card = Card(0, "mlp-64", 14, 64, ())
    (wire,) = agreement.build_method().wires(task, card)
    up = decode(unseal(responder.answer(request(agreement))).parts["up"], wire.up, "a test")
    assert up.rows("means").held.nonzero().flatten().tolist() == [7]
    measured = unseal(responder.answer(request(agreement, verb="evaluate"))).head["figures"]["after"]
    assert 0 <= measured["test"] <= 1


def chosen(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """Rows of these classes, with labels that are numbers into them."""
    numbers = torch.tensor([classes.index(name) if name in classes else -1 for name in dataset.classes])[dataset.y]
    return Dataset("few", dataset.x[numbers >= 0], numbers[numbers >= 0], classes)


def test_a_server_does_not_choose_what_a_site_imports(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh")
    responder = responder_of(parts, given, 0, tmp_path)
    other = dataclasses.replace(agreement, method="antigravity.Method")
    head = {"verb": "enrol", "client": 0, "agreement": other.facts()}
    with refused(UnknownNameError, "'antigravity.Method'"):
        responder.answer(seal(head, {}))
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(("method", "setting"), [("fml", "aux_model"), ("fedfree", "global_model")])
def test_nor_by_a_hyper_parameter_that_names_a_model(method: str, setting: str, tmp_path: Path) -> None:
    parts, agreement, given = agreed(method)
    responder = responder_of(parts, given, 0, tmp_path)
    other = dataclasses.replace(agreement, hyper=dict(agreement.hyper) | {setting: "antigravity.fly"})
    head = {"verb": "work", "client": 0, "t": 0, "stage": 0, "agreement": other.facts()}
    with refused(AgreementError, "'antigravity.fly'"):
        responder.answer(seal(head, {}))
    assert "antigravity" not in sys.modules


# ---- requests that no server should send ---------------------------------------------------------------------------

NONSENSE: dict[str, tuple[Any, ...]] = {
    "no agreement": ({"agreement": None}, "agree"),
    "a list for an agreement": ({"agreement": [1]}, "agree"),
    "no client": ({"client": None}, "'client'", "'None'"),
    "a client in words": ({"client": "0"}, "'client'", "'0'"),
    "a client too many": ({"client": 3}, "'client'", "3", "range"),
    "no verb": ({"verb": None}, "local", "'None'"),
    "an unknown verb": ({"verb": "format"}, "local", "'format'"),
    "a list for a verb": ({"verb": ["work"]}, "local", "'['work']'"),
    "a verb of peers": ({"verb": "teach"}, "local", "'teach'"),
    "an enrolment for nothing": ({"verb": "enrol"}, "local", "'enrol'"),
    "no round": ({"t": None}, "'t'", "'None'"),
    "a round after the last": ({"t": 3}, "'t'", "3", "range"),
    "a round before the first": ({"t": -2}, "'t'", "-2", "range"),
    "a stage from the end": ({"stage": -1}, "'stage'", "-1", "range"),
    "evaluation of no round": ({"verb": "evaluate", "t": "x"}, "'t'", "'x'"),
}
NO_AGREEMENT: dict[str, tuple[Any, ...]] = {
    "a run elsewhere": ({"run": "../elsewhere"}, "run", "'../elsewhere'"),
    "a run above": ({"run": ".."}, "run", "'..'"),
    "a run at the root": ({"run": "/tmp/elsewhere"}, "run", "'/tmp/elsewhere'"),
    "a run of no name": ({"run": ""}, "run", "''"),
    "a run of no text": ({"run": 7}, "'7'"),
    "no method": ({"method": ["local"]}, "'['local']'"),
    "an unknown fact": ({"secret": 1}, "secret"),
    "many clients": ({"clients": 10**9}, "1000000000", "range"),
    "less than no warm-up": ({"warmup": -1}, "-1", "range"),
    "endless warm-up": ({"warmup": 10**9}, "1000000000", "range"),
    "no epochs": ({"epochs": None}, "'None'"),
    "a flat image": ({"input": {"kind": "image", "shape": [8, 8]}}, "agree", "image"),
    "a rule of no kind": ({"rule": 1}, "agree"),
    "an unknown rule": ({"rule": {"name": "magic"}}, "name", "sgd", "'magic'"),
    "a rule in words": ({"rule": {"lr": "fast"}}, "lr", "'fast'"),
    "a rule too many": ({"rule": {"speed": 1.0}}, "'speed'"),
    "a rule uphill": ({"rule": {"lr": -1.0}}, "learning rate"),
    "a rule without end": ({"rule": {"lr": float("inf")}}, "head", "ValueError"),
    "hyper of no kind": ({"hyper": 3}, "agree"),
    "hyper too many": ({"hyper": {"nonsense": 1}}, "local", "'nonsense'"),
    "public rows": ({"public": [1, 1, 1]}, "public rows"),
    "half an image": ({"public": [0.5]}, "'0.5'"),
    "a projector": ({"projector": "magic"}, "projector", "'magic'"),
    "no metrics": ({"metrics": []}, "metrics", "accuracy"),
    "a metric of numbers": ({"metrics": ["accuracy", "rmse"]}, "metrics", "rmse"),
    "metrics of no kind": ({"metrics": 3}, "agree"),
}
KINDS: dict[str, Kind] = {  # of the others it is SchemaError
    "an unknown rule": UnknownNameError,
    "a rule in words": FormatError,
    "a rule without end": UnreadableMessageError,
    "hyper too many": AgreementError,
    "public rows": AgreementError,
    "a projector": UnknownNameError,
}


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", [*NONSENSE, *NO_AGREEMENT])
def test_a_worker_refuses_nonsense_and_lives_on(name: str, tmp_path: Path) -> None:
    parts, agreement, _ = agreed("local")
    responder = responder_of(parts, None, 0, tmp_path / "sites")
    answer = RequestHandler(responder).answer
    done = answer(request(agreement))
    known = _files(tmp_path)
    change, *facts = (NONSENSE | NO_AGREEMENT)[name]
    head = change if name in NONSENSE else {"agreement": agreement.facts() | change}
    nonsense = request(agreement, **{"t": 1} | head)
    with refused(KINDS.get(name, SchemaError), *facts) as caught:
        responder.answer(nonsense)
    assert unseal(answer(nonsense)).head["refused"] == caught.value.sentence
    assert _files(tmp_path) == known
    assert answer(request(agreement)) == done


def test_rounds_of_warm_up_are_rounds_too(tmp_path: Path) -> None:
    parts, agreement, _ = agreed("fedl2g-l", warmup=2, rounds=1)
    site, handler = make_host(parts), RequestHandler(responder_of(parts, None, 0, tmp_path))
    method, server = parts.method, Server(parts.task, parts.cards)
    method.setup(server)
    down = encode(method.download(server, 0), site.wires(0)[0].down, "server")

    def asked(t: int) -> dict[str, Any]:
        head = {"verb": "work", "client": 0, "t": t, "stage": 0, "agreement": agreement.facts()}
        return unseal(handler.answer(seal(head, {"down": down}))).head

    assert [asked(t).get("loss") is None for t in range(3)] == [True, True, False]
    assert_facts(asked(3)["refused"], "'t'", 3, "range")


@pytest.mark.parametrize(("verb", "known"), [("work", False), ("hello", True)])
def test_a_peer_knows_no_work(verb: str, known: bool, tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedh2l", **RUNS["fedh2l"])
    said = unseal(
        RequestHandler(responder_of(parts, given, 0, tmp_path)).answer(
            request(public_known(agreement, given), verb=verb)
        )
    )
    assert ("refused" not in said.head) is known
    if not known:
        assert_facts(said.head["refused"], "fedh2l", "'work'")


def public_known(agreement: Agreement, given: Public | None) -> Agreement:
    """As it is after the hello."""
    assert given is not None
    known = {"public": given.sizes(agreement.clients), "public_digest": given.digest(agreement.clients)}
    return dataclasses.replace(agreement, **known)


@pytest.mark.parametrize(
    ("teachers", "parts", "facts"),
    [
        (None, {"1": b""}, ["teachers", "messages"]),
        ({}, {}, ["teachers", "messages"]),
        ({"1": "cnn-16"}, {"2": b""}, ["teachers", "messages"]),
        ({"x": "cnn-16"}, {"x": b""}, ["teacher", "'x'"]),
        ({"0": "cnn-16"}, {"0": b""}, ["teacher", "'0'"]),
        ({"01": "cnn-16"}, {"01": b""}, ["teacher", "'01'"]),
        ({"1": "antigravity.fly"}, {"1": b""}, ["'antigravity.fly'"]),
        ({"1": 7}, {"1": b""}, ["model", "'7'"]),
        ({"1": "mlp-64"}, {"1": b"noise"}, ["round 0", "client 1"]),
    ],
)
def test_teachers_that_cannot_be(teachers: Any, parts: dict[str, bytes], facts: list[str], tmp_path: Path) -> None:
    simulated, agreement, given = agreed("fedh2l", **RUNS["fedh2l"])
    answer = RequestHandler(responder_of(simulated, given, 0, tmp_path)).answer
    known = public_known(agreement, given).facts()
    head = {"verb": "learn", "client": 0, "t": 0, "agreement": known, "teachers": teachers}
    assert_facts(unseal(answer(seal(head, parts))).head["refused"], *facts)
    assert "antigravity" not in sys.modules


class Short(Direct):
    """Site south teaches fewer rows than the others, in round 1."""

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        answer, head = super().carry(k, blob), unseal(blob).head
        assert isinstance(answer, bytes)
        if (k, head["verb"], head.get("t")) != (1, "teach", 1):
            return answer
        return _with(answer, lambda t: t.update(posterior=t["posterior"][:1].contiguous()))


@pytest.mark.parametrize("pairs", [False, True])
def test_students_of_a_short_lesson_say_so(pairs: bool, tmp_path: Path) -> None:
    """Alone it is too short for its public images; beside others it does not go with theirs."""
    parts, agreement, given = agreed("fedh2l", **RUNS["fedh2l"], pairs=pairs)
    short = Short({k: responder_of(parts, given, k, tmp_path) for k in NAMES})
    run = RunFolder.create(new_folder())
    result = federated(parts.experiment, agreement, NAMES, short, run, seconds=60).run()
    assert result.warnings
    for told in result.warnings:
        assert_facts(told, "round 1", "1 rows" if pairs else "'posterior'")


def test_a_worker_outlives_a_mistake_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, agreement, _ = agreed("local")
    answer = RequestHandler(responder_of(parts, None, 0, tmp_path)).answer
    with monkeypatch.context() as patch:
        patch.setattr("pluribus.host.Host.answer", lambda *args: {}["a key that is not there"])
        refusal = unseal(answer(request(agreement))).head["refused"]
    assert_facts(refusal, "KeyError", "log")
    assert "a key that is not there" in capsys.readouterr().err
    assert "refused" not in unseal(answer(request(agreement))).head


# ---- public images -------------------------------------------------------------------------------------------------


def images(rows: int, size: int = 8, classes: tuple[str, ...] = tuple("0123456789"), fill: int = 0) -> Dataset:
    return Dataset("some", torch.full((rows, 1, size, size), fill, dtype=torch.uint8), torch.arange(rows) % 2, classes)


@given_any(st.integers(1, 300), st.integers(1, 40))
def test_rows_are_dealt_in_order_and_evenly(rows: int, clients: int) -> None:
    public = Public(images(rows, size=1))
    owners, sizes = public.owners(clients), public.sizes(clients)
    assert owners.tolist() == sorted(k for k, size in enumerate(sizes) for _ in range(size))
    assert (len(sizes), sum(sizes)) == (clients, rows)
    assert max(sizes) - min(sizes) <= 1


def written(path: Path, **columns: np.ndarray) -> str:
    x, y = np.arange(12 * 64, dtype=np.uint8).reshape(12, 8, 8), np.arange(12) % 10
    arrays = {"x_train": x[:9], "y_train": y[:9], "x_test": x[9:], "y_test": y[9:]}
    write_npz(path, arrays | {"classes": np.array(list("0123456789"))} | columns)
    return str(path)


def test_a_file_says_whose_its_rows_are_or_they_are_dealt(tmp_path: Path) -> None:
    dealt = Public.read(written(tmp_path / "dealt.npz"), None)
    assert dealt.owners(3).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    said = Public.read(written(tmp_path / "said.npz", owner=np.array([2] * 7 + [0] * 5, dtype=np.uint8)), None)
    assert said.owners(3).tolist() == [2] * 7 + [0] * 5
    assert said.sizes(3) == (5, 0, 7)
    assert said.digest(3) != dealt.digest(3)
    spelled = Public.read(written(tmp_path / "spelled.npz", owner=dealt.owners(3).numpy()), None)
    assert spelled.digest(3) == dealt.digest(3)


@pytest.mark.parametrize(
    "owner", [np.zeros(9, int), np.zeros((12, 1), int), np.zeros(12), np.array(["north"] * 12)], ids=str
)
def test_a_column_of_owners_that_cannot_be(owner: np.ndarray, tmp_path: Path) -> None:
    with refused(DamagedDataError, tmp_path / "wrong.npz", "owner", "12 integers", owner.dtype, owner.shape):
        Public.read(written(tmp_path / "wrong.npz", owner=owner), None)


def test_a_column_of_pickles_is_not_opened(tmp_path: Path) -> None:
    with refused(DamagedDataError, tmp_path / "wrong.npz"):
        Public.read(written(tmp_path / "wrong.npz", owner=np.array([{}] * 12, dtype=object)), None)


@pytest.mark.parametrize("number", [-1, 3])
def test_an_owner_that_is_no_client(number: int) -> None:
    with refused(DataError, number, "3 clients", "0..2"):
        Public(images(2), torch.tensor([0, number])).owners(3)


def test_a_site_reads_what_its_file_names(tmp_path: Path) -> None:
    place = written(tmp_path / "public.npz")
    where = {"server": "127.0.0.1:9092", "keys": tmp_path, "state": tmp_path / "state"}
    means = load_resources(SiteFile("north", model="cnn-16", **where, data="digits", public=place, image_size=16))
    assert means.public is not None
    assert means.public.dataset.x.shape == (12, 1, 16, 16)


def test_a_site_reads_deep_images_as_it_reads_plain_ones_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"server": "127.0.0.1:9092", "keys": tmp_path, "state": tmp_path / "state", "model": "cnn-16"}
    for folder, deep in (("plain", False), ("deep", True)):
        sides(tmp_path / folder, deep)
    plain, deep = (
        load_resources(
            SiteFile("north", **where, data=str(tmp_path / folder), public=str(tmp_path / folder), image_size=8)
        )
        for folder in ("plain", "deep")
    )
    for name, own in plain.own.items():
        assert torch.equal(own.x, deep.own[name].x)
    assert plain.public is not None
    assert deep.public is not None
    assert plain.public.digest(3) == deep.public.digest(3)
    said = [line for line in capsys.readouterr().out.splitlines() if "note: " in line]
    assert [str(tmp_path / "deep") in line and "48 of 48" in line for line in said] == [True, True]


def test_a_site_says_that_it_pools_the_splits_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test"):
        sides(tmp_path / "all" / split, deep=False)
    where = {"server": "127.0.0.1:9092", "keys": tmp_path, "state": tmp_path / "state", "model": "cnn-16"}
    pooled = load_resources(SiteFile("north", **where, data=str(tmp_path / "all"), image_size=8))
    assert sum(len(own.y) for own in pooled.own.values()) == 96
    assert "site.toml" in capsys.readouterr().out
    apart = {name: str(tmp_path / "all" / folder) for name, folder in zip(OWN, ("train", "train", "test"), strict=True)}
    kept = load_resources(SiteFile("north", **where, **apart, image_size=8))
    assert [len(kept.own[name].y) for name in OWN] == [48, 48, 48]
    assert capsys.readouterr().out == ""


def test_names_of_classes_are_compared_however_they_are_spelled(tmp_path: Path) -> None:
    """The federation writes e with an accent as one letter, a site's file system as two."""
    parts, agreement, _ = agreed("fedgh")
    spelled = dataclasses.replace(agreement, classes=("\u00e9", *agreement.classes[1:]))
    own = {name: some(parts, parts.data.rows(0)[name]) for name in OWN}

    def answer(first: str, which: str) -> Any:
        sets = {name: dataclasses.replace(one, classes=(first, *one.classes[1:])) for name, one in own.items()}
        return unseal(Responder(SiteResources(sets, None, "mlp-64", tmp_path / which, CPU)).answer(request(spelled)))

    assert answer("\u00e9", "composed").parts == answer("e\u0301", "decomposed").parts
    with refused(AgreementError, "label", "\u00c9"):
        answer("\u00c9", "upper")


BRING = ("public rows", "'public'", "site.toml")


@pytest.mark.parametrize(
    ("north", "south", "kind", "facts"),
    [
        (images(9), images(9, fill=1), AgreementError, ["public rows", "north", "south", "same copy"]),
        (images(9), images(8), AgreementError, ["public rows", "north", "south", "same copy"]),
        (images(9), None, AgreementError, ["site north has", "site south has none", *BRING]),
        (None, images(9), AgreementError, ["site south has", "site north has none", *BRING]),
        (None, None, MismatchError, ["fedmd", *BRING]),
        (images(9), images(9, size=4), AgreementError, ["site south", "1x8x8", "public", "1x4x4"]),
        (images(9), images(9, classes=("a", "b")), AgreementError, ["site south", "label", "0, 1, 2", "a, b"]),
    ],
    ids=["pixels", "number", "one without", "the first without", "all without", "size", "classes"],
)
def test_all_sites_have_the_same_public_images(
    north: Dataset | None, south: Dataset | None, kind: Kind, facts: list[str], tmp_path: Path
) -> None:
    parts, agreement, _ = agreed("fedmd", **RUNS["fedmd"])
    brought = {0: north, 1: south, 2: north}
    given = {k: None if one is None else Public(one) for k, one in brought.items()}
    transport = Direct({k: responder_of(parts, given[k], k, tmp_path) for k in NAMES})
    with refused(kind, *facts):
        federated(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder()), 60)


@pytest.mark.parametrize("method", ["fedmd", "fedh2l"])
def test_fewer_public_images_than_clients(method: str, tmp_path: Path) -> None:
    parts, agreement, _ = agreed(method, **RUNS[method])
    transport = Direct({k: responder_of(parts, Public(images(2)), k, tmp_path) for k in NAMES})
    run = RunFolder.create(new_folder())
    result = federated(parts.experiment, agreement, NAMES, transport, run, seconds=60).run()
    assert result.warnings == []
    assert [record["answered"] for record in result.history] == [3, 3, 3]


# ---- envelopes -----------------------------------------------------------------------------------------------------

facts = st.dictionaries(st.text(), st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(), st.booleans(), st.none()))


@given_any(facts, st.dictionaries(st.text(), st.binary()))
def test_what_is_sealed_comes_out_again(head: dict[str, Any], parts: dict[str, bytes]) -> None:
    assert unseal(seal(head, parts)) == (head, parts)


@given_any(facts, st.dictionaries(st.text(), st.binary()), st.data())
def test_a_blob_that_was_cut_or_stretched_is_refused(head: Any, parts: Any, data: st.DataObject) -> None:
    blob = seal(head, parts)
    for other in (blob[: data.draw(st.integers(0, len(blob) - 1))], blob + data.draw(st.binary(min_size=1))):
        with refused(UnreadableMessageError):
            unseal(other)


@given_any(st.binary())
def test_noise_is_refused(noise: bytes) -> None:
    for blob in (noise, MAGIC + noise, MAGIC + len(noise).to_bytes(8, "big") + noise):
        with contextlib.suppress(UnreadableMessageError):  # nothing but a sentence, whatever came
            unseal(blob)
