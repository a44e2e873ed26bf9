"""The server half: what the round loop, a prediction and a real server share; and what a server knows of the data."""

from __future__ import annotations

import dataclasses
import json

import pytest

from conftest import assemble_tiny, new_folder
from kit import StopAfter, StoppedError
from parties import federation_of, run_through
from pluribus.federation import Federation
from pluribus.message import Parcel
from pluribus.request import Learn
from pluribus.server_half import ServerHalf
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.folder import RunFolder

PUBLIC = {"public_fraction": 0.2, "pretrain_public": 1, "pretrain_private": 1}


@pytest.mark.parametrize("method", ["fedgh", "fedproto", "fedgen"])
def test_a_half_that_was_put_back_sends_what_the_loop_would_send(method: str) -> None:
    federation = federation_of(assemble_tiny(method))
    run_through(federation)
    parts, saved = assemble_tiny(method), Checkpoint(federation.folder.path / "state")
    half = ServerHalf(parts.method, parts.task, parts.cards)
    new = {k: half.download(0, k) for k in parts.cards}
    half.put_back(saved.server(), saved.enrolled())
    half.begin(1)
    expected = {k: federation.half.download(0, k) for k in parts.cards}
    assert {k: half.download(0, k) for k in parts.cards} == expected != new


def test_who_enrolled_after_the_last_checkpoint_enrols_again() -> None:
    parts = assemble_tiny("fedmd", **PUBLIC, clients=8, participation=0.25, rounds=4, checkpoint_every=2, seed=1)
    folder = RunFolder.create(new_folder())
    with pytest.raises(StoppedError):
        Federation(parts, folder, [StopAfter(2)]).run()
    saved = set(folder.checkpoint.enrolled())
    assert set() < saved < set(parts.cards.enrolled), "someone enrolled since"
    again = Federation(parts, folder)
    assert set(again.half.enrolled) == set(parts.cards.enrolled) == saved
    again.engine.close()
    folder.close()


@pytest.mark.parametrize(
    ("method", "settings"), [("fedmd", PUBLIC), ("fedh2l", {"data": "rotated-digits", "partition": "domain"})]
)
def test_a_task_has_numbers_and_no_rows(method: str, settings: dict[str, object]) -> None:
    parts = assemble_tiny(method, **settings)
    assert json.dumps(dataclasses.asdict(parts.task))
    assert parts.task.public == {k: len(parts.data.sets(k)["public"]) for k in parts.cards}
    assert parts.task.exams == {domain: len(exam["test"]) for domain, exam in parts.data.exams.items()}
    assert bool(parts.task.exams) == (method == "fedh2l")


def test_a_parcel_is_opened_before_it_is_read() -> None:
    assert Learn(0, 0, {1: b"one"}).messages() == {1: b"one"}
    with pytest.raises(AssertionError):
        Learn(0, 0, {1: b"one", 2: Parcel()}).messages()
