"""Real sites with rows of every kind, with models and weights of their own: the same promises as for images."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_parties import NAMES, Direct, Liar, agreed, federated, images, request, responder_of, run_as_simulated
from torch import nn

import pluribus
from conftest import few_digits, new_folder
from kit import differing, numbers
from network import Network
from parties import CPU
from pluribus.data import Dataset
from pluribus.data.federated import Data, Store
from pluribus.data.scaling import measure
from pluribus.errors import (
    AgreementError,
    CertificateError,
    ConflictError,
    DataError,
    ForeignCodeError,
    FormatError,
    MismatchError,
    MissingSettingError,
    SchemaError,
    UnknownNameError,
    UserCodeError,
)
from pluribus.inputs import Input
from pluribus.models import TwoPartModel
from pluribus.models.unseen import Unseen
from pluribus.sites.agreement import Agreement
from pluribus.sites.config import FederationFile, SiteFile
from pluribus.sites.envelope import unseal
from pluribus.sites.federate import SiteFacts, complete_agreement, greet, make_federation
from pluribus.sites.form import read_form
from pluribus.sites.holdings import Holdings, fit
from pluribus.sites.keys import make_keys
from pluribus.sites.recall import recall_client
from pluribus.sites.remote import Missing
from pluribus.sites.responder import Responder, SiteResources
from pluribus.sites.trainer import RequestHandler, load_resources
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.files import write_tensors
from pluribus.storage.folder import RunFolder
from pluribus.targets import Target
from refusals import Kind, assert_facts, refused
from terminal import Terminal

RNG = np.random.default_rng(0)


# ---- rows ----------------------------------------------------------------------------------------------------------


@cache
def signals(rows: int = 90, classes: int = 3) -> Dataset:
    """Noise on a level that tells the class, with channels of unlike scales: unlearnable unless they are normalized."""
    y = torch.arange(rows) % classes
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal((rows, 2, 12)).astype(np.float32))
    x = (noise + y[:, None, None]) * torch.tensor([1.0, 500.0])[:, None] + torch.tensor([3.0, 9000.0])[:, None]
    group = torch.arange(rows) // 6
    time = (torch.arange(rows) % 6).double()
    return Dataset("signals", x, y, ("a", "b", "c")[:classes], kind="signal", group=group, time=time, span=1.0)


def table(rows: int = 8, **other: Any) -> Dataset:
    """Two numbers and two categories."""
    x = torch.stack([torch.arange(rows).float(), torch.ones(rows), torch.arange(rows) % 2, torch.arange(rows) % 3], 1)
    known: dict[str, Any] = {
        "columns": ("age", "dose", "sex", "ward"),
        "categories": (("f", "m"), ("east", "west", "north")),
    }
    return Dataset("table", x, torch.arange(rows) % 2, ("no", "yes"), kind="table", **known | other)


def tokens(rows: int = 6, vocabulary: int = 50) -> Dataset:
    x = torch.full((rows, 5), 7, dtype=torch.int32)
    return Dataset("tokens", x, torch.arange(rows) % 2, ("no", "yes"), kind="tokens", vocabulary=vocabulary)


def agreement_on(dataset: Dataset, **change: Any) -> Agreement:
    """A federation whose sites all have such rows."""
    base = agreed("local")[1]
    facts = {"classes": dataset.classes, "input": dataset.input, "target": Target(dataset.target)}
    facts |= {"columns": dataset.columns, "categories": dataset.categories}
    return dataclasses.replace(base, **facts | change)


# ---- the same bits as a simulation ---------------------------------------------------------------------------------

SIGNALS: dict[str, Any] = {"data": signals(), "models": "mlp-64,mlp-128-64", "split_by": "rows", "lr": 0.05}
RUNS: dict[str, dict[str, Any]] = {
    "fedgh": {"augment": "jitter,scale", "class_weights": "balanced"},
    "fedmd": {"public_fraction": 0.2, "pretrain_public": 1, "pretrain_private": 1},
}


@pytest.mark.parametrize("method", RUNS)
def test_signals_give_the_same_bits_as_a_simulation(method: str, tmp_path: Path) -> None:
    parts, agreement, given = agreed(method, **SIGNALS | RUNS[method])
    agreement = dataclasses.replace(agreement, class_weights=parts.local.class_weights)
    result, transport = run_as_simulated(parts, agreement, given, tmp_path)
    check_recalled(result, transport, tmp_path)


def check_recalled(result: pluribus.Result, transport: Direct, folder: Path) -> None:
    """Without its data, a site normalizes as it did: its model has the accuracy that the run reports."""
    for k, responder in transport.responders.items():
        test = responder._means.own["test"]
        scale = measure(responder._means.own["train"], np.arange(len(responder._means.own["train"].y)))
        with recall_client(folder / str(k)) as (method, client):
            found = client.data["test"].scale
            assert found is not None
            assert torch.equal(found.mean, scale.mean)
            assert torch.equal(found.factor, scale.factor)
            rows = Data(Store(test.x, test.y, CPU), torch.arange(len(test.y)), found)
            right = (client.sweep(method.predict, rows).argmax(1) == test.y).float().mean()
        view = method.views[0]
        tests = [record["clients"][str(k)][view] for record in result.history]
        best = max(tests, key=lambda one: one["val"])
        assert float(right) == pytest.approx(best["test"])


def test_a_site_normalizes_by_its_own_training_rows(tmp_path: Path) -> None:
    site = Holdings({"train": signals(30), "test": signals(90)}, None, 1, CPU, SiteResources.normalize)
    sets = site.sets(0)
    x, _ = sets["train"].take(torch.arange(30))
    assert x.mean((0, 2)).tolist() == pytest.approx([0, 0], abs=1e-4)
    assert x.std((0, 2), correction=0).tolist() == pytest.approx([1, 1], abs=1e-4)
    assert sets["test"].scale == sets["train"].scale
    assert len(sets["val"]) == 0


# ---- rows that do not fit ------------------------------------------------------------------------------------------

LABELS = Dataset("labels", torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.ones(4, 2, dtype=torch.uint8), ("x", "y"))
MISFITS: dict[str, tuple[Any, ...]] = {
    "images for signals": (images(4, classes=("a", "b", "c")), agreement_on(signals()), "2x12 signals", "1x8x8 images"),
    "another length": (
        signals(),
        agreement_on(signals(), input=Input("signal", (2, 30))),
        *("2x30 signals", "2x12 signals"),
    ),
    "another vocabulary": (tokens(), agreement_on(tokens(vocabulary=99)), "99", "50", "rows of 5 tokens"),
    "classes for numbers": (table(), agreement_on(table(), target=Target("numbers")), "numbers", "classes"),
    "several labels": (LABELS, agreement_on(LABELS, target=Target()), "classes", "several labels", "label_kind"),
    "another column": (
        table(columns=("age", "size", "sex", "ward")),
        agreement_on(table()),
        *("age, dose, sex, ward", "age, size, sex, ward", "site.toml"),
    ),
    "an unknown value": (
        table(categories=(("f", "m"), ("east", "south", "north"))),
        agreement_on(table()),
        *("row 1", "'south'", "'ward'", "east, west, north"),
    ),
    "text for numbers": (table(columns=("age", "sex", "dose", "ward")), agreement_on(table()), "'dose'", "'f'"),
    "values that nobody knows": (
        table(),
        agreement_on(table(), columns=(), categories=(), input=Input("table", (4,))),
        *("categories", "[input]", "federation.toml"),
    ),
    "columns without names": (table(columns=()), agreement_on(table()), "names", "categories"),
    "a number too few": (
        Dataset("n", torch.zeros(3, 2), torch.zeros(3, 1), ("dose",), kind="table"),
        agreement_on(Dataset("n", torch.zeros(3, 2), torch.zeros(3, 2), ("dose", "age"), kind="table")),
        *("dose, age", "dose"),
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_rows_of_another_form_are_refused_with_both(case: str) -> None:
    dataset, agreement, *facts = MISFITS[case]
    with refused(DataError if case == "an unknown value" else AgreementError, *facts):
        fit(dataset, agreement)


def test_a_server_does_not_learn_what_stands_in_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = table(categories=(("f", "m"), ("east", "south", "north")))
    means = SiteResources({"train": odd, "test": odd}, None, "mlp-64", tmp_path, CPU)
    said = unseal(RequestHandler(Responder(means)).answer(request(agreement_on(table()), verb="hello"))).head["refused"]
    assert_facts(capsys.readouterr().out, "row 1", "'south'", "'ward'")
    assert "south" not in said
    assert_facts(said, "log")


def test_columns_and_categories_are_matched_by_name() -> None:
    """A site that has all in another order has the same rows."""
    usual, ours = table(), table()
    swapped = ours.x[:, [1, 0, 3, 2]].clone()
    swapped[:, 2] = torch.tensor([2.0, 0.0, 1.0])[ours.x[:, 3].long()]
    other = dataclasses.replace(
        ours, x=swapped, columns=("dose", "age", "ward", "sex"), categories=(("west", "north", "east"), ("f", "m"))
    )
    fitted = fit(other, agreement_on(usual))
    assert torch.equal(fitted.x, usual.x)
    assert (fitted.columns, fitted.categories) == (usual.columns, usual.categories)


def test_channels_of_signals_are_matched_by_name() -> None:
    usual = dataclasses.replace(signals(), columns=("ax", "ay"))
    other = dataclasses.replace(usual, x=usual.x.flip(1), columns=("ay", "ax"))
    assert not torch.equal(other.x, usual.x)
    fitted = fit(other, agreement_on(usual))
    assert torch.equal(fitted.x, usual.x)
    with refused(AgreementError, "ax, ay", "ax, az"):
        fit(dataclasses.replace(usual, columns=("ax", "az")), agreement_on(usual))
    form = form_of(input={"kind": "signal", "shape": [2, 5], "columns": ["ax", "ay"]})
    assert (form.input, form.columns) == (Input("signal", (2, 5)), ("ax", "ay"))


def test_numbers_of_a_file_may_be_values_of_a_category() -> None:
    x = torch.tensor([[0.5, 2.0], [0.25, 1.0]])
    dataset = Dataset("wards", x, torch.tensor([0, 1]), ("no", "yes"), kind="table", columns=("dose", "ward"))
    known = dataclasses.replace(dataset, x=torch.tensor([[0.5, 0.0], [0.25, 1.0]]), categories=(("2", "1"),))
    assert torch.equal(fit(dataset, agreement_on(known)).x, known.x)


def test_labels_and_numbers_are_matched_by_name() -> None:
    y = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.uint8)
    some = Dataset("some", torch.zeros(3, 2), y, ("cough", "fever"), kind="table")
    all_three = agreement_on(some, classes=("fever", "rash", "cough"))
    assert fit(some, all_three).y.tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 1]]
    numbers = dataclasses.replace(some, y=torch.tensor([[1.5, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert fit(numbers, agreement_on(numbers, classes=("fever", "cough"))).y.tolist() == [[2, 1.5], [4, 3], [6, 5]]


def test_sets_of_two_types_of_numbers_are_refused() -> None:
    floats = dataclasses.replace(images(4), x=torch.zeros(4, 1, 8, 8))
    with refused(DataError, "uint8", "float32"):
        Holdings({"train": images(4), "test": floats}, None, 1, CPU)


# ---- older state folders -------------------------------------------------------------------------------------------


def test_a_state_folder_of_an_older_version_still_predicts(tmp_path: Path) -> None:
    """It knows the shape of images instead of their form, and nothing of types and scales."""
    parts, agreement, given = agreed("local", rounds=1)
    responder = responder_of(parts, given, 0, tmp_path)
    for verb in ("work", "evaluate"):
        responder.answer(request(agreement, verb=verb))
    rows = parts.dataset.x[:5]
    before = pluribus.predict(tmp_path / "0", rows)
    for file in (tmp_path / "0" / "run").glob("*.safetensors"):
        with safe_open(file, framework="pt") as saved:
            tensors, facts = {name: saved.get_tensor(name) for name in saved.keys()}, saved.metadata()  # noqa: SIM118
        facts = {name: value for name, value in facts.items() if name not in ("rows", "weights")}
        old = json.loads(facts["agreement"])
        old["shape"] = old["input"]["shape"]
        for name in ("input", "target", "columns", "categories", "class_weights"):
            del old[name]
        write_tensors(file, tensors, facts | {"agreement": json.dumps(old)})
    assert pluribus.predict(tmp_path / "0", rows) == before


# ---- what a site reads ---------------------------------------------------------------------------------------------


def recordings() -> Dataset:
    """Data of a site by its dotted path."""
    return signals()


def parted() -> Dataset:
    return dataclasses.replace(signals(), part=torch.arange(90) % 3)


def site_file(tmp_path: Path, **settings: Any) -> SiteFile:
    where = {"server": "127.0.0.1:9092", "keys": tmp_path, "state": tmp_path / "state", "device": "cpu"}
    return SiteFile(**{"name": "north", "model": "mlp-64", "data": f"{__name__}.recordings"} | where | settings)


def test_a_site_splits_in_groups_by_time_or_as_its_data_say(tmp_path: Path) -> None:
    whole = signals()
    where = {tuple(row.flatten().tolist()): n for n, row in enumerate(whole.x)}

    def parts(**settings: Any) -> dict[str, set[int]]:
        own = load_resources(site_file(tmp_path, **settings)).own
        return {name: {where[tuple(row.flatten().tolist())] for row in part.x} for name, part in own.items()}

    groups = [{n // 6 for n in rows} for rows in parts(split_by="group").values()]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 15
    rows = parts(split_by="rows")
    assert sum(map(len, rows.values())) == 90
    assert len({n // 6 for n in rows["train"]} & {n // 6 for n in rows["test"]}) > 0
    by_time = parts(val_fraction=0.0, test_fraction=1 / 3)  # signals with times, by default
    assert {n % 6 for n in by_time["train"]} == {0, 1, 2, 3}
    assert {n % 6 for n in by_time["test"]} == {4, 5}
    assert "val" not in by_time
    fixed = parts(data=f"{__name__}.parted")
    assert [{n % 3 for n in fixed[name]} for name in ("train", "val", "test")] == [{0}, {1}, {2}]


def test_a_site_keeps_what_its_rows_are(tmp_path: Path) -> None:
    means = load_resources(site_file(tmp_path, normalize="3,9000/2"))
    assert means.own["train"].kind == "signal"
    assert (means.normalize.mode, means.normalize.mean) == ("given", (3.0, 9000.0))
    x, _ = Holdings(means.own, None, 1, CPU, means.normalize).sets(0)["train"].take(torch.arange(5))
    assert torch.equal(x, (means.own["train"].x[:5] - torch.tensor([3.0, 9000.0])[:, None]) * 0.5)


def write_files(folder: Path) -> dict[str, dict[str, Any]]:
    """A site's settings for a table, a text and a signal in files with columns."""
    rng = np.random.default_rng(0)
    lines = {"table": ["age,sex,days"], "text": ["note,kind"], "signal": ["ax,ay,move,who"]}
    for n in range(60):
        lines["table"].append(f"{20 + n},{'mf'[n % 2]},{rng.normal():.3f}")
        lines["text"].append(f"{'no pain today' if n % 2 else 'severe pain at night'},{('well', 'ill')[n % 2 == 0]}")
        lines["signal"] += [f"{rng.normal():.3f},{rng.normal():.3f},{'ab'[n % 2]},{n}" for _ in range(4)]
    for name, written in lines.items():
        (folder / f"{name}.csv").write_text("\n".join(written))
    return {
        "table": {"data": str(folder / "table.csv"), "columns": {"label": "days"}, "label_kind": "numbers"},
        "text": {"data": str(folder / "text.csv"), "columns": "text=note,label=kind", "length": 4, "vocabulary": 64},
        "signal": {"data": str(folder / "signal.csv"), "columns": "label=move,group=who", "window": 4},
    }


