"""Searches as Optuna's users know them: samplers, pruners, seeds, parallel trials, storages, and what is shown."""

from __future__ import annotations

import io
import json
import logging
import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from rich.console import Console

import pluribus
from conftest import few_digits, new_folder, tiny
from pluribus.errors import (
    DamagedFileError,
    FileAccessError,
    FormatError,
    MissingSettingError,
    NotFiniteError,
    OtherRunError,
    PackageError,
    RangeError,
    UnfinishedError,
    UnknownNameError,
)
from pluribus.experiment import experiment
from pluribus.internal.metrics import METRICS
from pluribus.storage.files import read_json, read_lines
from pluribus.study.parallel import Failure, Progress
from pluribus.study.proposal import Proposals
from pluribus.study.search import Search
from pluribus.study.space import parse_space, spaces_of
from pluribus.study.stored_study import StoredStudy
from pluribus.study.trial_board import TrialBoard
from pluribus.study.tune import Tuned, tune
from processes import start
from refusals import Kind, refused
from terminal import Terminal

WIDE = "lr=1e-6:0.3:log"  # most trials learn nothing
FALLING = "lr=0.3|0.29|0.28|0.27|0.26|1e-6|1e-5"  # the last two of a grid learn nothing


def tune_tiny(*methods: Any, **settings: Any) -> list[Tuned]:
    small = {"out": None, "space": WIDE, "trials": 2, "models": "mlp-64", "rounds": 1, "clients": 2}
    return tune(methods, progress=False, **tiny(**small | settings))


def cut(out: str, label: str, lines: int) -> None:
    """Leave what a kill would: the record of some trials, and run folders."""
    path = Path(out) / label / "trials.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


# ---- samplers --------------------------------------------------------------------------------------------------------


def test_the_best_of_a_grid_is_that_of_all_runs() -> None:
    (found,) = tune_tiny("local", space="lr=1e-4|0.3,epochs=1:2", sampler="grid", trials=20)
    settings = [{"lr": lr, "epochs": epochs} for lr in (1e-4, 0.3) for epochs in (1, 2)]
    assert [one["settings"] for one in found.trials] == settings
    how = tiny(models="mlp-64", rounds=1, clients=2, workers=1, threads=1)
    runs = [pluribus.run("local", progress=False, **how | one) for one in settings]
    scores = [run.summary["after"]["selected"]["val"]["mean"] for run in runs]
    assert [one["score"] for one in found.trials] == scores
    assert found.settings == settings[scores.index(max(scores))]


@pytest.mark.parametrize(
    ("settings", "kind", "facts"),
    [
        ({"space": WIDE}, FormatError, ("--sampler grid", "lr=1e-06|0.3")),
        ({"space": "lr=0.1|0.2,epochs=1:2", "trials": 3}, RangeError, ("local", 4, "--trials 4")),
    ],
)
def test_a_grid_must_be_finite_and_fit(settings: dict[str, Any], kind: Kind, facts: tuple[object, ...]) -> None:
    with refused(kind, *facts):
        tune_tiny("local", sampler="grid", **settings)


def test_random_trials_do_not_depend_on_scores() -> None:
    longer, shorter = (tune_tiny("local", sampler="random", trials=3, rounds=rounds)[0] for rounds in (1, 2))
    assert [one["settings"] for one in longer.trials] == [one["settings"] for one in shorter.trials]
    assert [one["score"] for one in longer.trials] != [one["score"] for one in shorter.trials]


@pytest.mark.parametrize(
    ("space", "values"),
    [
        ("lr=0.1|1e-3", {0.1, 1e-3}),
        ("batch_size=5|10", {5, 10}),
        ("dp_secure=true|false", {True, False}),
        ("server_step=class|client", {"class", "client"}),
        ("clip_norm=1|2.5", {1.0, 2.5}),
    ],
)
def test_choices_have_the_type_of_their_setting(space: str, values: set[Any]) -> None:
    (found,) = spaces_of(parse_space(space), {"fedgh": experiment("fedgh", dp_epsilon=8.0)})["fedgh"].values()
    assert set(found.choices) == values
    assert {type(one) for one in found.choices} == {type(one) for one in values}


