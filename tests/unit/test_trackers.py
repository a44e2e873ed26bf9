"""Trackers: what the real programs find in what was written, and that none of them can stop a run."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import pluribus
from conftest import new_folder, run_tiny, tiny
from pluribus.cli import main
from pluribus.errors import PackageError, UnknownNameError
from pluribus.result import Result
from pluribus.track.tracker import TRACKERS, Tracker, make_trackers
from refusals import assert_facts
from terminal import Terminal

OURS = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_GROUP")


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def together(package: str) -> pytest.MarkDecorator:
    """In one process, which imports the package once and has one run of it for all to look at."""
    return pytest.mark.xdist_group(package)


# ---- reading back ----------------------------------------------------------------------------------------------------

Points = list[tuple[int, float]]


def tensorboard_points(folder: Path, name: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def mlflow_run(folder: Path) -> tuple[Any, Any]:
    """A client of the store, and the one run in it."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("pluribus")
    [run] = client.search_runs([experiment.experiment_id])
    return client, run


def mlflow_points(folder: Path, name: str) -> Points:
    client, run = mlflow_run(folder)
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


def wandb_records(folder: Path) -> list[Any]:
    """What W&B's files hold, once its helper has written all of it."""
    deadline = time.monotonic() + 60
    while True:
        files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
        records = [record for file in files for record in records_of(file.read_bytes())]
        if files and sum(record.HasField("exit") for record in records) == len(files):
            return records
        assert time.monotonic() < deadline, f"{files} are not whole"
        time.sleep(0.02)


def records_of(data: bytes) -> Iterator[Any]:
    """Chunks in the format of LevelDB's log, of which some are parts of a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:  # a block ends with padding where no header fits
            at += left
            continue
        if len(data) < at + 7:
            return  # half a header: W&B is still writing
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if len(data) < at + 7 + size:
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def wandb_values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    return [wandb_values(record.history.item) for record in wandb_records(folder) if record.HasField("history")]


def wandb_points(folder: Path, name: str) -> Points:
    return [(line["_step"], line[name]) for line in wandb_history(folder) if name in line]


POINTS = {"tensorboard": tensorboard_points, "mlflow": mlflow_points, "wandb": wandb_points}
each = pytest.mark.parametrize("name", [pytest.param(name, marks=(needs(name), together(name))) for name in POINTS])


def expected(result: Result) -> dict[str, Points]:
    """The curves, worked out from the lines of metrics.jsonl."""
    curves: dict[str, Points] = {}
    up = down = 0
    for record in result.history:
        up, down = up + record["bytes"]["up"], down + record["bytes"]["down"]
        values = {
            "loss": record["loss"],
            "seconds": record["seconds"],
            "bytes/up": up,
            "bytes/down": down,
            "after/test/mean": record["mean"]["after"]["test"]["mean"],
            "after/test/weighted": record["mean"]["after"]["test"]["weighted"],
            "before/test/worst": record["mean"]["before"]["test"]["worst"],
            "before/test/best": record["mean"]["before"]["test"]["best"],
        }
        for name, value in values.items():
            curves.setdefault(name, []).append((record["round"] + 1, value))
    return curves


def assert_same(found: Points, wanted: Points) -> None:
    assert [step for step, _ in found] == [step for step, _ in wanted]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-6)  # float32


# ---- what is written -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A run that was tracked, and which addresses were asked for meanwhile."""

    result: Result
    asked: list[str]


@cache
def told(name: str) -> Told:
    asked: list[str] = []
    listening = True

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if listening and event == "socket.getaddrinfo":
            asked.append(str(args[0]))
        if listening and event == "socket.connect" and isinstance(args[1], tuple):
            asked.append(args[1][0])

    sys.addaudithook(heard)  # for good: no hook can be taken back
    result = run_tiny("fedgh", rounds=3, server_lr=0.03, track=[name])
    listening = False
    return Told(result, asked)


@each
def test_every_round_is_told(name: str) -> None:
    result = told(name).result
    assert result.warnings == []
    for curve, points in expected(result).items():
        assert_same(POINTS[name](result.folder, curve), points)


