"""Arrays of every kind, from npz files and from objects in Python: what is read, and what is refused with its row."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from PIL import Image
from torch.utils.data import TensorDataset

import pluribus
from conftest import tiny
from pluribus.assembly import assemble
from pluribus.data import load
from pluribus.data.datasets import kind_of_data
from pluribus.data.given import as_dataset, take_rows
from pluribus.data.npz import read_kind, read_npz
from pluribus.data.reading import DEFAULT
from pluribus.errors import DamagedDataError, DataError, MismatchError, PluribusError, UnknownNameError
from pluribus.experiment import experiment
from pluribus.inputs import KINDS, Input
from refusals import refused

RNG = np.random.default_rng(0)
SIGNALS = RNG.normal(size=(6, 2, 5)).astype(np.float32)
TABLE = RNG.normal(size=(6, 4)).astype(np.float32)
IDS = np.array([[5, 6, 7], [5, 0, 0], [2, 3, 0], [9, 9, 9], [4, 0, 0], [4, 4, 0]])
Y = np.array([0, 1, 0, 1, 1, 0])
HELD = {
    "client": np.array(["b", "b", "a", "a", "c", "c"]),
    "group": np.array([3, 3, 9, 9, 4, 4]),
    "time": np.array([0.0, 1, 0, 1, 0, 1], np.float32),
    "span": np.array(1.5),
    "split": np.array(["train", "test", "Training", "val", "train", "test"]),
}


def saved(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "mine.npz", **arrays)
    return folder / "mine.npz"


# ---- npz -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "kind", "dtype"),
    [
        ({"x": SIGNALS}, "signal", torch.float32),
        ({"x": SIGNALS.astype(np.float16)}, "signal", torch.float16),
        ({"x": TABLE}, "table", torch.float32),
        ({"x": IDS, "vocabulary": 10}, "tokens", torch.int32),
        ({"x": RNG.integers(0, 256, (6, 4, 4), dtype=np.uint8)}, "image", torch.uint8),
        ({"x": RNG.integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)}, "image", torch.uint8),
        ({"x": TABLE.reshape(6, 1, 2, 2, 1)}, "tensor", torch.float32),
    ],
)
def test_the_kind_of_a_file_is_guessed_and_that_is_noted(
    tmp_path: Path, arrays: dict[str, Any], kind: str, dtype: torch.dtype
) -> None:
    file = saved(tmp_path, y=Y, **arrays)
    found = load(str(file))
    assert (found.name, found.kind, found.x.dtype, found.y.tolist()) == ("mine", kind, dtype, Y.tolist())
    assert any("is read as" in note for note in found.notes)
    assert read_kind(file) == kind_of_data(str(file), (), False) == kind
    told = load(str(saved(tmp_path, y=Y, kind=kind, **arrays)))
    assert torch.equal(told.x, found.x)
    assert not any("is read as" in note for note in told.notes)
    assert read_kind(tmp_path / "mine.npz") == kind


def test_numbers_come_through_unchanged(tmp_path: Path) -> None:
    assert np.array_equal(load(str(saved(tmp_path, x=SIGNALS, y=Y))).x, SIGNALS)
    swapped = load(str(saved(tmp_path, x=SIGNALS.astype(">f8"), y=Y.astype(">i2"))))
    assert np.array_equal(swapped.x, SIGNALS)
    assert any("float64" in note for note in swapped.notes)
    table = load(str(saved(tmp_path, x=np.arange(24).reshape(6, 4), y=Y, kind="table", columns=list("abcd"))))
    assert (table.columns, table.x[5].tolist()) == (("a", "b", "c", "d"), [20, 21, 22, 23])


def test_who_holds_a_row_and_when_it_was_recorded(tmp_path: Path) -> None:
    found = load(str(saved(tmp_path, x=SIGNALS, y=Y, classes=["still", "moving"], **HELD)))
    assert found.classes == ("still", "moving")
    assert (found.clients, found.client.tolist()) == (("a", "b", "c"), [1, 1, 0, 0, 2, 2])
    assert found.group.tolist() == [3, 3, 9, 9, 4, 4]
    assert (found.time.dtype, found.span) == (torch.float64, 1.5)
    assert found.part.tolist() == [0, 2, 0, 1, 0, 2]
    numbers = load(str(saved(tmp_path, x=SIGNALS, y=Y, client=[7, 7, 30, 30, 8, 8], group=list("xxyyzz"))))
    assert (numbers.clients, numbers.client.tolist()) == (("7", "8", "30"), [0, 0, 2, 2, 1, 1])
    assert numbers.group.tolist() == [0, 0, 1, 1, 2, 2]
    named = load(str(saved(tmp_path, x=SIGNALS, y=Y, client=[1, 1, 0, 0, 1, 0], clients=["q", "p"])))
    assert (named.clients, named.client.tolist()) == (("q", "p"), [1, 1, 0, 0, 1, 0])


def test_dates_are_seconds(tmp_path: Path) -> None:
    days = np.array(["2024-01-01", "2024-01-02", "2024-01-03"] * 2, "datetime64[D]")
    found = load(str(saved(tmp_path, x=SIGNALS, y=Y, time=days)))
    assert (found.time[1:3] - found.time[:2]).tolist() == [86400.0, 86400.0]


def test_lengths_say_where_tokens_end(tmp_path: Path) -> None:
    ids = np.array([[5, 6, 7], [5, 8, 8]])
    found = load(str(saved(tmp_path, x=ids, y=[0, 1], lengths=[3, 1])))
    assert found.x.tolist() == [[5, 6, 7], [5, 0, 0]]
    assert found.vocabulary == 8
    shifted = load(str(saved(tmp_path, x=[[0, 6, 7], [5, 0, 0]], y=[0, 1], lengths=[3, 2], vocabulary=9)))
    assert shifted.x.tolist() == [[1, 7, 8], [6, 1, 0]]
    assert shifted.vocabulary == 10
    assert any("raised by 1" in note for note in shifted.notes)


def test_what_is_not_read_is_noted(tmp_path: Path) -> None:
    found = load(str(saved(tmp_path, x=SIGNALS, y=Y, kind="signal", rate=50, owner=Y)))
    assert [("rate" in note, "owner" in note) for note in found.notes] == [(True, False)]


@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        ({"x": np.where(np.arange(60).reshape(6, 2, 5) == 33, np.nan, SIGNALS)}, ("x ", "NaN", "row 3")),
        ({"x": np.where(np.arange(60).reshape(6, 2, 5) == 33, 1e300, 0)}, ("x ", "1e+300", "row 3")),
        ({"x": (SIGNALS * 0 + 4000).astype(np.uint16)}, ("x ", "uint16", "4000", "bytes")),
        ({"x": IDS}, ("x ", "int64 (6, 3)", "kind", "tokens")),
        ({"x": IDS.astype(np.int64) - 1, "kind": "tokens"}, ("x ", "-1", "row 1")),
        ({"x": IDS, "vocabulary": 9}, ("0..8", "row 3")),
        ({"x": IDS, "lengths": [3, 1, 2, 0, 1, 2]}, ("lengths", "0", "row 3")),
        ({"x": IDS, "lengths": [3, 1, 2, 3, 1, 4]}, ("lengths", "4", "row 5")),
        ({"x": IDS, "lengths": [3, 1]}, ("lengths", "6 rows", "(2,)")),
        ({"x": IDS[:, ::-1], "kind": "tokens"}, ("row 1", "padding", "lengths")),
        ({"x": IDS * 0 + np.arange(6)[:, None], "kind": "tokens"}, ("row 0", "no token")),
        ({"x": SIGNALS, "kind": "sound"}, ("kind", "'sound'", "signal")),
        ({"x": SIGNALS, "kind": "table"}, ("x ", "(6, 2, 5)", "table")),
        ({"x": SIGNALS, "y": Y[:5]}, ("6 rows", "5 labels")),
        ({"x": SIGNALS, "y": Y / 2}, ("y ", "float64", "--label-kind numbers")),
        ({"x": SIGNALS, "y": None}, ("'y'",)),
        ({"x": SIGNALS, "classes": ["a"]}, ("y ", "0..0", "1", "row 1")),
        ({"x": SIGNALS, "y": list("abcabc"), "classes": ["a", "b"]}, ("y ", "'c'", "row 2", "a, b")),
        ({"x": SIGNALS, "client": Y / 2}, ("client", "float64")),
        ({"x": SIGNALS, "client": Y + 1, "clients": ["p", "q"]}, ("client", "0..1", "2", "row 1")),
        ({"x": SIGNALS, "clients": ["p", "q"]}, ("clients", "'client'")),
        ({"x": SIGNALS, "client": Y[:5]}, ("client", "(6,)", "(5,)")),
        ({"x": SIGNALS, "time": [0, 1, np.nan, 0, 1, 2]}, ("time", "row 2")),
        ({"x": SIGNALS, "span": [1.0, 2.0]}, ("span", "one number")),
        ({"x": SIGNALS, "split": ["train", "test", "dev", "val", "train", "test"]}, ("part", "'dev'", "row 2")),
        ({"x": SIGNALS, "vocabulary": 5}, ("vocabulary", "signals")),
        ({"x": SIGNALS.astype(complex)}, ("x ", "complex")),
        ({"x": SIGNALS[:0], "y": Y[:0]}, ("no signals",)),
        ({"x": np.zeros(6)}, ("x ", "(6,)")),
    ],
)
def test_wrong_arrays_name_file_and_row(tmp_path: Path, arrays: dict[str, Any], facts: tuple[str, ...]) -> None:
    given_arrays = {key: value for key, value in ({"y": Y} | arrays).items() if value is not None}
    file = saved(tmp_path, **given_arrays)
    with refused(DataError, file, *facts):
        load(str(file))


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("unpickled",))

    file = saved(tmp_path, x=SIGNALS, y=np.array([Trap()] * 6, object))
    with refused(DamagedDataError, file, "Object"):
        load(str(file))


NUMBERS = st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.float16, np.float32, np.float64, np.bool_])
OPTIONAL = ("classes", "client", "clients", "domain", "group", "time", "part", "lengths", "columns", "notes")


@st.composite
def any_arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Arrays that often, but not always, have as many rows as x."""
    rows = draw(st.integers(0, 4))
    rest = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
    shapes = st.one_of(rest.map(lambda shape: (rows, *shape)), st.just((rows,)), rest)
    found = {"x": draw(arrays_of.arrays(NUMBERS, rest.map(lambda shape: (rows, *shape))))}
    for name in ("y", *draw(st.lists(st.sampled_from(OPTIONAL), unique=True, max_size=4))):
        if draw(st.booleans()):  # small numbers: classes, ids and lengths
            small = arrays_of.arrays(np.int8, shapes, elements=st.integers(0, 3))
            found[name] = draw(small).astype(draw(NUMBERS))
        else:
            found[name] = draw(arrays_of.arrays(st.sampled_from([np.dtype("U2"), np.dtype("f8")]), shapes))
    for name, values in (("kind", KINDS), ("vocabulary", (0, 2, 9)), ("span", (1, 2.5)), ("official", (-1, 1))):
        if draw(st.booleans()):
            found[name] = np.array(draw(st.sampled_from(values)))
    return found


