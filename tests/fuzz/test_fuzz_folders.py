"""Run folders, checkpoints, model files and state folders of sites that somebody else wrote or a disk damaged."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import documents, fuzzed, mutated, to_toml_bytes
from safetensors import safe_open

import pluribus
from conftest import few_digits, new_folder, run_tiny
from pluribus.data import Manifest
from pluribus.errors import PluribusError
from pluribus.report.numbers import read_runs
from pluribus.report.page import content
from pluribus.report.plots import sections
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.files import read_json, read_lines
from pluribus.storage.folder import RunFolder
from pluribus.storage.model_file import read_model
from pluribus.storage.toml import read_toml

TEXTS = ("config.toml", "started.json", "partition.json", "metrics.jsonl", "traffic.jsonl", "result.json")


@cache
def honest() -> Path:
    """A finished run, which is copied and changed."""
    folder = Path(new_folder())
    how: dict[str, Any] = {"models": "mlp-64", "device": "cpu", "workers": 1, "threads": 1, "checkpoint_every": 1}
    run_tiny("fedgh", data=few_digits(80, 3), clients=2, rounds=2, width=8, out=str(folder), **how)
    return folder


@cache
def model_file() -> Path:
    path = Path(new_folder()) / "model.safetensors"
    pluribus.load_result(honest()).save_model(0, path)
    return path


@cache
def tensor_files() -> list[str]:
    return sorted(str(path.relative_to(honest())) for path in honest().rglob("*.safetensors"))


@cache
def parsed(name: str) -> Any:
    path = honest() / name
    if name.endswith(".toml"):
        return read_toml(path)
    if name == "metrics.jsonl":  # with what a private run under attack writes, too
        spent = {"epsilon": {"0": 0.5}, "used_up": [0]}
        return [line | {"privacy": spent, "attackers": [1]} for line in read_lines(path)]
    return read_json(path) if name.endswith(".json") else read_lines(path)


def written(name: str, document: Any) -> bytes:
    if name.endswith(".toml"):
        return to_toml_bytes(document)
    lines = document if name.endswith(".jsonl") else [document]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@st.composite
def changed_texts(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of a run folder, with wrong values or changed bytes."""
    name = draw(st.sampled_from(TEXTS))
    if draw(st.booleans()):
        return name, written(name, draw(documents([parsed(name)])))
    return name, draw(mutated([(honest() / name).read_bytes()]))


@cache
def layout_of(name: str) -> tuple[Any, bytes]:
    """The header of a file of tensors, and its tensors."""
    data = (honest() / name if name else model_file()).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def forge(header: Any, tensors: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


@st.composite
def changed_tensors(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of tensors of a run folder, with wrong facts or changed bytes."""
    name = draw(st.sampled_from(tensor_files()))
    header, tensors = layout_of(name)
    if draw(st.booleans()):
        return name, forge(draw(documents([header])), tensors)
    return name, draw(mutated([(honest() / name).read_bytes()]))


def copy_with(folder: Path, name: str, data: bytes, finished: bool = True) -> Path:
    run = folder / "run"
    shutil.copytree(honest(), run)
    if not finished:
        (run / "result.json").unlink()
    (run / name).write_bytes(data)
    return run


ROWS = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)


@fuzzed()
@given(changed_texts())
def test_the_files_of_a_run(file: tuple[str, bytes]) -> None:
    def read() -> Any:
        result = pluribus.load_result(run)
        return result.score, result.summary, result.bytes, result.to_json(), repr(result)

    with scratch() as folder:
        run = copy_with(folder, *file)
        survives(read, folder)
        survives(lambda: RunFolder.open(run, read_only=True).history(1), folder)
        survives(lambda: RunFolder.open(run, read_only=True).read_partition(), folder)


def make_page(run: Path) -> str:
    runs = read_runs([run])
    return content(runs, sections(runs, why_not="not asked for"))


@fuzzed(0.1)
@given(changed_texts())
def test_reports(file: tuple[str, bytes]) -> None:
    with scratch() as folder:
        run = copy_with(folder, *file)
        survives(lambda: make_page(run), folder)


@fuzzed(0.1)
@given(changed_texts() | changed_tensors(), st.sampled_from(["selected", "last"]))
def test_models_of_a_folder(file: tuple[str, bytes], round: Any) -> None:
    with scratch() as folder:
        run = copy_with(folder, *file)
        survives(lambda: pluribus.predict(run, ROWS, client=0, round=round), folder)


@fuzzed(0.05)
@given(changed_texts() | changed_tensors())
def test_runs_that_are_resumed(file: tuple[str, bytes]) -> None:
    with scratch() as folder:
        run = copy_with(folder, *file, finished=False)
        survives(lambda: pluribus.resume(run, progress=False), folder)


@fuzzed()
@given(changed_tensors())
def test_checkpoints(file: tuple[str, bytes]) -> None:
    def read() -> Any:
        saved = Checkpoint(state, read_only=True)
        if saved.latest is not None:
            saved.server(), saved.enrolled(), saved.way_back()
        return [(saved.client(k), saved.selected(k, t), saved.tested(k, t)) for k in (0, 1) for t in (0, 1)]

    with scratch() as folder:
        state = folder / "state"
        shutil.copytree(honest() / "state", state)
        (folder / file[0]).write_bytes(file[1])
        survives(read, folder)


@st.composite
def changed_models(draw: st.DrawFn) -> bytes:
    """A model file with wrong facts, a wrong header or changed bytes."""
    header, tensors = layout_of("")
    match draw(st.sampled_from(["facts", "facts", "header", "bytes"])):
        case "bytes":
            return draw(mutated([model_file().read_bytes()]))
        case "header":
            return forge(draw(documents([header])), tensors)
    facts = draw(documents([{name: json.loads(text) for name, text in header["__metadata__"].items()}]))
    texts = {str(name): json.dumps(value) for name, value in facts.items()}
    return forge(header | {"__metadata__": texts}, tensors)


@fuzzed()
@given(changed_models())
def test_model_files(data: bytes) -> None:
    with scratch() as folder:
        path = folder / "model.safetensors"
        path.write_bytes(data)
        found = survives(lambda: read_model(path), folder)
        if not isinstance(found, PluribusError):
            with safe_open(path, framework="pt") as file:
                assert set(file.keys()) == set(found.state_dict())


@fuzzed()
@given(mutated([b'{"a": 1, "b": [1, 2]}\n', b"null\n"]) | st.integers(1, 5000).map(lambda depth: b"[" * depth))
def test_small_json_files(data: bytes) -> None:
    with scratch() as folder:
        path = folder / "one.json"
        path.write_bytes(data)
        survives(lambda: read_json(path), folder)
        survives(lambda: read_lines(path), folder)
        survives(lambda: Manifest.from_json(data.decode("utf-8", "replace")), folder)
