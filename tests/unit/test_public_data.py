"""`--public-data`: public rows from another data set, whose labels count only if they mean the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import pluribus
from conftest import assemble_tiny, new_folder, run_tiny
from kit import StopAfter, StoppedError, assert_same
from pluribus.conformance.kinds import few_labels, few_numbers, few_table
from pluribus.data import Dataset
from pluribus.data.dataset import UNLABELED
from pluribus.errors import ConflictError, MismatchError, OtherRunError
from refusals import refused

OTHERS = 31


def alike() -> Dataset:
    """Other rows with the same classes: those of a table, back to front."""
    table = few_table()
    x, y = table.x.flip(0)[:OTHERS], table.y.flip(0)[:OTHERS]
    return dataclasses.replace(table, name="alike", x=x, y=y)


def foreign() -> Dataset:
    """The same rows with classes of their own."""
    return dataclasses.replace(alike(), name="foreign", y=alike().y % 3, classes=("a", "b", "c"))


def reordered() -> Dataset:
    """The same names of classes in another order: class 3 is another one."""
    return dataclasses.replace(alike(), name="reordered", classes=alike().classes[::-1])


def measured() -> Dataset:
    """The same rows with numbers to predict."""
    y = alike().x[:, :1].clone()
    return dataclasses.replace(alike(), name="measured", y=y, classes=("gray",))


def turned() -> Dataset:
    """The same numbers for other values of the category."""
    return dataclasses.replace(alike(), name="turned", categories=(alike().categories[0][::-1],))


def narrow() -> Dataset:
    return Dataset("narrow", alike().x[:, :5].contiguous(), alike().y, alike().classes, kind="table")


HERE = __name__
TABLE = {"data": "pluribus.conformance.kinds.few_table", "clients": 3}
MODELS = "pluribus.conformance.kinds.table_mlp,pluribus.conformance.kinds.wide_table_mlp"


def assembled(method: str, public: str, **settings: Any):
    models = MODELS.split(",")[0] if method in ("fedavg-matched", "fedprox-matched") else MODELS
    how = {"public_data": f"{HERE}.{public}", "models": models}
    return assemble_tiny(method, **TABLE | how | settings)


def run(method: str, public: str, **settings: Any):
    return run_tiny(method, public_data=f"{HERE}.{public}", models=MODELS, threads=1, **TABLE | settings)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_clients_own_equal_shares_of_all_rows_in_order():
    parts = assembled("fedh2l", "alike")
    assert parts.task.public == {0: 10, 1: 10, 2: 11}
    plain = assemble_tiny("local", models=MODELS, **TABLE)
    rows = torch.cat([parts.data.public[k].rows for k in range(3)])
    assert rows.tolist() == list(range(120, 120 + OTHERS))
    for k in range(3):
        raw = parts.data.store.x[parts.data.public[k].rows]
        assert torch.equal(raw, alike().x[10 * k : 10 * k + len(raw)])
        for name in ("train", "val", "test"):
            assert torch.equal(parts.data.rows(k)[name], plain.data.rows(k)[name]), "their own rows are not used for it"


def test_more_clients_than_rows_leave_some_without():
    parts = assembled("fedh2l", "alike", clients=40, partition="iid", min_samples=1)
    assert sorted({*parts.task.public.values()}) == [0, 1]
    assert sum(parts.task.public.values()) == OTHERS


@pytest.mark.parametrize(
    ("public", "same"), [("alike", True), ("foreign", False), ("reordered", False), ("measured", False)]
)
def test_labels_count_only_if_they_mean_the_same(public, same):
    parts = assembled("fedmd", public, pretrain_public=0)
    labels = torch.cat([rows.labels() for rows in parts.data.public.values()])
    assert parts.task.public_labels == same
    assert torch.equal(labels, alike().y if same else torch.full((OTHERS,), UNLABELED))


def test_rows_of_another_form_are_refused():
    with refused(MismatchError, "--public-data", "few-table has rows of 11 columns", "narrow has rows of 5 columns"):
        assembled("fedmd", "narrow")
    with refused(MismatchError, "--public-data", "few-table", "digits"):
        assemble_tiny("fedmd", models=MODELS, public_data="digits", **TABLE)


def test_the_same_number_may_not_be_another_category():
    with refused(MismatchError, "--public-data", "few-table", "turned"):
        assembled("fedmd", "turned")


def test_a_file_of_public_rows_is_read_as_the_file_of_the_clients(tmp_path):
    lines = [f"{number % 7},{number % 2},{'ab'[number % 2]}" for number in range(60)]
    for name in ("own.csv", "public.csv"):
        (tmp_path / name).write_text("\n".join(["size,flag,kind", *lines]) + "\n")
    files = {"data": str(tmp_path / "own.csv"), "public_data": str(tmp_path / "public.csv")}
    task = assemble_tiny("fedmd", clients=3, models="table-mlp-1", columns="label=kind", **files).task
    assert (sum(task.public.values()), task.public_labels) == (60, True)


def test_public_rows_come_from_one_place():
    with refused(ConflictError, "--public-data", "--public-fraction"):
        assembled("fedmd", "alike", public_fraction=0.1)


# ---- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ind", "agg", "fedavg-matched", "fedprox-matched"])
def test_methods_that_train_on_public_labels_refuse_rows_without(method):
    with refused(MismatchError, method, "--public-data", "classes"):
        assembled(method, "foreign")
    assert assembled(method, "alike", rounds=2000).task.public_labels


def test_fedmd_cannot_pretrain_on_rows_without_labels():
    with refused(MismatchError, "--pretrain-public 0"):
        assembled("fedmd", "foreign")
    result = run("fedmd", "foreign", pretrain_public=0, pretrain_private=1)
    assert result.accuracy is not None
    assert all(record["loss"] is not None for record in result.history)


def test_fedh2l_learns_from_posteriors_alone():
    for labels in ("all", "own"):
        with refused(ConflictError, f"--labels {labels}", "--labels none"):
            assembled("fedh2l", "foreign", labels=labels)
    result = run("fedh2l", "foreign", labels="none")
    assert result.bytes["up"] > 0


@pytest.mark.parametrize("public", ["foreign", "alike"])
def test_no_label_of_foreign_rows_decides_anything_where_there_are_none(public, monkeypatch):
    """Other labels of the same rows change a run if they count, and nothing if they do not."""
    settings = {"pretrain_public": 0 if public == "foreign" else 1, "pretrain_private": 1}
    before = run("fedmd", public, **settings)
    as_it_is = globals()[public]()
    other = dataclasses.replace(as_it_is, y=(as_it_is.y + 1) % len(as_it_is.classes))
    monkeypatch.setitem(globals(), public, lambda: other)
    after = run("fedmd", public, **settings)
    losses = [[one["loss"] for one in result.history] for result in (before, after)]
    assert (losses[0] == losses[1]) == (public == "foreign")


def test_a_resumed_run_has_the_same_public_rows():
    settings = {"pretrain_public": 0, "pretrain_private": 1, "rounds": 3}
    whole, folder = run("fedmd", "foreign", **settings), new_folder()
    with pytest.raises(StoppedError):
        run("fedmd", "foreign", out=folder, observers=[StopAfter(0)], **settings)
    assert_same(whole, pluribus.resume(folder, progress=False))


def test_other_public_rows_are_refused_on_resume():
    folder, settings = new_folder(), {"pretrain_public": 0, "pretrain_private": 1, "rounds": 3, "models": MODELS}
    with pytest.raises(StoppedError):
        run_tiny("fedmd", public_data=foreign(), out=folder, observers=[StopAfter(0)], **TABLE | settings)
    other = dataclasses.replace(foreign(), x=foreign().x.flip(0))
    with refused(OtherRunError, folder):
        pluribus.resume(folder, public_data=other, progress=False)


@pytest.mark.parametrize("make", [few_numbers, few_labels])
def test_numbers_and_labels_have_public_rows_too(make):
    dataset = make()
    other = dataclasses.replace(dataset, name="other", x=dataset.x[:9], y=dataset.y[:9])
    renamed = dataclasses.replace(other, classes=tuple(f"{name}'" for name in other.classes))
    for public, same in ((other, True), (renamed, False)):
        labels = "own" if same else "none"
        parts = assemble_tiny("fedh2l", data=dataset, public_data=public, clients=2, labels=labels, models=MODELS)
        assert parts.task.public_labels == same
        assert parts.data.public[0].labels().shape == (4, len(dataset.classes))