FORMS: dict[str, dict[str, Any]] = {
    "table": {
        "input": {"kind": "table", "columns": ["sex", "age"], "categories": {"sex": ["f", "m", "x"]}},
        "classes": ("days",),
        "label_kind": "numbers",
    },
    "text": {"input": {"kind": "tokens", "shape": [4], "vocabulary": 64}, "classes": ("ill", "well")},
    "signal": {"input": {"kind": "signal", "shape": [2, 4]}, "classes": ("b", "a", "c")},
}
MODELS = {"table": "mlp-64", "text": f"{__name__}.bag_of_words", "signal": "mlp-64"}


def bag_of_words(shape: tuple[int, ...], vocabulary: int) -> nn.Module:
    return nn.EmbeddingBag(vocabulary, 8, padding_idx=0)


@pytest.mark.parametrize("kind", FORMS)
def test_files_with_columns_train_at_a_site(kind: str, tmp_path: Path) -> None:
    means = load_resources(site_file(tmp_path, model=MODELS[kind], **write_files(tmp_path)[kind]))
    file = FederationFile(("north",), **FORMS[kind])
    form, target = read_form(file), Target(file.label_kind)
    described = pluribus.experiment.experiment("local", data="(sites)", clients=1, rounds=2)
    agreement = Agreement.of_experiment(described, "run", file.classes, form, target)
    responder = Responder(means)
    assert unseal(responder.answer(request(agreement, verb="hello"))).head["samples"] == 42
    losses = [unseal(responder.answer(request(agreement, t=t))).head["loss"] for t in range(2)]
    assert losses[1] < losses[0]
    client = responder._get_host(0).client(0)
    x, y = client.data["train"].take(torch.arange(42))
    assert tuple(x.shape[1:]) == form.input.shape
    assert y.shape == ((42,) if kind != "table" else (42, 1))
    if kind == "table":
        assert set(x[:, 1].tolist()) == {0.0, 1.0}  # f and m, of three values
        assert x[:, 0].mean() == pytest.approx(0, abs=1e-5)


