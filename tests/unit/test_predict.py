"""Predictions: the accuracy that a run has on record, from its folder or from a site's alone."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save
from test_parties import NAMES, RUNS, Direct, agreed, federated, responder_of

import pluribus
from conftest import new_folder, run_tiny
from pluribus.assembly import Assembly, assemble
from pluribus.conformance.cases import Case
from pluribus.conformance.kinds import SAMPLES, Sample
from pluribus.data import Dataset
from pluribus.data.folders import read_image_folder
from pluribus.errors import (
    ConflictError,
    DamagedDataError,
    DamagedFileError,
    DataError,
    FileAccessError,
    MismatchError,
    MissingDataError,
    MissingSettingError,
    NoModelError,
    PluribusError,
    RangeError,
    UnknownNameError,
)
from pluribus.experiment import Experiment, from_toml
from pluribus.method import methods
from pluribus.prediction import LabelsPrediction, NumbersPrediction, Prediction, to_csv
from pluribus.result import Result
from pluribus.storage.folder import RunFolder
from pluribus.terminal import print_predictions
from refusals import refused
from terminal import Terminal

NOTHING = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
ALIKE = {"models": "mlp-64"}
SITES: dict[str, dict[str, Any]] = RUNS | {
    "fedgen": {"clip_norm": 0.5},
    "fedfree": {"momentum": 0.9},
    "fedproto": {},
    "fedtgp": {},
    "fedbabu": ALIKE,
    "per-fedavg": ALIKE,
    "pfedpt": ALIKE,
    "fedhpl": {"models": "tiny", "image_size": 16, "width": None},
}


@cache
def simulated(method: str) -> Result:
    """A run that tests may look at, but not change."""
    return Case(method, Path(new_folder())).run()


def parts_of(result: Result) -> Assembly:
    return assemble(Experiment(**from_toml(result.folder / "config.toml")))


def exam_of(parts: Assembly, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's own test images, and their labels."""
    rows = parts.data.rows(k)["test"]
    return parts.dataset.x[rows], parts.dataset.y[rows]


def recorded(result: Result, k: int, round: str = "selected") -> float:
    """The test accuracy that a run reports of a client, or that of its last round."""
    accuracy = getattr(result.per_client()[k], round)["test"]
    assert accuracy is not None
    return accuracy


def accuracy(predictions: list[Prediction], labels: torch.Tensor) -> float:
    return sum(one.number == int(y) for one, y in zip(predictions, labels, strict=True)) / len(labels)


def as_files(x: torch.Tensor, folder: Path) -> Path:
    """Images as files, in an order in which they are found again."""
    folder.mkdir(parents=True)
    for number, image in enumerate(x):
        Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()).save(folder / f"{number:05d}.png")
    return folder


# ---- as it was measured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", methods())
def test_a_run_predicts_as_well_as_it_was_measured(method: str) -> None:
    result = simulated(method)
    parts = parts_of(result)
    for k in parts.cards:
        x, y = exam_of(parts, k)
        assert accuracy(pluribus.predict(result.folder, x, k), y) == recorded(result, k)
        assert accuracy(pluribus.predict(result.folder, x, k, "last"), y) == recorded(result, k, "last")


shares_a_run = pytest.mark.xdist_group("selective")  # one process makes it for all


@cache
def selective() -> Result:
    """A run long enough that validation prefers an earlier round for some clients; Ctrl-C could stop it anywhere."""
    return pluribus.run("fedgh", clients=8, rounds=20, progress=False, threads=1, out=new_folder(), checkpoint_every=3)


def right(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x.float().mul(1 / 127.5).sub(1.0)).argmax(1) == y).sum() / len(y))


@shares_a_run
def test_the_model_that_is_delivered_is_the_model_that_was_measured() -> None:
    result = selective()
    parts, chosen = parts_of(result), result.per_client()
    earlier = [k for k, one in chosen.items() if one.selected["test"] != one.last["test"]]
    assert len(earlier) >= 3
    for k in chosen:
        x, y = exam_of(parts, k)
        for round in ("selected", "last"):
            expected = recorded(result, k, round)
            assert accuracy(pluribus.predict(result.folder, x, k, round), y) == expected
            assert right(result.model(k, round), x, y) == pytest.approx(expected, abs=1e-6)  # in float32
        assert right(result.model(k), x, y) == pytest.approx(recorded(result, k), abs=1e-6)