@each
def test_nothing_is_sent(name: str) -> None:
    """By Python; W&B's helper is another program, and is told to stay offline."""
    assert [host for host in told(name).asked if host not in ("localhost", "127.0.0.1", "::1")] == []


@needs("tensorboard")
@together("tensorboard")
def test_tensorboard_has_settings_and_final_figures() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    result = told("tensorboard").result
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    settings = events.PluginTagToContent("hparams")
    session = HParamsPluginData.FromString(settings["_hparams_/session_start_info"]).session_start_info.hparams
    assert session["method"].string_value == "fedgh"
    assert session["server_lr"].number_value == 0.03
    assert "_hparams_/session_end_info" in settings
    assert_same(tensorboard_points(result.folder, "accuracy"), [(3, result.accuracy)])
    best = result.summary["before"]["selected"]["test"]["worst"]
    assert_same(tensorboard_points(result.folder, "selected/before/test/worst"), [(3, best)])


@needs("mlflow")
@together("mlflow")
def test_mlflow_has_settings_and_final_figures() -> None:
    result = told("mlflow").result
    _, run = mlflow_run(result.folder)
    assert run.data.params["method"] == "fedgh"
    assert run.data.params["server_lr"] == "0.03"
    assert run.data.metrics["accuracy"] == result.accuracy
    assert run.data.metrics["selected/before/test/worst"] == result.summary["before"]["selected"]["test"]["worst"]
    assert (run.info.status, run.info.run_name) == ("FINISHED", result.folder.name)


@needs("wandb")
@together("wandb")
def test_wandb_has_settings_and_final_figures() -> None:
    result = told("wandb").result
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    records = wandb_records(result.folder)
    for record in records:
        config |= wandb_values(record.run.config.update)
        summary |= wandb_values(record.summary.update)
    assert config["method"] == "fedgh"
    assert config["server_lr"] == 0.03
    assert summary["accuracy"] == result.accuracy
    assert summary["selected/before/test/worst"] == result.summary["before"]["selected"]["test"]["worst"]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def test_figures_that_nobody_measured_are_left_out() -> None:
    heard = Heard()
    run_tiny("fedgh", rounds=2, evaluate_every=2, observers=[heard])
    assert [set(figures) >= {"loss", "bytes/up"} for _, figures in heard.rounds] == [True, True]
    assert ["after/test/mean" in figures for _, figures in heard.rounds] == [False, True]


# ---- a run that was stopped ------------------------------------------------------------------------------------------


class Stop:
    """Stops a run after so many rounds, as Ctrl-C would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def start(self, federation: Any) -> None: ...

    def round(self, record: Mapping[str, Any], ledger: Any) -> None:
        if record["round"] + 1 == self.after:
            raise KeyboardInterrupt

    def finish(self, result: Result) -> None: ...


@each
def test_a_resumed_run_goes_on_with_its_numbers(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    [tracker] = make_trackers(name)
    with pytest.raises(KeyboardInterrupt):  # three rounds are told, two of them are in the checkpoint
        run_tiny("fedgh", out, rounds=4, checkpoint_every=2, observers=[tracker, Stop(3)])
    assert [step for step, _ in POINTS[name](out, "loss")] == [1, 2, 3]
    if name == "mlflow":
        assert mlflow_run(out)[1].info.status == "KILLED"
    result = pluribus.resume(out, progress=False, track=[name])
    for curve in ("loss", "bytes/up", "after/test/mean"):
        found = POINTS[name](out, curve)
        if name == "wandb":  # its files have the third round in both parts; W&B puts them together by step
            assert found[2] == found[3]
            del found[2]
        assert_same(found, expected(result)[curve])
    if name == "wandb":
        assert len({record.run.run_id for record in wandb_records(out) if record.HasField("run")}) == 1


# ---- runs that belong together ---------------------------------------------------------------------------------------

ROWS = {"slow": ("fedgh", {"server_lr": 0.01}), "alone": "local"}
RUNS = ["alone-0", "alone-1", "slow-0", "slow-1"]


def compared(name: str, out: Path, seeds: int = 2, jobs: int = 1) -> Path:
    """A comparison of two rows, in a folder that is called study."""
    pluribus.compare(ROWS, seeds=seeds, jobs=jobs, out=out / "study", progress=False, track=name, **tiny())
    return out / "study"


def mlflow_runs(folder: Path) -> tuple[Any, list[Any]]:
    """A client of the store of several runs, and these runs by name."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    names = [experiment.name for experiment in client.search_experiments()]
    assert names.count("pluribus") == 1
    runs = client.search_runs([client.get_experiment_by_name("pluribus").experiment_id])
    return client, sorted(runs, key=lambda run: run.info.run_name)