WRONG_SITES: dict[str, tuple[Any, ...]] = {
    "all rows of all": ({"normalize": "dataset"}, ConflictError, "'normalize'", "site.toml", "client"),
    "no scale": ({"normalize": "somehow"}, FormatError, "normalize"),
    "no such role": ({"columns": "target=y"}, UnknownNameError, "target"),
    "no columns to choose from": ({"columns": {"label": "y"}}, MismatchError, "columns"),
    "no time": ({"data": few_digits(160), "split_by": "time"}, MismatchError, "time"),
    "two splits": (
        {"data": None, **dict.fromkeys(("train", "val", "test"), "digits"), "split_by": "rows"},
        ConflictError,
    ),
    "a model for images": ({"model": "cnn-16"}, MismatchError, "cnn-16", "signals"),
    "no module": ({"model": "no_such_module.net"}, UserCodeError, "no_such_module.net"),
    "a class of its own": ({"classes": ("a", "b", "d")}, MismatchError, "'c'", "'classes'"),
    "weights of nobody": ({"weights": "nowhere"}, pluribus.errors.WeightsError, "nowhere"),
}


@pytest.mark.parametrize("case", WRONG_SITES)
def test_a_wrong_setting_of_a_site_gets_a_sentence(case: str, tmp_path: Path) -> None:
    settings, kind, *facts = WRONG_SITES[case]
    with refused(kind, *facts):
        load_resources(site_file(tmp_path, **settings))


