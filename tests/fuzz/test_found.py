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
import test_fuzz_sites as sites
from guard import survives
from test_fuzz_configs import FEDERATION, SITE, SUPERLINK
from test_fuzz_folders import forge, honest, layout_of
from test_fuzz_images import VALID
from test_fuzz_studies import summaries

import pluribus
from conftest import few_digits
from pluribus.data.columns import read_columns
from pluribus.data.datasets import is_code, load
from pluribus.data.images import decode
from pluribus.data.npz import read_npz
from pluribus.data.partitions import OwnPartition, partition, take_partition
from pluribus.data.reading import Reading, parse_columns
from pluribus.errors import (
    DamagedDataError,
    DamagedFileError,
    DataError,
    FileAccessError,
    FormatError,
    MismatchError,
    PartitionError,
    PluribusError,
    RangeError,
)
from pluribus.experiment import Experiment, from_toml
from pluribus.optim import parse_steps
from pluribus.privacy.terms import Terms
from pluribus.report import write_report
from pluribus.sites.config import SiteFile, read_site
from pluribus.sites.federate import Absences
from pluribus.sites.flower.address import parse_address
from pluribus.sites.flower.link import read_nodes, read_seen
from pluribus.sites.join import _address
from pluribus.sites.norms import LearnedNorms
from pluribus.sites.serve import _read_agreement, read_federation
from pluribus.storage.files import read_json, read_lines
from pluribus.storage.folder import RunFolder
from pluribus.storage.history import read_summary
from pluribus.storage.model_file import read_model
from pluribus.storage.toml import read_toml, to_toml
from pluribus.study.reproduce import summary
from pluribus.study.search import read_trials
from pluribus.study.space import parse_space
from pluribus.track.tracker import identity


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


@pytest.mark.parametrize("key", ["9" * 5000, "x", "-1"])
def test_models_of_clients_that_are_no_number(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml({"models": {key: "mlp-64"}}))
    check(survives(lambda: from_toml(path), tmp_path), FormatError, "[models]")


@pytest.mark.parametrize("steps", ["9" * 5000, [10**400]])
def test_rounds_of_thousands_of_digits(tmp_path: Path, steps: Any) -> None:
    check(survives(lambda: parse_steps(steps), tmp_path), FormatError, "--lr-steps")


@pytest.mark.parametrize("augment", [3, 0.5, True])
def test_augmentations_that_are_no_text(tmp_path: Path, augment: Any) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(to_toml(FEDERATION | {"augment": augment}))
    check(survives(lambda: read_federation(path, "fedgh"), tmp_path), FormatError, "--augment")