def our_tags(run: Any) -> dict[str, str]:
    return {name: value for name, value in run.data.tags.items() if not name.startswith("mlflow.")}


@needs("mlflow")
@together("mlflow")
def test_a_comparison_has_one_store_of_mlflow(tmp_path: Path) -> None:
    folder = compared("mlflow", tmp_path, seeds=1, jobs=2)  # two processes, which both find no store
    _, runs = mlflow_runs(folder)
    assert [run.info.run_name for run in runs] == ["alone-0", "slow-0"]
    wanted = {"method": "fedgh", "seed": "0", "label": "slow", "study": "study"}
    assert [our_tags(run) for run in runs] == [wanted | {"method": "local", "label": "alone"}, wanted]
    for run in runs:
        result = pluribus.load_result(folder / run.info.run_name)
        assert run.data.metrics["accuracy"] == result.accuracy
        assert not (result.folder / "mlruns").exists()


@needs("mlflow")
@together("mlflow")
def test_a_run_of_a_comparison_is_resumed_in_the_same_store(tmp_path: Path) -> None:
    folder = compared("mlflow", tmp_path)
    (folder / "slow-1" / "result.json").unlink()
    alone = pluribus.resume(folder / "slow-1", progress=False, track="mlflow")
    assert_facts(" ".join(alone.warnings), "MLflow", "MLFLOW_TRACKING_URI")
    (folder / "slow-1" / "result.json").unlink()
    compared("mlflow", tmp_path)
    client, runs = mlflow_runs(folder)
    assert [run.info.run_name for run in runs] == RUNS
    assert [point.step for point in client.get_metric_history(runs[3].info.run_id, "loss")] == [1, 2]


@needs("mlflow")
@together("mlflow")
def test_the_trials_of_a_search_have_one_store_of_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pluribus.tune(["local"], trials=2, out=tmp_path / "search", progress=False, track="mlflow", **tiny(rounds=1))
    _, runs = mlflow_runs(tmp_path / "search")
    assert [run.info.run_name for run in runs] == ["local/trial-0/seed-0", "local/trial-1/seed-0"]
    assert [our_tags(run)["label"] for run in runs] == ["local/trial-0", "local/trial-1"]
    assert [our_tags(run)["study"] for run in runs] == ["search"] * 2
    assert len({run.data.params["lr"] for run in runs}) == 2


@needs("tensorboard")
@together("tensorboard")
def test_tensorboard_shows_the_runs_of_a_comparison_by_their_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    shown = EventMultiplexer().AddRunsFromDirectory(str(compared("tensorboard", tmp_path)))
    shown.Reload()
    assert sorted(shown.Runs()) == [f"{name}/tensorboard" for name in RUNS]
    assert [point.step for point in shown.Tensors("slow-1/tensorboard", "loss")] == [1, 2]


@needs("wandb")
@together("wandb")
def test_the_runs_of_a_comparison_are_a_group_of_wandb(tmp_path: Path) -> None:
    folder = compared("wandb", tmp_path)
    for name in RUNS:
        run = next(record.run for record in wandb_records(folder / name) if record.HasField("run"))
        assert (run.run_group, run.display_name) == ("study", name)
        label, _, seed = name.partition("-")
        assert {f"label:{label}", f"seed:{seed}"} < set(run.tags)


# ---- a tracker that fails --------------------------------------------------------------------------------------------