@pytest.mark.parametrize(
    ("space", "kind", "facts"),
    [
        ("lr=0.1|fast", FormatError, ("lr", "'fast'")),
        ("lr=0.1|-1", RangeError, ("--lr", -1)),
        ("epochs=1|1.5", FormatError, ("epochs", "'1.5'")),
        ("server_step=class|clint", UnknownNameError, ("clint",)),
        ("server_step=0:1", FormatError, ("server_step", "ONE|OTHER")),
    ],
)
def test_choices_that_cannot_run_are_refused_before_the_search(
    tmp_path: Path, space: str, kind: Kind, facts: tuple[object, ...]
) -> None:
    with refused(kind, *facts):
        tune_tiny("fedgh", space=space, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_the_score_of_a_trial_is_the_mean_over_its_seeds() -> None:
    found = tune_tiny("local", "fedgh", seed=3, seeds=2, out=(out := new_folder()))
    digests: dict[int, set[str]] = {3: set(), 4: set()}
    for row in found:
        for one in row.trials:
            scores = []
            for seed in (3, 4):
                folder = Path(out) / row.label / f"trial-{one['trial']}" / f"seed-{seed}"
                scores.append(read_json(folder / "result.json")["summary"]["after"]["selected"]["val"]["mean"])
                digests[seed].add(read_json(folder / "partition.json")["digest"])
            assert one["scores"] == {"3": scores[0], "4": scores[1]}
            assert one["score"] == statistics.fmean(scores)
    assert [len(some) for some in digests.values()] == [1, 1], "all trials of a seed have its partition"
    assert digests[3] != digests[4]


def test_a_trial_that_diverges_with_one_seed_scores_nothing() -> None:
    (found,) = tune_tiny("fedgh", space="lr=1e29:1e30", trials=1, seeds=3, out=(out := new_folder()))
    assert (found.score, found.trials[0]["scores"]) == (0, {"0": 0})
    assert [path.name for path in (Path(out) / "fedgh" / "trial-0").iterdir()] == ["seed-0"]


# ---- pruners ---------------------------------------------------------------------------------------------------------


PRUNED: dict[str, Any] = {"pruner": "median", "sampler": "grid", "space": FALLING, "trials": 7}


def best_at(one: dict[str, Any], done: int) -> float:
    return max(value for step, value in one["values"].items() if int(step) <= done)


def test_a_trial_below_the_median_is_pruned_and_recorded() -> None:
    (found,) = tune_tiny("local", **PRUNED, rounds=3, out=(out := new_folder()))
    assert [one["state"] for one in found.trials] == ["COMPLETE"] * 5 + ["PRUNED"] * 2
    for number, one in enumerate(found.trials):
        folder = Path(out) / "local" / f"trial-{number}" / "seed-0"
        earlier = [other for other in found.trials[:number] if other["state"] == "COMPLETE"]
        for done in range(1, min(one["rounds"], 2) + 1):  # after the last round nothing is pruned
            below = len(earlier) >= 5 and best_at(one, done) < np.median([of["values"][str(done)] for of in earlier])
            assert below == (one["state"] == "PRUNED" and done == one["rounds"])
        means = [line["mean"]["after"]["val"]["mean"] for line in read_lines(folder / "metrics.jsonl")]
        assert list(one["values"].values()) == means
        assert (folder / "result.json").exists() == (one["state"] == "COMPLETE")
    pruned = next(one for one in found.trials if one["state"] == "PRUNED")
    assert pruned["score"] == list(pruned["values"].values())[-1]
    assert found.score == max(one["score"] for one in found.trials if one["state"] == "COMPLETE")
    stored = found.study().trials[pruned["trial"]]
    assert (stored.state.name, len(stored.intermediate_values)) == ("PRUNED", pruned["rounds"])
    finished = pluribus.resume(Path(out) / "local" / f"trial-{pruned['trial']}" / "seed-0", progress=False)
    assert len(finished.history) == 3, "the run of a pruned trial can be resumed"


def test_no_trial_is_pruned_after_its_last_round() -> None:
    (found,) = tune_tiny("local", **PRUNED, rounds=1)
    assert {one["state"] for one in found.trials} == {"COMPLETE"}


def test_hyperband_decides_as_in_a_study_that_was_never_rebuilt() -> None:
    (found,) = tune_tiny("local", **PRUNED | {"pruner": "hyperband"}, rounds=4)
    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=4)
    study = optuna.create_study(study_name="local-0", direction="maximize", pruner=pruner)
    for one in found.trials:
        trial = study.ask()
        stopped = None
        for done, value in one["values"].items():
            trial.report(value, int(done))
            if int(done) < 4 and trial.should_prune():
                stopped = int(done)
        study.tell(trial, one["score"])
        assert stopped == (one["rounds"] if one["state"] == "PRUNED" else None)
    assert any(one["state"] == "PRUNED" for one in found.trials)


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_pruned_trials_are_pruned_again(pruner: Any) -> None:
    how = PRUNED | {"pruner": pruner, "rounds": 3, "checkpoint_every": 1, "out": new_folder()}
    (whole,) = tune_tiny("local", **how)
    pruned = next(one for one in whole.trials if one["state"] == "PRUNED")
    cut(how["out"], "local", pruned["trial"])
    (again,) = tune_tiny("local", **how)
    assert again.trials == whole.trials