@shares_a_run
def test_there_are_two_copies_of_a_client_at_most() -> None:
    result = selective()
    selected = sorted(path.name for path in (result.folder / "state" / "selected").iterdir())
    rounds = {k: one.selected_round for k, one in result.per_client().items()}
    assert selected == [f"client-{k:06d}-round-{t:06d}.safetensors" for k, t in sorted(rounds.items())]
    assert len(set(rounds.values())) > 2


@shares_a_run
def test_a_round_that_is_neither_is_refused() -> None:
    with refused(UnknownNameError, "'best'", "'selected'", "'last'"):
        pluribus.predict(selective().folder, NOTHING, 0, "best")  # type: ignore[arg-type]
    with refused(UnknownNameError, "'best'", "'selected'", "'last'"):
        selective().model(0, "best")  # type: ignore[arg-type]


@shares_a_run
def test_a_run_of_an_older_version_has_its_last_round_alone(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(selective().folder, folder)
    shutil.rmtree(folder / "state" / "selected")
    with refused(NoModelError, folder, "client 0", "round"):
        pluribus.predict(folder, NOTHING, 0)
    assert len(pluribus.predict(folder, NOTHING, 0, "last")) == 1


@pytest.mark.parametrize("method", ["fedgh", "fedproto", "pfedpt"])
def test_files_give_what_tensors_give(method: str, tmp_path: Path) -> None:
    result = simulated(method)
    x, y = exam_of(parts_of(result), 1)
    folder = as_files(x, tmp_path / "scans" / "deep")
    from_files = pluribus.predict(result.folder, [tmp_path / "scans"], client=1)
    assert [one.file for one in from_files] == [str(file) for file in sorted(folder.iterdir())]
    assert accuracy(from_files, y) == recorded(result, 1)
    without_files = [dataclasses.replace(one, file=None) for one in from_files]
    assert without_files == pluribus.predict(result.folder, x, client=1)


@cache
def sites(method: str) -> tuple[Assembly, Result, Path]:
    """A federation of real sites that ran to its end, and where the sites' state lies, by number."""
    parts, agreement, given = agreed(method, **{"rounds": 2} | SITES[method])
    folder = Path(new_folder())
    transport = Direct({k: responder_of(parts, given, k, folder) for k in NAMES})
    run = RunFolder.create(new_folder())
    return parts, federated(parts.experiment, agreement, NAMES, transport, run, seconds=60).run(), folder


@pytest.mark.parametrize("method", SITES)
def test_a_site_predicts_from_its_state_folder_alone(method: str) -> None:
    parts, result, folder = sites(method)
    for k in NAMES:
        x, y = exam_of(parts, k)
        predictions = pluribus.predict(folder / str(k), x)
        assert accuracy(predictions, y) == recorded(result, k)
        assert accuracy(pluribus.predict(folder / str(k), x, round="last"), y) == recorded(result, k, "last")
        assert predictions == pluribus.predict(folder / str(k) / "run", x)


def test_predictions_for_test_rows_are_not_kept_of_sites() -> None:
    _, result, folder = sites("fedgh")
    with refused(NoModelError, "client 0", result.folder):
        result.predictions(0)
    files = [path for path in folder.rglob("*.safetensors") if "selected" in path.name]
    assert len(files) == len(NAMES)
    assert not [name for path in files for name in load(path.read_bytes()) if "test/" in name]


def test_many_images_are_taken_in_batches_as_evaluation_takes_them() -> None:
    result = simulated("fedgh")
    parts = parts_of(result)
    x = parts.dataset.x.repeat(4, 1, 1, 1)
    predictions = pluribus.predict(result.folder, x, 0)
    model = pluribus.load_model(result.folder, 0)
    with torch.no_grad():
        numbers = parts.data.store.x.repeat(4, 1, 1, 1).float().mul(1 / 127.5).sub(1.0)
        best = torch.cat([model(part) for part in numbers.split(256)]).softmax(1).max(1)
    assert len(predictions) == 4 * 160
    assert [one.score for one in predictions] == best.values.tolist()
    assert [one.label for one in predictions] == [parts.task.names[number] for number in best.indices.tolist()]


def test_images_are_brought_to_the_shape_of_the_task_as_folders_are(tmp_path: Path) -> None:
    """Color photos of any size, for a model that was trained on a folder of images."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 255, (20 + number, 31, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number:02d}.jpg")
    settings = {"data": str(tmp_path / "data"), "image_size": 9, "clients": 2, "min_samples": 4}
    result = run_tiny("local", models="mlp-64", **settings)
    found = pluribus.predict(result.folder, tmp_path / "data", 0)
    assert [Path(str(one.file)).name for one in found] == [f"{number:02d}.jpg" for number in range(12)] * 2
    assert {one.label for one in found} <= {"cat", "dog"}
    given = pluribus.predict(result.folder, read_image_folder(tmp_path / "data", 9).x, 0)
    assert [one.score for one in found] == [one.score for one in given]


def test_a_gray_model_sees_a_color_image_in_gray(tmp_path: Path) -> None:
    result = simulated("fedgh")
    x, _ = exam_of(parts_of(result), 0)
    gray = Image.fromarray(x[0, 0].numpy())
    gray.save(tmp_path / "gray.png")
    gray.convert("RGB").save(tmp_path / "color.png")
    one, other = pluribus.predict(result.folder, [tmp_path / "gray.png", tmp_path / "color.png"], 0)
    assert (one.number, one.score) == (other.number, other.score)


def test_of_several_runs_of_a_site_the_newest_predicts(tmp_path: Path) -> None:
    parts, _, folder = sites("fedgh")
    places = {"a": folder / "0", "b": sites("fedproto")[2] / "0"}
    x, _ = exam_of(parts, 0)
    for name, place in places.items():
        shutil.copytree(place / "run", tmp_path / name)
    assert pluribus.predict(places["a"], x) != pluribus.predict(places["b"], x)
    for seconds, newest in ((1000, "a"), (2000, "b"), (3000, "a")):
        for file in (tmp_path / newest).iterdir():
            os.utime(file, (seconds + 2**31, seconds + 2**31))
        assert pluribus.predict(tmp_path, x) == pluribus.predict(places[newest], x)
        assert pluribus.predict(tmp_path / "b", x) == pluribus.predict(places["b"], x)


# ---- rows that are no images -----------------------------------------------------------------------------------------

CLASSIFIED = [sample for sample in SAMPLES if sample.target == "classes"]


@cache
def sampled(method: str, name: str) -> Result:
    """A run on a kind of rows that tests may look at, but not change."""
    (sample,) = (one for one in SAMPLES if one.name == name)
    return Case(method, Path(new_folder())).but(sample=sample, clients=3).run()


@pytest.mark.parametrize("method", ["fedgh", "fedproto"])
@pytest.mark.parametrize("sample", CLASSIFIED, ids=lambda sample: sample.name)
def test_rows_of_every_kind_are_predicted_as_they_were_measured(method: str, sample: Sample) -> None:
    result = sampled(method, sample.name)
    parts = parts_of(result)
    for k in parts.cards:
        x, y = exam_of(parts, k)
        found = pluribus.predict(result.folder, x, k)
        assert accuracy(found, y) == recorded(result, k)
        assert pluribus.predict(result.folder, x.numpy(), k) == found
        assert result.evaluate(x, y, k)["accuracy"] == recorded(result, k)


def by_hand(result: Result, k: int, x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """The scores of a client's model for rows that are normalized by these numbers."""
    with torch.no_grad():
        return result.model(k)((x.double() - mean).mul(1 / std).float())


def test_signals_are_normalized_by_the_rows_that_the_client_trained_on() -> None:
    result = sampled("fedgh", "signals")
    parts = parts_of(result)
    own = parts.dataset.x[parts.data.rows(1)["train"]].double()
    mean, std = own.mean((0, 2))[:, None], own.std((0, 2), correction=0)[:, None]
    x, _ = exam_of(parts, 1)
    scores = by_hand(result, 1, x, mean, torch.where(std > 0, std, 1.0))
    found = pluribus.predict(result.folder, x.float(), 1)  # of float16 rows
    assert [one.number for one in found] == scores.argmax(1).tolist()
    assert [one.score for one in found] == pytest.approx(scores.softmax(1).max(1).values.tolist(), abs=1e-4)


def test_rows_may_have_another_type_if_that_changes_no_number() -> None:
    tokens, table = sampled("fedgh", "tokens"), sampled("fedgh", "tables")
    ids, _ = exam_of(parts_of(tokens), 0)
    expected = pluribus.predict(tokens.folder, ids, 0)
    assert pluribus.predict(tokens.folder, ids.long(), 0) == expected
    short = ids[:, : int((ids != 0).sum(1).max())]
    assert short.shape[1] < ids.shape[1]
    assert pluribus.predict(tokens.folder, short, 0) == expected, "the rest is padding"
    rows, _ = exam_of(parts_of(table), 0)
    assert pluribus.predict(table.folder, rows.double(), 0) == pluribus.predict(table.folder, rows, 0)


FAULTS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "an id beyond the vocabulary": ("tokens", lambda x: x + 2**31 - 8, ("0..65",)),
    "an id that wraps": ("tokens", lambda x: x.long() + 2**32, ("0..65",)),
    "no token": ("tokens", lambda x: x * 0, ("row 0", "token")),
    "padding inside": ("tokens", lambda x: x.flip(1), ("padding",)),
    "too long": ("tokens", lambda x: torch.cat([x, x], 1), ("int32", "tokens")),
    "ids that are no whole numbers": ("tokens", lambda x: x.float(), ("int32", "float32")),
    "NaN": ("signals", lambda x: x.float() / 0, ("not finite", "row 0")),
    "too few channels": ("signals", lambda x: x[:, :7], ("N x 8 x 8", "7 x 8")),
    "bools": ("tensors", lambda x: x > 0, ("float32", "bool")),
    "a category that there is not": ("tables", lambda x: x.clone().index_fill_(1, torch.tensor(10), 4), ("0..3",)),
}


