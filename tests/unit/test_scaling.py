"""Normalization: by whose rows, of which channels, and what of it is recorded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pluribus
from conftest import new_folder
from parties import CPU
from pluribus.assembly import assemble
from pluribus.data import Dataset
from pluribus.data.federated import Federated, Fractions
from pluribus.data.scaling import measure, parse_normalize, scale_facts
from pluribus.errors import ConflictError, FormatError, MismatchError
from pluribus.experiment import experiment
from refusals import refused

TWO = [np.arange(4), np.arange(4, 8)]  # rows of two clients
ALL_TRAIN = Fractions(val=0.0, test=0.0)


def signals() -> Dataset:
    """Eight rows of two channels: the first counts, the second is constant. Rows of client 1 are ten times as large."""
    counting = torch.arange(8.0)[:, None] + torch.tensor([0.0, 8.0])
    x = torch.stack([counting, torch.full((8, 2), 0.1)], 1)
    x[4:, 0] *= 10
    return Dataset("signals", x, torch.arange(8) % 2, ("a", "b"), kind="signal")


def table(**columns: Any) -> Dataset:
    numbers = torch.tensor([[1.0, 5], [3, 5], [1, 9], [3, 9], [10, 0], [30, 0], [10, 4], [30, 4]])
    category = (torch.arange(8) % 3)[:, None].float()
    x, values = torch.cat([numbers, category], 1), (("red", "green", "blue"),)
    return Dataset("table", x, torch.arange(8) % 2, ("a", "b"), kind="table", categories=values, **columns)


def federated(dataset: Dataset, normalize: str = "auto", foreign: Dataset | None = None) -> Federated:
    how = {"normalize": parse_normalize(normalize), "foreign": foreign}
    return Federated(dataset, TWO, ALL_TRAIN, 0, CPU, **how)


def seen(data: Federated, client: int, part: str = "train") -> Tensor:
    """A client's rows as a model gets them, in the order of the data set."""
    own = data.sets(client)[part]
    return own.take(own.rows.argsort())[0]


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_each_client_measures_its_own_rows() -> None:
    data = federated(signals())
    # channel 0 of client 0: 0, 8, 1, 9, 2, 10, 3, 11, with mean 5.5 and variance 4^2 + 5/4
    mean, std = 5.5, 17.25**0.5
    expected = (torch.arange(4.0)[:, None] + torch.tensor([0.0, 8.0]) - mean) / std
    torch.testing.assert_close(seen(data, 0)[:, 0], expected)
    for k in (0, 1):
        torch.testing.assert_close(seen(data, k)[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
        torch.testing.assert_close(seen(data, k)[:, 0].std(correction=0), torch.tensor(1.0))
    assert data.scale_of(1).mean[0, 0] == 10 * (4 + 8 + 1.5) - 40  # 40, 120, ..., 70, 150


def test_a_constant_channel_becomes_zero_and_other_values_of_it_stay_small() -> None:
    x = torch.full((7, 1, 1), 0.1)
    dataset = Dataset("constant", x, torch.arange(7) % 2, ("a", "b"), kind="signal")
    scale = measure(dataset, np.arange(7))
    assert float(scale.factor) == 1
    assert float(scale(torch.full((1, 1, 1), 0.6)).abs()) < 1
    assert not seen(federated(signals()), 0)[:, 1].any()


def test_columns_of_a_table_are_normalized_one_by_one_and_categories_stay() -> None:
    data = federated(table())
    assert seen(data, 0).tolist() == [[-1, -1, 0], [1, -1, 1], [-1, 1, 2], [1, 1, 0]]
    assert seen(data, 1).tolist() == [[-1, -1, 1], [1, -1, 2], [-1, 1, 0], [1, 1, 1]]


def test_one_scale_for_all_clients() -> None:
    data = federated(table(), "dataset")
    x = table().x[:, :2].double()
    both = (x - x.mean(0)) / x.std(0, correction=0)
    for k, rows in enumerate(TWO):
        torch.testing.assert_close(seen(data, k)[:, :2], both[rows].float())


def test_only_training_rows_are_measured() -> None:
    dataset = signals()
    data = Federated(dataset, [np.arange(8)], Fractions(val=0.25, test=0.25), 0, CPU, normalize=parse_normalize("auto"))
    own = dataset.x[data.rows(0)["train"]].double()
    assert float(data.scale_of(0).mean[0]) == pytest.approx(float(own[:, 0].mean()))
    test = data.sets(0)["test"]
    raw = dataset.x[test.rows]
    torch.testing.assert_close(test.take(torch.arange(len(test)))[0], data.scale_of(0)(raw))


def test_given_numbers_count_for_the_whole_or_per_channel() -> None:
    assert seen(federated(signals(), "2/4"), 0)[0].tolist() == [[-0.5, 1.5], [pytest.approx(-0.475)] * 2]
    assert seen(federated(signals(), "2,0.1/4,1"), 0)[0].tolist() == [[-0.5, 1.5], [0, 0]]
    assert seen(federated(table(), "1/2"), 0)[2].tolist() == [0, 4, 2], "the category stays"
    assert seen(federated(signals(), "none"), 0)[0].tolist() == [[0, 8], [pytest.approx(0.1)] * 2]


def test_images_are_given_and_recorded_for_pixels_of_0_to_1() -> None:
    x = torch.tensor([0, 51, 102, 255], dtype=torch.uint8).repeat(2).view(8, 1, 1, 1)
    dataset = Dataset("images", x, torch.arange(8) % 2, ("a", "b"))
    assert federated(dataset).scale_of(0) is None, "by default, images are in [-1, 1]"
    assert seen(federated(dataset), 0).flatten().tolist() == [-1, pytest.approx(-0.6), pytest.approx(-0.2), 1]
    given = federated(dataset, "0.2/0.5")
    assert seen(given, 0).flatten().tolist() == pytest.approx([-0.4, 0, 0.4, 1.6], abs=1e-6)
    measured = federated(dataset, "dataset")
    pixels = np.array([0, 0.2, 0.4, 1])
    facts = scale_facts(measured.scale_of(0), dataset)
    assert facts["mean"] == [pytest.approx(0.4)]
    assert facts["std"] == [pytest.approx(pixels.std())]
    expected = ((pixels - 0.4) / pixels.std()).tolist()
    assert seen(measured, 0).flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_float16_is_measured_and_normalized_in_more_precision() -> None:
    half = Dataset("half", signals().x[:, :1].half() * 100, signals().y, ("a", "b"), kind="signal")
    x = seen(federated(half), 1)
    assert x.dtype == torch.float32
    assert float(x.std(correction=0)) == pytest.approx(1, abs=1e-5)


# ---- public rows and domains -----------------------------------------------------------------------------------------


def test_public_rows_are_normalized_by_whoever_reads_them() -> None:
    data = Federated(table(), TWO, Fractions(0.0, 0.0, 0.25), 0, CPU, normalize=parse_normalize("auto"))
    for reader in (0, 1):
        for owner, rows in data.public_for(reader).items():
            raw = table().x[data.rows(owner)["public"]]
            torch.testing.assert_close(rows.take(torch.arange(len(rows)))[0], data.scale_of(reader)(raw))
    assert not torch.equal(data.scale_of(0).mean, data.scale_of(1).mean)


def test_public_rows_of_other_data_too() -> None:
    other = Dataset("other", table().x.flip(0), table().y, ("x", "y"), kind="table", categories=table().categories)
    data = federated(table(), foreign=other)
    for reader in (0, 1):
        own = data.sets(reader)["public"]
        raw = other.x[4 * reader : 4 * reader + 4]
        torch.testing.assert_close(own.take(torch.arange(4))[0], data.scale_of(reader)(raw))
        theirs = data.public_for(reader)[1 - reader]
        raw = other.x[4 - 4 * reader : 8 - 4 * reader]
        torch.testing.assert_close(theirs.take(torch.arange(4))[0], data.scale_of(reader)(raw))


def test_foreign_rows_are_not_measured() -> None:
    other = Dataset("other", table().x * 1000 % 3, table().y, ("x", "y"), kind="table", categories=table().categories)
    for mode in ("client", "dataset"):
        alone, beside = federated(table(), mode), federated(table(), mode, other)
        assert torch.equal(alone.scale_of(0).mean, beside.scale_of(0).mean)


# ---- what cannot be normalized ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["client", "dataset", "0/1"])
def test_tokens_and_whole_numbers_are_refused(mode: str) -> None:
    ids = torch.full((8, 3), 2, dtype=torch.int32)
    tokens = Dataset("words", ids, torch.arange(8) % 2, ("a", "b"), kind="tokens", vocabulary=5)
    whole = Dataset("whole", ids.long(), torch.arange(8) % 2, ("a", "b"), kind="tensor")
    for dataset in (tokens, whole):
        with refused(MismatchError, dataset.name, "--normalize"):
            federated(dataset, mode)
        assert seen(federated(dataset), 0).tolist() == [[2, 2, 2]] * 4


@pytest.mark.parametrize("text", ["mean", "1", "1/2/3", "1,x/2", "1/0", "1/-1", "nan/1", "1/inf", "/", ""])
def test_what_is_no_normalization(text: str) -> None:
    with refused(FormatError, "--normalize"):
        parse_normalize(text)


def test_numbers_must_be_as_many_as_channels() -> None:
    with refused(MismatchError, "3 numbers", "deviation", "2", "signals"):
        federated(signals(), "1/1,2,3")


def test_pretrained_backbones_normalize_images_themselves() -> None:
    with refused(ConflictError, "tiny-vit-32", "--normalize"):
        assemble(experiment("local", models="tiny-vit-32", image_size=16, normalize="dataset"))


# ---- what is recorded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "dataset", "none"])
def test_a_run_folder_has_the_numbers(mode: str) -> None:
    small = {"data": "pluribus.conformance.kinds.few_table", "models": "pluribus.conformance.kinds.table_mlp"}
    small |= {"clients": 2, "device": "cpu", "rounds": 1, "normalize": mode, "out": new_folder()}
    parts, result = assemble(experiment("local", **small)), pluribus.run("local", progress=False, **small)
    file = result.folder / "normalization.json"
    if mode == "none":
        assert not file.exists()
        return
    facts = json.loads(file.read_text())
    x = parts.dataset.x.double().numpy()
    trained = [x[parts.data.rows(k)["train"]] for k in (0, 1)]
    if mode == "dataset":
        assert facts["mode"] == "dataset"
        assert facts["mean"][:10] == pytest.approx(np.concatenate(trained).mean(0)[:10].tolist())
        assert (facts["mean"][10], facts["std"][10]) == (0, 1)
    else:
        assert facts["mode"] == "client"
        for own, rows in zip(facts["clients"], trained, strict=True):
            assert own["std"][:10] == pytest.approx(rows.std(0)[:10].tolist())
