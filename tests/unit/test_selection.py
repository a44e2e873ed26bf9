"""The round that validation selects: its model is kept, in bounded memory and on bounded disk, for anyone to read."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import pluribus
from conftest import assemble_tiny, few_digits, new_folder, run_tiny, tiny
from kit import assert_same
from pluribus.cli import main
from pluribus.engines.engine import Engine
from pluribus.errors import DamagedFileError, FileAccessError, NoModelError, OtherRunError
from pluribus.evaluate import Selection, selects
from pluribus.internal.metrics import METRICS
from pluribus.report.groups import group_runs
from pluribus.report.numbers import read_runs
from pluribus.report.page import page
from pluribus.report.plots import per_client
from pluribus.storage import checkpoint
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.folder import RunFolder
from pluribus.storage.selection import Selections
from processes import start
from refusals import refused

NOTHING = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("val", "best", "selected"),
    [
        (0.5, None, True),  # the first evaluation
        (0.6, Selection(0, 0.5), True),
        (0.5, Selection(0, 0.5), False),  # a tie keeps the earlier round
        (0.4, Selection(0, 0.5), False),
        (None, None, True),
        (None, Selection(0, None), True),  # without validation data the last round stands
    ],
)
def test_what_is_selected(val: float | None, best: Selection | None, selected: bool) -> None:
    assert selects({"val": val, "test": 0.0}, best, METRICS["accuracy"]) is selected


@pytest.mark.parametrize(
    ("val", "best", "selected"),
    [(2.0, Selection(0, 3.0), True), (3.0, Selection(0, 3.0), False), (4.0, Selection(0, 3.0), False)],
)
def test_of_an_error_the_smallest_is_selected(val: float, best: Selection, selected: bool) -> None:
    assert selects({"val": val, "test": 0.0}, best, METRICS["rmse"]) is selected


# ---- in memory and on disk -------------------------------------------------------------------------------------------


def test_with_little_memory_models_are_saved_between_groups_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"clients": 6, "rounds": 3, "checkpoint_every": 2}
    written: list[int] = []
    keep = Checkpoint.keep

    def counted(self: Checkpoint, k: int, t: int, measured: dict[str, torch.Tensor]) -> None:
        written.append(k)
        keep(self, k, t, measured)

    monkeypatch.setattr(Checkpoint, "keep", counted)
    roomy, at_commits = run_tiny("fedgh", **how), len(written)
    monkeypatch.setattr("pluribus.host.SELECTED_SHARE", 60_000 / 2**33)  # of 8 GiB: room for two or three small models
    cramped = run_tiny("fedgh", **how)
    assert_same(roomy, cramped)
    assert len(written) - at_commits > at_commits  # also between commits, and what is superseded by the next one


def test_predictions_count_as_memory_too(tmp_path: Path) -> None:
    """Each copy has 12 bytes per test row besides the weights, so that two copies exceed the weights of two models."""
    parts = assemble_tiny("local", models="mlp-64")
    weights, rows = parts.cards.nbytes(0), parts.data.test_samples(0) + parts.data.test_samples(1)
    for room, first in ((2 * weights, [0]), (2 * weights + 12 * rows, [0, 1])):
        engine = cast(Engine, SimpleNamespace(room=room, take_selected=dict))
        selections = Selections(parts.task, parts.cards, parts.data, engine, Checkpoint(tmp_path))
        assert next(iter(selections.groups(range(4)))) == first


def test_older_files_go_with_the_commit_that_no_longer_needs_them(tmp_path: Path) -> None:
    saved = Checkpoint(tmp_path)
    saved.keep(3, 0, {"a": torch.tensor([0.0])})
    saved.keep(3, 4, {"a": torch.tensor([4.0])})
    again = Checkpoint(tmp_path)  # after a crash
    assert again.doubled == {3}
    assert [float((again.selected(3, t) or {})["a"]) for t in (0, 4)] == [0.0, 4.0]
    again.drop_superseded({3: 4})
    assert again.selected(3, 0) is None
    assert [path.name for path in (tmp_path / "selected").iterdir()] == ["client-000003-round-000004.safetensors"]
    assert Checkpoint(tmp_path).doubled == set()


def test_who_was_never_evaluated_has_no_selected_round() -> None:
    result = run_tiny("fedgh", clients=6, participation=0.2, evaluate="participants")
    away = next(k for k in range(6) if k not in result.clients)
    with refused(NoModelError, f"client {away}", "evaluated"):
        result.model(away)
    assert len(pluribus.predict(result.folder, NOTHING, away, "last")) == 1


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_any_number_of_processes_read_a_run_at_once(tmp_path: Path) -> None:
    result = run_tiny("fedgh", out=str(tmp_path / "run"))
    images = tmp_path / "image.png"
    from PIL import Image

    Image.new("L", (8, 8)).save(images)
    readers = [start("predict", result.folder, images, "--client", "0", "--json") for _ in range(3)]
    assert [reader.wait() for reader in readers] == [0, 0, 0], [reader.err for reader in readers]
    answers = [json.loads(reader.out) for reader in readers]
    assert answers[0] == answers[1] == answers[2]


def test_a_run_is_read_while_it_is_written() -> None:
    folder = Path(new_folder()) / "run"
    settings = ["--clients", "4", "--rounds", "100000", "--device", "cpu", "--checkpoint-every", "1", "--threads", "1"]
    writer = start("run", "local", "--data", few_digits(), "--out", folder, *settings)
    try:
        while not list((folder / "state").glob("round-00000[2-9]*")):
            assert writer.poll() is None, writer.err
            time.sleep(0.01)
        for _ in range(10):
            assert len(pluribus.predict(folder, NOTHING, 1, "last")) == 1
            assert len(pluribus.predict(folder, NOTHING, 1)) == 1
        assert writer.poll() is None, writer.err
        with refused(OtherRunError, folder, "in use"):
            RunFolder.open(folder)
    finally:
        writer.kill()


def test_a_file_that_goes_away_while_it_is_opened_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors has found the file, and then torch has not: the writer has dropped it in between."""
    result = pluribus.run("local", progress=False, out=new_folder() + "/run", **tiny())
    opened, fails = checkpoint.safe_open, iter([True])

    def vanishing(path: Path, framework: str) -> Any:
        if next(fails, False):
            raise RuntimeError(f"unable to open file <{path}> in read-only mode: No such file or directory (2)")
        return opened(path, framework=framework)

    monkeypatch.setattr(checkpoint, "safe_open", vanishing)
    assert Checkpoint(result.folder / "state", read_only=True).latest == result.rounds - 1
    assert not next(fails, False)