def test_the_first_seed_decides_whether_a_trial_is_pruned() -> None:
    (found,) = tune_tiny("local", **PRUNED, rounds=2, seeds=2)
    assert [len(one["scores"]) for one in found.trials] == [2] * 5 + [0] * 2
    assert [len(one["values"]) for one in found.trials] == [2] * 5 + [1] * 2


# ---- parallel trials -------------------------------------------------------------------------------------------------


def search_without_runs(jobs: int, trials: int, out: str, pruner: str = "none") -> Search:
    described = experiment("local", **tiny(models="mlp-64", clients=2))
    proposals = Proposals(described, parse_space("lr=0.01:0.1"), METRICS["accuracy"], "tpe", pruner, jobs)
    (folder := Path(out) / "local").mkdir(exist_ok=True)
    stored = StoredStudy(None, None, "local", {}, METRICS["accuracy"])
    board = TrialBoard({"local": 2 * trials}, 1, shown=False)
    search = Search(folder, proposals, trials, [0], "after", stored, board)
    search.begin()
    return search


def settings_in_order(order: list[int]) -> list[float]:
    """The learning rates of trials, three at a time, whose runs end in this order; all diverge."""
    search = search_without_runs(3, len(order), new_folder())
    running = dict(enumerate(search.take() for _ in range(3)))
    for number in order:
        assert search.take() is None, "three trials run"
        run = running.pop(number)
        assert run is not None
        search.finish(run.out or "", Failure(NotFiniteError.kind, "diverged."))
        while (more := search.take()) is not None:
            running[int(Path(more.out or "").parent.name.removeprefix("trial-"))] = more
    assert [one["trial"] for one in search.tried] == sorted(order)
    return [one["settings"]["lr"] for one in search.tried]


def test_trials_do_not_depend_on_which_of_them_ends_first() -> None:
    """Ten trials are drawn blindly, the others are not."""
    mixed = [2, 1, 0, 5, 3, 4, 6, 8, 7, 11, 10, 9, 13, 12]
    assert settings_in_order(mixed) == settings_in_order(sorted(mixed))


def test_parallel_trials_know_only_what_has_certainly_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    propose = Proposals.propose

    def spy(self: Proposals, tried: Any, others: Any) -> Any:
        asked.append((len(tried), len(others)))
        return propose(self, tried, others)

    monkeypatch.setattr(Proposals, "propose", spy)
    settings_in_order([1, 0, 2, 4, 3, 5])
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (3, 2)]


def test_trials_in_processes_end_as_those_in_this_one() -> None:
    """Random settings do not depend on earlier trials, so only the way of running differs."""
    how: dict[str, Any] = {"sampler": "random", "trials": 3, "seeds": 2, "rounds": 2}
    (alone,), (beside,) = tune_tiny("fedgh", **how), tune_tiny("fedgh", jobs=2, **how)
    assert beside.trials == alone.trials


def test_trials_in_processes_are_pruned(tmp_path: Path) -> None:
    """Trial 5 knows trials 0 to 3, which are too few to prune. Trial 6 knows one more."""
    how = PRUNED | {"rounds": 3, "jobs": 2, "out": tmp_path / "a"}
    (found,) = tune_tiny("local", **how)
    assert [one["state"] for one in found.trials] == ["COMPLETE"] * 6 + ["PRUNED"]
    assert not (tmp_path / "a" / "local" / "trial-6" / "seed-0" / "result.json").exists()
    cut(str(tmp_path / "a"), "local", 5)
    assert tune_tiny("local", **how)[0].trials == found.trials