@pytest.mark.parametrize(("kind", "change", "facts"), FAULTS.values(), ids=FAULTS)
def test_rows_of_another_form_are_refused(kind: str, change: Any, facts: tuple[str, ...]) -> None:
    result = sampled("fedgh", kind)
    x, _ = exam_of(parts_of(result), 0)
    with refused(DataError, *facts):
        pluribus.predict(result.folder, change(x), 0)


# ---- files with columns ----------------------------------------------------------------------------------------------


def write(path: Path, names: str, rows: list[str]) -> Path:
    path.write_text("\n".join([names, *rows, ""]))
    return path


def people(folder: Path) -> Path:
    """Sixty rows: two numbers, a category, a label, and who holds them."""
    rows = [
        f"{k % 7},{k * k % 11}.5,{('red', 'green', 'blue')[k % 3]},{'yes' if k % 2 else 'no'},{k % 2}"
        for k in range(60)
    ]
    return write(folder / "people.csv", "age,weight,color,label,client", rows)


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("people")
    data = people(folder)
    return run_tiny(
        "local", data=str(data), models="pluribus.conformance.kinds.table_mlp", clients=2, partition="natural", rounds=1
    ), folder


def test_a_file_with_the_columns_of_training_is_predicted(table_run: tuple[Result, Path]) -> None:
    """In another order, without the label, and with a column that training did not have."""
    result, folder = table_run
    rows = [f"{('red', 'green', 'blue')[k % 3]},{k},{k * k % 11}.5,{k % 7}" for k in range(5)]
    file = write(folder / "new.csv", "color,height,weight,age", rows)
    x = parts_of(result).dataset.x[:5]
    expected = pluribus.predict(result.folder, x, 1)
    found = pluribus.predict(result.folder, file, 1)
    assert [one.file for one in found] == [f"{file}:{row}" for row in range(1, 6)]
    assert [dataclasses.replace(one, file=None) for one in found] == expected
    twice = pluribus.predict(result.folder, [file, folder / "people.csv"], 1)
    assert twice[:5] == found
    assert len(twice) == 65