METHOD = """
import pluribus

class Mine(pluribus.Method):
    pass
"""


def test_a_finished_result_needs_neither_the_code_nor_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_alone.py").write_text(METHOD)
    data = tmp_path / "data.npz"
    data.write_bytes(Path(few_digits()).read_bytes())
    result = pluribus.run("mine_alone.Mine", progress=False, out=str(tmp_path / "run"), **tiny(data=str(data)))
    data.unlink()
    (tmp_path / "mine_alone.py").unlink()
    monkeypatch.delitem(sys.modules, "mine_alone")

    again = pluribus.load_result(tmp_path / "run")
    assert again.to_json() == result.to_json()
    assert again.history == result.history
    assert again.ledger.by("tensor") == result.ledger.by("tensor")
    assert again.clients == result.clients
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert f"{result.accuracy:.3f}" in capsys.readouterr().out


def test_what_is_not_finished_or_damaged_is_a_sentence(tmp_path: Path) -> None:
    with refused(FileAccessError, tmp_path, "result.json", "pluribus resume"):
        pluribus.load_result(tmp_path)
    for content in ("{}", "[1]", "{", '{"clients": {"a": {}}}'):
        (tmp_path / "result.json").write_text(content)
        with refused(DamagedFileError, tmp_path / "result.json"):
            pluribus.load_result(tmp_path)


# ---- what tables say -------------------------------------------------------------------------------------------------


def test_without_validation_data_nothing_is_said_to_be_selected_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_tiny("local", val_fraction=0.0)
    result.table()
    for text in (capsys.readouterr().out, result.to_json()["accuracy_is"]):
        assert "selected on validation" not in text
        assert "last round" in text
    assert all(one.selected == one.last for one in result.per_client().values())
    runs = read_runs([result.folder])
    assert "selected on" not in page(runs, [per_client(group_runs(runs))])
    with_some = run_tiny("local")
    with_some.table()
    for text in (capsys.readouterr().out, with_some.to_json()["accuracy_is"]):
        assert "selected on validation" in text