# ---- federation.toml -----------------------------------------------------------------------------------------------


def form_of(**settings: Any) -> Any:
    return read_form(FederationFile(("north",), **{"classes": ("a", "b")} | settings))


def test_the_form_of_rows_in_a_file() -> None:
    assert form_of(image=(3, 8, 8)).input == Input("image", (3, 8, 8))
    assert form_of(input={"kind": "signal", "shape": [2, 12]}).input == Input("signal", (2, 12))
    assert form_of(input={"kind": "tokens", "shape": [5], "vocabulary": 50}).input == tokens().input
    columns = {"kind": "table", "columns": ["sex", "age", "ward", "dose"]}
    written = form_of(input=columns | {"categories": {"ward": ["east", "west", "north"], "sex": ["f", "m"]}})
    assert written == (table().input, table().columns, table().categories)
    assert form_of(input={"kind": "table", "shape": [4]}, label_kind="numbers", classes=("dose",)).input.shape == (4,)


WRONG_FORMS: dict[str, tuple[Any, ...]] = {
    "nothing": ({}, MissingSettingError, "'image'", "[input]"),
    "both": ({"image": (3, 8, 8), "input": {"kind": "table", "shape": [3]}}, ConflictError, "'image'", "[input]"),
    "no kind": ({"input": {"shape": [3]}}, FormatError, "'kind'", "signal"),
    "an unknown word": ({"input": {"kind": "table", "size": [3]}}, UnknownNameError, "'size'", "shape"),
    "no shape": ({"input": {"kind": "signal"}}, FormatError, "'shape'"),
    "a flat signal": ({"input": {"kind": "signal", "shape": [3]}}, FormatError, "[input]"),
    "tokens of no vocabulary": ({"input": {"kind": "tokens", "shape": [3]}}, FormatError, "vocabulary"),
    "columns of a signal": ({"input": {"kind": "signal", "shape": [2, 3], "columns": ["a"]}}, FormatError, "columns"),
    "a column twice": ({"input": {"kind": "table", "columns": ["a", "a"]}}, FormatError, "'columns'"),
    "values of no column": (
        {"input": {"kind": "table", "columns": ["a"], "categories": {"b": ["x"]}}},
        *(FormatError, "'b'", "'columns'"),
    ),
    "no values": ({"input": {"kind": "table", "columns": ["a"], "categories": {"a": []}}}, FormatError, "'a'"),
    "too many columns": ({"input": {"kind": "table", "columns": ["a"], "shape": [2]}}, FormatError, "1 columns"),
    "no number": ({"image": (3, 8, 8), "label_kind": "numbers", "classes": ()}, FormatError, "'classes'", "one"),
}