def test_the_number_of_a_node_with_thousands_of_digits(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(to_toml(SUPERLINK | {"nodes": {"north": "9" * 5000}}))
    check(survives(lambda: read_federation(path, "fedgh"), tmp_path), FormatError, "nodes", "north")


@pytest.mark.parametrize("port", ["9" * 5000, "65536"])
def test_a_port_that_no_machine_has(tmp_path: Path, port: str) -> None:
    check(survives(lambda: parse_address("--listen", f"localhost:{port}"), tmp_path), FormatError, "--listen")
    site = SiteFile("n", f"localhost:{port}", Path("k"), "mlp-64", Path("s"))
    check(survives(lambda: _address(site), tmp_path), FormatError, "server")


def test_data_of_a_site_at_what_can_be_no_path(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(to_toml(SITE | {"data": "x" * 5000}))
    check(survives(lambda: read_site(path), tmp_path), FileAccessError, path, "x" * 20)


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
@pytest.mark.parametrize(
    "use",
    [
        pluribus.resume,
        pluribus.load_result,
        pluribus.load_model,
        lambda path: pluribus.run("local", out=path),
        lambda path: pluribus.compare(["local"], out=path),
        lambda path: write_report(honest(), path, embeddings="none"),
    ],
    ids=["resume", "load_result", "load_model", "run", "compare", "report"],
)
def test_folders_at_what_can_be_no_path(tmp_path: Path, use: Any, path: str) -> None:
    honest()  # made once, before the guard forbids other folders
    check(survives(lambda: use(path), tmp_path), FileAccessError)


@pytest.mark.parametrize(
    "space", ["lr=1:inf", "lr=-1e308:1e308", "batch_size=1:inf", "batch_size=0.1:0.2:log", "batch_size=1:1e30"]
)
def test_a_space_that_cannot_be_searched(tmp_path: Path, space: str) -> None:
    how: dict[str, Any] = {"data": few_digits(40, 3), "clients": 2, "models": "mlp-64", "trials": 1}
    name = space.partition("=")[0]
    check(survives(lambda: pluribus.tune("local", space=space, **how), tmp_path), FormatError, "--space", name)


@pytest.mark.parametrize(
    "settings",
    [
        {"dp_noise": 1e-300},
        {"dp_noise": 1e300},
        {"dp_clip": float("inf")},
        {"dp_clip": 1e300},
        {"dp_sums_clip": float("inf")},
    ],
    ids=str,
)
def test_terms_of_privacy_that_cannot_be_computed(tmp_path: Path, settings: dict[str, float]) -> None:
    (name,), (value,) = settings, settings.values()
    found = survives(lambda: Experiment(dp_epsilon=1.0, **settings), tmp_path)
    check(found, RangeError, f"--{name.replace('_', '-')}")
    assert Terms(1.0, **{name.removeprefix("dp_"): value}).problem(), "a server cannot send it either"


# Partitions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint64", "int32"])
def test_client_numbers_of_any_type(dtype: str) -> None:
    taken = take_partition(np.array([0, 1, 0, 1], dtype))
    assert isinstance(taken, OwnPartition)
    assert taken.clients == 2
    found = partition(taken, np.zeros(4), 2, np.random.default_rng(0))
    assert [part.tolist() for part in found] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("given", [[[[], 1], [2]], [[0], [2**64]], [[0.5], [1]], [["a"], [1]], [[0], 5]], ids=str)
def test_rows_that_are_no_numbers(tmp_path: Path, given: Any) -> None:
    check(survives(lambda: take_partition(given), tmp_path), FormatError, "--partition")


def test_a_client_number_that_no_row_can_have(tmp_path: Path) -> None:
    check(survives(lambda: take_partition([0, 2**62]), tmp_path), PartitionError, 2**62)
    taken = take_partition(lambda labels, clients, rng: np.array([0, -5, 1]))
    divide = partial(partition, taken, np.zeros(3), 2, np.random.default_rng(0))
    check(survives(divide, tmp_path), PartitionError, -5)


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
        ("metrics.jsonl", [RECORD | {"privacy": {}}]),
        ("metrics.jsonl", [RECORD | {"privacy": {"epsilon": {"0": "x"}, "used_up": []}}]),
        ("metrics.jsonl", [RECORD | {"attackers": 5}]),
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


@pytest.mark.parametrize("selected", [None, {}, {"test": {}}, {"val": {"mean": 0.5}}, {"test": {"mean": "x"}}], ids=str)
def test_summaries_that_no_run_writes(tmp_path: Path, selected: Any) -> None:
    """An empty one is right: nobody was evaluated."""
    run = tmp_path / "run"
    shutil.copytree(honest(), run)
    saved = read_json(run / "result.json")
    saved["summary"]["after"]["selected"] = selected
    (run / "result.json").write_text(json.dumps(saved))
    found = survives(lambda: read_summary(run / "result.json"), tmp_path)
    assert found == saved if selected == {} else isinstance(found, DamagedFileError)


# State of sites, of servers and of searches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saved", [[], {"0 means": 5}, {"0 means": {"0": {}}}, {"0 means": {"0": {"0": None}}}], ids=str
)
def test_norms_that_no_server_wrote(tmp_path: Path, saved: Any) -> None:
    file = tmp_path / "norms.json"
    file.write_text(json.dumps(saved))
    check(survives(lambda: LearnedNorms(file, 0).check(9, 0, 0, {"means": 1.0}), tmp_path), DamagedFileError, file)


@pytest.mark.parametrize("read", [read_seen, read_nodes, lambda file: identity(file.parent, "wandb", str)])
@pytest.mark.parametrize("saved", [[], 5, {"north": 5}, {"north": {"key": "k"}}, {"wandb": ["x"]}], ids=str)
def test_small_tables_that_nobody_wrote(tmp_path: Path, read: Any, saved: Any) -> None:
    file = tmp_path / "trackers.json"
    file.write_text(json.dumps(saved))
    check(survives(lambda: read(file), tmp_path), DamagedFileError, file)


def test_a_note_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "missing.jsonl"
    file.write_text('"a"\n5\n')
    check(survives(lambda: Absences(file), tmp_path), DamagedFileError, file, "line 2")


@pytest.mark.parametrize("fact", [{"own": ""}, {"public": ""}, {"samples": "x"}, {"model": 5}, {"test": -1}], ids=str)
def test_facts_that_no_site_sent(tmp_path: Path, fact: dict[str, Any]) -> None:
    one, server = sites.honest("fedgh"), tmp_path / "server"
    shutil.copytree(one.folder / "server", server)
    path = server / "link" / "agreement.json"
    saved = read_json(path)
    saved["facts"]["1"] |= fact
    path.write_text(json.dumps(saved))
    check(survives(lambda: _read_agreement(path, one.file, one.described), tmp_path), DamagedFileError, path)
    del saved["facts"]["1"]
    path.write_text(json.dumps(saved))
    check(survives(lambda: _read_agreement(path, one.file, one.described), tmp_path), DamagedFileError, path)


def site_with(tmp_path: Path, facts: dict[str, Any], agreement: dict[str, Any]) -> Path:
    """The state of a site whose newest file has other facts."""
    name = sites.states("fedgh")[1]
    found, tensors = sites.layout_of("fedgh", name)
    known = found["__metadata__"]
    agreed = json.dumps(json.loads(known["agreement"]) | agreement)
    texts = known | {"agreement": agreed} | {key: json.dumps(value) for key, value in facts.items()}
    sites.copy_site(tmp_path, "fedgh", name, forge(found | {"__metadata__": texts}, tensors))
    return tmp_path / "0" / name


@pytest.mark.parametrize("step", [[[], 0], [0], ["0", 0], 5])
def test_a_step_that_no_site_saved(tmp_path: Path, step: Any) -> None:
    path = site_with(tmp_path, {"step": step}, {})
    one = sites.honest("fedgh")
    responder = sites.site_of(one.parts, 0, tmp_path)
    check(survives(lambda: responder.answer(one.requests["work"]), tmp_path), DamagedFileError, path)


@pytest.mark.parametrize(
    ("facts", "agreement", "kind"),
    [
        ({}, {"width": 10**6, "projector": "linear", "input": {"kind": "image", "shape": [1, 2**15, 2**15]}}, "large"),
        ({}, {"public": [2**60]}, "empty"),
        ({"rows": {"type": "uint8", "scale": {"mean": ["x"], "factor": 1.0}}}, {}, "numbers"),
        ({"rows": {"type": "uint8", "scale": {"mean": [], "factor": 1.0}}}, {}, "numbers"),
        ({"rows": {"type": "uint8", "scale": {"mean": 0.0, "factor": [[[[1.0]]]]}}}, {}, "numbers"),
    ],
)
def test_a_site_that_claims_too_much(tmp_path: Path, facts: Any, agreement: Any, kind: str) -> None:
    """Public rows take no memory: their number alone is needed."""
    site_with(tmp_path, facts, agreement)
    found = survives(lambda: pluribus.predict(tmp_path / "0", sites.ROWS, round="last"), tmp_path)
    if kind == "empty":
        assert len(found) == 1
    else:
        check(found, DamagedFileError, tmp_path)


TRIAL: dict[str, Any] = {"trial": 0, "settings": {"lr": 0.05}, "score": 0.5}
NEXT = TRIAL | {"trial": 1}


@pytest.mark.parametrize(
    "line",
    [
        5,
        {},
        TRIAL | {"score": None},
        TRIAL | {"score": "x"},
        TRIAL | {"settings": {}},
        TRIAL | {"settings": {"lr": "x"}},
        TRIAL | {"settings": {"lr": 5.0}},
        TRIAL | {"settings": {"lr": 0.05, "out": "/"}},
        TRIAL,
        NEXT | {"state": "RUNNING"},
        NEXT | {"scores": {"1": 0.5}},
        NEXT | {"scores": {"0": None}},
        NEXT | {"values": {"-1": 0.5}},
        NEXT | {"rounds": -1},
    ],
    ids=str,
)
def test_trials_of_no_search(tmp_path: Path, line: Any) -> None:
    path, space = tmp_path / "trials.jsonl", parse_space("lr=0.01:0.1")
    path.write_text(f"{json.dumps(TRIAL)}\n{json.dumps(line)}\n")
    found = survives(lambda: read_trials(path, Experiment("local"), space, [0]), tmp_path)
    check(found, DamagedFileError, path, "line 2")


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", []), ("summary", None), ("clients", {"0": 5}), ("reached", 5), ("bytes", None), ("seconds", "x")],
)
def test_summaries_of_no_table(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "table.json"
    saved = read_json(summaries())
    saved["groups"][0]["runs"][0][name] = value
    path.write_text(json.dumps(saved))
    check(survives(lambda: summary.read(path), tmp_path), DamagedFileError, path, name)


@pytest.mark.parametrize("node", [2**64 - 1, str(2**64 - 1)])
def test_node_ids_as_flower_prints_them(node: Any, tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text(json.dumps({"north": {"key": "k", "node": node}}))
    assert read_nodes(tmp_path / "nodes.json")["north"]["node"] == node
