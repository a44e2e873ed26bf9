"""The Python face: every way to say what should run, what a run gives back, and what it leaves alone."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pluribus
from conftest import assemble_tiny, few_digits, new_folder, run_tiny, tiny
from kit import assert_same, timeless
from pluribus.engines.serial import Serial
from pluribus.errors import (
    ConflictError,
    FormatError,
    HostLostError,
    NotFiniteError,
    RangeError,
    UnknownNameError,
    UserCodeError,
)
from pluribus.experiment import experiment
from pluribus.internal.batches import batch_sizes
from pluribus.methods.fedgh import FedGH
from pluribus.request import Work
from pluribus.result import Result
from pluribus.storage.checkpoint import Checkpoint
from processes import start
from refusals import Kind, assert_facts, refused

Models = str | list[str] | dict[int, str] | Callable[[int], str]


@pytest.fixture(scope="module")
def fedgh() -> Result:
    """A run that tests may look at, but not change."""
    return run_tiny("fedgh", rounds=3, momentum=0.9, participation=0.5)


def outcome(folder: Path) -> dict[str, Any]:
    """Every weight and every figure, but the time it took."""
    saved = Checkpoint(folder / "state")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parts = [saved.server(), *(saved.client(k) or {} for k in range(4))]
    return {
        "weights": [{name: value.numpy().tobytes() for name, value in part.items()} for part in parts],
        "metrics": [timeless(line) for line in lines],
        "traffic": (folder / "traffic.jsonl").read_text(),
    }


class Watcher:
    """Notes what it is shown, and stops the run after some rounds."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen: list[object] = []
        self._stop_after = stop_after

    def start(self, federation: Any) -> None:
        self.seen.append("start")

    def round(self, record: Any, ledger: Any) -> None:
        self.seen.append(record["round"])
        if record["round"] + 1 == self._stop_after:
            raise KeyboardInterrupt

    def finish(self, result: Any) -> None:
        self.seen.append(result)


# ---- what to run -----------------------------------------------------------------------------------------------------


def test_a_method_by_name_class_instance_path_or_experiment() -> None:
    by_name = run_tiny("fedgh", server_lr=0.5)
    spellings: dict[str, Result] = {
        "class": run_tiny(FedGH, server_lr=0.5),
        "instance": run_tiny(FedGH(server_lr=0.5)),
        "path": run_tiny("pluribus.methods.fedgh.FedGH", server_lr=0.5),
        "nothing": pluribus.run(progress=False, out=new_folder(), server_lr=0.5, **tiny()),
        "experiment": pluribus.run(experiment("fedgh", out=new_folder(), server_lr=0.5, **tiny()), progress=False),
        "file": pluribus.run(config=by_name.folder / "config.toml", out=new_folder(), progress=False),
    }
    for spelling, result in spellings.items():
        assert outcome(result.folder) == outcome(by_name.folder), spelling
    assert outcome(run_tiny("fedgh").folder) != outcome(by_name.folder)


def test_an_experiment_takes_no_further_settings() -> None:
    for more in ({"rounds": 3}, {"config": "config.toml"}):
        with refused(ConflictError, "Experiment", "dataclasses.replace"):
            pluribus.run(experiment("local"), **more)


def test_an_unknown_setting_gets_the_nearest_one() -> None:
    with refused(UnknownNameError, "'round'", "'rounds'"):
        pluribus.run("fedgh", round=5)