@pytest.mark.parametrize("case", WRONG_FORMS)
def test_rows_that_cannot_be_agreed_on(case: str) -> None:
    settings, kind, *facts = WRONG_FORMS[case]
    with refused(kind, *facts):
        form_of(**settings)


NO_FORMS: dict[str, Any] = {
    "a kind of no kind": {"input": {"kind": "video", "shape": [3]}},
    "a number for rows": {"input": 7},
    "a target of no kind": {"target": {"kind": 7}},
    "columns too many": {"columns": ["a", "b"]},
    "categories without columns": {"categories": [["a", "b"]]},
    "weights of classes": {"class_weights": "heavy"},
    "an augmentation of signals": {"augment": ["jitter"]},
}


@pytest.mark.parametrize("case", NO_FORMS)
def test_an_agreement_on_nonsense_is_refused(case: str) -> None:
    kind = FormatError if case == "a target of no kind" else SchemaError
    with pytest.raises((kind, UnknownNameError)):
        Agreement.of(agreed("local")[1].facts() | NO_FORMS[case])


# ---- models of their own -------------------------------------------------------------------------------------------

at_site = False  # whether code of a site runs now


def own_net(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A site's own classifier. Only the site may build it."""
    assert at_site, "the server has built a site's own model"
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 64), nn.Tanh(), nn.Linear(64, classes))


def deep_head(shape: tuple[int, ...], classes: int) -> TwoPartModel:
    body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 64))
    return TwoPartModel(body, nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, classes)), 64)


class Odd(nn.Linear):
    """A linear layer that calls its weights otherwise."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(width, classes)
        self.slope = nn.Parameter(self.weight.detach().clone())
        self.offset = nn.Parameter(self.bias.detach().clone())
        del self.weight, self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.slope.T + self.offset


def odd_head(shape: tuple[int, ...], classes: int) -> TwoPartModel:
    return TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 64)), Odd(64, classes), 64)


def shared_net(shape: tuple[int, ...]) -> nn.Module:
    """A model that a federation shares, by its dotted path."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 16))


OWN = f"{__name__}.own_net"


@contextmanager
def working_at_a_site() -> Iterator[None]:
    global at_site
    at_site = True
    try:
        yield
    finally:
        at_site = False


class Watched(Direct):
    """Keeps what travels, and knows on which side it is."""

    def __init__(self, responders: Mapping[int, Responder]) -> None:
        super().__init__(responders)
        self.blobs: list[bytes] = []

    def carry(self, k: int, blob: bytes) -> bytes | Missing:
        with working_at_a_site():
            answer = super().carry(k, blob)
        assert isinstance(answer, bytes)
        self.blobs += [blob, answer]
        return answer


