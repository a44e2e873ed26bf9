"""What several runs leave on disk, and the library reads again: searches, comparisons, summaries, names in trackers."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import documents, fuzzed, mutated
from test_fuzz_folders import written

import pluribus
from conftest import few_digits, new_folder
from pluribus.errors import PluribusError
from pluribus.experiment import experiment
from pluribus.storage.files import read_json, read_lines
from pluribus.storage.toml import read_toml
from pluribus.study.reproduce import summary
from pluribus.study.search import read_trials
from pluribus.study.space import parse_space, spaces_of
from pluribus.track.tracker import identity

HOW: dict[str, Any] = {"data": few_digits(80, 3), "clients": 2, "rounds": 1, "models": "mlp-64", "width": 8}
HOW |= {"device": "cpu", "workers": 1, "threads": 1}
SPACE = "lr=0.01:0.1:log,server_step=class|client,batch_size=4:8"
TRIALS = 2


def tune(out: Path) -> Any:
    return pluribus.tune("fedgh", space=SPACE, trials=TRIALS, out=str(out), progress=False, **HOW)


def compare(out: Path) -> Any:
    found = pluribus.compare(["local", "fedgh"], seeds=2, out=str(out), jobs=1, progress=False, **HOW)
    return str(found), found.to_json(), found.to_markdown()


@cache
def search() -> Path:
    tune(folder := Path(new_folder()))
    return folder


@cache
def comparison() -> Path:
    compare(folder := Path(new_folder()))
    return folder


@cache
def summaries() -> Path:
    path = Path(new_folder()) / "table.json"
    runs = [experiment(method, **HOW | {"out": str(comparison() / f"{method}-0")}) for method in ("local", "fedgh")]
    summary.write(path, "table", [summary.collect(one, ["0.1"], "cpu") for one in runs])
    return path


@cache
def parsed(path: Path) -> Any:
    read = {".toml": read_toml, ".json": read_json, ".jsonl": read_lines}
    return read[path.suffix](path)


@st.composite
def changed(draw: st.DrawFn, path: Path) -> bytes:
    """A file with wrong values, or with changed bytes."""
    if draw(st.integers(0, 3)):
        return written(path.name, draw(documents([parsed(path)])))
    return draw(mutated([path.read_bytes()]))


def copy_with(folder: Path, where: Path, name: str, data: bytes) -> Path:
    copied = folder / "copied"
    shutil.copytree(where, copied)
    (copied / name).write_bytes(data)
    return copied


@fuzzed()
@given(st.deferred(lambda: changed(search() / "fedgh" / "trials.jsonl")))
def test_trials(data: bytes) -> None:
    described = experiment("fedgh", **HOW)
    space = spaces_of(parse_space(SPACE), {"fedgh": described})["fedgh"]
    with scratch() as folder:
        path = folder / "trials.jsonl"
        path.write_bytes(data)
        found = survives(lambda: read_trials(path, described, space, [0]), folder)
        if not isinstance(found, PluribusError):
            assert all(0.01 <= one["settings"]["lr"] <= 0.1 for one in found)


@fuzzed(0.25)
@given(st.sampled_from(["trials.jsonl", "search.json", "best.toml"]), st.data())
def test_searches_that_are_resumed(name: str, data: st.DataObject) -> None:
    with scratch() as folder:
        out = copy_with(folder, search(), f"fedgh/{name}", data.draw(changed(search() / "fedgh" / name)))
        survives(lambda: tune(out), folder)


@fuzzed(0.25)
@given(st.deferred(lambda: mutated([(search() / "study.db").read_bytes()])))
def test_storages_of_searches_that_are_resumed(data: bytes) -> None:
    with scratch() as folder:
        survives(lambda: tune(copy_with(folder, search(), "study.db", data)), folder)


@fuzzed(0.25)
@given(st.sampled_from(["result.json", "partition.json", "config.toml", "metrics.jsonl"]), st.data())
def test_comparisons_that_are_read_again(name: str, data: st.DataObject) -> None:
    name = f"fedgh-1/{name}"
    with scratch() as folder:
        out = copy_with(folder, comparison(), name, data.draw(changed(comparison() / name)))
        survives(lambda: compare(out), folder)


@fuzzed()
@given(st.deferred(lambda: changed(summaries())))
def test_summaries(data: bytes) -> None:
    def read() -> None:
        for one in summary.read(path).values():
            _ = one.rounds, one.key, one.to_json(), one.run.scores, one.run.by_client

    with scratch() as folder:
        path = folder / "table.json"
        path.write_bytes(data)
        survives(read, folder)


@fuzzed()
@given(documents([{"mlflow": "a", "wandb": "b"}]) | documents([[]]))
def test_names_of_runs_in_trackers(document: Any) -> None:
    with scratch() as folder:
        (folder / "trackers.json").write_bytes(written("trackers.json", document))
        found = survives(lambda: identity(folder, "wandb", lambda: "new"), folder)
    assert isinstance(found, str | PluribusError)
