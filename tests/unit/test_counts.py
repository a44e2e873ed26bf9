"""`share_counts = False`: no client tells how many rows it has, by its card, its messages or its records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import pluribus
from conftest import assemble_tiny, make_host, run_tiny
from kit import differing, kept, numbers
from pluribus.assembly import assemble
from pluribus.audit.disclosure import describe_card
from pluribus.audit.rehearsal import rehearse
from pluribus.conformance.cases import fitting_settings
from pluribus.errors import ConflictError, MismatchError
from pluribus.experiment import experiment, flags
from pluribus.message import Field, Wire
from pluribus.method import methods
from pluribus.methods.fedgh import FedGH
from pluribus.study.budget import equal_rounds
from pluribus.task import Card, Task
from refusals import assert_facts, refused

HIDDEN: dict[str, Any] = {"share_counts": False}
ONE = {"models": "mlp-64"}
REFUSED = {"fedgen", "fedhpl", "fedpac"}  # their messages count rows


def test_no_card_holds_a_number() -> None:
    """Neither at the server nor at a client. The rows are as unequal as before."""
    parts = assemble_tiny("fedavg", **ONE, **HIDDEN)
    assert len({parts.data.samples(k) for k in parts.cards}) > 1
    assert {card.samples for card in parts.cards.values()} == {1}
    assert make_host(parts).client(0).card.samples == 1
    assert {parts.cards.told.counts(k) for k in parts.cards} == {None}


def test_all_clients_weigh_the_same() -> None:
    """To the bit as with equal weights, and not as with the number of rows."""
    hidden, equal, plain = (run_tiny("fedavg", **ONE, **one) for one in (HIDDEN, {"weighting": "uniform"}, {}))
    assert differing(kept(hidden), kept(equal)) == []
    assert [r["clients"] for r in hidden.history] == [r["clients"] for r in equal.history]
    assert hidden.bytes == equal.bytes
    assert differing(kept(hidden), kept(plain)) != []
    assert_facts(hidden.warnings[-1], "fedavg", "weighting", "samples")
    assert equal.warnings == plain.warnings


def test_a_method_that_never_weighs_keeps_its_bits() -> None:
    hidden, plain = (run_tiny("fedgh", **one) for one in (HIDDEN, {}))
    assert differing(kept(hidden), kept(plain)) == []
    assert hidden.bytes == plain.bytes
    assert hidden.warnings == plain.warnings


def test_records_hold_no_number(tmp_path: Path) -> None:
    """Nor steps, which follow from the number of rows. Means over clients are plain ones. The folder can be read."""
    result = run_tiny("fedavg", **ONE, **HIDDEN, out=str(tmp_path / "run"))
    assert result.steps is None
    assert {(one.train, one.test, one.classes) for one in result.clients.values()} == {(None, None, ())}
    assert not any("steps" in record for record in result.history)
    found = result.history[-1]["mean"]["before"]["test_loss"]
    assert found["weighted"] == pytest.approx(found["mean"], rel=1e-12)
    read = pluribus.load_result(tmp_path / "run")
    assert (read.clients, read.steps, read.summary) == (result.clients, None, result.summary)


def test_the_table_shows_that_nobody_told(capsys: pytest.CaptureFixture[str]) -> None:
    run_tiny("fedavg", **ONE, **HIDDEN).table()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["client", "model", "train", "fedavg"]
    assert lines[1].split()[:3] == ["0", "mlp-64", "-"]


def test_workers_give_the_bits_of_one_process() -> None:
    one, other = (run_tiny("fedavg", **ONE, **HIDDEN, workers=workers) for workers in (1, 2))
    assert numbers(one) == numbers(other)


def test_equal_steps_can_still_be_found() -> None:
    """They are measured in a run of their own."""
    described = {name: assemble_tiny(name, **ONE, **HIDDEN).experiment for name in ("fedavg", "local")}
    assert equal_rounds(described) == {"fedavg": 2, "local": 2}


# ---- who must tell -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(set(methods()) - REFUSED))
def test_most_methods_do_not_need_to_know(method: str) -> None:
    parts = assemble(experiment(method, **fitting_settings(method), **HIDDEN))
    assert parts.cards[0].samples == 1


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_a_message_that_counts_rows_is_refused(method: str) -> None:
    with refused(MismatchError, method, "counts", "--no-share-counts"):
        assemble(experiment(method, **fitting_settings(method), **HIDDEN))


def test_so_is_one_whose_size_counts_them() -> None:
    """FedHPL can send the logit of every row."""
    how = fitting_settings("fedhpl") | {"upload": "full"}
    with refused(MismatchError, "fedhpl", "logits"):
        assemble(experiment("fedhpl", **how, **HIDDEN))


def test_fedproto_weighs_classes_the_same_or_is_refused() -> None:
    assemble_tiny("fedproto", weighting="uniform", **HIDDEN)
    with refused(ConflictError, "--weighting uniform", "--no-share-counts"):
        assemble_tiny("fedproto", weighting="samples", **HIDDEN)


def test_a_quiz_of_fixed_size_needs_to_know() -> None:
    assemble_tiny("fedl2g-l", **HIDDEN)
    with refused(ConflictError, "--quiz", "--no-share-counts"):
        assemble_tiny("fedl2g-l", quiz=4, **HIDDEN)


@dataclass(frozen=True)
class Undeclared(FedGH):
    """Does not say where what it sends comes from."""

    def schema(self, task: Task, card: Card) -> Wire:
        wire = super().schema(task, card)
        return Wire(down=wire.down, up={**wire.up, "size": Field(())})


def test_what_nobody_declares_may_count_rows() -> None:
    assemble_tiny(Undeclared)
    with refused(MismatchError, "size", "source"):
        assemble_tiny(Undeclared, **HIDDEN)


# ---- privacy and audit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["row", "client"])
def test_a_private_run_can_do_without(level: str) -> None:
    result = run_tiny("fedavg", **ONE, **HIDDEN, dp_epsilon=8.0, dp_level=level)
    assert result.epsilon == pytest.approx(8.0, rel=0.01)
    assert {one.train for one in result.clients.values()} == {None}


@pytest.mark.parametrize("told", [True, False])
def test_an_audit_says_whether_rows_are_counted(told: bool) -> None:
    with run_tiny("fedavg", **ONE, share_counts=told)._open() as (parts, store):
        rehearsal = rehearse(parts, store, 1)
        said = describe_card(rehearsal)
    assert_facts(said, "mlp-64", "64")
    assert ("number of training rows" in said) == told
    assert (str(parts.data.samples(rehearsal.clients[0])) in said) == told


def test_it_is_a_setting_of_its_own() -> None:
    """It needs no --dp-epsilon, and FedAvg with it is another experiment than without."""
    one, other = (experiment("fedavg", **ONE, **how) for how in (HIDDEN, {}))
    assert one.decisive() != other.decisive()
    assert "--no-share-counts" in flags(one)
