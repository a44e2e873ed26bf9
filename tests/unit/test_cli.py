"""The command line, as people and scripts meet it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pluribus
from conftest import few_digits, run_tiny
from pluribus.data import Dataset, load
from pluribus.data.datasets import write_npz
from pluribus.errors import (
    ConflictError,
    DamagedDataError,
    DamagedFileError,
    DataError,
    FileAccessError,
    FormatError,
    MismatchError,
    MissingSettingError,
    NotFiniteError,
    OtherRunError,
    PartitionError,
    RangeError,
    UnknownNameError,
    UserCodeError,
)
from pluribus.experiment import Experiment
from pluribus.listing import LISTS
from pluribus.method import Need, methods
from processes import start
from refusals import assert_facts, refused
from terminal import Terminal, python

SMALL = ["--data", few_digits(), "--clients", "4", "--rounds", "2", "--device", "cpu"]


# ---- run -----------------------------------------------------------------------------------------------------------


def test_run_prints_who_holds_what_and_how_it_went(terminal: Terminal, tmp_path: Path) -> None:
    answer = terminal("run", "fedgh", *SMALL, "--out", tmp_path / "run")
    assert answer.code == 0
    assert re.search(r"^Pluribus \S+   fedgh   ", answer.out)
    assert "partition dirichlet" in answer.out
    for word in ("client", "mlp-64", "cnn-16-32", "mean", "weighted", "worst", "best"):
        assert word in answer.out
    assert "test accuracy, selected on validation, after local training" in answer.out
    assert f" Saved {tmp_path / 'run'}   again: pluribus run --config {tmp_path / 'run'}/config.toml\n" in answer.out
    assert "2 of 2 rounds" in answer.err


def test_run_as_json_is_one_object(terminal: Terminal, tmp_path: Path) -> None:
    answer = terminal("run", "fedgh", *SMALL, "--out", tmp_path / "run", "--json")
    assert answer.code == 0
    told = answer.json
    result = pluribus.resume(tmp_path / "run")
    assert told == json.loads(json.dumps(result.to_json() | {"against": []}))
    assert told["accuracy"] == result.accuracy
    assert json.loads((tmp_path / "run" / "result.json").read_text()).items() <= told.items()


def test_a_dry_run_tells_what_a_run_then_does(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "fedgh", *SMALL, "--partition", "iid", "--participation", "0.5"]
    answer = terminal(*words, "--dry-run")
    assert answer.code == 0
    assert "partition iid" in answer.out
    assert "2 of 4 clients" in answer.out
    [plan] = terminal(*words, "--dry-run", "--json").json["plans"]
    assert list(tmp_path.iterdir()) == []
    result = pluribus.run(
        "fedgh",
        data=few_digits(),
        clients=4,
        rounds=2,
        device="cpu",
        partition="iid",
        participation=0.5,
        progress=False,
    )
    assert plan["models"] == sorted({one.model for one in result.clients.values()})
    assert plan["seconds"] > 0
    assert plan["rounds"] * plan["clients_per_round"] == sum(one["answered"] for one in result.history)
    headers = 1.2  # a message is a little more than its tensors
    sent = result.bytes["up"] / (2 * 2)
    assert plan["bytes"]["up"] <= sent <= headers * plan["bytes"]["up"]


def test_a_dry_run_refuses_what_a_run_would(terminal: Terminal) -> None:
    taken = run_tiny("local").folder
    told = terminal.refused("run", "fedgh", *SMALL, "--out", taken, "--dry-run")
    told.check(OtherRunError, f"pluribus resume {taken}")
    terminal.refused("run", "fedavg", *SMALL, "--models", "small", "--dry-run").check(
        MismatchError, "fedavg", "--models"
    )
    plans = terminal("run", "fedgh", *SMALL, "--against", "local", "--dry-run", "--json").json["plans"]
    assert [one["method"] for one in plans] == ["local", "fedgh"]


@pytest.mark.parametrize("command", ["run fedgh", "run fedhpl", "bench", "compare", "tune", "serve"])
def test_a_help_text_has_no_remains_of_types(command: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for line in terminal(*command.split(), "--help").out.splitlines():
        assert not re.search(r"\{None|\{\[|\[\w+ \[|Default: ", line), line


def test_flags_override_a_config_file(terminal: Terminal, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(
        f'method = "fedgh"\ndata = "{few_digits()}"\nclients = 3\nrounds = 1\nlr = 0.5\n'
        'models = ["cnn-16", "mlp-64"]\n[hyper]\nserver_lr = 0.25\nserver_step = "client"\n'
    )
    flags = ["--config", config, "--rounds", "2", "--server-lr", "0.125", "--out", tmp_path / "run", "--json"]
    answer = terminal("run", *flags)
    assert answer.code == 0, answer.err
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert {name: written[name] for name in ("method", "clients", "rounds", "lr", "models", "batch_size")} == {
        "method": "fedgh",
        "clients": 3,
        "rounds": 2,
        "lr": 0.5,
        "models": ["cnn-16", "mlp-64"],
        "batch_size": 10,
    }
    assert written["hyper"] == {"server_lr": 0.125, "server_step": "client"}

    answer = terminal("run", "local", f"--config={config}", "--models", "mlp-64", "--out", tmp_path / "other", "--json")
    assert answer.code == 0, answer.err
    written = tomllib.loads((tmp_path / "other" / "config.toml").read_text())
    assert (written["method"], written["models"], written["clients"]) == ("local", "mlp-64", 3)
    assert "hyper" not in written


OWN_METHOD = '''
from dataclasses import dataclass
from pluribus import Method

@dataclass(frozen=True)
class Patient(Method):
    """Trains more often."""

    times: int = 2
    """How often."""

    def local_update(self, client):
        for _ in range(self.times):
            message = super().local_update(client)
        return message
'''


@pytest.mark.parametrize("spelling", [["--method", "patience.Patient"], ["patience.Patient"]])
def test_a_method_of_the_users_own(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: list[str]
) -> None:
    (tmp_path / "patience.py").write_text(OWN_METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "patience", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    answer = terminal("run", *spelling, *SMALL, "--times", "1", "--json")
    assert answer.code == 0, answer.err
    told = answer.json
    assert told["method"] == "patience.Patient"
    assert told["folder"].startswith("runs/")
    local = terminal("run", "local", *SMALL, "--json").json
    assert told["summary"] == local["summary"]
    resumed = terminal("resume", told["folder"], "--json").json
    assert resumed["summary"] == told["summary"]
    helped = terminal("run", *spelling, "--help")
    assert helped.code == 0
    assert "How often" in helped.out


@pytest.mark.parametrize("given", [[], ["--lr", "0.01"]])
def test_against_says_where_the_other_method_is_used_to_train_otherwise(
    terminal: Terminal, tmp_path: Path, given: list[str]
) -> None:
    """FML has a learning rate of 0.05 by default; both train as the first method does."""
    argv = ["run", "local", *SMALL, *given, "--models", "mlp-64", "--against", "fml", "--view", "own"]
    answer = terminal(*argv, "--out", tmp_path / "run")
    assert answer.code == 0
    assert ("fml: --lr is 0.05 by default" in " ".join(answer.out.split())) == (not given)
    told = terminal(*argv, "--out", tmp_path / "again", "--json").json
    assert len(told.get("cautions", [])) == (not given)


def test_against_runs_both_and_shows_them_side_by_side(terminal: Terminal, tmp_path: Path) -> None:
    answer = terminal("run", "fedgh", *SMALL, "--against", "local", "--out", tmp_path / "run")
    assert answer.code == 0
    assert re.search(r"^Pluribus \S+   fedgh against local   ", answer.out)
    assert re.search(r"client +model +classes +train +local +fedgh", answer.out)
    assert answer.out.count("partition dirichlet") == 1
    answer = terminal("run", "fedgh", *SMALL, "--against", "local", "--out", tmp_path / "again", "--json")
    told = answer.json
    assert (told["method"], [other["method"] for other in told["against"]]) == ("fedgh", ["local"])
    assert (told["folder"], told["against"][0]["folder"]) == (f"{tmp_path}/again", f"{tmp_path}/again-local")
    assert told["against"][0]["summary"] == run_tiny("local", lr=0.01).summary


def noted_digits() -> Dataset:
    """Few digits; each time that they are loaded is noted in a file."""
    with Path(os.environ["NOTED"]).open("a") as file:
        file.write("loaded\n")
    return load(few_digits())


@pytest.mark.parametrize("workers", [1, 2])
def test_against_loads_the_data_once(
    workers: int, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTED", str(file := tmp_path / "noted"))
    settings = [*SMALL, "--data", "test_cli.noted_digits", "--workers", workers]
    assert terminal("run", "fedgh", *settings, "--against", "local", "--out", tmp_path / "run").code == 0
    assert file.read_text().count("loaded") == 1
    assert terminal("run", "fedgh", *settings, "--out", tmp_path / "alone").code == 0
    assert file.read_text().count("loaded") == 2  # nothing is kept beyond a command


def test_what_is_wrong_with_the_second_run_shows_before_the_first(terminal: Terminal, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "run", "--against", "local"]
    told = terminal.refused("run", "fedavg", *SMALL, "--models", "small", *out)
    told.check(MismatchError, "fedavg", "--models")
    taken = run_tiny("local").folder
    told = terminal.refused("run", "fedgh", *SMALL, "--against", "local", "--out", taken)
    told.check(OtherRunError, f"pluribus resume {taken}")
    assert not (tmp_path / "run-local").exists()
    assert not Path(f"{taken}-local").exists()


def test_one_class_clients_are_a_note(terminal: Terminal, tmp_path: Path) -> None:
    flags = ["--partition", "pathological", "--classes-per-client", "1", "--out"]
    answer = terminal("run", "fedgh", *SMALL, *flags, tmp_path / "run")
    assert answer.code == 0
    notes = terminal("run", "fedgh", *SMALL, *flags, tmp_path / "again", "--json").json["warnings"]
    one_class, left = notes  # four of ten classes are held
    assert_facts(one_class, "4 of 4 clients", "one class", "0, 1, 2, 3")
    assert_facts(left, "'pathological'")
    assert f"note {one_class}" in " ".join(answer.err.split())


def test_a_model_that_diverges_alone_is_a_note_and_json_stays_json(terminal: Terminal, tmp_path: Path) -> None:
    answer = terminal("run", "local", *SMALL, "--lr", "1e30", "--out", tmp_path / "run", "--json")
    assert answer.code == 0
    notes = answer.json["warnings"]
    assert_facts(notes[0], "round 0", "client 0", "loss", "--lr")
    for name in ("metrics.jsonl", "result.json"):
        assert not re.search("NaN|Infinity", (tmp_path / "run" / name).read_text())


def test_a_diverged_message_is_refused_by_round_client_and_field(terminal: Terminal, tmp_path: Path) -> None:
    told = terminal.refused("run", "fedgh", *SMALL, "--lr", "1e30", "--out", tmp_path / "run")
    told.check(NotFiniteError, "round 0, client 0", "'means'", "--lr")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a user can get wrong in a file."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in {
        "invalid": "rounds = ",
        "key": "round = 5",
        "text": 'rounds = "five"',
        "truth": "rounds = true",
        "choice": 'optimizer = "sdg"',
        "hyper-type": '[hyper]\nserver_lr = "x"',
        "hyper-choice": '[hyper]\nserver_step = "layer"',
        "hyper-key": "[hyper]\nserver_l = 0.1",
        "hyper-number": "hyper = 5",
        "method": "method = 5",
        "models": "models = 5",
        "clients": '[models]\nfirst = "mlp-64"',
        "fraction": "drop_rate = 1.5",
    }.items():
        (folder / f"{name}.toml").write_text(text)
    (folder / "corrupt.npz").write_bytes(Path(few_digits()).read_bytes()[:5000])
    with np.load(few_digits()) as archive:
        write_npz(folder / "labels.npz", dict(archive) | {"classes": np.array(["a", "b", "c"])})
    taken = run_tiny("local", out=folder / "taken", checkpoint_every=1).folder
    (taken / "result.json").unlink()
    newest = taken / "state" / "round-000001.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    return folder


RUN = ["run", "fedgh", *SMALL]
BAD: dict[str, tuple[Any, ...]] = {
    "command": (["rn"], UnknownNameError, "'rn'", "'run'", "pluribus --help"),
    "method": (["run", "fedg"], UnknownNameError, "'fedg'", "'fedgh'", "pluribus list methods"),
    "against": ([*RUN, "--against", "loca"], UnknownNameError, "'loca'", "'local'"),
    "method's case": (["run", "FedGH"], UnknownNameError, "'FedGH'", "'fedgh'"),
    "compared method's case": (["compare", "local", "FedAvg"], UnknownNameError, "'FedAvg'", "'fedavg'"),
    "tuned method's case": (["tune", "FedProto"], UnknownNameError, "'FedProto'", "'fedproto'"),
    "model's case": ([*RUN, "--models", "ResNet18"], UnknownNameError, "'ResNet18'", "'resnet18'"),
    "group's case": ([*RUN, "--models", "HtFE8"], UnknownNameError, "'HtFE8'", "'htfe8'"),
    "data's case": (["run", "fedgh", "--data", "CIFAR10"], UnknownNameError, "'CIFAR10'", "'cifar10'"),
    "partition's case": ([*RUN, "--partition", "DOMAIN"], UnknownNameError, "'DOMAIN'", "'domain'"),
    "another name": ([*RUN, "--learning-rate", "0.1"], UnknownNameError, "'--learning-rate'", "'--lr'"),
    "former name of a choice": (
        ["run", "fedfree", "--distribution=paper"],
        UnknownNameError,
        "--distribution paper",
        "--distribution any-depth",
    ),
    "another name in one word": ([*RUN, "--num_clients=3"], UnknownNameError, "'--num_clients'", "'--clients'"),
    "another name in compare": (["compare", "local", "--bs", "3"], UnknownNameError, "'--bs'", "'--batch-size'"),
    "another name in list": (["list", "methods", "--dataset", "x"], UnknownNameError, "'--dataset'", "'--data'"),
    "own method": (["run", "no.such.Method"], UserCodeError, "'no.such.Method'", "No module named 'no'"),
    "no method": (["run", "json.JSONDecoder"], UserCodeError, "'json.JSONDecoder'", "Method"),
    "model": ([*RUN, "--models", "mlp64"], UnknownNameError, "'mlp64'", "'mlp-64'"),
    "data": (["run", "fedgh", "--data", "digit"], UnknownNameError, "'digit'", "'digits'"),
    "partition": ([*RUN, "--partition", "dirichelt"], UnknownNameError, "'dirichelt'", "'dirichlet'"),
    "list": (["list", "method"], UnknownNameError, "'method'", "'methods'", "pluribus list --help"),
    "list nothing": (["list"], MissingSettingError, "pluribus list {methods,"),
    "list flag": (["list", "models", "--jsn"], UnknownNameError, "'--jsn'", "'--json'"),
    "resume nothing": (["resume"], MissingSettingError, "pluribus resume FOLDER"),
    "resume two": (["resume", "a", "b"], FormatError, 2, "pluribus resume FOLDER"),
    "resume flag": (["resume", "--jsn"], UnknownNameError, "'--jsn'", "'--json'", "pluribus resume --help"),
    "resume no run": (["resume", "{files}"], FileAccessError, "{files} ", "config.toml"),
    "truncated checkpoint": (
        ["resume", "{files}/taken"],
        DamagedFileError,
        "{files}/taken/state/round-000001.safetensors",
    ),
    "taken": (
        [*RUN, "--out", "{files}/taken"],
        OtherRunError,
        "{files}/taken ",
        "pluribus resume {files}/taken",
        "--out",
    ),
    "no place": ([*RUN, "--out", "{files}/key.toml/run"], FileAccessError, "{files}/key.toml/run", "Not a directory"),
    "mixed models": (
        ["run", "fedavg", *SMALL, "--models", "small"],
        MismatchError,
        "fedavg",
        "0 (mlp-64)",
        "1 (cnn-16)",
        "--models mlp-64",
    ),
    "mixed heads": (
        [*RUN, "--models", "resnet18,vit-b16-mlp", "--image-size", "32", "--width", "512"],
        MismatchError,
        "fedgh",
        "heads",
        "0 (resnet18)",
        "1 (vit-b16-mlp)",
    ),
    "mixed widths": (
        [*RUN, "--models", "cnn4,fedgh-cnn5", "--image-size", "32", "--projector", "none"],
        MismatchError,
        "fedgh",
        "0 (cnn4)",
        "1 (fedgh-cnn5)",
        512,
        500,
    ),
    "width without projector": ([*RUN, "--projector", "none", "--width", "64"], ConflictError, "--width", "projector"),
    "no samples": ([*RUN, "--clients", "400", "--partition", "iid"], PartitionError, "client 320", "'iid'"),
    "one sample": (
        [*RUN, "--clients", "320", "--partition", "iid"],
        PartitionError,
        "client 0",
        "1 sample",
        "--clients",
    ),
    "too many clients": ([*RUN, "--clients", "400"], PartitionError, "320 samples", "400 clients", 10),
    "corrupt npz": (["run", "fedgh", "--data", "{files}/corrupt.npz"], DamagedDataError, "{files}/corrupt.npz"),
    "labels": (["run", "fedgh", "--data", "{files}/labels.npz"], DataError, "{files}/labels.npz", "0..2", 9),
    "no config": ([*RUN, "--config", "{files}/no.toml"], FileAccessError, "{files}/no.toml", "No such file"),
    "invalid TOML": ([*RUN, "--config", "{files}/invalid.toml"], DamagedFileError, "{files}/invalid.toml", "TOML"),
    "TOML key": (
        [*RUN, "--config", "{files}/key.toml"],
        UnknownNameError,
        "{files}/key.toml",
        "'round'",
        "'rounds'",
    ),
    "TOML text": ([*RUN, "--config", "{files}/text.toml"], FormatError, "--rounds", "'five'"),
    "TOML truth": ([*RUN, "--config", "{files}/truth.toml"], FormatError, "--rounds", "True"),
    "TOML choice": ([*RUN, "--config", "{files}/choice.toml"], UnknownNameError, "--optimizer", "sgd, adam,", "'sdg'"),
    "TOML range": ([*RUN, "--config", "{files}/fraction.toml"], RangeError, "--drop-rate", 0, 1, 1.5),
    "TOML method": (["run", "--config", "{files}/method.toml"], FormatError, "--method", 5),
    "TOML models": ([*RUN, "--config", "{files}/models.toml"], FormatError, "--models"),
    "TOML client": (
        [*RUN, "--config", "{files}/clients.toml"],
        FormatError,
        "[models]",
        "{files}/clients.toml",
        "first",
    ),
    "TOML hyper": ([*RUN, "--config", "{files}/hyper-number.toml"], FormatError, "--hyper", 5),
    "TOML hyper type": ([*RUN, "--config", "{files}/hyper-type.toml"], FormatError, "--server-lr", "'x'"),
    "TOML hyper choice": (
        [*RUN, "--config", "{files}/hyper-choice.toml"],
        UnknownNameError,
        "--server-step",
        "class, client",
        "'layer'",
    ),
    "TOML hyper key": (
        [*RUN, "--config", "{files}/hyper-key.toml"],
        UnknownNameError,
        "fedgh",
        "'server_l'",
        "'server_lr'",
        "pluribus run fedgh --help",
    ),
    "participation": ([*RUN, "--participation", "0"], RangeError, "--participation", 0, 1, 0.0),
    "lr": ([*RUN, "--lr", "-1"], RangeError, "--lr", -1.0),
    "lr nan": ([*RUN, "--lr", "nan"], RangeError, "--lr", "nan"),
    "fractions": (
        [*RUN, "--val-fraction", "0.9", "--test-fraction", "0.9"],
        ConflictError,
        "--val-fraction",
        "--test-fraction",
    ),
    "momentum": ([*RUN, "--momentum", "-0.9"], RangeError, "--momentum", -0.9),
    "rounds": ([*RUN, "--rounds", "0"], RangeError, "--rounds", 1, 0),
    "threads": ([*RUN, "--threads", "0"], RangeError, "--threads", 1, 0),
    "checkpoints": ([*RUN, "--checkpoint-every", "0"], RangeError, "--checkpoint-every", 1, 0),
    "width": ([*RUN, "--width", "0"], RangeError, "--width", 1, 0),
    "image size": ([*RUN, "--image-size", "0"], RangeError, "--image-size", 1, 0),
    "alpha": ([*RUN, "--alpha", "-1"], RangeError, "--alpha", -1.0),
    "device": ([*RUN, "--device", "gpu"], UnknownNameError, "'gpu'", "cpu", "cuda", "auto"),
    "no real device": ([*RUN, "--device", "meta"], UnknownNameError, "'meta'", "cpu", "cuda", "auto"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence(terminal: Terminal, files: Path, case: str) -> None:
    argv, kind, *facts = BAD[case]
    told = terminal.refused(*(word.replace("{files}", str(files)) for word in argv))
    told.check(kind, *(str(fact).replace("{files}", str(files)) for fact in facts))


def test_bad_input_as_json_is_one_object(terminal: Terminal) -> None:
    answer = terminal("run", "fedg", "--json")
    assert (answer.code, answer.json) == (
        2,
        {"error": answer.err.removeprefix("error: ").rstrip("\n"), "kind": "unknown-name"},
    )


# ---- resume and list ------------------------------------------------------------------------------------------------


def test_resume_as_text_and_as_json(terminal: Terminal) -> None:
    result = run_tiny("fedgh")
    (result.folder / "result.json").unlink()
    answer = terminal("resume", result.folder, "--json")
    assert answer.code == 0
    assert answer.json["summary"] == json.loads(json.dumps(result.summary))
    answer = terminal("resume", result.folder)
    assert answer.code == 0
    assert f"Saved {result.folder}" in answer.out
    usage = "usage: pluribus resume FOLDER [--track NAMES] [--allow-code] [--allow PATHS] [--quiet] [--json] "
    assert " ".join(terminal("resume", "--help").out.split()).startswith(usage)


def test_the_list_of_methods_says_what_travels_on_a_task(terminal: Terminal) -> None:
    """FedGH's head has 10 x 64 weights and 10 biases; with one class each a client sends 64 numbers and the class."""
    rows = {row["name"]: row for row in terminal("list", "methods", "--json").json["methods"]}
    assert list(rows) == list(methods())
    for name, row in rows.items():
        assert row["about"]
        assert row["refused"] is None
        assert (row["bytes_up"] == 0) == (row["up"] == "nothing"), name
    assert rows["fedgh"]["bytes_down"] == 4 * (10 * 64 + 10)
    posteriors = 4 * (32 * 10 + 1)  # of a batch, and an accuracy, from each of three teachers
    assert (rows["fedh2l"]["bytes_up"], rows["fedh2l"]["bytes_down"]) == (posteriors, 3 * posteriors)
    task = ["--partition", "pathological", "--classes-per-client", "1", "--clients", "10", "--models", "small"]
    answer = terminal("list", "methods", *task, "--json")
    rows = {row["name"]: row for row in answer.json["methods"]}
    assert rows["fedgh"]["bytes_up"] == 4 * 64 + 4
    assert rows["fedavg"]["bytes_up"] is None
    assert "one model" in rows["fedavg"]["refused"]
    answer = terminal("list", "methods", *task)
    assert (answer.code, answer.err) == (0, "")
    assert all(name in answer.out for name in rows)
    assert "cannot run on this task: " in answer.out
    assert "--classes-per-client" in terminal("list", "methods", "--help").out
    mistyped = terminal("list", "methods", "--clints", "3", "--json")
    assert mistyped.code == 2
    assert "--clients" in mistyped.err
    assert "error" in mistyped.json


