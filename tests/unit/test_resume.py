"""Nothing is lost: a run that is killed at any moment, again and again, ends bit-equal to one that never was."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pluribus
from conftest import few_digits, new_folder, run_tiny, tiny
from kit import assert_same, numbers, timeless
from pluribus.cli import main
from pluribus.data.datasets import write_npz
from pluribus.errors import OtherRunError
from pluribus.experiment import SETTINGS, known_settings
from pluribus.storage.checkpoint import Checkpoint
from processes import Process, start
from refusals import assert_facts, refused

ROUNDS = 8
CLIENTS = 6
METHODS = {
    "fedgh": "--momentum 0.9 --participation 0.5 --drop-rate 0.2 --straggler-rate 0.2",
    "fedavg": "--optimizer adam --participation 0.5",
}
PACES = {"every round": ("--checkpoint-every", "1"), "automatic": ()}
KILLED = -signal.SIGKILL


def command(method: str, folder: Path, *more: str) -> list[object]:
    settings = f"--clients {CLIENTS} --rounds {ROUNDS} --lr 0.05 --device cpu {METHODS[method]}"
    return ["run", method, "--data", few_digits(), "--out", folder, *settings.split(), *more, "--json"]


@cache
def unbroken(method: str) -> dict[str, Any]:
    """What a run comes to when nobody disturbs it."""
    folder = Path(new_folder())
    process = start(*command(method, folder))
    assert process.wait() == 0, process.err
    return outcome(folder)


def outcome(folder: Path) -> dict[str, Any]:
    """Every weight and every figure of a finished run, but the time it took."""
    saved = Checkpoint(folder / "state")
    parts = {"server": saved.server()} | {f"client {k}": saved.client(k) or {} for k in range(CLIENTS)}
    chosen = pluribus.load_result(folder).per_client()
    parts |= {f"selected {k}": saved.selected(k, one.selected_round) or {} for k, one in chosen.items()}
    assert len(list((folder / "state" / "selected").iterdir())) == len(chosen)  # older ones are gone
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    return {
        "weights": {part: {name: bits(value) for name, value in state.items()} for part, state in parts.items()},
        "metrics": [timeless(line) for line in lines],
        "traffic": (folder / "traffic.jsonl").read_text(),
        "result": {name: value for name, value in result.items() if name not in ("seconds", "folder")},
    }


def bits(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return value.dtype, tuple(value.shape), value.numpy().tobytes()


def proceed(method: str, folder: Path, pace: str, **how: Any) -> Process:
    """Resume; or run, if the run that was killed had not come as far as being one."""
    if (folder / "config.toml").exists():
        return start("resume", folder, "--json", **how)
    return start(*command(method, folder, *PACES[pace]), **how)


# ---- killed from outside, whatever it is doing ---------------------------------------------------------------------

Moment = Callable[[Path], bool]


def before_the_first_round(folder: Path) -> bool:
    return (folder / "config.toml").exists()


def in_a_commit(folder: Path) -> bool:
    return any(path.suffix == ".tmp" for path in (folder / "state").glob("*"))


def in_round(number: int, seconds: float) -> Moment:
    """When so many rounds are written down, and then some time into the next."""

    def has_come(folder: Path) -> bool:
        path = folder / "metrics.jsonl"
        if not path.exists() or path.read_text().count("\n") < number:
            return False
        time.sleep(seconds)
        return True

    return has_come


@pytest.mark.slow
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("method", METHODS)
def test_killed_from_outside(tmp_path: Path, method: str, pace: str) -> None:
    rng = random.Random(f"{method} {pace}")
    rounds = [in_round(number, rng.uniform(0, 0.06)) for number in (1, 2, 4, 5)]
    ends = []
    for moment in (before_the_first_round, *rounds[:2], in_a_commit, *rounds[2:]):
        process = proceed(method, tmp_path / "run", pace)
        while process.poll() is None and not moment(tmp_path / "run"):
            time.sleep(0.0005)  # leaves the processor to the run
        ends.append(process.kill())
    assert proceed(method, tmp_path / "run", pace).wait() == 0
    assert KILLED in ends
    assert outcome(tmp_path / "run") == unbroken(method)


# ---- killed at exact moments: between writing a file, making it durable and giving it its name -----------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_between_any_two_steps_of_writing(tmp_path: Path, method: str) -> None:
    """A new run syncs 6 times until it has its config.toml, and a resumed one 4 times. Each commit syncs the lines (2),
    every client that has selected another round (2 each, 12 in the first one), and the commit itself (2)."""
    new, resumed = (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 7, 12, 18, 19, 20, 21, 9)
    for number in (*new, *resumed):
        process = proceed(method, tmp_path / "run", "every round", die_at_sync=number)
        assert process.wait() == KILLED, process.err
    assert (tmp_path / "run" / "config.toml").exists()
    assert proceed(method, tmp_path / "run", "every round").wait() == 0
    assert outcome(tmp_path / "run") == unbroken(method)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """By the kernel, at the very byte: none of its files may have more than so many."""
    folder = tmp_path / "run"
    assert proceed("fedgh", folder, "every round", die_at_sync=15).wait() == KILLED
    for largest in (1_000, 10_000, 30_000):
        process = proceed("fedgh", folder, "every round", largest_file=largest, dies_when_full=True)
        assert process.wait() == -signal.SIGXFSZ, process.err
    assert proceed("fedgh", folder, "every round").wait() == 0
    assert outcome(folder) == unbroken("fedgh")
    assert all(path.match("round-*.safetensors") for path in (folder / "state").glob("*.*"))


# ---- resuming what should not be resumed, or need not be ------------------------------------------------------------


def test_one_folder_belongs_to_one_process(tmp_path: Path) -> None:
    first = start(*command("fedgh", tmp_path / "run", "--rounds", "100000"))
    while not before_the_first_round(tmp_path / "run"):
        assert first.poll() is None, first.err
        time.sleep(0.001)
    second = start("resume", tmp_path / "run")
    assert second.wait() == 2
    assert second.err.startswith("error: ")
    assert second.err.count("\n") == 1
    assert_facts(second.err, tmp_path / "run", "in use")
    assert first.poll() is None
    first.kill()


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_finished_run_shows_its_table_again_and_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    first = run_tiny("fedgh")
    first.table()
    table = capsys.readouterr().out
    before = contents(first.folder)
    assert main(["resume", str(first.folder)]) == 0
    assert table in capsys.readouterr().out
    again = pluribus.resume(first.folder, progress=False)
    assert again.to_json() == first.to_json()
    assert contents(first.folder) == before


def test_a_finished_run_without_its_checkpoints_still_has_its_history() -> None:
    first = run_tiny("fedgh")
    shutil.rmtree(first.folder / "state")
    assert pluribus.resume(first.folder, progress=False).history == first.history
    assert len((first.folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_other_data_under_the_same_name_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    shutil.copy(few_digits(), data)
    result = run_tiny("local", data=str(data), out=tmp_path / "run")
    with np.load(data) as archive:
        arrays = dict(archive)
    arrays["y_train"] = arrays["y_train"][::-1].copy()
    write_npz(data, arrays)
    for use in (pluribus.resume, lambda folder: pluribus.load_model(folder, 0)):
        (result.folder / "result.json").unlink(missing_ok=True)  # what is finished is read, not resumed
        with refused(OtherRunError, result.folder, "partition.json", data):
            use(result.folder)


def edited(folder: Path, **changes: tuple[str, str]) -> None:
    """What a person does with an editor."""
    file = folder / "config.toml"
    text = "\n" + file.read_text()
    for name, (before, now) in changes.items():
        assert f"\n{name} = {before}\n" in text
        text = text.replace(f"\n{name} = {before}\n", f"\n{name} = {now}\n")
    file.write_text(text.removeprefix("\n"))


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    settings = tiny(out=tmp_path / "run", clients=2, models="mlp-64", checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        pluribus.run("fedgh", progress=False, observers=[StopAfter(1)], **settings)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("lr", "0.05", "0.5"),
        ("server_lr", "0.01", "0.5"),
        ("rounds", "2", "3"),
        ("seed", "0", "1"),
        ("method", '"fedgh"', '"fedproto"'),
        ("models", '"mlp-64"', '["mlp-64", "cnn-16"]'),
    ],
)
def test_a_setting_that_was_changed_since_the_start_is_refused(stopped: Path, name: str, before: str, now: str) -> None:
    edited(stopped, **{name: (before, now)})
    facts = f"'{name}'", before.strip('"'), now.strip('"[]').split('"')[0], stopped / "config.toml"
    with refused(OtherRunError, *facts):
        pluribus.resume(stopped, progress=False)
    edited(stopped, **{name: (now, before)})
    assert len(pluribus.resume(stopped, progress=False).history) == 2


def test_a_finished_run_is_not_shown_under_other_settings() -> None:
    first = run_tiny("fedgh")
    edited(first.folder, lr=("0.05", "0.5"))
    for use in (pluribus.resume, pluribus.load_result, lambda folder: pluribus.load_model(folder, 0)):
        with refused(OtherRunError, "'lr'", 0.5, 0.05):
            use(first.folder)


def test_what_decides_no_figure_may_change_and_data_may_move(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(few_digits(), tmp_path / "moved")
    data = (json.dumps(few_digits()), json.dumps(str(moved)))
    edited(stopped, data=data, checkpoint_every=("1", "2"), capture=("true", "false"))
    assert len(pluribus.resume(stopped, progress=False).history) == 2


def test_a_run_of_an_older_version_can_be_resumed(stopped: Path) -> None:
    """It has no started.json; a later one may have had fewer settings."""
    started = json.loads((stopped / "started.json").read_text())
    (stopped / "started.json").write_text(json.dumps({name: started[name] for name in started if name != "lr"}))
    edited(stopped, lr=("0.05", "0.02"))
    with pytest.raises(KeyboardInterrupt):
        pluribus.resume(stopped, progress=False, observers=[StopAfter(1)])
    (stopped / "started.json").unlink()
    assert len(pluribus.resume(stopped, progress=False).history) == 2


def test_every_setting_decides_figures_or_is_about_execution() -> None:
    """Who adds a setting decides: what is not in the group `execution` may not change in the middle of a run."""
    decisive = pluribus.Experiment().decisive()
    assert set(SETTINGS["execution"]) == set(known_settings()) - decisive.keys() - {"hyper"}
    assert {"seed", "method", "precision", "server_lr"} <= decisive.keys()


class StopAfter:
    """Someone who watches a run, and has seen enough after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def start(self, federation: Any) -> None: ...

    def round(self, record: Any, ledger: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def finish(self, result: Any) -> None: ...


def test_another_number_of_threads_is_told(tmp_path: Path) -> None:
    settings = tiny(out=tmp_path / "run", clients=2, models="mlp-64", checkpoint_every=1, workers=1)
    with pytest.raises(KeyboardInterrupt):
        pluribus.run("local", progress=False, observers=[StopAfter(1)], **settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        result = pluribus.resume(tmp_path / "run", progress=False)
    finally:
        torch.set_num_threads(threads)
    assert len(result.history) == 2
    (told,) = result.warnings
    assert_facts(told, f"{threads + 1} threads", f"started with {threads}:")


def test_momentum_that_lasts_for_the_run_is_kept_and_decides() -> None:
    settings = {"models": "mlp-64", "momentum": 0.9, "rounds": 3, "checkpoint_every": 1}
    afresh, straight = (run_tiny("fedavg", optimizer_life=life, **settings) for life in ("round", "run"))
    assert numbers(straight) != numbers(afresh)
    folder = new_folder()
    with pytest.raises(KeyboardInterrupt):
        run_tiny("fedavg", folder, observers=[StopAfter(2)], optimizer_life="run", **settings)
    assert_same(straight, pluribus.resume(folder, progress=False))


@pytest.mark.parametrize("schedule", [{"lr_schedule": "cosine"}, {"lr_schedule": "steps", "lr_steps": "1,3"}], ids=str)
def test_a_schedule_continues_where_it_was(schedule: dict[str, Any]) -> None:
    settings = schedule | {"models": "mlp-64", "rounds": 4, "checkpoint_every": 1, "clip_norm": 1.0}
    folder = new_folder()
    with pytest.raises(KeyboardInterrupt):
        run_tiny("fedavg", folder, observers=[StopAfter(2)], **settings)
    assert_same(run_tiny("fedavg", **settings), pluribus.resume(folder, progress=False))