def with_own(parts: Any, given: Any, folder: Path, model: str = OWN, **means: Any) -> Watched:
    """Sites of a simulation, of which south has a model of its own."""
    responders = {k: responder_of(parts, given, k, folder) for k in NAMES}
    responders[1] = Responder(dataclasses.replace(responders[1]._means, model=model, **means))
    return Watched(responders)


OWN_RUNS: dict[str, dict[str, Any]] = {
    "fedgh": {},
    "fedproto": {},
    "fd": {},
    "fedl2g-f": {},
    "fedgen": {},
    "fml": {},
    "local": {},
    "fedmd": {"public_fraction": 0.2, "pretrain_public": 1, "pretrain_private": 1},
    "fedh2l": {"partition": "dirichlet", "val_fraction": 0.1, "public_fraction": 0.2, "evaluate_every": 1},
}


@pytest.mark.parametrize("method", OWN_RUNS)
def test_a_site_brings_a_model_that_only_it_can_build(method: str, tmp_path: Path) -> None:
    parts, agreement, given = agreed(method, models="mlp-64", rounds=2, **OWN_RUNS[method])
    transport = with_own(parts, given, tmp_path)
    run = RunFolder.create(new_folder())
    made = federated(parts.experiment, agreement, NAMES, transport, run, seconds=60)
    assert [made.parts.cards[k].model for k in NAMES] == ["mlp-64", "own-1", "mlp-64"]
    result = made.run()
    assert [(record["present"], record["answered"]) for record in result.history[-2:]] == [(3, 3)] * 2
    assert not any(OWN.encode() in blob or b"own_net" in blob for blob in transport.blobs)
    with working_at_a_site():
        with refused(ForeignCodeError, tmp_path / "1", OWN, "--allow-code"):
            pluribus.predict(tmp_path / "1", parts.dataset.x[:3])
        predicted = pluribus.predict(tmp_path / "1", parts.dataset.x[:3], allow_code=[OWN])
    assert len(predicted) == 3


