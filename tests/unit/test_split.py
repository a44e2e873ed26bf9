"""Splits in groups and by time: what belongs together stays together, and nothing of the future is trained on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import run_tiny
from parties import CPU
from pluribus.assembly import Assembly, assemble
from pluribus.conformance.kinds import HERE, few_signals
from pluribus.data import Dataset, partition
from pluribus.data.federated import Federated, Fractions
from pluribus.data.partitions import BY_CLASS
from pluribus.data.split import split_by_time, split_groups
from pluribus.draws import numpy_rng
from pluribus.errors import MismatchError, PartitionError
from pluribus.experiment import experiment
from refusals import refused

TRAIN_VAL_TEST = {"train": 0.7, "val": 0.1, "test": 0.2}
examples = settings(deadline=None, max_examples=60)


def listed(cut: dict[str, np.ndarray]) -> dict[str, list[int]]:
    return {name: part.tolist() for name, part in cut.items()}


# ---- groups ----------------------------------------------------------------------------------------------------------

some_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=80)  # class and group


@examples
@given(rows=some_rows, seed=st.integers(0, 99))
def test_no_group_is_in_two_parts_and_no_row_is_lost(rows, seed):
    labels, groups = np.array(rows).T
    cut, again = (split_groups(labels, TRAIN_VAL_TEST, groups, numpy_rng(seed)) for _ in range(2))
    assert listed(cut) == listed(again)
    assert sorted(np.concatenate(list(cut.values())).tolist()) == list(range(len(rows)))
    held = [set(groups[part].tolist()) for part in cut.values()]
    assert sum(map(len, held)) == len(set(groups.tolist()))
    assert len(cut["train"]) > 0


def test_ten_groups_by_hand():
    """Ten recordings of four rows, five of each class: seven, one and two of them."""
    groups = np.repeat(np.arange(10), 4)
    labels = groups % 2
    cut = split_groups(labels, TRAIN_VAL_TEST, groups, numpy_rng("any"))
    assert [len(set(groups[part].tolist())) for part in cut.values()] == [7, 1, 2]
    assert {name: len(part) for name, part in cut.items()} == {"train": 28, "val": 4, "test": 8}
    assert set(labels[cut["test"]].tolist()) == {0, 1}, "stratified by the class of the groups"


def test_a_group_counts_as_its_most_frequent_class():
    """Group 9 has one row of class 1 among three of class 0: class 1 has group 0 alone, which stays in training."""
    groups = np.repeat(np.arange(10), 4)
    labels = np.where(groups == 0, 1, 0)
    labels[-1] = 1
    for seed in range(10):
        cut = split_groups(labels, TRAIN_VAL_TEST, groups, numpy_rng(seed))
        assert set(range(4)) <= set(cut["train"].tolist())


# ---- time ------------------------------------------------------------------------------------------------------------


def test_the_first_rows_train_and_the_last_test():
    times = np.array([9, 0, 8, 1, 7, 2, 6, 3, 5, 4.0])
    assert listed(split_by_time(times, TRAIN_VAL_TEST)) == {"train": [1, 3, 5, 6, 7, 8, 9], "val": [4], "test": [0, 2]}


def test_each_recording_is_split_on_its_own():
    times, groups = np.concatenate([np.arange(5.0), 100 + np.arange(5.0)]), np.repeat([3, 8], 5)
    cut = split_by_time(times, {"train": 0.6, "test": 0.4}, groups)
    assert listed(cut) == {"train": [0, 1, 2, 5, 6, 7], "test": [3, 4, 8, 9]}
    assert listed(split_by_time(times, {"train": 0.6, "test": 0.4})) == {
        "train": [0, 1, 2, 3, 4, 5],
        "test": [6, 7, 8, 9],
    }


def test_windows_that_overlap_a_later_part_are_left_out():
    """Windows start every second and last two. Of the ten, 6 reaches into 7, the first of validation, and so on."""
    times = np.arange(10.0)
    cut = split_by_time(times, TRAIN_VAL_TEST, span=2.0)
    assert listed(cut) == {"train": [0, 1, 2, 3, 4, 5], "val": [], "test": [8, 9]}
    longer = split_by_time(np.arange(20.0), {"train": 0.5, "val": 0.25, "test": 0.25}, span=3.0)
    assert listed(longer) == {"train": [*range(8)], "val": [10, 11, 12], "test": [15, 16, 17, 18, 19]}
    touching = split_by_time(times, TRAIN_VAL_TEST, span=1.0)
    assert sum(map(len, touching.values())) == 10, "a window that ends where the next one starts does not overlap"


def test_windows_of_two_recordings_do_not_overlap():
    times, groups = np.tile(np.arange(5.0), 2), np.repeat([0, 1], 5)
    cut = split_by_time(times, {"train": 0.6, "test": 0.4}, groups, span=1.0)
    assert listed(cut) == {"train": [0, 1, 2, 5, 6, 7], "test": [3, 4, 8, 9]}


@examples
@given(
    times=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    groups=st.integers(1, 4),
    span=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    val=st.sampled_from([0.0, 0.1, 0.3]),
    public=st.sampled_from([0.0, 0.2]),
)
def test_no_row_overlaps_a_later_part(times, groups, span, val, public):
    shares = {"train": 0.8 - val - public, "val": val, "test": 0.2, "public": public}
    at, group = np.array(times, float), np.arange(len(times)) % groups
    cut = split_by_time(at, shares, group, span)
    rows = np.concatenate(list(cut.values()))
    assert len(set(rows.tolist())) == len(rows)
    if span == 0:
        assert len(rows) == len(times)
    order = list(cut.values())
    for number, part in enumerate(order):
        for later in order[number + 1 :]:
            for i in part:
                after = at[later[group[later] == group[i]]]
                assert (after - at[i] >= span - 1e-6).all()


# ---- in a federation -------------------------------------------------------------------------------------------------


def recordings() -> Dataset:
    """Two clients with four recordings of five windows each. A window lasts 2 seconds, and starts every second."""
    at = torch.arange(40)
    x = torch.arange(40.0).view(40, 1, 1).expand(40, 2, 3).contiguous()
    who = {"client": at // 20, "clients": ("a", "b"), "group": at // 5, "time": (at % 5).double(), "span": 2.0}
    return Dataset("recordings", x, at % 2, ("x", "y"), kind="signal", **who)


def federated(by: str, dataset: Dataset | None = None) -> Federated:
    dataset = dataset or recordings()
    return Federated(dataset, [np.arange(20), np.arange(20, 40)], Fractions(0.0, 0.4, by=by), 0, CPU)


def test_by_default_signals_are_split_by_time_and_others_in_groups():
    assert [federated(by).split_by for by in ("auto", "group", "rows")] == ["time", "group", "rows"]
    assert federated("auto", dataclasses.replace(recordings(), time=None)).split_by == "group"
    assert federated("auto", dataclasses.replace(recordings(), time=None, group=None)).split_by == "rows"


def test_rows_of_a_group_stay_together():
    data = federated("group")
    for k in (0, 1):
        held = [set((data.rows(k)[name] // 5).tolist()) for name in ("train", "test")]
        assert sum(map(len, held)) == 4
        assert len(held[1]) == 2
    rows = federated("rows").rows(0)
    assert set((rows["train"] // 5).tolist()) & set((rows["test"] // 5).tolist()), "one by one, they do not"


def test_by_time_the_end_of_each_recording_is_tested():
    rows = federated("time").rows(1)
    assert rows["test"].tolist() == [23, 24, 28, 29, 33, 34, 38, 39]
    assert rows["train"].tolist() == [20, 21, 25, 26, 30, 31, 35, 36], "22 reaches into 23"


@pytest.mark.parametrize("by", ["group", "time"])
def test_data_without_the_column_are_refused(by):
    plain = Dataset("plain", recordings().x, recordings().y, ("x", "y"), kind="signal")
    with refused(MismatchError, f"--split-by {by}", "plain"):
        federated(by, plain)


def assembled(**settings: Any) -> Assembly:
    small = {"data": "test_split.recordings", "models": "pluribus.conformance.kinds.signal_cnn", "clients": 2}
    return assemble(experiment("local", device="cpu", **small | settings))


def test_rows_that_overlap_are_counted_in_a_note():
    parts = assembled(partition="natural", split_by="time", val_fraction=0.0, test_fraction=0.4)
    (note,) = (one for one in parts.warnings if "overlap" in one)
    assert "8 rows" in note  # one of each recording
    assert not any("overlap" in one for one in assembled(partition="natural", split_by="group").warnings)


def test_small_recordings_leave_no_part_empty():
    """Groups of three rows, of which a tenth validates: every tenth row, not a tenth of three."""
    groups, times = np.arange(30) // 3, np.arange(30) % 3
    cut = split_by_time(times, {"train": 0.5, "public": 0.2, "val": 0.1, "test": 0.2}, groups)
    assert {name: len(rows) for name, rows in cut.items()} == {"train": 15, "public": 6, "val": 3, "test": 6}
    for group in range(10):
        parts = [name for row in range(3 * group, 3 * group + 3) for name, rows in cut.items() if row in rows]
        assert parts == sorted(parts, key=list(cut).index), "in the order of time"


# ---- natural clients -------------------------------------------------------------------------------------------------


def test_client_k_holds_the_rows_of_holder_k():
    holder = np.array([2, 0, 1, 0, 2, 2])
    assert [part.tolist() for part in partition("natural", holder, 3, numpy_rng(0), holder=holder)] == [
        [1, 3],
        [2],
        [0, 4, 5],
    ]
    few = partition("natural", holder, 2, numpy_rng(0), holder=holder)
    assert [part.tolist() for part in few] == [[1, 3], [2]], "the rows of the last holder have no client"


def test_more_clients_than_holders_are_refused():
    with refused(PartitionError, "2 clients", "3"):
        assembled(partition="natural", clients=3)


def test_data_that_say_nothing_about_clients_are_refused():
    with refused(PartitionError, "natural"):
        assembled(data="pluribus.conformance.kinds.few_table", models="pluribus.conformance.kinds.table_mlp",
                  partition="natural")  # fmt: skip


def test_rows_without_a_client_are_noted():
    parts = assembled(data="pluribus.conformance.kinds.few_signals", partition="natural", clients=3)
    (note,) = (one for one in parts.warnings if "no client holds" in one)
    assert "30 of 120 rows" in note
    held = few_signals().client
    for k, rows in enumerate(parts.data.parts):
        assert held[rows].tolist() == [k] * 30


def test_natural_clients_run_and_are_tested_on_their_own_rows():
    settings = {"data": "test_split.recordings", "models": "pluribus.conformance.kinds.signal_cnn", "clients": 2}
    result = run_tiny("local", partition="natural", rounds=1, **settings)
    frames = [result.predictions(k) for k in (0, 1)]
    assert all({row // 20 for row in frame["row"]} == {k} for k, frame in enumerate(frames))


# ---- targets without classes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BY_CLASS)
def test_without_classes_nothing_is_divided_by_class(kind):
    settings = {"data": f"{HERE}.few_numbers", "models": f"{HERE}.table_mlp", "partition": kind, "clients": 3}
    if kind == "dirichlet":
        (note,) = (one for one in assemble(experiment("local", **settings)).warnings if "classes" in one)
        assert "few-numbers" in note
    else:
        with refused(PartitionError, kind, "few-numbers"):
            assemble(experiment("local", **settings))


def test_every_client_is_checked_for_rows_to_train_on(monkeypatch):
    """Not only the first ones: all training rows of the last client reach into its test."""
    monkeypatch.setattr("pluribus.assembly.ENOUGH_CLIENTS", 1)
    time = torch.cat([torch.arange(40.0), torch.arange(4.0)]).double()
    who = {"client": torch.tensor([0] * 40 + [1] * 4), "clients": ("long", "short"), "time": time, "span": 5.0}
    data = Dataset("uneven", torch.rand(44, 2, 3), torch.arange(44) % 2, ("x", "y"), kind="signal", **who)
    with refused(PartitionError, "client 1", "--split-by"):
        assemble(experiment("local", data=data, models="mlp-64", partition="natural"))