@pytest.mark.parametrize(
    ("names", "row", "error", "facts"),
    [
        ("age,color", "1,red", UnknownNameError, ("'weight'", "age, color")),
        ("age,weight,color", "1,2.5,mauve", DataError, ("row 1", "'mauve'", "'color'", "blue")),
        ("age,weight,color", "1,tall,red", DataError, ("row 1", "'tall'", "'weight'")),
        ("age,weight,color", "1,,red", DataError, ("row 1", "'weight'")),
    ],
)
def test_mistakes_in_a_file_are_named_by_row_and_column(table_run, names, row, error, facts) -> None:
    result, folder = table_run
    with refused(error, *facts):
        pluribus.predict(result.folder, write(folder / "bad.csv", names, [row]), 0)


def test_the_command_predicts_files_with_columns(table_run: tuple[Result, Path], terminal: Terminal) -> None:
    result, folder = table_run
    told = terminal("predict", result.folder, folder / "people.csv", "--client", 0, "--json")
    assert len(json.loads(told.out)) == 60
    nothing = terminal.refused("predict", result.folder, folder, "--client", 0)
    nothing.check(MismatchError, "3 columns", folder)


def test_texts_become_the_tokens_of_training(tmp_path: Path) -> None:
    rows = [json.dumps({"said": f"word{k % 5} and word{k % 3} again" * (1 + k % 2), "label": k % 2}) for k in range(40)]
    data = tmp_path / "said.jsonl"
    data.write_text("\n".join(rows))
    settings = {"columns": "text=said", "vocabulary": 100, "models": "fasttext", "clients": 2}
    result = run_tiny("local", data=str(data), rounds=1, **settings)
    parts = parts_of(result)
    new = tmp_path / "new.jsonl"
    new.write_text("\n".join(json.dumps({"said": json.loads(row)["said"]}) for row in rows[:4]))
    found = pluribus.predict(result.folder, new, 0)
    assert [dataclasses.replace(one, file=None) for one in found] == pluribus.predict(
        result.folder, parts.dataset.x[:4], 0
    )
    told: list[str] = []
    new.write_text(json.dumps({"said": "word1 " * 999}))
    pluribus.predict(result.folder, new, 0, tell=told.append)
    assert any("1 of 1 texts are cut" in note for note in told)