def test_a_pruned_trial_is_recorded_when_its_process_has_ended(tmp_path: Path) -> None:
    """The trial beside it may end between the pruner's decision and the end of the process."""
    diverged = Failure(NotFiniteError.kind, "diverged.")
    search = search_without_runs(2, 8, str(tmp_path), "median")
    running = [search.take(), search.take()]
    for _ in range(6):
        first = running.pop(0)
        assert first is not None
        assert not search.update(first.out or "", Progress(1, 0.9))
        search.finish(first.out or "", diverged)
        running.append(search.take())
    earlier, pruned = (one.out or "" for one in running if one is not None)
    assert search.update(pruned, Progress(1, 0.1))
    search.finish(earlier, diverged)
    assert len(search.tried) == 7
    search.finish(pruned, None)
    assert [one["state"] for one in search.tried] == ["COMPLETE"] * 7 + ["PRUNED"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_search_ends_as_if_never_killed(jobs: int, tmp_path: Path, terminal: Terminal) -> None:
    flags = ["--data", few_digits(), "--clients", "2", "--rounds", "3", "--device", "cpu", "--models", "mlp-64"]
    flags += ["--trials", "4", "--space", "lr=0.01:0.1", "--jobs", jobs, "--checkpoint-every", "1", "--quiet"]
    record = tmp_path / "killed" / "local" / "trials.jsonl"
    process = start("tune", "local", *flags, "--out", tmp_path / "killed")
    while not record.exists():  # trial 0 has ended, the others have not
        assert process.poll() is None, process.err
        time.sleep(0.01)
    process.kill()
    assert len(read_lines(record)) < 4
    answers = [terminal("tune", "local", *flags, "--json", "--out", tmp_path / name) for name in ("killed", "whole")]
    killed, whole = (answer.json["tuned"][0] for answer in answers)
    assert killed["trials"] == whole["trials"]
    assert killed["settings"] == whole["settings"]
    study = optuna.load_study(study_name="local", storage=killed["storage"])
    assert [trial.value for trial in study.trials] == [one["score"] for one in whole["trials"]]
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}


# ---- storages --------------------------------------------------------------------------------------------------------


def test_optuna_opens_the_study_of_every_row() -> None:
    found = tune_tiny("local", "fedgh", space=f"{WIDE},epochs=1|2", seeds=2, out=(out := new_folder()))
    storage = f"sqlite:///{out}/study.db"
    assert optuna.get_all_study_names(storage) == ["local", "fedgh"]
    for row in found:
        assert (row.storage, row.study_name) == (storage, row.label)
        study = optuna.load_study(study_name=row.label, storage=storage)
        assert study.best_params == row.settings
        assert study.best_value == row.score
        assert study.user_attrs["metric"] == "accuracy"
        assert study.user_attrs["pluribus"] == read_json(Path(out) / row.label / "search.json")
        for stored, one in zip(study.trials, row.trials, strict=True):
            assert (stored.params, stored.value) == (one["settings"], one["score"])
            assert {str(step): value for step, value in stored.intermediate_values.items()} == one["values"]
            assert stored.user_attrs["scores"] == one["scores"]
            for folder in stored.user_attrs["folders"]:
                assert (Path(folder) / "result.json").exists()


@pytest.mark.parametrize("kind", ["sqlite:///{}/of-all.db", "{}/journal.log"])
def test_a_storage_may_hold_several_searches(kind: str, tmp_path: Path) -> None:
    storage = kind.format(tmp_path)
    for name in ("first", "second"):
        (found,) = tune_tiny("local", out=tmp_path / name, storage=storage)
        assert found.study_name == f"{name}-local"
        assert not (tmp_path / name / "study.db").exists()
        assert [trial.params for trial in found.study().trials] == [one["settings"] for one in found.trials]
    assert len(tune_tiny("local", out=tmp_path / "first", storage=storage, trials=3)[0].study().trials) == 3
    (tmp_path / "elsewhere").mkdir()
    with refused(OtherRunError, "first-local", "--storage"):
        tune_tiny("local", out=tmp_path / "elsewhere" / "first", storage=storage, seed=1)