@pytest.mark.parametrize("what", LISTS)
def test_lists_as_text_and_as_json(terminal: Terminal, what: str) -> None:
    answer = terminal("list", what)
    assert (answer.code, answer.err) == (0, "")
    rows = terminal("list", what, "--json").json[what]
    assert rows
    for row in rows:
        assert row["name"] in answer.out
        assert row["about"]
    assert terminal("list", "--help").code == 0
    assert rows == getattr(pluribus, f"list_{what}")()


def test_lists_take_a_pattern(terminal: Terminal) -> None:
    """One function answers both ways."""
    rows = pluribus.list_models("ResNet1[0-9]")
    assert [row["name"] for row in rows] == ["resnet10", "resnet18"]
    assert terminal("list", "models", "ResNet1[0-9]", "--json").json["models"] == rows
    pattern = "fed[gp][hr]*"
    rows = pluribus.list_methods(pattern, needs=[Need.SAME_WIDTH, "same-head"])
    assert [row["name"] for row in rows] == ["fedgh"]
    assert terminal("list", "methods", pattern, "--needs", "same-width,same_head", "--json").json["methods"] == rows
    assert [row["name"] for row in pluribus.list_methods("f[md]*", needs=())] == ["fd", "fml"]
    assert pluribus.list_data("no*") == []
    terminal.refused("list", "data", "no*").check(UnknownNameError, "'no*'", "pluribus list data")
    terminal.refused("list", "methods", "no*").check(UnknownNameError, "'no*'", "pluribus list methods")