def test_tokens_that_were_made_elsewhere_come_as_arrays(tmp_path: Path) -> None:
    file = write(tmp_path / "new.csv", "text", ["a word"])
    with refused(MismatchError, "tokens", file, "array"):
        pluribus.predict(sampled("fedgh", "tokens").folder, file, 0)


def test_signals_are_cut_into_windows_as_in_training(tmp_path: Path) -> None:
    rows = [f"{k},{k % 5},{(k // 40) % 2},{k // 80}" for k in range(320)]
    data = write(tmp_path / "moves.csv", "a,b,label,group", rows)
    settings = {"window": 8, "stride": 4, "models": "cnn1d-2", "clients": 2, "partition": "iid", "split_by": "rows"}
    result = run_tiny("local", data=str(data), rounds=1, **settings)
    parts = parts_of(result)
    new = write(tmp_path / "new.csv", "a,b", [f"{k},{k % 5}" for k in range(21)])
    told: list[str] = []
    found = pluribus.predict(result.folder, new, 0, tell=told.append)
    assert [one.file for one in found] == [f"{new}:{first}" for first in (1, 5, 9, 13)]
    assert any("1 of 21 samples" in note for note in told)
    expected = pluribus.predict(result.folder, parts.dataset.x[:4], 0)
    assert [dataclasses.replace(one, file=None) for one in found] == expected
    turned = write(tmp_path / "turned.csv", "b,a", [f"{k % 5},{k}" for k in range(21)])
    by_name = pluribus.predict(result.folder, turned, 0, tell=told.append)
    assert [dataclasses.replace(one, file=None) for one in by_name] == expected, "channels go by name, not by order"
    with refused(MismatchError, "2 channels (a, b)", "a, d"):
        pluribus.predict(result.folder, write(tmp_path / "other.csv", "a,d", ["1,2"] * 9), 0)
    with refused(MismatchError, "2 channels", "a, b, c"):
        pluribus.predict(result.folder, write(tmp_path / "more.csv", "a,b,c", ["1,2,3"] * 9), 0)
    with refused(DataError, "8 samples"):
        pluribus.predict(result.folder, write(tmp_path / "few.csv", "a,b", ["1,2"] * 7), 0)