def test_trials_of_another_search_in_the_study_are_refused() -> None:
    (found,) = tune_tiny("local", out=(out := new_folder()))
    assert found.storage is not None
    study = optuna.load_study(study_name="local", storage=found.storage)
    study.add_trial(optuna.trial.create_trial(params={"lr": 0.1}, distributions=study.trials[0].distributions, value=1))
    with refused(OtherRunError, "'local'", "trial 2"):
        tune_tiny("local", out=out, trials=3)


def test_a_lost_study_is_written_again() -> None:
    (found,) = tune_tiny("local", out=(out := new_folder()))
    (Path(out) / "study.db").unlink()
    (again,) = tune_tiny("local", out=out)
    assert again.trials == found.trials
    assert [trial.value for trial in again.study().trials] == [one["score"] for one in found.trials]


@pytest.mark.parametrize(
    ("storage", "kind", "facts"),
    [
        ("sqlite:////no/such/folder/study.db", FileAccessError, ("/no/such/folder",)),
        ("/no/such/folder/journal.log", FileAccessError, ("/no/such/folder",)),
        ("nonsense://somewhere", FileAccessError, ("nonsense",)),
        ("mysql+nodriver://me:secret@nowhere/db", FileAccessError, ("mysql+nodriver", "nowhere")),
        ("postgresql+psycopg2://me:secret@nowhere/db", PackageError, ("psycopg2", "nowhere")),
        ("redis://localhost", FormatError, ("Redis",)),
    ],
)
def test_storages_that_cannot_be_used(
    terminal: Terminal, tmp_path: Path, storage: str, kind: Kind, facts: tuple[str, ...]
) -> None:
    flags = ["--data", few_digits(), "--clients", "2", "--rounds", "1", "--models", "mlp-64"]
    told = terminal.refused("tune", "local", *flags, "--storage", storage, "--out", tmp_path / "a")
    told.check(kind, *facts)
    assert "secret" not in told


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    tune_tiny("local", out=tmp_path / "a")
    (tmp_path / "a" / "study.db").write_text("not a database, but long enough to look like one " * 100)
    with refused(FileAccessError, tmp_path / "a" / "study.db"):
        tune_tiny("local", out=tmp_path / "a", trials=3)


def test_a_folder_that_no_url_can_name(tmp_path: Path) -> None:
    with refused(FormatError, "a?b", "--out"):
        tune_tiny("local", out=tmp_path / "a?b")


# ---- what is returned and refused ------------------------------------------------------------------------------------


def test_found_has_a_study_and_a_frame() -> None:
    (found,) = tune_tiny("local", seeds=2, out=None)
    assert (found.storage, found.file) == (None, None)
    assert [trial.value for trial in found.study().trials] == [one["score"] for one in found.trials]
    frame = found.frame()
    assert list(frame.columns) == ["trial", "state", "score", "rounds", "lr", "seed 0", "seed 1"]
    assert frame["score"].tolist() == [one["score"] for one in found.trials]
    assert frame["seed 1"].tolist() == [one["scores"]["1"] for one in found.trials]
    assert json.loads(json.dumps(found.to_json()))["best_trial"] == frame["score"].idxmax()


