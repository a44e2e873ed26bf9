"""A run folder on disk: its TOML, its lines of JSON, and disks that are full or cannot be written to."""

from __future__ import annotations

import json
import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pluribus
from conftest import few_digits, new_folder, run_tiny
from pluribus.errors import DamagedFileError, FileAccessError
from pluribus.internal.ledger import Ledger
from pluribus.storage import folder
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.files import append_lines, read_lines, to_json, write_json
from pluribus.storage.folder import RunFolder
from pluribus.storage.toml import read_toml, to_toml
from processes import start
from refusals import Kind, assert_facts, refused

# ---- TOML ----------------------------------------------------------------------------------------------------------

plain = st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False)
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), nested))
@example({"text": "\"quoted\" 'twice' \\ \n\r\t\x00\x7f\x85\u2028 é 字 🜁"})
@example({"numbers": [1e-05, 1e16, -0.0, 5e-324, math.inf, -math.inf, 0, -1], "yes": [True, False]})
@example({"models": {"0": "mlp-64", "10": "cnn-16"}, "hyper": {"é": 1, "a b": 2, "": 3, "deep": {"er": [{"x": 1}]}}})
def test_settings_come_back_from_toml_as_they_were(settings: dict[str, Any]) -> None:
    again = tomllib.loads(to_toml(settings))
    assert exact(again) == exact(without_empty_tables(settings))


def exact(value: Any) -> str:
    """A value with its types and signs, but for the order of names: TOML has to write tables last."""
    match value:
        case dict():
            return "{" + ", ".join(sorted(f"{name!r}: {exact(item)}" for name, item in value.items())) + "}"
        case list():
            return "[" + ", ".join(map(exact, value)) + "]"
    return repr(value)


def without_empty_tables(table: dict[str, Any]) -> dict[str, Any]:
    """Lists keep theirs."""
    kept = {name: value for name, value in table.items() if value != {}}
    return {name: without_empty_tables(value) if isinstance(value, dict) else value for name, value in kept.items()}