def test_image_files_are_refused_where_a_model_takes_no_images(terminal: Terminal, tmp_path: Path) -> None:
    file = as_files(NOTHING, tmp_path / "scans") / "00000.png"
    refusal = terminal.refused("predict", sampled("fedgh", "tokens").folder, file, "--client", 0)
    refusal.check(MismatchError, "tokens", file)


def test_several_labels_come_with_the_share_of_each() -> None:
    result = sampled("local", "several labels")
    x, _ = exam_of(parts_of(result), 0)
    own = parts_of(result).data.scale_of(0)
    scores = by_hand(result, 0, x, own.mean, 1 / own.factor)
    found, names = pluribus.predict(result.folder, x, 0), ("even", "has a circle", "above 4")
    assert all(isinstance(one, LabelsPrediction) for one in found)
    for one, row in zip(found, scores, strict=True):
        assert list(one.shares) == list(names)
        assert list(one.shares.values()) == pytest.approx(row.sigmoid().tolist(), abs=1e-5)
        assert one.labels == tuple(name for name, score in zip(names, row.tolist(), strict=True) if score > 0)
    assert {len(one.labels) for one in found} > {1}


def test_numbers_come_by_name_and_in_columns(tmp_path: Path) -> None:
    result = sampled("local", "numbers to predict")
    x, _ = exam_of(parts_of(result), 0)
    own = parts_of(result).data.scale_of(0)
    scores = by_hand(result, 0, x, own.mean, 1 / own.factor)
    found = pluribus.predict(result.folder, x, 0)
    assert all(isinstance(one, NumbersPrediction) for one in found)
    assert [list(one.numbers) for one in found] == [["lower", "right"]] * len(x)
    assert [list(one.numbers.values()) for one in found] == [pytest.approx(row.tolist(), abs=1e-5) for row in scores]
    to_csv(found, tmp_path / "p.csv")
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["lower"]) for row in rows] == [one.numbers["lower"] for one in found]


def test_what_is_predicted_is_printed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    print_predictions([LabelsPrediction("a", ("even", "above 4"), {"even": 0.75, "above 4": 0.625})])
    print_predictions([NumbersPrediction(None, {"lower": 0.125})])
    printed = capsys.readouterr().out.split()
    assert " ".join(printed) == "file labels share even share above 4 a even, above 4 0.750 0.625 file lower - 0.125"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_json_and_a_file(terminal: Terminal, tmp_path: Path) -> None:
    result = simulated("fedgh")
    x, _ = exam_of(parts_of(result), 1)
    folder = as_files(x[:3], tmp_path / "scans")
    expected = pluribus.predict(result.folder, folder, 1)
    words = ["predict", result.folder, folder, "--client", "1"]
    answer = terminal(*words, "--out", tmp_path / "predictions.csv")
    assert (answer.code, answer.err) == (0, "")
    assert "score" in answer.out
    for one in expected:
        assert f"{one.score:.3f}" in answer.out
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{name: str(value) for name, value in dataclasses.asdict(one).items()} for one in expected]
    told = terminal(*words, "--json")
    assert told.out.count("\n") == 1
    assert json.loads(told.out) == [dataclasses.asdict(one) for one in expected]