class Heard(Tracker):
    """A tracker of which every call can be made to fail."""

    name = "json"  # a package that is there

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails
        self.rounds: list[tuple[int, Mapping[str, float]]] = []
        self.calls: list[str] = []

    def _called(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails:
            raise OSError(28, "No space left on device")

    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        self._called("begin")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.rounds.append((step, figures))
        self._called("log")

    def end(self, step: int, figures: Mapping[str, float] | None) -> None:
        self._called("end")


@pytest.mark.parametrize(
    ("fails", "calls"), [("begin", ["begin"]), ("log", ["begin", "log"]), ("end", ["begin", "log", "log", "end"])]
)
def test_a_tracker_that_fails_is_told_of_once_and_the_run_goes_on(fails: str, calls: list[str]) -> None:
    tracker = Heard(fails)
    result = run_tiny("fedgh", rounds=2, observers=[tracker])
    assert tracker.calls == calls
    (told,) = result.warnings
    assert_facts(told, "Heard", "No space left on device")
    assert len(result.history) == 2


def test_a_person_sees_it_when_a_tracker_fails_at_the_very_end(capsys: pytest.CaptureFixture[str]) -> None:
    pluribus.run("fedgh", out=new_folder(), observers=[Heard("end")], **tiny())
    assert capsys.readouterr().err.count("Heard failed") == 1


@needs("tensorboard")
@together("tensorboard")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # its writer's thread prints it too
def test_a_full_disk_stops_the_tracker_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Fills:
        """Puts what never has space in the place of the file that the tracker writes."""

        def start(self, federation: Any) -> None: ...

        def round(self, record: Mapping[str, Any], ledger: Any) -> None:
            [file] = (tmp_path / "run" / "tensorboard").iterdir()
            file.unlink()
            file.symlink_to("/dev/full")

        def finish(self, result: Result) -> None: ...

    result = pluribus.run(
        "fedgh", out=str(tmp_path / "run"), observers=[Fills()], track="tensorboard", **tiny(rounds=3)
    )
    assert len(result.history) == 3
    assert len(result.warnings) == 1
    assert "No space left on device" in result.warnings[0]
    assert capsys.readouterr().err.count("TensorBoard failed") == 1  # and a person sees it


def test_the_numbers_do_not_depend_on_who_watches() -> None:
    alone, tracked = run_tiny("fedgh"), run_tiny("fedgh", observers=[Heard()])
    assert [record["mean"] for record in alone.history] == [record["mean"] for record in tracked.history]
    assert (alone.folder / "config.toml").read_text() == (tracked.folder / "config.toml").read_text()


# ---- the command -----------------------------------------------------------------------------------------------------

SMALL = [f"--{name.replace('_', '-')}={value}" for name, value in tiny().items()]


@needs("tensorboard")
@together("tensorboard")
def test_run_and_resume_take_trackers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "fedgh", *SMALL, "--out", str(out), "--against", "local", "--track", "tensorboard"]) == 0
    assert [step for step, _ in tensorboard_points(out, "loss")] == [1, 2]
    assert [step for step, _ in tensorboard_points(tmp_path / "run-local", "loss")] == [1, 2]
    (out / "result.json").unlink()
    assert main(["resume", str(out), "--track=tensorboard", "--json"]) == 0


@pytest.mark.parametrize("command", [["run", "fedgh"], ["resume", "runs/a"], ["tune", "fedgh"], ["serve", "fedgh"]])
def test_an_unknown_tracker_is_refused(command: list[str], terminal: Terminal) -> None:
    told = terminal.refused(*command, "--track", "tensorbord")
    told.check(UnknownNameError, "'tensorbord'", "'tensorboard'", "pluribus run --help")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: Terminal
) -> None:
    monkeypatch.setattr("pluribus.track.tracker.find_spec", lambda package: None)
    told = terminal.refused("run", "fedgh", *SMALL, "--out", tmp_path / "run", "--track", name)
    told.check(PackageError, TRACKERS[name], f"pip install 'pluribus[{name}]'")
    assert not (tmp_path / "run").exists()