@settings(max_examples=200, deadline=None)
@given(any_arrays(), st.sampled_from(["auto", "classes", "labels", "numbers"]))
def test_any_file_is_a_data_set_or_a_sentence(arrays: dict[str, np.ndarray], label_kind: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = saved(Path(folder), **arrays)
        assert read_kind(file) in KINDS
        try:
            found = read_npz(file, label_kind=label_kind)
        except PluribusError as refusal:
            sentence = refusal.sentence
        else:
            assert len(found.y) == len(arrays["x"])
            return
        assert str(file) in sentence
        assert "\n" not in sentence


# ---- objects ---------------------------------------------------------------------------------------------------------


def test_three_dimensions_are_gray_images_unless_a_kind_says_otherwise() -> None:
    assert as_dataset((SIGNALS, Y)).kind == "image"
    found = as_dataset({"x": SIGNALS, "y": Y, "kind": "signal", "name": "steps", **HELD})
    assert (found.name, found.kind, found.input) == ("steps", "signal", Input("signal", (2, 5)))
    assert (found.clients, found.part.tolist()) == (("a", "b", "c"), [0, 2, 0, 1, 0, 2])
    tensors = {name: torch.from_numpy(value) for name, value in (("x", SIGNALS), ("y", Y), ("group", HELD["group"]))}
    assert torch.equal(as_dataset({**tensors, "kind": "signal"}).x, found.x)
    rows = TensorDataset(torch.from_numpy(SIGNALS), torch.from_numpy(Y))
    assert torch.equal(as_dataset({"x": rows, "kind": "signal"}).x, found.x)


def test_two_dimensions_are_a_table_or_tokens() -> None:
    assert as_dataset((TABLE, Y)).kind == as_dataset(TensorDataset(torch.from_numpy(TABLE), torch.tensor(Y))).kind
    assert as_dataset((TABLE, Y)).kind == "table"
    with refused(DataError, "x ", "(6, 3)", "kind"):
        as_dataset((IDS, Y))
    assert as_dataset({"x": IDS, "y": Y, "vocabulary": 10}).input == Input("tokens", (3,), 10)
    assert as_dataset({"x": IDS, "y": Y, "kind": "table"}).x[3].tolist() == [9.0, 9.0, 9.0]


def test_a_field_of_no_data_set_is_refused() -> None:
    with refused(UnknownNameError, "'clint'", "'client'"):
        as_dataset({"x": SIGNALS, "y": Y, "clint": Y})
    with refused(DataError, "'x'"):
        as_dataset({"y": Y})
    with refused(DataError, "client", "row 2", "None"):
        as_dataset({"x": SIGNALS, "y": Y, "client": ["a", "a", None, "b", "b", "b"]})
    with refused(DataError, "client", "row 1", "2"):
        as_dataset({"x": SIGNALS, "y": Y, "client": ["a", 2, "a", "b", "b", "b"]})


def test_names_are_classes() -> None:
    found = as_dataset((TABLE, ["b", "a", "b", "b", "c", "a"]))
    assert (found.classes, found.y.tolist()) == (("a", "b", "c"), [1, 0, 1, 1, 2, 0])


LABELS = np.array([[0, 1], [1, 1], [0, 0], [1, 0], [1, 1], [0, 1]])


def test_what_is_predicted() -> None:
    assert (as_dataset((TABLE, LABELS)).target, as_dataset((TABLE, LABELS)).y.tolist()) == ("labels", LABELS.tolist())
    one_hot = np.eye(3, dtype=int)[[0, 1, 2, 0, 1, 2]]
    with refused(DataError, "y ", "argmax", "--label-kind labels"):
        as_dataset((TABLE, one_hot))
    assert as_dataset((TABLE, one_hot), "labels").target == "labels"
    with refused(DataError, "y ", "(6, 1)", "y[:, 0]"):
        as_dataset((TABLE, Y[:, None]))
    with refused(DataError, "y ", "float64", "--label-kind numbers"):
        as_dataset((TABLE, Y + 0.5))
    numbers = as_dataset((TABLE, Y + 0.5), "numbers")
    assert (numbers.target, numbers.classes, numbers.y[:, 0].tolist()) == ("numbers", ("y",), (Y + 0.5).tolist())
    assert as_dataset((TABLE, Y), "numbers").y.dtype == torch.float32
    assert as_dataset((TABLE, Y.astype(float)), "classes").y.tolist() == Y.tolist()
    with refused(DataError, "y ", "row 1", "1.5"):
        as_dataset((TABLE, Y * 1.5), "classes")
    with refused(DataError, "y ", "row 0", "2"):
        as_dataset((TABLE, LABELS * 2), "labels")
    with refused(DataError, "y ", "row 4"):
        as_dataset((TABLE, [0.5, 1, 2, 3, float("inf"), 5]), "numbers")


def test_label_kind_of_a_run(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(40, 4)), RNG.normal(size=40)
    assert experiment("local", data=(x, y), label_kind="numbers").data.target == "numbers"
    assert experiment("local", data=(x, y), label_kind="numbers", models="mlp-64").data.kind == "table"
    file = saved(tmp_path, x=x, y=y)
    by_name = experiment("local", data=str(file), label_kind="numbers", models="mlp-64")
    assert load(by_name.data, reading=by_name.reading()).target == "numbers"
    own = experiment("local", data=lambda: (x, y), label_kind="numbers")
    assert load(own.data, reading=own.reading()).y[:, 0].tolist() == torch.from_numpy(y).float().tolist()
    with refused(MismatchError, "digits", "--label-kind numbers"):
        load("digits", reading=DEFAULT._replace(label_kind="numbers"))


def test_a_data_frame_is_a_table_with_names_and_categories() -> None:
    frame = pd.DataFrame(
        {"city": ["x", "y", "x", "z", "x", "y"], "age": [1, 2, 3, 4, 5, 6], "tall": [True, False] * 3, "w": TABLE[:, 0]}
    )
    found = as_dataset((frame, pd.Series(["no", "yes"] * 3)))
    assert found.columns == ("age", "tall", "w", "city")
    assert found.categories == (("x", "y", "z"),)
    assert found.x[3].tolist() == [4.0, 0.0, float(TABLE[3, 0]), 2.0]
    assert (found.classes, found.input) == (("no", "yes"), Input("table", (4,), categories=(3,)))
    typed = as_dataset((frame.astype({"city": "category", "age": "Int64"}), frame[["age", "w"]]), "numbers")
    assert torch.equal(typed.x, found.x)
    assert typed.classes == ("age", "w")
    for column, value in (("age", None), ("city", None), ("w", float("nan"))):
        broken = frame.astype({"age": "Int64"})
        broken.loc[2, column] = value
        with refused(DataError, f"'{column}'", "row 2"):
            as_dataset((broken, Y))
    with refused(DataError, "'when'", "datetime64"):
        as_dataset((frame.assign(when=pd.Timestamp("2024-01-01")), Y))


def test_rows_to_evaluate_on() -> None:
    names = ("still", "moving")
    rows, labels = take_rows(SIGNALS.astype(np.float64), ["moving"] * 6, names, Input("signal", (2, 5)))
    assert torch.equal(rows, torch.from_numpy(SIGNALS))
    assert labels.tolist() == [1] * 6
    rows, _ = take_rows(IDS, Y, names, Input("tokens", (5,), 10))
    assert (rows.shape, rows[3].tolist()) == ((6, 5), [9, 9, 9, 0, 0])
    _, numbers = take_rows(TABLE, Y + 0.5, ("y",), Input("table", (4,)), "numbers")
    assert numbers[:, 0].tolist() == (Y + 0.5).tolist()
    _, several = take_rows(TABLE, LABELS, names, Input("table", (4,)), "labels")
    assert several.dtype == torch.uint8
    with refused(DataError, "2 columns", "has 1"):
        take_rows(TABLE, Y, names, Input("table", (4,)), "labels")


# ---- images ----------------------------------------------------------------------------------------------------------


def test_deep_and_rotated_images_have_the_right_values(tmp_path: Path) -> None:
    """16 bits are scaled to 8, and a photo is turned as its EXIF data say."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    Image.fromarray(np.full((4, 4), 32768, np.uint16)).save(tmp_path / "a" / "deep.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((4, 4), np.uint8)
    pixels[0, 0] = 200  # the top left corner, which a turn to the right brings to the top right
    Image.fromarray(pixels).save(tmp_path / "b" / "turned.png", exif=exif)
    found = load(str(tmp_path), image_size=4)
    assert found.x[0].unique().tolist() == [128]
    assert (found.x[1, 0] == 200).nonzero().tolist() == [[0, 3]]
    assert len(found.notes) == 2


# ---- natural clients -------------------------------------------------------------------------------------------------


def test_folders_of_clients_are_natural_clients(tmp_path: Path) -> None:
    for client in ("anna", "ben", "cleo"):
        for name in ("cat", "dog"):
            folder = tmp_path / client / name
            folder.mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / f"{number}.png")
    settings = {"data": str(tmp_path), "image_size": 8, "models": "mlp-64", "device": "cpu"}
    parts = assemble(experiment("local", partition="natural", **settings))
    assert [part.tolist() for part in parts.data.parts] == [list(range(10 * k, 10 * k + 10)) for k in range(3)]
    assert sum("domains" in note and "clients" in note for note in parts.warnings) == 1
    assert parts.task.exams == {}
    assert all(set(parts.data.rows(k)["test"].tolist()) <= set(range(10 * k, 10 * k + 10)) for k in range(3))


# ---- check -----------------------------------------------------------------------------------------------------------


def test_a_check_of_every_kind(tmp_path: Path) -> None:
    found = pluribus.check_data(saved(tmp_path, x=SIGNALS, y=Y, **HELD))
    assert (found.images, found.shapes, found.modes) == (6, {"2 x 5": 6}, {"float32": 6})
    facts = found.facts
    assert (facts["kind"], facts["clients"], facts["groups"]) == ("signal", {"a": 2, "b": 2, "c": 2}, 3)
    assert (facts["time"], facts["span"]) == ([0.0, 1.0], 1.5)
    assert {place.split for place in found.counts} == {"train", "val", "test"}
    tokens = pluribus.check_data(saved(tmp_path, x=IDS, y=Y, vocabulary=10)).facts
    assert (tokens["vocabulary"], tokens["tokens"]) == (10, [1, 3])
    labels = pluribus.check_data(saved(tmp_path, x=TABLE, y=LABELS, columns=list("abcd")))
    assert ([*labels.counts.values()], labels.facts["columns"]) == ([3, 4], [*"abcd"])
    assert pluribus.check_data("digits").facts == {
        "kind": "image",
        "shape": [1, 8, 8],
        "dtype": "uint8",
        "target": "classes",
    }


def test_a_check_prints_numbers_and_clients(terminal: Any) -> None:
    out = terminal("data", "check", "diabetes").out
    assert "442 rows" in out
    assert "progression: 0.25 to 3.46, mean 1.52" in out
    out = terminal("data", "check", "watch").out
    assert "1833 signals" in out
    assert "10, with 116 to 220 rows each" in out


def test_a_run_on_a_dict(tmp_path: Path) -> None:
    """A model of the user's own, so that this needs no group of models."""
    x = RNG.normal(size=(80, 2, 5)).astype(np.float32) + (np.arange(80) % 2)[:, None, None]
    data = {"x": x, "y": np.arange(80) % 2, "kind": "signal", "client": np.repeat(["p", "q"], 40)}
    body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(10, 4))
    settings = tiny(data=data, partition="natural", models=[body], split="none", rounds=1)
    settings.pop("clients")
    result = pluribus.run("local", **settings, progress=False)
    assert len(result.clients) == 2