def test_what_lists_cannot_be_asked() -> None:
    with refused(UnknownNameError, "'publik-data'", "'public-data'"):
        pluribus.list_methods(needs="publik-data")
    with refused(UnknownNameError, "'learning_rate'", "'lr'"):
        pluribus.list_methods(learning_rate=0.1)
    with refused(RangeError, "clients", 0):
        pluribus.list_methods(clients=0)


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_every_setting_is_a_flag(terminal: Terminal) -> None:
    settings = [field.name for field in dataclasses.fields(Experiment) if field.name not in ("method", "hyper")]
    helped = terminal("run", "fedgh", "--help").out
    for name in [*settings, "server_lr", "server_step", "against", "json", "config"]:
        turned_off = getattr(Experiment, name, None) is True
        assert f"--{'no-' if turned_off else ''}{name.replace('_', '-')}" in helped


def test_usage_and_version(terminal: Terminal) -> None:
    for argv in ([], ["-h"], ["--help"]):
        answer = terminal(*argv)
        assert answer.code == 0
        assert "pluribus run METHOD" in answer.out
    assert terminal("--version").out == pluribus.__version__ + "\n"


HELP = [
    *(["run", "fedgh"], ["bench", "fedgh"], ["compare"], ["tune"], ["study"], ["reproduce"], ["predict"], ["report"]),
    *(["watch"], ["audit"], ["list"], ["list", "methods"], ["data", "check"], ["check"], ["resume"], ["keys"]),
    *(["serve"], ["join"], ["doctor"], ["completion"]),
]


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_fits_the_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, command: list[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    answer = terminal(*command, "--help")
    assert answer.code == 0
    assert [line for line in answer.out.splitlines() if len(line) > columns] == []
    assert "None" not in answer.out


def test_help_says_what_a_flag_that_turns_off_does(terminal: Terminal) -> None:
    told = " ".join(terminal("run", "fedgh", "--help").out.replace("│", " ").split())
    for name in ("capture", "stack", "share-counts"):
        about = told.partition(f"--no-{name} ")[2].partition(" --")[0]
        assert "(default: on; this flag turns it off)" in about
    assert "--same-init Start clients of the same architecture from the same weights. (default: off)" in told


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_a_setting_takes_the_same_values_in_every_command(command: str, terminal: Terminal) -> None:
    def values_of(*words: str) -> dict[str, str]:
        told = terminal(*words, "--help").out
        names = ("epochs", "lr", "optimizer", "augment")
        return {name: told.partition(f" --{name} ")[2].split()[0] for name in names}

    assert values_of(command) == values_of("run", "local")


def test_an_unknown_flag_gets_the_nearest_one(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = terminal("run", "fedgh", "--client", "3")
    assert (answer.code, answer.out) == (2, "")
    assert "--client" in answer.err
    assert "--clients INT" in answer.err
    assert "Traceback" not in answer.err
    assert list(tmp_path.iterdir()) == []


# ---- real processes --------------------------------------------------------------------------------------------------


def test_help_answers_without_torch() -> None:
    answer = python("-m", "pluribus", "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("Pluribus: ")
    check = "import sys; from pluribus.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert python("-c", check).code == 0


@pytest.mark.slow
def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    settings = [*SMALL, "--rounds", "100000", "--out", tmp_path / "run"]
    process = start("run", "fedgh", *settings)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert process.poll() is None, process.err
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert "Traceback" not in process.err
    assert process.err.endswith(f"pluribus resume {tmp_path / 'run'}\n")


def test_an_interrupt_before_the_first_round_is_no_traceback(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slow_data.py").write_text("def load():\n    raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    answer = terminal("run", "local", "--data", "slow_data.load")
    assert (answer.code, answer.err.strip()) == (130, "stopped.")


def test_whoever_reads_may_have_read_enough() -> None:
    """As head does: it closes its end before all is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pluribus", "run", "fedgh", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
