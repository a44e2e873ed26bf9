"""The command line with any words and flags: it answers, or refuses in one sentence. Nothing trains."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from guard import survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import NUMBERS, TEXTS, TRAP, fuzzed

from conftest import few_digits, new_folder, run_tiny
from pluribus import cli
from pluribus.data.reading import Reading
from pluribus.experiment import SETTINGS, Experiment
from pluribus.method import find, hyperparameters
from pluribus.report import figures  # noqa: F401  Matplotlib starts a program when it is imported
from pluribus.storage.toml import to_toml


@cache
def place() -> Path:
    """A folder with a run, data, and files that are none of it."""
    folder = Path(new_folder())
    how: dict[str, Any] = {"models": "mlp-64", "device": "cpu", "workers": 1, "threads": 1}
    run_tiny("local", data=few_digits(40, 3), clients=2, rounds=1, out=str(folder / "run"), **how)
    (folder / "empty").mkdir()
    (folder / "rows.csv").write_text("label,a,b,text\nx,1,2,one\ny,3,4,two\nx,5,6,three\ny,7,8,four\n")
    (folder / "noise").write_bytes(bytes(range(256)))
    rows = {"a": {"method": "local"}, "b": {"method": "fedgh"}}
    (folder / "study.toml").write_text(to_toml({"rows": rows, "settings": {"data": few_digits(40, 3), "clients": 2}}))
    (folder / "run.toml").write_text(to_toml({"method": "fedgh", "lr": 0.1, "clients": 2}))
    (folder / "federation.toml").write_text(to_toml({"sites": ["n"], "classes": ["0", "1"], "image": [1, 8, 8]}))
    site = {"name": "n", "server": "localhost:1", "keys": "k", "model": "mlp-64", "state": "s"}
    (folder / "site.toml").write_text(to_toml(site))
    return folder


PATHS = [
    "run",
    "empty",
    "rows.csv",
    "noise",
    "study.toml",
    "run.toml",
    "federation.toml",
    "site.toml",
    "missing",
    ".",
    "..",
]
PATHS += ["run/result.json", "run/state", "rows.csv/x", "noise/", "/dev/null", "/dev/null/x", "~nobody", "x" * 300]
WORDS = [*TEXTS, *PATHS, *map(str, NUMBERS), "fedgh,local", "1,2", "0.5", "1e-3", "lr=0.1:1", "lr=1:0:log", "lr=a|b"]
WORDS += [
    "a=local",
    "b=fedgh:server_lr=0.1",
    "local.lr=0.1",
    "fedgh.server_lr=x",
    "mlp-64,cnn-16",
    "pathological",
    "natural",
]
WORDS += [
    "public_data",
    "accuracy,f1",
    "crop,flip",
    "tensorboard",
    "mlflow,x",
    "3x32x32",
    "1x0",
    "methods",
    "models",
    "data",
]
words = st.sampled_from(WORDS) | st.text(max_size=6)


def flag_names(*more: str) -> list[str]:
    names = [name for group in SETTINGS.values() for name in group] + [*hyperparameters(find("fedgh")())]
    return [f"--{name.replace('_', '-')}" for name in (*names, *more)]


READING = [f"--{name.replace('_', '-')}" for name in Reading._fields]
OF_RUNS = flag_names("against", "view", "track", "json", "config", "method", "bare")
OF_MANY = flag_names(
    "seeds",
    "baseline",
    "target",
    "view",
    "equal-steps",
    "jobs",
    "track",
    "row",
    "set",
    "json",
    "config",
    "markdown",
    "csv",
    "latex",
)
# What stands before the drawn words, which flags a command has, and what stands after them: where nothing may train,
# the folder of a run that exists, or one that cannot be.
COMMANDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "run": (["run", "fedgh"], OF_RUNS, ["--out", "run"]),
    "bench": (["bench", "fedgh"], OF_RUNS, ["--out", "run"]),
    "compare": (["compare", "local"], OF_MANY, ["--out", "/dev/null/x"]),
    "tune": (["tune", "local"], [*OF_MANY, "--trials", "--space"], ["--out", "/dev/null/x"]),
    "study": (
        ["study"],
        [
            "--seeds",
            "--rounds",
            "--only",
            "--baseline",
            "--view",
            "--jobs",
            "--device",
            "--track",
            "--plot",
            "--markdown",
        ],
        ["--out", "/dev/null/x"],
    ),
    "list": (
        ["list"],
        ["--takes", "--needs", "--json", "--data", "--clients", "--width", "--models", "--classes-per-client"],
        [],
    ),
    "data": (["data", "check"], [*READING, "--json"], []),
    "check": (["check", "missing"], ["--kind", "--device", "--shape", "--classes", "--json"], []),
    "predict": (["predict"], ["--client", "--round", "--json", "--out", "--allow-code", "--allow"], []),
    "report": (["report"], ["--out", "--figures", "--embeddings", "--allow"], ["--embeddings", "none"]),
    "watch": (["watch", "missing"], ["--port", "--allow"], []),
    "resume": (["resume"], ["--track", "--allow", "--json"], []),
    "reproduce": (
        ["reproduce"],
        ["--list", "--seeds", "--rounds", "--only", "--json", "--jobs"],
        ["--out", "/dev/null/x"],
    ),
    "keys": (["keys", "noise"], ["--server", "--sites", "--days"], []),
    "serve": (["serve"], ["--config", "--out", "--json"], []),
    "join": (["join"], ["--config", "--check"], []),
}


@st.composite
def command_lines(draw: st.DrawFn, command: str) -> list[str]:
    before, flags, after = COMMANDS[command]
    drawn: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        match draw(st.sampled_from(["flag", "flag", "flag", "joined", "word", "bare"])):
            case "flag":
                drawn += [draw(st.sampled_from(flags)), draw(words)]
            case "joined":
                drawn += [f"{draw(st.sampled_from(flags))}={draw(words)}"]
            case "word":
                drawn += [draw(words)]
            case "bare":
                drawn += [draw(st.sampled_from(flags))]
    return [*before, *drawn, *after]


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """In this folder, with what is printed."""
    before, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield out, err
    finally:
        os.chdir(before)


def call(line: list[str]) -> int:
    try:
        return cli.main(line)
    except SystemExit as leave:
        return int(leave.code or 0)


def is_safe(line: list[str]) -> bool:
    """Whether the command line may be tried: code that the user types is imported, and these names ask a network."""
    return not any(f"{TRAP}." in word or word.startswith(("hf:", "timm:")) for word in line)


SLOW = ("run", "bench", "compare", "tune", "report", "serve", "join", "reproduce")  # they have a share of the cases


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines(command: str) -> None:
    @fuzzed(1 / 4 if command in SLOW else 1)
    @given(command_lines(command))
    def check(line: list[str]) -> None:
        line = [few_digits(40, 3) if word == "digits" else word for word in line if is_safe([word])]
        with inside(place()) as (out, err):
            code = survives(lambda: call(line), place())
        said = out.getvalue() + err.getvalue()
        assert code in (0, 1, 2), (code, line)
        assert "Traceback" not in said, (line, said[-1500:])
        assert "error: " not in said or code == 2, (line, said)
        if code == 2:
            assert said.strip(), line

    check()


def test_every_flag_of_an_experiment_is_tried() -> None:
    settings = {one.name for one in dataclasses.fields(Experiment)} - {"method", "hyper"}
    assert {f"--{name.replace('_', '-')}" for name in settings} <= {*OF_RUNS}