@pytest.mark.parametrize(
    "models",
    [
        ["mlp-64", "cnn-16"],
        {0: "mlp-64", 1: "cnn-16", 2: "mlp-64", 3: "cnn-16"},
        "mlp-64, cnn-16",
    ],
    ids=["list", "dict", "text"],
)
def test_models_in_any_form_also_after_a_resume(models: Models, tmp_path: Path) -> None:
    whole = run_tiny("fedgh", models=["mlp-64", "cnn-16", "mlp-64", "cnn-16"])
    assert [facts.model for facts in whole.clients.values()] == ["mlp-64", "cnn-16"] * 2
    settings = tiny(models=models, out=tmp_path / "run", checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        pluribus.run("fedgh", progress=False, observers=[Watcher(stop_after=1)], **settings)
    pluribus.resume(tmp_path / "run", progress=False)
    assert outcome(tmp_path / "run") == outcome(whole.folder)


def test_the_config_of_a_run_is_the_run(fedgh: Result) -> None:
    config = fedgh.folder / "config.toml"
    again = pluribus.run(config=config, out=new_folder(), progress=False)
    assert outcome(again.folder) == outcome(fedgh.folder)
    assert (again.folder / "config.toml").read_text() == config.read_text()
    other = pluribus.run(config=config, out=new_folder(), progress=False, seed=1)
    assert outcome(other.folder) != outcome(fedgh.folder)


# ---- what it gives back ----------------------------------------------------------------------------------------------


def test_a_result_has_history_figures_and_bytes(fedgh: Result) -> None:
    assert [record["round"] for record in fedgh.history] == [0, 1, 2]
    assert (fedgh.method, fedgh.seed, fedgh.rounds, fedgh.views) == ("fedgh", 0, 3, ("after", "before"))
    assert list(fedgh.clients) == [0, 1, 2, 3]
    assert fedgh.bytes == {way: sum(record["bytes"][way] for record in fedgh.history) for way in fedgh.bytes}
    assert min(fedgh.bytes.values()) > 0
    assert fedgh.seconds == sum(record["seconds"] for record in fedgh.history)
    last = [fedgh.history[-1]["clients"][str(k)]["after"]["test"] for k in range(4)]
    assert fedgh.summary["after"]["last"]["test"]["mean"] == sum(last) / 4
    assert fedgh.summary["after"]["last"]["test"]["worst"] == min(last)
    selected = [chosen.selected["test"] for chosen in fedgh.per_client().values()]
    assert fedgh.accuracy == fedgh.summary["after"]["selected"]["test"]["mean"]
    assert fedgh.accuracy == sum(value for value in selected if value is not None) / 4
    assert json.loads((fedgh.folder / "result.json").read_text()) == json.loads(json.dumps(fedgh.to_json()))


def test_steps_by_hand() -> None:
    """Three rounds of two epochs over batches of ten; a remainder of one joins its neighbor."""
    result = run_tiny("local", models="mlp-64", rounds=3, epochs=2, batch_size=10)
    batches = {k: len(batch_sizes(facts.train, 10)) for k, facts in result.clients.items()}
    assert result.steps == {k: 3 * 2 * number for k, number in batches.items()}
    assert result.steps_per_client == 6 * sum(batches.values()) / 4
    told = result.to_json()
    assert told["steps"] == {"total": sum(result.steps.values()), "per_client": result.steps_per_client}
    assert {k: row["steps"] for k, row in told["clients"].items()} == result.steps
    for record in result.history:
        del record["steps"]  # of a run that began before they were counted
    assert (result.steps, result.steps_per_client) == (None, None)


def test_a_table_stands_beside_others(fedgh: Result, capsys: pytest.CaptureFixture[str]) -> None:
    fedgh.table(run_tiny("local"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["client", "model", "classes", "train", "local", "fedgh"]
    assert [line.split()[0] for line in lines[1:9]] == ["0", "1", "2", "3", "mean", "weighted", "worst", "best"]
    assert lines[5].split()[-1] == f"{fedgh.accuracy:.3f}"


def test_a_table_beside_others_is_of_one_view(capsys: pytest.CaptureFixture[str]) -> None:
    """FedAvg's headline is before training, which local does not have."""
    local, fedavg = (run_tiny(name, models="mlp-64") for name in ("local", "fedavg"))
    alone, after, own = ({}, {}, {"view": "own"})
    shown = []
    for others, view in (([], alone), ([local], after), ([local], own)):
        fedavg.table(*others, **view)
        shown.append(capsys.readouterr().out)
    means = [next(line.split()[1:] for line in text.splitlines() if line.split()[0] == "mean") for text in shown]
    summary = {view: f"{moments['selected']['test']['mean']:.3f}" for view, moments in fedavg.summary.items()}
    assert means == [
        [summary["before"]],
        [f"{local.accuracy:.3f}", summary["after"]],
        [f"{local.accuracy:.3f}", summary["before"]],
    ]
    other = [line.split()[1:] for line in shown[1].splitlines() if line.split()[:1] == ["mean,"]]
    assert other == [["before", "-", summary["before"]]]
    assert ["views differ" in text for text in shown] == [False, False, True]
    costs = [line.split() for line in shown[1].splitlines() if line.split()[:1] in (["steps"], ["up"], ["down"])]
    assert [cost[0] for cost in costs] == ["steps", "up", "down"]
    assert costs[0][1:] == [f"{local.steps_per_client:,.0f}", f"{fedavg.steps_per_client:,.0f}"]
    assert "steps per client differ" not in shown[1]
    run_tiny("local", models="mlp-64", epochs=2).table(local)
    assert "steps per client differ" in " ".join(capsys.readouterr().out.split())


def test_a_model_comes_back_trained_and_predicts(fedgh: Result) -> None:
    parts, saved = assemble_tiny("fedgh", momentum=0.9), Checkpoint(fedgh.folder / "state")
    trained = 0
    for k, chosen in fedgh.per_client().items():
        x, y = parts.data.store.take(parts.data.rows(k)["test"])
        for round, reported in (("selected", chosen.selected["test"]), ("last", chosen.last["test"])):
            model = fedgh.model(k, round)
            assert not model.training
            with torch.no_grad():
                right = (model(x).argmax(1) == y).sum()
            assert int(right) / len(y) == reported
        if (state := saved.client(k)) is not None:
            trained += 1
            assert same_weights(model, {name.removeprefix("model."): value for name, value in state.items()})
    assert trained == 2  # of four clients, half of which are sampled each round


def same_weights(model: nn.Module, saved: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_a_client_that_never_took_part_has_the_weights_it_would_start_from() -> None:
    result = run_tiny("local", rounds=1, participation=0.25, models="mlp-64", same_init=True)
    saved = Checkpoint(result.folder / "state")
    idle = [k for k in range(4) if saved.client(k) is None]
    assert len(idle) == 3
    first, second = (pluribus.load_model(result.folder, k) for k in idle[:2])
    assert same_weights(first, second.state_dict())
    start = assemble_tiny("local").task.build("mlp-64", "client", "mlp-64")
    assert same_weights(first, start.state_dict())


def test_a_client_that_is_not_there_is_a_sentence(fedgh: Result) -> None:
    with refused(RangeError, "client 4", "0 to 3"):
        fedgh.model(4)


# ---- what it leaves alone --------------------------------------------------------------------------------------------


def global_state() -> tuple[object, ...]:
    numpy_state = np.random.get_state()
    return torch.get_rng_state().tolist(), str(numpy_state), random.getstate(), torch.get_num_threads()


def test_nobodys_random_numbers_are_touched(tmp_path: Path, fedgh: Result) -> None:
    before = global_state()  # after a first run: a library that it imports draws a number when it is imported
    settings = tiny(out=tmp_path / "run", clients=2, checkpoint_every=1, threads=2, drop_rate=0.1)
    with pytest.raises(KeyboardInterrupt):
        pluribus.run("fedgh", observers=[Watcher(stop_after=1)], **settings)
    result = pluribus.resume(tmp_path / "run")
    result.model(0)
    result.table(fedgh)
    assert global_state() == before


def test_observers_see_everything_in_order() -> None:
    watcher = Watcher()
    result = pluribus.run("local", progress=False, observers=[watcher], out=new_folder(), **tiny())
    assert watcher.seen == ["start", 0, 1, result]


def test_an_observer_has_any_of_its_functions() -> None:
    class Rounds:
        """No base class, and one function."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def round(self, record: Any, ledger: Any, times: int = 1) -> None:
            self.seen.append(times * record["round"])

    class Last(pluribus.Observer):
        def finish(self, result: Result) -> None:
            self.result = result

    rounds, last = Rounds(), Last()
    observers: Any = [rounds, last]
    result = pluribus.run("local", progress=False, observers=observers, out=new_folder(), **tiny())
    assert rounds.seen == [0, 1]
    assert last.result is result


class OnRound:
    def on_round(self, record: Any, ledger: Any) -> None: ...


class Rounds(pluribus.Observer):
    def start(self, federation: Any) -> None: ...

    def rounds(self, record: Any) -> None: ...


class Idle(pluribus.Observer):
    def work(self) -> None: ...


class OneArgument:
    def round(self, record: Any) -> None: ...


@pytest.mark.parametrize(
    ("observers", "kind", "facts"),
    [
        ([OnRound()], UserCodeError, ("OnRound.on_round", "round(self, record, ledger)")),
        ([Rounds()], UserCodeError, ("Rounds.rounds", "round(self, record, ledger)")),
        ([Idle()], UserCodeError, ("Idle", "start", "round", "finish", "pluribus.Observer")),
        ([OneArgument()], UserCodeError, ("OneArgument.round(self, record", "round(self, record, ledger)")),
        ([print], UserCodeError, ("print", "start", "round", "finish")),
        ([Watcher], UserCodeError, ("Watcher()",)),
        (Watcher(), FormatError, ("observers=[...]",)),
    ],
)
def test_an_observer_that_would_see_nothing_is_refused(observers: Any, kind: Kind, facts: Any, tmp_path: Path) -> None:
    with refused(kind, *facts):
        pluribus.run("local", observers=observers, out=tmp_path / "run", **tiny())
    assert list(tmp_path.iterdir()) == []


def test_a_progress_bar_ends_with_its_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that is still alive would hide the cursor and keep a thread."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes standard error for a terminal
    before = set(threading.enumerate())
    pluribus.run("local", out=new_folder(), **tiny())
    assert "2/2" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        pluribus.run("local", observers=[Watcher(stop_after=1)], out=new_folder(), **tiny())
    with refused(NotFiniteError, "'means'", "NaN", "--lr"):
        pluribus.run("fedgh", out=new_folder(), **tiny(lr=1e30))
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # a bar that was told to stop ends at its next refresh
    assert set(threading.enumerate()) <= before


@pytest.mark.slow
def test_python_needs_nothing_of_the_command_line(fedgh: Result) -> None:
    program = """
import sys
assert "tyro" not in sys.modules
sys.modules["tyro"] = None
import pluribus
result = pluribus.run(config=sys.argv[1], out=sys.argv[2], progress=False, threads=1)
result.table()
for library, why in {"torch._dynamo": "takes as long to import as torch", "scipy": "takes a quarter of it"}.items():
    assert library not in sys.modules, why
pluribus.bench("local", data=sys.argv[3], clients=2, rounds=1, models="mlp-64", progress=False).table()
"""
    out = new_folder()
    process = start(fedgh.folder / "config.toml", out, few_digits(), program=program)
    assert process.wait() == 0, process.err
    assert "weighted" in process.out
    assert "bench local" in process.out
    assert outcome(Path(out)) == outcome(fedgh.folder)


def test_public_names_are_there() -> None:
    for name in pluribus.__all__:
        assert getattr(pluribus, name) is not None
    with pytest.raises(AttributeError, match="module 'pluribus' has no attribute 'runn'"):
        _ = pluribus.runn


@pytest.mark.parametrize(
    ("losses", "ends"), [((0, 1), True), ((0, 0), True), ((0, 0, 0), False), ((0, 1, 1, 2, 2), True)]
)
def test_lost_hosts_are_forgiven_unless_they_are_lost_again_and_again(losses, ends, monkeypatch):
    """Rounds in which a host is lost; after every one that ends there is a checkpoint."""
    todo, each = list(losses), Serial.each

    def faulty(engine, requests):
        requests = list(requests)
        if isinstance(requests[0], Work) and todo and requests[0].t == todo[0]:
            todo.pop(0)
            raise HostLostError("a host was lost.")
        return each(engine, requests)

    monkeypatch.setattr(Serial, "each", faulty)
    settings = {"rounds": 3, "checkpoint_every": 1}
    if not ends:
        with refused(HostLostError, "a host was lost.", "pluribus resume"):
            run_tiny("fedgh", **settings)
        return
    result = run_tiny("fedgh", **settings)
    monkeypatch.undo()
    assert_same(run_tiny("fedgh", **settings), result)
    told = [sentence for sentence in result.warnings if "a host was lost." in sentence]
    for sentence, t in zip(told, losses, strict=True):
        assert_facts(sentence, f"round {t}" if t else "beginning")


def test_a_former_name_says_what_it_is_called_now() -> None:
    with pytest.raises(AttributeError, match=r"pluribus\.TwoPartModel"):
        pluribus.Split  # noqa: B018