def test_what_happens_to_files_is_said_on_standard_error(terminal: Terminal, tmp_path: Path) -> None:
    result = simulated("fedgh")
    x, _ = exam_of(parts_of(result), 1)
    folder = as_files(x[:3], tmp_path / "scans")
    plain = json.loads(terminal("predict", result.folder, folder, "--client", 1, "--json").out)
    deep = tmp_path / "deep"
    deep.mkdir()
    for file, image in zip(("0.png", "1.tif", "2.pgm"), x, strict=False):
        Image.fromarray(image[0].numpy().astype(np.uint16) * 257).save(deep / file)
    (deep / "notes.txt").touch()
    told = terminal("predict", result.folder, deep, "--client", 1, "--json")
    answers = [(one["label"], one["score"]) for one in json.loads(told.out)]
    assert answers == [(one["label"], one["score"]) for one in plain]
    notes = [line for line in told.err.splitlines() if line.startswith("note: ")]
    assert [("1 file" in line, "3 of 3" in line) for line in notes] == [(True, False), (False, True)]


def test_a_sites_model_by_the_command(terminal: Terminal, tmp_path: Path) -> None:
    parts, _, folder = sites("fedproto")
    scans = as_files(exam_of(parts, 2)[0][:2], tmp_path / "scans")
    told = json.loads(terminal("predict", folder / "2", scans / "00000.png", scans / "00001.png", "--json").out)
    assert [one["file"] for one in told] == [str(scans / "00000.png"), str(scans / "00001.png")]


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes_get_one_sentence(terminal: Terminal, tmp_path: Path) -> None:
    run, (_, _, folder) = simulated("fedgh").folder, sites("fedgh")
    image = as_files(NOTHING, tmp_path / "scans") / "00000.png"
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.png").write_text("no image")
    state, text, empty = folder / "0", tmp_path / "text.png", tmp_path / "empty"
    mistakes: dict[tuple[object, ...], tuple[Any, ...]] = {
        (tmp_path / "nowhere", image): (FileAccessError, tmp_path / "nowhere"),
        (empty, image): (NoModelError, empty),
        (run, image): (MissingSettingError, run, "--client", "0 to 3"),
        (run, image, "--client", 4): (RangeError, run, "client 4", "0 to 3"),
        (run, image, "--client", -1): (RangeError, run, "client -1", "0 to 3"),
        (state, image, "--client", 0): (ConflictError, state, "--client"),
        (state,): (MissingDataError, "images"),
        (state, tmp_path / "lost.png"): (MissingDataError, tmp_path / "lost.png"),
        (state, empty): (MissingDataError, empty, ".bmp"),
        (state, image, text): (DamagedDataError, text),
        (state, image, "--out", empty / "no" / "p.csv"): (FileAccessError, empty / "no" / "p.csv"),
    }
    for words, (kind, *facts) in mistakes.items():
        terminal.refused("predict", *words).check(kind, *facts)


@pytest.mark.parametrize(
    ("x", "given"),
    [
        (torch.zeros(2, 1, 8, 8), "float32 2 x 1 x 8 x 8"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "uint8 2 x 3 x 8 x 8"),
        (torch.zeros(8, dtype=torch.uint8), "uint8 8"),
    ],
    ids=["numbers", "color", "flat"],
)
def test_tensors_must_have_the_shape_of_the_task(x: torch.Tensor, given: str) -> None:
    with refused(DataError, "uint8 N x 1 x 8 x 8", given):
        pluribus.predict(simulated("fedgh").folder, x, 0)


def two_channels() -> Dataset:
    return Dataset("two", torch.zeros(40, 2, 8, 8, dtype=torch.uint8), torch.arange(40) % 2, ("a", "b"))


def test_files_hold_one_or_three_channels(tmp_path: Path) -> None:
    result = run_tiny("local", data="test_predict.two_channels", clients=2, models="mlp-64")
    image = as_files(NOTHING, tmp_path / "scans")
    with refused(DataError, "2 x 8 x 8", "tensor"):
        pluribus.predict(result.folder, image, 0)


def test_a_run_without_a_checkpoint_has_no_model(tmp_path: Path) -> None:
    shutil.copytree(simulated("fedgh").folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "state")
    (tmp_path / "run" / "state").mkdir()
    with refused(NoModelError, tmp_path / "run"):
        pluribus.predict(tmp_path / "run", NOTHING, 0)


