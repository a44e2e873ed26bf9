"""`pluribus tune`: the same budget for all, validation data alone, and a search that goes on as if never stopped."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

import pluribus
from conftest import few_digits, new_folder, tiny
from pluribus.cli.flags import begin, parse_experiment
from pluribus.errors import FormatError, MismatchError, OtherRunError, RangeError, UnknownNameError
from pluribus.storage.files import read_json
from pluribus.study.space import Range, parse_space
from pluribus.study.tune import Tuned, tune
from refusals import Kind, refused
from terminal import Terminal

SMALL = ["--data", few_digits(), "--clients", "3", "--rounds", "1", "--device", "cpu", "--models", "mlp-64"]
SPACE = "lr=1e-3:1e-1:log,server_lr=0.01:1"


def tune_tiny(*methods: Any, rows: Any = None, **settings: Any) -> list[Tuned]:
    settings = {"out": new_folder(), "space": SPACE, "trials": 3, "models": "mlp-64", "rounds": 1} | settings
    return tune(rows or methods, progress=False, **tiny(**settings))


def test_every_method_has_the_same_budget_and_its_own_space() -> None:
    local, fedgh = tune_tiny("local", "fedgh")
    assert [len(one.trials) for one in (local, fedgh)] == [3, 3]
    assert {tuple(trial["settings"]) for trial in local.trials} == {("lr",)}
    assert {tuple(trial["settings"]) for trial in fedgh.trials} == {("lr", "server_lr")}
    for trial in fedgh.trials:
        assert 1e-3 <= trial["settings"]["lr"] <= 1e-1
        assert 0.01 <= trial["settings"]["server_lr"] <= 1
    assert len({trial["settings"]["lr"] for trial in fedgh.trials}) == 3


def test_rows_have_labels_and_leave_nothing_on_disk_without_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = {"class": "fedgh", "client": ("fedgh", {"server_step": "client"})}
    found = tune_tiny(rows=rows, out=None, trials=1)
    assert [(one.label, one.method, one.file) for one in found] == [("class", "fedgh", None), ("client", "fedgh", None)]
    assert "--server-step client" in found[1].command
    assert list(tmp_path.iterdir()) == []
    kept = tune_tiny(rows=rows, out=tmp_path / "kept", trials=1)
    assert [one.trials for one in kept] == [one.trials for one in found]
    assert kept[1].file == tmp_path / "kept" / "client" / "best.toml"


def test_validation_data_decides() -> None:
    (found,) = tune_tiny("fedgh")
    for trial in found.trials:
        result = read_json(found.file.parent / f"trial-{trial['trial']}" / "seed-0" / "result.json")
        assert trial["score"] == result["summary"]["after"]["selected"]["val"]["mean"]
    assert found.score == max(trial["score"] for trial in found.trials)
    best = next(trial for trial in found.trials if trial["score"] == found.score)
    assert found.settings == best["settings"]


@pytest.mark.parametrize(("view", "asked"), [("after", "after"), ("before", "before"), ("own", "before")])
def test_one_view_decides(view: Any, asked: str) -> None:
    (found,) = tune_tiny("fedavg", space="lr=0.01:0.1", trials=2, view=view, out=(out := new_folder()))
    assert found.view == asked
    for trial in found.trials:
        result = read_json(found.file.parent / f"trial-{trial['trial']}" / "seed-0" / "result.json")
        assert trial["score"] == result["summary"][asked]["selected"]["val"]["mean"]
    with refused(OtherRunError, out, "--out"):
        tune_tiny("fedavg", space="lr=0.01:0.1", trials=2, view="before" if asked == "after" else "after", out=out)


def test_what_is_not_searched_is_the_same_for_all() -> None:
    """FML would have a learning rate of 0.05."""
    settings = {name: value for name, value in tiny(models="mlp-64", rounds=1, trials=1).items() if name != "lr"}
    for space, rate in (("epochs=1:2", 0.01), ("lr=0.02:0.03", None)):
        (fml,) = tune(["fml"], space=space, out=new_folder(), progress=False, **settings)
        assert read_json(fml.file.parent / "search.json")["settings"]["lr"] == 0.01
        assert [("--lr is 0.05" in caution) for caution in fml.cautions] == ([True] if rate else [])


def test_what_it_prints_is_the_best_run() -> None:
    (found,) = tune_tiny("fedgh", trials=2)
    begun, rest = begin(shlex.split(found.command)[2:])
    told, _ = parse_experiment("run", begun, rest, [])
    file = pluribus.experiment.experiment(None, found.file)
    assert told.settings() == file.settings()
    assert (file.lr, file.hyper["server_lr"]) == (found.settings["lr"], found.settings["server_lr"])


def test_a_search_goes_on_as_if_never_stopped() -> None:
    (whole,) = tune_tiny("fedgh", trials=12, out=(out := new_folder()))  # beyond the ten that are drawn blindly
    path = Path(out) / "fedgh" / "trials.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:10]))
    (Path(out) / "fedgh" / "trial-10" / "seed-0" / "result.json").unlink()  # stopped in the middle
    shutil.rmtree(Path(out) / "fedgh" / "trial-11")
    (again,) = tune_tiny("fedgh", trials=12, out=out)
    assert again.trials == whole.trials
    assert len(tune_tiny("fedgh", trials=13, out=out)[0].trials) == 13
    with refused(OtherRunError, out, "--out"):
        tune_tiny("fedgh", out=out, clients=3)


def test_training_that_diverges_counts_as_nothing() -> None:
    (found,) = tune_tiny("fedgh", space="lr=1e29:1e30", trials=1)
    assert found.score == 0


def test_the_command(terminal: Terminal, tmp_path: Path) -> None:
    argv = ["tune", "local", "fedgh", *SMALL, "--trials", "1", "--out", tmp_path / "a"]
    answer = terminal(*argv)
    assert answer.code == 0
    assert "on validation data, after local training, the best of 1 trials" in answer.out
    assert f"  pluribus run --config {tmp_path / 'a'}/fedgh/best.toml\n" in answer.out
    told = terminal(*argv, "--json").json
    assert [one["method"] for one in told["tuned"]] == ["local", "fedgh"]
    assert json.loads(json.dumps(told))["tuned"][0]["settings"].keys() == {"lr"}
    assert "never test data" in " ".join(terminal("tune", "--help").out.split())


@pytest.mark.parametrize(
    ("space", "kind", "facts"),
    [
        ("server_l=0:1", UnknownNameError, ["'server_l'", "'server_lr'"]),
        ("clients=2:5", UnknownNameError, ["'clients'"]),
        ("lr", FormatError, ["NAME=LOW:HIGH", "'lr'"]),
        ("lr=1:0", FormatError, ["lr", "LOW:HIGH", "'1:0'"]),
        ("lr=0:1:log", FormatError, ["lr", "LOW:HIGH:log", "'0:1:log'"]),
        ("lr=a:b", FormatError, ["lr", "LOW:HIGH", "'a:b'"]),
        ("lr=1:2:square", FormatError, ["lr", "LOW:HIGH", "'1:2:square'"]),
    ],
)
def test_bad_spaces_are_refused_in_one_sentence(
    terminal: Terminal, tmp_path: Path, space: str, kind: Kind, facts: list[str]
) -> None:
    told = terminal.refused("tune", "fedgh", *SMALL, "--space", space, "--out", tmp_path / "a")
    told.check(kind, "--space", *facts)
    assert not (tmp_path / "a").exists()


def test_ranges_of_all_kinds() -> None:
    space = parse_space("lr=1e-3:1e-1:log,server-step=class|client")
    assert space == {"lr": Range(1e-3, 1e-1, log=True), "server_step": Range(choices=("class", "client"))}
    (found,) = tune_tiny("fedgh", space="epochs=1:2,server-step=class|client", trials=1)
    assert found.settings["epochs"] in (1, 2)
    assert found.settings["server_step"] in ("class", "client")


def test_without_validation_data_nothing_can_be_decided() -> None:
    with refused(RangeError, "--val-fraction", 0):
        tune_tiny("fedgh", val_fraction=0.0)
    with refused(RangeError, "--trials", 1, 0):
        tune_tiny("local", trials=0)


def test_what_cannot_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with refused(MismatchError, "fedavg", "0 (mlp-64)", "1 (cnn-16)"):
        tune_tiny("local", "fedavg", space="lr=0.01:0.1", models="small", out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