def test_none_is_left_out_and_nan_stays() -> None:
    text = to_toml({"alpha": None, "hyper": {"beta": None, "gamma": math.nan}})
    assert text == "[hyper]\ngamma = nan\n"
    assert math.isnan(tomllib.loads(text)["hyper"]["gamma"])


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        (b"rounds = ", DamagedFileError, "Invalid value"),
        (b"data = 'caf\xe9'", DamagedFileError, "'utf-8' codec"),
        (None, FileAccessError, "No such file"),
    ],
)
def test_unreadable_toml_is_a_sentence(tmp_path: Path, content: bytes | None, kind: Kind, reason: str) -> None:
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_bytes(content)
    with refused(kind, path, reason):
        read_toml(path)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_get_its_name_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "result.json").mkdir()
    with refused(FileAccessError, tmp_path / "result.json", "Is a directory"):
        write_json(tmp_path / "result.json", {})
    with refused(FileAccessError, tmp_path / "result.json", "Is a directory"):
        append_lines(tmp_path / "result.json", [{}])
    with refused(FileAccessError, Path(few_digits()) / "result.json", "Not a directory"):
        write_json(Path(few_digits()) / "result.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


# ---- lines of JSON -------------------------------------------------------------------------------------------------


def test_json_has_null_where_a_number_is_not_finite() -> None:
    value = {"loss": math.nan, "all": [1.5, -math.inf, (math.inf, 2)], "text": "NaN", "none": None}
    assert to_json(value) == '{"loss": null, "all": [1.5, null, [null, 2]], "text": "NaN", "none": null}'


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    lines = [{"round": t, "name": "é\u2028", "loss": 0.1 * t} for t in range(3)]
    whole = "".join(to_json(line) + "\n" for line in lines).encode()
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert read_lines(path) == lines[: (whole[:cut] + b"\n").count(b"}\n")]
        path.write_bytes(whole[:cut] + b"\x00\xff\xfe")
        assert read_lines(path) == lines[: whole[:cut].count(b"}\n")]


@pytest.fixture(scope="module")
def lines() -> dict[str, list[dict[str, Any]]]:
    """What four real rounds write down; a client that joins late brings a layout in the middle."""
    folder = run_tiny("fedgh", rounds=4, participation=0.5).folder
    return {name: read_lines(folder / name) for name in ("metrics.jsonl", "traffic.jsonl")}


@pytest.mark.parametrize("until", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("torn", ["", '{"round": 4, "seco'])
def test_history_ends_with_the_committed_round(
    tmp_path: Path, lines: dict[str, list[dict[str, Any]]], until: int | None, torn: str
) -> None:
    assert [line["round"] for line in lines["metrics.jsonl"]] == [0, 1, 2, 3]
    assert any("tensors" in line for line in lines["traffic.jsonl"][1:])
    for name, values in lines.items():
        (tmp_path / name).write_text("".join(json.dumps(value) + "\n" for value in values) + torn)
    folder = RunFolder(tmp_path)
    metrics, traffic = folder.history(until)
    folder.close()
    last = -1 if until is None else until
    assert metrics == [line for line in lines["metrics.jsonl"] if line["round"] <= last]
    assert traffic == lines["traffic.jsonl"][: len(traffic)]
    transfers = [line for line in lines["traffic.jsonl"] if "tensors" not in line and line["round"] <= last]
    assert [line for line in traffic if "tensors" not in line] == transfers
    used = {line["layout"] for line in transfers}
    assert {line["layout"] for line in traffic if "tensors" in line} == used
    assert read_lines(tmp_path / "metrics.jsonl") == metrics
    assert read_lines(tmp_path / "traffic.jsonl") == traffic
    ledger = Ledger()
    for line in traffic:
        ledger.replay(line)
    assert ledger.total == {way: sum(line["bytes"][way] for line in metrics) for way in ("up", "down", "evaluation")}


def test_a_history_with_a_gap_is_refused() -> None:
    folder = run_tiny("local", rounds=4).folder
    (folder / "result.json").unlink()
    metrics = folder / "metrics.jsonl"
    rounds = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(rounds[0] + "?\n" + "".join(rounds[2:]))
    with refused(DamagedFileError, metrics, "1 of 4 rounds", f"pluribus run --config {folder / 'config.toml'}"):
        pluribus.resume(folder, progress=False)


# ---- folders -------------------------------------------------------------------------------------------------------


def test_a_run_without_a_name_gets_a_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened = [RunFolder.create(str(folder.new_folder("fedgh-digits-0"))) for _ in range(3)]
    names = [one.path.name for one in opened]
    assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]
    assert names[0].endswith("-fedgh-digits-0")
    assert all(one.path.parent == Path("runs") for one in opened)
    for one in opened:
        one.close()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with refused(FileAccessError, tmp_path, "config.toml"):
        pluribus.resume(tmp_path)


def test_a_damaged_partition_is_named() -> None:
    result = run_tiny("local")
    (result.folder / "result.json").unlink()  # a finished run is read, not resumed
    for content in (b"{}", b"\xff", b"[1"):
        (result.folder / "partition.json").write_bytes(content)
        with refused(DamagedFileError, result.folder / "partition.json"):
            pluribus.resume(result.folder)
    (result.folder / "partition.json").unlink()
    with refused(FileAccessError, result.folder / "partition.json", "No such file"):
        pluribus.resume(result.folder)


@pytest.mark.parametrize("out", ["{file}", "{file}/run", "/proc/nowhere/run"])
def test_a_place_that_cannot_be_written_to_is_a_sentence(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    place = out.format(file=tmp_path / "file")
    with refused(FileAccessError, place, "--out"):
        run_tiny("local", out=place)


# ---- a disk that is full: no file may grow beyond a limit ------------------------------------------------------------


def command(folder: Path) -> list[object]:
    settings = "--clients 8 --participation 0.125 --models mlp-64 --rounds 16 --checkpoint-every 1 --min-samples 5"
    return ["run", "fedgh", "--data", few_digits(), "--device", "cpu", *settings.split(), "--json", "--out", folder]


@cache
def unbroken() -> dict[str, Any]:
    folder = Path(new_folder())
    process = start(*command(folder))
    assert process.wait() == 0, process.err
    return outcome(folder)


def outcome(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    figures = {name: value for name, value in result.items() if name not in ("seconds", "folder")}
    return figures | {"traffic": (folder / "traffic.jsonl").read_text()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest_file", "full", "none"),
    [
        (2_000, "metrics.jsonl", True),
        (10_000, "state/selected/client-000000-round-000000.safetensors", True),
        (25_000, "metrics.jsonl", False),
    ],
)
def test_a_full_disk_is_a_sentence_that_says_which_rounds_are_saved(
    tmp_path: Path, largest_file: int, full: str, none: bool
) -> None:
    folder = tmp_path / "run"
    stopped = start(*command(folder), largest_file=largest_file)
    assert stopped.wait() == 2
    assert "Traceback" not in stopped.err
    sentence = stopped.err.splitlines()[-1]
    assert_facts(sentence, folder / full, "File too large")
    assert sentence.endswith(f" pluribus resume {folder}")
    assert json.loads(stopped.out) == {"error": sentence.removeprefix("error: "), "kind": "file-access"}
    assert not list(folder.rglob("*.tmp"))

    saved = Checkpoint(folder / "state").latest
    assert (saved is None) == none
    assert_facts(sentence, "No round" if saved is None else f"Rounds 0 to {saved}")
    resumed = start("resume", folder)
    assert resumed.wait() == 0, resumed.err
    assert outcome(folder) == unbroken()