def test_a_site_that_has_only_enrolled_has_no_model(tmp_path: Path) -> None:
    _, _, folder = sites("fedgen")
    (tmp_path / "run").mkdir()
    first = min((folder / "0" / "run").iterdir())
    shutil.copy(first, tmp_path / "run")
    with refused(NoModelError, tmp_path / "run", "enrolled"):
        pluribus.predict(tmp_path, NOTHING)


def test_a_site_whose_method_answers_as_evaluated_must_have_been(tmp_path: Path) -> None:
    _, _, folder = sites("fedproto")
    shutil.copytree(folder / "0", tmp_path / "state")
    for path in (tmp_path / "state" / "run").glob("[es]*.safetensors"):
        path.unlink()
    for round in ("selected", "last"):
        with refused(NoModelError, tmp_path / "state" / "run", "evaluated"):
            pluribus.predict(tmp_path / "state", NOTHING, round=round)


def _agreement(facts: dict[str, str], **change: Any) -> dict[str, str]:
    return facts | {"agreement": json.dumps(json.loads(facts["agreement"]) | change)}


DAMAGES: dict[str, Any] = {
    "no facts": lambda facts: {},
    "no agreement": lambda facts: {name: value for name, value in facts.items() if name != "agreement"},
    "no JSON": lambda facts: facts | {"agreement": "{"},
    "no object": lambda facts: facts | {"agreement": "[]"},
    "another client": lambda facts: facts | {"client": "3"},
    "no number": lambda facts: facts | {"client": "north"},
    "unknown model": lambda facts: facts | {"model": "cnn-17"},
    "another model": lambda facts: facts | {"model": "mlp-128-64"},
    "a class of its own": lambda facts: _agreement(facts, method="antigravity.Method"),
    "unknown setting": lambda facts: _agreement(facts, hyper={"speed": 3}),
    "no shape": lambda facts: _agreement(facts, shape=[8, 8]),
}


FILES = {"selected": "selected-*", "last": "[0-9]*"}  # by the round whose model they hold


def spoiled(round: str, folder: Path, change: Any) -> None:
    """The newest files of a site, of which that of one round is changed."""
    run = sites("fedgh")[2] / "0" / "run"
    for pattern in FILES.values():
        newest = max(run.glob(pattern))
        data = newest.read_bytes()
        (folder / newest.name).write_bytes(change(data) if pattern == FILES[round] else data)


def with_facts(change: Any) -> Any:
    """A file of tensors with other facts."""

    def changed(data: bytes) -> bytes:
        length = 8 + int.from_bytes(data[:8], "little")
        facts = json.loads(data[8:length])["__metadata__"]
        return save(load(data), change(facts))

    return changed


@pytest.mark.parametrize("round", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_a_sentence(round: str, damage: str, tmp_path: Path) -> None:
    spoiled(round, tmp_path, with_facts(DAMAGES[damage]))
    with pytest.raises(PluribusError):
        pluribus.predict(tmp_path, NOTHING, round=round)


@pytest.mark.parametrize("round", FILES)
def test_a_file_that_was_cut_is_one_sentence(round: str, tmp_path: Path) -> None:
    spoiled(round, tmp_path, lambda data: data[:-100])
    with refused(DamagedFileError, tmp_path):
        pluribus.predict(tmp_path, NOTHING, round=round)


@pytest.mark.parametrize("round", FILES)
def test_a_later_version_predicts_too(round: str, tmp_path: Path) -> None:
    spoiled(round, tmp_path, with_facts(lambda facts: _agreement(facts, version="0.0.1")))
    parts, _, folder = sites("fedgh")
    x, _ = exam_of(parts, 0)
    assert pluribus.predict(tmp_path, x, round=round) == pluribus.predict(folder / "0", x, round=round)


def test_a_client_is_for_runs() -> None:
    with refused(ConflictError, "--client"):
        pluribus.predict(sites("fedgh")[2] / "0", NOTHING, client=0)
