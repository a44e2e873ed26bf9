"""Real sites, without a network yet: the same bits as a simulation, whoever crashes, falls back or lies."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given as given_any
from hypothesis import strategies as st

import pluribus
from conftest import few_digits, new_folder
from kit import StopAfter, StoppedError, differing, numbers
from pluribus.assembly import Assembly, assemble
from pluribus.checkpoint import Checkpoint
from pluribus.data import Dataset
from pluribus.errors import ConfigError, MessageError, PluribusError
from pluribus.experiment import experiment
from pluribus.federation import Federation
from pluribus.flower.agreement import Agreement
from pluribus.flower.envelope import MAGIC, seal, unseal
from pluribus.flower.federate import federation
from pluribus.flower.holdings import Public
from pluribus.flower.party import Means, Party
from pluribus.flower.remote import Missing
from pluribus.folder import RunFolder

SETTINGS: dict[str, Any] = {"data": few_digits(160), "clients": 3, "rounds": 3, "models": "small", "threads": 1}
NAMES = {0: "north", 1: "south", 2: "west"}


def agreed(method: str, **settings: Any) -> tuple[Assembly, Agreement, Public | None]:
    """A simulation, and what a federation of real sites must agree on to do the same."""
    parts = assemble(experiment(method, **SETTINGS | settings))
    task, local, given = parts.task, parts.local, public_of(parts)
    facts = {name: getattr(task, name) for name in ("shape", "width", "projector", "clients", "rounds", "seed")}
    how = {"rule": local.rule, "epochs": local.epochs, "batch": local.batch}
    return parts, Agreement("run", method, dataclasses.asdict(parts.method), task.names, **how, **facts), given


def some(parts: Assembly, rows: torch.Tensor) -> Dataset:
    whole = parts.dataset
    return Dataset("some", whole.x[rows], whole.y[rows], whole.classes)


def public_of(parts: Assembly) -> Public | None:
    public = parts.task.public
    if not public:
        return None
    owner = torch.cat([torch.full((len(data),), k) for k, data in public.items()])
    return Public(some(parts, torch.cat([data.rows for data in public.values()])), owner)


def party_of(parts: Assembly, given: Public | None, k: int, folder: Path) -> Party:
    """A site that has the images which the simulation gives to client k, and nothing else."""
    own = {name: some(parts, parts.data.rows(k)[name]) for name in ("train", "val", "test")}
    return Party(Means(own, given, parts.cards[k].model, folder / str(k), torch.device("cpu")))


class Direct:
    """Carries blobs to parties in this process; what a party refuses is its answer."""

    def __init__(self, parties: Mapping[int, Party]) -> None:
        self.parties = dict(parties)

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> dict[int, bytes | Missing]:
        return {k: self.carry(k, blob) for k, blob in requests.items()}

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        try:
            return self.parties[k].answer(blob)
        except PluribusError as error:
            return seal({"refused": str(error)}, {})


def states(transport: Direct) -> dict[str, torch.Tensor]:
    return {
        f"{k} {name}": value.clone()
        for k, party in transport.parties.items()
        for name, value in party._at_hand(k).client(k).tensors().items()
    }


RUNS: dict[str, dict[str, Any]] = {
    "fedgh": {},
    "fedl2g-f": {},
    "fedfree": {"momentum": 0.9},
    "fedgen": {},
    "fedh2l": {"partition": "dirichlet", "val_fraction": 0.1, "public_fraction": 0.2, "evaluate_every": 1},
    "fedmd": {"public_fraction": 0.2, "pretrain_public": 1, "pretrain_private": 1},
}


@pytest.mark.parametrize("method", RUNS)
def test_the_same_bits_as_a_simulation(method: str, tmp_path: Path) -> None:
    parts, agreement, given = agreed(method, **RUNS[method])
    simulated = pluribus.run(parts.experiment, progress=False)
    transport = Direct({k: party_of(parts, given, k, tmp_path) for k in NAMES})
    folder = RunFolder.create(new_folder(), "sites")
    result = federation(parts.experiment, agreement, NAMES, transport, folder, seconds=60).run()
    assert result.bytes == simulated.bytes
    assert numbers(result) == numbers(simulated)
    saved = Checkpoint(simulated.folder / "state")
    expected = {f"{k} {name}": value for k in NAMES for name, value in (saved.client(k) or {}).items()}
    assert differing(expected, states(transport)) == []


# ---- crashes -------------------------------------------------------------------------------------------------------


def started(method: str, folder: Path, transport: Direct | None = None, **settings: Any) -> tuple[Federation, Direct]:
    """A federation of fresh sites, or of those given."""
    parts, agreement, given = agreed(method, **RUNS[method] | settings)
    transport = transport or Direct({k: party_of(parts, given, k, folder) for k in NAMES})
    run = RunFolder.create(new_folder(), "sites")
    return federation(parts.experiment, agreement, NAMES, transport, run, seconds=60), transport


@cache
def straight(method: str, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    made, transport = started(method, Path(new_folder()), **settings)
    return numbers(made.run()), states(transport)


class Forgetful(Direct):
    """Every site is a new process for every request: all it knows is what lies in its folder."""

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        self.parties[k] = Party(self.parties[k]._means)
        return super().carry(k, blob)


@pytest.mark.parametrize("method", ["fedfree", "fedh2l", "fedmd"])
def test_a_site_is_what_lies_in_its_folder(method: str, tmp_path: Path) -> None:
    parts, _, given = agreed(method, **RUNS[method])
    made, transport = started(method, tmp_path, Forgetful({k: party_of(parts, given, k, tmp_path) for k in NAMES}))
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
    made, transport = started("fedfree", tmp_path, Stuttering({k: party_of(parts, given, k, tmp_path) for k in NAMES}))
    assert numbers(made.run()) == straight("fedfree")[0]
    assert differing(straight("fedfree")[1], states(transport)) == []


class CrashedError(Exception):
    pass


class Crashing(Direct):
    """Sites die in the middle of writing, again and again, and come back."""

    def __init__(self, parties: Mapping[int, Party], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(parties)
        self._patch = monkeypatch
        self.crashes = 0

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        with self._patch.context() as patch:
            patch.setattr("pluribus.files.os.replace", self._crash)
            try:
                return super().carry(k, blob)
            except CrashedError:
                self.crashes += 1
        self.parties[k] = Party(self.parties[k]._means)
        return super().carry(k, blob)

    @staticmethod
    def _crash(*args: Any) -> None:
        raise CrashedError


def test_a_crash_before_the_rename_is_as_if_nothing_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, _, given = agreed("fedh2l", **RUNS["fedh2l"])
    crashing = Crashing({k: party_of(parts, given, k, tmp_path) for k in NAMES}, monkeypatch)
    made, transport = started("fedh2l", tmp_path, crashing)
    assert numbers(made.run()) == straight("fedh2l")[0]
    assert crashing.crashes == 3 * 2 * 3
    assert differing(straight("fedh2l")[1], states(transport)) == []


@pytest.mark.parametrize("method", ["fedgh", "fedfree", "fedgen"])
def test_a_server_that_falls_back_finds_its_sites_as_they_were(method: str, tmp_path: Path) -> None:
    """It is stopped after three rounds, of which it has saved two."""
    settings = {"rounds": 4, "checkpoint_every": 2}
    parts, agreement, given = agreed(method, **RUNS[method] | settings)
    transport = Direct({k: party_of(parts, given, k, tmp_path) for k in NAMES})
    folder = RunFolder.create(new_folder(), "sites")
    with pytest.raises(StoppedError):
        federation(parts.experiment, agreement, NAMES, transport, folder, 60, [StopAfter(2)]).run()
    result = federation(parts.experiment, agreement, NAMES, transport, folder, 60).run()
    assert numbers(result) == straight(method, **settings)[0]
    assert differing(straight(method, **settings)[1], states(transport)) == []


# ---- sites that are late, wrong or lying ---------------------------------------------------------------------------


class Lying(Direct):
    """One site answers the work of round 1 in its own way."""

    def __init__(self, parties: Mapping[int, Party], lie: Callable[[bytes], bytes | Missing]) -> None:
        super().__init__(parties)
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


LIES: dict[str, tuple[Callable[[bytes], bytes | Missing], str]] = {
    "late": (lambda answer: Missing("no answer by the deadline"), "no answer by the deadline"),
    "cut off": (lambda answer: answer[:-7], "the message has another length than its head says."),
    "not ours": (lambda answer: b"GET / HTTP/1.1", "this is no message of Pluribus, or one of another version."),
    "NaN": (lambda answer: _with(answer, lambda t: t["means"].fill_(torch.nan)), "'means' holds NaN or infinity."),
    "a wrong shape": (
        lambda answer: _with(answer, lambda t: t.update(means=t["means"][:, :3].contiguous())),
        "'means'",
    ),
    "a field too many": (
        lambda answer: _with(answer, lambda t: t.update(secret=torch.ones(1))),
        "has undeclared 'secret'",
    ),
    "a broken part": (lambda answer: seal(unseal(answer).head, {"up": b"\x00" * 20}), "its message"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_site_that_lies_is_a_site_that_did_not_answer(name: str, tmp_path: Path) -> None:
    lie, reason = LIES[name]
    parts, _, given = agreed("fedgh")
    lying = Lying({k: party_of(parts, given, k, tmp_path) for k in NAMES}, lie)
    result = started("fedgh", tmp_path, lying)[0].run()
    assert [(record["present"], record["answered"]) for record in result.history] == [(3, 3), (3, 2), (3, 3)]
    (told,) = result.warnings
    assert told.startswith("site south is missing in round 1: ")
    assert reason in told


def test_a_site_that_is_not_there_at_the_start(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh")
    transport = Direct({k: party_of(parts, given, k, tmp_path) for k in NAMES})
    transport.exchange = lambda requests, seconds: {0: transport.carry(0, requests[0])}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"site south is not there: no answer\."):
        federation(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder(), "s"), 60)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"classes": tuple("abcdefghij")}, "site north: the label space differs: the federation has a, b, c"),
        ({"shape": (3, 8, 8)}, "site north: the federation has images of 3 x 8 x 8; this site's are 1 x 8 x 8."),
        ({"version": "9.9"}, "site north: the server runs Pluribus 9.9, this site"),
        ({"width": "wide"}, "site north: "),
    ],
    ids=["labels", "images", "version", "nonsense"],
)
def test_what_does_not_fit_is_one_sentence_at_the_start(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh")
    transport = Direct({k: party_of(parts, given, k, tmp_path) for k in NAMES})
    other = dataclasses.replace(agreement, **change)
    with pytest.raises(ConfigError) as error:
        federation(parts.experiment, other, NAMES, transport, RunFolder.create(new_folder(), "s"), 60)
    assert str(error.value).startswith(sentence)


def test_a_server_does_not_choose_what_a_site_imports(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh")
    party = party_of(parts, given, 0, tmp_path)
    other = dataclasses.replace(agreement, method="antigravity.Method")
    head = {"verb": "enrol", "client": 0, "agreement": other.facts()}
    with pytest.raises(ConfigError, match="unknown method"):
        party.answer(seal(head, {}))
    assert "antigravity" not in sys.modules


# ---- envelopes -----------------------------------------------------------------------------------------------------

facts = st.dictionaries(st.text(), st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(), st.booleans(), st.none()))


@given_any(facts, st.dictionaries(st.text(), st.binary()))
def test_what_is_sealed_comes_out_again(head: dict[str, Any], parts: dict[str, bytes]) -> None:
    assert unseal(seal(head, parts)) == (head, parts)


@given_any(facts, st.dictionaries(st.text(), st.binary()), st.data())
def test_a_blob_that_was_cut_or_stretched_is_refused(head: Any, parts: Any, data: st.DataObject) -> None:
    blob = seal(head, parts)
    for other in (blob[: data.draw(st.integers(0, len(blob) - 1))], blob + data.draw(st.binary(min_size=1))):
        with pytest.raises(MessageError):
            unseal(other)


@given_any(st.binary())
def test_noise_is_refused(noise: bytes) -> None:
    for blob in (noise, MAGIC + noise, MAGIC + len(noise).to_bytes(8, "big") + noise):
        with contextlib.suppress(MessageError):  # nothing but a sentence, whatever came
            unseal(blob)
