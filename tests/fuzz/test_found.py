"""The smallest cases of what fuzzing has found. Each is refused with a sentence; before, it was an error of Python."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from guard import survives
from test_fuzz_configs import FEDERATION
from test_fuzz_folders import forge, honest, layout_of
from test_fuzz_images import VALID

import pluribus
from pluribus.data.columns import read_columns
from pluribus.data.datasets import is_code, load
from pluribus.data.images import decode
from pluribus.data.npz import read_npz
from pluribus.data.reading import Reading, parse_columns
from pluribus.errors import (
    DamagedDataError,
    DamagedFileError,
    DataError,
    FileAccessError,
    FormatError,
    MismatchError,
    PluribusError,
    RangeError,
)
from pluribus.experiment import Experiment, from_toml
from pluribus.report import write_report
from pluribus.sites.serve import _read_agreement, read_federation
from pluribus.storage.files import read_json, read_lines
from pluribus.storage.folder import RunFolder
from pluribus.storage.model_file import read_model
from pluribus.storage.toml import read_toml, to_toml


def check(found: Any, kind: type[PluribusError], *facts: object) -> None:
    assert type(found) is kind, repr(found)
    for fact in facts:
        assert str(fact) in found.sentence


# Data -----------------------------------------------------------------------------------------------------------------


def npz_with(path: Path, name: str, content: bytes) -> Path:
    arrays = {
        "x_train": np.zeros((2, 8, 8), np.uint8),
        "y_train": np.array([0, 1]),
        "x_test": np.zeros((0, 8, 8), np.uint8),
    }
    arrays |= {"y_test": np.array([], np.int64), "classes": np.array(["a", "b"])}
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in arrays.items():
            data = io.BytesIO()
            np.save(data, array)
            archive.writestr(f"{key}.npy", content if key == name else data.getvalue())
    return path


def header(dtype: str, shape: tuple[int, ...]) -> bytes:
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"no array",
        header("|u1", (2**60, 8, 8)),
        header("<f4", (2**31,)),
        header("|u1", (-1, -8, 8)),
        header("|O", (2,)),
        b"",
    ],
)
@pytest.mark.parametrize("name", ["x_train", "classes"])
def test_an_array_that_is_none_or_claims_too_much(tmp_path: Path, name: str, content: bytes) -> None:
    file = npz_with(tmp_path / "data.npz", name, content)
    check(survives(lambda: read_npz(file), tmp_path), DamagedDataError, file)


def test_a_png_that_claims_two_gigabytes_of_pixels(tmp_path: Path) -> None:
    """Its pixels are all there, so it may be read. But no memory may be taken for the others."""
    file, data = tmp_path / "one.png", bytearray(VALID[0])
    data[33:37] = (2**31 - 1).to_bytes(4, "big")
    file.write_bytes(data)
    pixels, _ = survives(lambda: decode(file, (3, 8, 8)), tmp_path)
    assert pixels.shape == (3, 8, 8)


@pytest.mark.parametrize("cell", [None, 5, True, ["2024"]])
def test_a_time_that_is_no_text(tmp_path: Path, cell: Any) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"label": "x", "a": 1, "time": "2024-05-31"}, {"label": "y", "a": 2, "time": cell}]
    file.write_text("\n".join(map(json.dumps, rows)))
    reading = Reading(columns=parse_columns("time=time"))
    check(survives(lambda: read_columns(file, reading=reading), tmp_path), DataError, "time", "line 2")


def test_a_column_with_numbers_and_booleans(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("label,a\nx,1.5\ny,False\n")
    check(survives(lambda: read_columns(file, reading=Reading()), tmp_path), DataError, "'a'", "true and false")


def test_a_parquet_file_of_damaged_types(tmp_path: Path) -> None:
    """Every flip of one bit. Some describe integers of 65 bits and more."""
    content = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"label": ["x", "y"], "a": [1, 2]}), content)
    file, data = tmp_path / "rows.parquet", content.getvalue()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in range(footer, len(data), 3):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
        survives(lambda: read_columns(file, reading=Reading()), tmp_path)


@pytest.mark.parametrize(("name", "value"), [("length", 2**31), ("vocabulary", 10**30), ("window", 10**30)])
def test_settings_that_no_memory_holds(tmp_path: Path, name: str, value: int) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("label,text\nx,one\ny,two\n" if name != "window" else "label,a\nx,1\ny,2\n")
    reading = Reading()._replace(**{name: value})
    check(survives(lambda: read_columns(file, reading=reading), tmp_path), RangeError, f"--{name}", value)


@pytest.mark.parametrize("columns", [[], 5, None, {"label": 5}])
def test_columns_that_are_no_table(tmp_path: Path, columns: Any) -> None:
    check(survives(lambda: parse_columns(columns), tmp_path), FormatError, "--columns")


@pytest.mark.parametrize("path", ["x" * 300, "~nobody-of-this-name/x", "a\0b"])
@pytest.mark.parametrize("read", [load, is_code], ids=["load", "is_code"])
def test_data_at_what_can_be_no_path(tmp_path: Path, path: str, read: Any) -> None:
    check(survives(lambda: read(path), tmp_path), FileAccessError, path[:50].partition("\0")[0])


# Config files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "\ud800"])
def test_toml_that_python_cannot_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    check(survives(lambda: read_toml(path), tmp_path), DamagedFileError, path)
    check(survives(lambda: read_toml(Path("a\0b")), tmp_path), DamagedFileError)


@pytest.mark.parametrize(
    ("name", "value"), [("classes", [1, 2]), ("sites", [1, 2]), ("sites", [["a"], "b"]), ("image", [1, 8.0, 8])]
)
def test_a_list_of_the_wrong_type(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(to_toml(FEDERATION | {name: value}))
    check(survives(lambda: read_federation(path, "fedgh"), tmp_path), FormatError, name)


@pytest.mark.parametrize("saved", [{}, [], {"facts": {"x": {}}}, {"facts": {}, "sites": [], "agreement": 3}], ids=str)
def test_an_agreement_that_no_server_wrote(tmp_path: Path, saved: Any) -> None:
    config, agreed = tmp_path / "federation.toml", tmp_path / "agreement.json"
    config.write_text(to_toml(FEDERATION))
    agreed.write_text(json.dumps(saved))
    read = partial(_read_agreement, agreed, *read_federation(config, "fedgh"))
    check(survives(read, tmp_path), DamagedFileError, agreed)


def test_a_whole_number_that_no_float_holds(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"lr = {10**400}")
    check(survives(lambda: from_toml(path), tmp_path), RangeError, "--lr")


def test_a_number_of_threads_that_torch_cannot_take(tmp_path: Path) -> None:
    check(survives(lambda: Experiment(threads=2**31), tmp_path), RangeError, "--threads", 2**31)


def test_a_page_without_a_name(tmp_path: Path) -> None:
    run = honest()
    check(survives(lambda: write_report(run, "", embeddings="none"), tmp_path), FileAccessError)


def test_rows_at_what_can_be_no_path(tmp_path: Path) -> None:
    run = honest()
    check(survives(lambda: pluribus.predict(run, ["x" * 300], client=0), tmp_path), FileAccessError, "x" * 50)


# Run folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [read_json, lambda path: read_lines(path) or read_json(path)])
def test_json_that_is_too_deep(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "one.json"
    path.write_text("[" * 100_000)
    check(survives(lambda: read(path), tmp_path), DamagedFileError, path)


RECORD = {"round": 0, "seconds": 1.0, "clients": {"0": {"after": {"val": 0.5, "test": 0.5}}}}
TRANSFER = {"round": 0, "exchange": 0, "client": 0, "direction": "up", "layout": 0}


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        *(("metrics.jsonl", [RECORD | {name: []}]) for name in RECORD),
        ("metrics.jsonl", [{name: value for name, value in RECORD.items() if name != "seconds"}]),
        ("metrics.jsonl", [RECORD | {"clients": {"0": {"after": {"test": 0.5}}}}]),
        ("metrics.jsonl", [RECORD | {"clients": {"x": {}}}]),
        ("metrics.jsonl", [RECORD, RECORD | {"round": 1, "clients": {"0": {"after": {"val": 0.5}}}}]),
        ("metrics.jsonl", [RECORD | {"seconds": float("nan")}]),
        ("metrics.jsonl", [5]),
        ("traffic.jsonl", [TRANSFER]),
        ("traffic.jsonl", [{"layout": 0, "tensors": {"a": -1}}]),
        ("traffic.jsonl", [{"layout": 0, "tensors": {"a": 1}}, TRANSFER | {"direction": "sideways"}]),
        ("traffic.jsonl", [{"layout": 0, "tensors": {"a": 1}}, TRANSFER | {"": 1}]),
    ],
)
def test_lines_that_no_run_writes(tmp_path: Path, name: str, lines: list[Any]) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest(), run)
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    number = len(lines)
    for read in (pluribus.load_result, lambda path: RunFolder.open(path, read_only=True).history(1)):
        check(survives(lambda read=read: read(run), tmp_path), DamagedFileError, run / name, f"line {number}")


@pytest.mark.parametrize(
    ("name", "value"),
    [("warmup", "x"), ("seed", None), ("warnings", 5), ("clients", {"0": 5}), ("summary", {}), ("classes", 5)],
)
def test_results_that_no_run_writes(tmp_path: Path, name: str, value: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest(), run)
    saved = read_json(run / "result.json") | {name: value}
    (run / "result.json").write_text(json.dumps(saved))
    check(survives(lambda: pluribus.load_result(run), tmp_path), DamagedFileError, run / "result.json", name)


@pytest.mark.parametrize(("name", "text"), [("started.json", "5"), ("config.toml", "hyper = 5")])
def test_settings_that_are_no_table(tmp_path: Path, name: str, text: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest(), run)
    (run / name).write_text(text)
    check(survives(lambda: pluribus.load_result(run), tmp_path), DamagedFileError, run / name)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"width": 2**60}, DamagedFileError),
        ({"width": 2**31}, MismatchError),
        ({"classes": 2**40}, MismatchError),
        ({"classes": -1}, DamagedFileError),
        ({"input": {"kind": "image", "shape": [2**24, 1, 1]}}, MismatchError),
        ({"prompting": 5}, DamagedFileError),
        ({"prompting": {}}, DamagedFileError),
        ({"model": 5}, DamagedFileError),
        ({"names": 5}, DamagedFileError),
    ],
)
def test_model_files_with_wrong_facts(tmp_path: Path, facts: dict[str, Any], kind: type[PluribusError]) -> None:
    written, tensors = layout_of("")
    known = written["__metadata__"] | {name: json.dumps(value) for name, value in facts.items()}
    path = tmp_path / "model.safetensors"
    path.write_bytes(forge(written | {"__metadata__": known}, tensors))
    check(survives(lambda: read_model(path), tmp_path), kind, path)