def test_the_server_resumes_with_a_model_that_it_cannot_build(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh", models="mlp-64")
    facts = greet(agreement, NAMES, with_own(parts, given, tmp_path), seconds=0)
    saved = json.loads(json.dumps({k: dataclasses.asdict(one) for k, one in facts.items()}))
    assert {int(k): SiteFacts.of(one, int(k), len(saved)) for k, one in saved.items()} == facts
    assert facts[1].own == (64, ((10, 64), (10,)))


@pytest.mark.parametrize(
    ("method", "model", "kind", "facts"),
    [
        ("fedavg", "own_net", AgreementError, ["site south", "own-1", "fedproto"]),
        ("fedfree", "own_net", AgreementError, ["site south", "own-1", "fedproto"]),
        ("fedgh", "deep_head", AgreementError, ["site south", "own-1", "fedproto"]),
        ("fedgh", "odd_head", AgreementError, ["site south", "head", "linear"]),
    ],
)
def test_methods_that_need_the_architecture_are_refused_at_the_start(
    method: str, model: str, kind: Kind, facts: list[str], tmp_path: Path
) -> None:
    parts, agreement, given = agreed(method, models="mlp-64")
    transport = with_own(parts, given, tmp_path, f"{__name__}.{model}")
    with refused(kind, *facts) as caught:
        federated(parts.experiment, agreement, NAMES, transport, RunFolder.create(new_folder()), 60)
    assert model not in caught.value.sentence


def test_a_shared_model_is_chosen_among_those_that_the_server_knows(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fml", models="mlp-128-64", rounds=1)
    offer = dataclasses.replace(agreement, hyper={**agreement.hyper, "aux_model": None})
    transport = with_own(parts, given, tmp_path)
    run = RunFolder.create(new_folder())
    made = federated(parts.experiment, offer, NAMES, transport, run, seconds=60)
    assert made.parts.method.aux_model == "mlp-128-64"  # type: ignore[attr-defined]  # own_net is smaller
    assert [record["answered"] for record in made.run().history] == [3]
    for k in NAMES:
        transport.responders[k] = Responder(dataclasses.replace(transport.responders[k]._means, model=OWN))
    with refused(MissingSettingError, "--aux-model"):
        federated(parts.experiment, offer, NAMES, transport, RunFolder.create(new_folder()), 60)


def test_the_width_of_a_sites_own_model_counts(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh", models="mlp-64")
    offer = dataclasses.replace(agreement, width=None)
    facts = greet(offer, NAMES, with_own(parts, given, tmp_path), seconds=0)
    assert complete_agreement(offer, facts, NAMES).width == 64
    facts[1] = dataclasses.replace(facts[1], own=Unseen(32, ((10, 32), (10,))))
    unlike = complete_agreement(offer, facts, NAMES)
    assert unlike.width is None
    with refused(MismatchError, 64, 32, "own-1"):
        make_federation(parts.experiment, unlike, NAMES, facts, Direct({}), RunFolder.create(new_folder()), 60)


def test_a_deep_head_of_its_own_suits_methods_without_heads(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedproto", models="mlp-64", rounds=1)
    transport = with_own(parts, given, tmp_path, f"{__name__}.deep_head")
    run = RunFolder.create(new_folder())
    result = federated(parts.experiment, agreement, NAMES, transport, run, seconds=60).run()
    assert [record["answered"] for record in result.history] == [3]


@pytest.mark.parametrize(
    "lie",
    [
        {"own": 7},
        {"own": {"width": 64}},
        {"own": {"width": "64", "head": [[10, 64], [10]]}},
        {"own": {"width": 2**40, "head": [[10, 64], [10]]}},
        {"own": {"width": 64, "head": [[10, -64]]}},
        {"own": {"width": 64, "head": [[1]] * 1000}},
    ],
    ids=str,
)
def test_what_a_site_says_of_its_own_model_is_believed_only_if_it_can_be(lie: Any, tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh")
    lying = Liar({k: responder_of(parts, given, k, tmp_path) for k in NAMES}, "hello", lambda head: head | lie)
    with refused(SchemaError, "site south"):
        greet(agreement, NAMES, lying, seconds=0)


def test_a_server_names_models_of_the_allow_list_alone(tmp_path: Path) -> None:
    """Sites that allow it share a model of their own code; the others do not import it."""
    path = f"{__name__}.shared_net"
    parts, agreement, given = agreed("fml", models="mlp-64", rounds=1, aux_model=path)
    assert agreement.hyper["aux_model"] == path
    responders = {k: responder_of(parts, given, k, tmp_path) for k in NAMES}
    with refused(AgreementError, f"'{path}'", "'allow'", "site.toml"):
        responders[0].answer(request(agreement))
    allowing = {k: Responder(dataclasses.replace(one._means, allow=(path,))) for k, one in responders.items()}
    run = RunFolder.create(new_folder())
    result = federated(parts.experiment, agreement, NAMES, Direct(allowing), run, seconds=60).run()
    assert result.warnings == []
    assert [record["answered"] for record in result.history] == [3]


# ---- weights of their own ------------------------------------------------------------------------------------------


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """A folder with weights for mlp-64."""
    folder.mkdir()
    tensors = {"fc1.weight": torch.full((64, 64), 0.25), "fc1.bias": torch.full((64,), 0.5)}
    save_file(tensors, folder / "mlp-64.safetensors")
    return tensors


def test_a_site_starts_from_its_own_weights(tmp_path: Path) -> None:
    """They are for its own model. The model that all share stays as the server knows it."""
    tensors = weights_of(tmp_path / "weights")
    parts, agreement, given = agreed("fml", models="mlp-64", aux_model="mlp-128-64")
    means = dataclasses.replace(
        responder_of(parts, given, 0, tmp_path)._means, weights=str(tmp_path / "weights"), folder=tmp_path / "own"
    )
    responder = Responder(means)
    said = unseal(responder.answer(request(agreement, verb="hello"))).head
    assert (said["model"], said["pretrained"]) == ("mlp-64", True)
    responder._accept(agreement, 0)
    client = responder._get_host(0).client(0)
    assert torch.equal(client.model.features.backbone.fc1.weight, tensors["fc1.weight"])
    assert not torch.equal(client.state.shared.features.backbone.fc2.bias, tensors["fc1.bias"])


def test_weights_need_be_declared_where_they_are_needed(tmp_path: Path) -> None:
    parts, agreement, given = agreed("fedgh", models="mlp-64")
    facts = greet(agreement, NAMES, Direct({k: responder_of(parts, given, k, tmp_path) for k in NAMES}), seconds=0)
    hyper = dataclasses.asdict(pluribus.method.methods()["fedhpl"]())
    needy = dataclasses.replace(agreement, method="fedhpl", hyper=hyper)
    folder = RunFolder.create(new_folder())
    declared = {k: dataclasses.replace(one, pretrained=k != 1) for k, one in facts.items()}
    with refused(MismatchError, "fedhpl", "site south", "'weights'", "site.toml"):
        make_federation(parts.experiment, needy, NAMES, declared, Direct({}), folder, 60)


# ---- join --check --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    make_keys(folder, ["127.0.0.1"], ["north", "south"], 30, datetime.now(UTC))
    return folder / "sites" / "north"


MODULE = """
import torch
from torch import nn
from pluribus.data import Dataset

def signals():
    y = torch.arange(40) % 1
    return Dataset("signals", torch.arange(40 * 24.0).view(40, 2, 12), y, ("only",), kind="signal")

def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], 5), nn.ReLU(), nn.Linear(5, classes))
"""


def write_check(folder: Path, where: Path, /, **settings: Any) -> Path:
    """site.toml beside a module with a model and data of its own."""
    (folder / "north_code.py").write_text(MODULE)
    base = {"name": "north", "server": "fl.example.org:9092", "keys": str(where), "state": "state", "device": "cpu"}
    base |= {"model": "north_code.net", "data": "north_code.signals"}
    file = folder / "site.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in (base | settings).items()))
    return file


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a check has used the network")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a check adds the folder of its file


@pytest.mark.usefixtures("no_network")
def test_a_site_is_checked_without_any_network(terminal: Terminal, keys: Path, tmp_path: Path) -> None:
    """It holds one class, and has a model and data of its own code."""
    answer = terminal("join", write_check(tmp_path, keys), "--check")
    assert answer.code == 0, answer.err
    assert_facts(answer.out, "28 train, 4 val, 8 test", "2x12 signals", "only 28", "north_code.net")
    assert_facts(answer.out, "normalize client", f"{(24 * 5 + 5) + (5 * 2 + 2)} parameters", "width 5", "cpu", "loss")
    assert_facts(answer.out, tmp_path / "state", "fl.example.org:9092", "north.key")
    assert [file.name for file in (tmp_path / "state").iterdir()] == [".lock"]


def of_another_site(folder: Path, keys: Path) -> dict[str, Any]:
    mixed = folder / "mixed"
    mixed.mkdir()
    for name in ("ca.crt", "north.pub"):
        (mixed / name).write_bytes((keys / name).read_bytes())
    (mixed / "north.key").write_bytes((keys.parent / "south" / "south.key").read_bytes())
    (mixed / "north.key").chmod(0o600)
    return {"keys": str(mixed)}


WRONG_CHECKS: dict[str, tuple[Any, ...]] = {
    "a key of another site": (of_another_site, CertificateError, "north.key", "north.pub"),
    "no data": (lambda folder, keys: {"data": "nowhere"}, UnknownNameError, "nowhere"),
    "a model for images": (lambda folder, keys: {"model": "cnn-16"}, MismatchError, "cnn-16"),
    "an address of no port": (lambda folder, keys: {"server": "fl.example.org"}, FormatError, "HOST:PORT"),
    "classes of others": (lambda folder, keys: {"classes": ["a", "b"]}, MismatchError, "'only'"),
}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("case", WRONG_CHECKS)
def test_a_check_finds_mistakes(case: str, terminal: Terminal, keys: Path, tmp_path: Path) -> None:
    spoil, kind, *facts = WRONG_CHECKS[case]
    file = write_check(tmp_path, keys, **spoil(tmp_path, keys))
    terminal.refused("join", "--config", file, "--check").check(kind, *facts)


# ---- over a network ------------------------------------------------------------------------------------------------

SITE_CODE = """
from pathlib import Path
import numpy as np
import torch
from pluribus.data import Dataset

def _read(name):
    held = np.load(Path(__file__).parent / f"{name}.npz")
    return Dataset("signals", torch.from_numpy(held["x"]), torch.from_numpy(held["y"]), ("a", "b", "c"), kind="signal")

"""


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.xdist_group("network")
def test_signals_over_loopback_give_the_same_bits(tmp_path: Path) -> None:
    """From federation.toml and site.toml on, with data that a function of the site's own folder reads."""
    pytest.importorskip("flwr")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = {0: "north", 1: "south"}
    how = {"rounds": 1, "lr": 0.05, "epochs": 1, "width": 64, "class_weights": "balanced"}
    settings = SIGNALS | how | {"clients": 2, "threads": 1, "device": "cpu"}
    parts = pluribus.assembly.assemble(pluribus.experiment.experiment("fedgh", **settings))
    simulated = pluribus.run(dataclasses.replace(parts.experiment, out=new_folder()), progress=False)
    network, code = Network(tmp_path, parts, names), [SITE_CODE]
    try:
        for k, name in names.items():
            for part in ("train", "val", "test"):
                rows = parts.data.rows(k)[part]
                np.savez(
                    tmp_path / f"{name}_{part}.npz", x=parts.dataset.x[rows].numpy(), y=parts.dataset.y[rows].numpy()
                )
                code.append(f"def {name}_{part}():\n    return _read('{name}_{part}')\n")
            sources = {part: f"site_code.{name}_{part}" for part in ("train", "val", "test")}
            network.write_site(name, model=parts.cards[k].model, **sources)
        (tmp_path / "site_code.py").write_text("\n".join(code))
        rows = {"kind": "signal", "shape": [2, 12]}
        network.write_server(classes=["a", "b", "c"], input=rows, **how)
        track = "--config", tmp_path / "federation.toml", "--track", "tensorboard"
        server = network.pluribus("server", "serve", "fedgh", *track)
        network.until(lambda: "listening on" in network.said("server"))
        sites = [network.join(name) for name in names.values()]
        network.until(lambda: server.poll() is not None)
        assert [server.returncode, *(site.wait(60) for site in sites)] == [0, 0, 0], network.said("server")
    finally:
        network.close()
    saved = Checkpoint(simulated.folder / "state")
    for k in names:
        assert differing(saved.client(k) or {}, network.learned(k)) == []
    result = pluribus.load_result(tmp_path / "federation")
    assert numbers(result) == numbers(simulated)
    events = EventAccumulator(str(tmp_path / "federation" / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, pytest.approx(result.history[0]["loss"]))]