@pytest.mark.parametrize(
    ("settings", "kind", "facts"),
    [
        ({"seeds": 0}, RangeError, ("--seeds", 0)),
        ({"jobs": 0}, RangeError, ("--jobs", 0)),
        ({"pruner": "medium"}, UnknownNameError, ("'medium'", "'median'")),
        ({"sampler": "cmaes"}, UnknownNameError, ("'cmaes'", "--help")),
        ({"storage": optuna.storages.InMemoryStorage(), "out": "a"}, FormatError, ("--storage", "InMemoryStorage")),
        ({"storage": "sqlite:///a.db", "out": None}, MissingSettingError, ("--storage", "--out")),
    ],
)
def test_bad_settings_are_refused(
    settings: dict[str, Any], kind: Kind, facts: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(kind, *facts):
        tune_tiny("local", **settings)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_stops_the_search_and_keeps_the_rest(jobs: int, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "trial-1").write_text("in the way of a folder")
    how: dict[str, Any] = {"sampler": "random", "trials": 3, "jobs": jobs, "out": tmp_path}
    with refused(UnfinishedError, "local/trial-1/seed-0", "--out"):
        tune_tiny("local", **how)
    assert [one["trial"] for one in read_lines(tmp_path / "local" / "trials.jsonl")] == [0]
    (tmp_path / "local" / "trial-1").unlink()
    assert len(tune_tiny("local", **how)[0].trials) == 3


def test_a_damaged_record_of_a_later_row_shows_before_the_first_search(tmp_path: Path) -> None:
    tune_tiny("local", "fedgh", out=tmp_path)
    (tmp_path / "fedgh" / "trials.jsonl").write_text("5\n")
    with refused(DamagedFileError, tmp_path / "fedgh" / "trials.jsonl"):
        tune_tiny("local", "fedgh", out=tmp_path, trials=3)
    assert not (tmp_path / "local" / "trial-2").exists()


@pytest.mark.parametrize("settings", [{"jobs": 2}, {"seeds": 2}, {"pruner": "median"}, {"sampler": "random"}])
def test_a_search_cannot_change_on_its_way(settings: dict[str, Any]) -> None:
    tune_tiny("local", out=(out := new_folder()))
    with refused(OtherRunError, out, *(f"--{name}" for name in settings), *settings.values()):
        tune_tiny("local", out=out, trials=3, **settings)


def test_a_search_of_version_0_1_is_resumed() -> None:
    (whole,) = tune_tiny("local", trials=3, out=(out := new_folder()))
    folder = Path(out) / "local"
    lines = [{name: one[name] for name in ("trial", "settings", "score")} for one in whole.trials[:2]]
    (folder / "trials.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    search = read_json(folder / "search.json")
    (folder / "search.json").write_text(json.dumps({name: search[name] for name in ("space", "view", "settings")}))
    (Path(out) / "study.db").unlink()
    (again,) = tune_tiny("local", trials=3, out=out)
    assert [one["score"] for one in again.trials] == [one["score"] for one in whole.trials]
    assert again.trials[2] == whole.trials[2]


# ---- what is shown ---------------------------------------------------------------------------------------------------


def show(width: int = 80) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    one = {"trial": 0, "settings": {"lr": 0.0123456}, "score": 0.5, "state": "COMPLETE", "rounds": 4}
    two = {"trial": 1, "settings": {"lr": 0.2}, "score": 0.125, "state": "PRUNED", "rounds": 1}
    with TrialBoard({"local": 12}, 1, console=console) as board:
        board.begin("local", METRICS["accuracy"], ["lr"], 3, 0, None)
        board.start(0, one["settings"])  # type: ignore[arg-type]
        board.update(0, 0, Progress(2, 0.25))
        board.end(one, one)
        board.start(1, two["settings"])  # type: ignore[arg-type]
        board.end(two, one)
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text.getvalue())


def test_a_terminal_shows_trials_and_the_best_so_far() -> None:
    lines = [line.split() for line in show().splitlines()]
    assert ["trial", "accuracy", "lr"] in lines
    assert ["0", "0.500", "0.01235", "best", "so", "far"] in lines
    assert ["1", "0.125", "0.2", "pruned", "after", "1", "round"] in lines
    assert "best 0.500 (trial 0)" in show()
    assert "8/12" in show()


def test_without_a_terminal_there_is_a_line_per_trial(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pluribus"):
        (found,) = tune("local", space=WIDE, trials=2, **tiny(models="mlp-64", rounds=1, clients=2))
        tune_tiny("local")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "progress=False logs nothing"
    for one, line in zip(found.trials, told, strict=True):
        assert f"trial {one['trial']}" in line
        assert f"accuracy {one['score']:.3f}" in line
        assert f"lr {one['settings']['lr']:.4g}" in line


def test_the_command_takes_all_of_it(terminal: Terminal, tmp_path: Path) -> None:
    flags = ["--data", few_digits(), "--clients", "2", "--rounds", "1", "--device", "cpu", "--models", "mlp-64"]
    flags += ["--trials", "2", "--seeds", "2", "--sampler", "random", "--pruner", "median", "--out", tmp_path / "a"]
    answer = terminal("tune", "local", *flags)
    assert answer.code == 0
    assert "mean of 2 seeds, the best of 2 trials\n" in answer.out
    assert f"Optuna storage sqlite:///{tmp_path / 'a'}/study.db" in answer.out
    assert answer.err.count("local, trial") == 2
    quiet = terminal("tune", "local", *flags, "--json")
    (told,) = quiet.json["tuned"]
    assert quiet.err == ""
    assert [sorted(one) for one in told["trials"]] == [
        ["rounds", "score", "scores", "settings", "state", "trial", "values"]
    ] * 2
