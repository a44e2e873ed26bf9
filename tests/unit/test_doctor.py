"""pluribus doctor."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest
import torch

import pluribus
from pluribus.cli.doctor import find_extras, is_writable, missing_packages
from terminal import Terminal


def test_it_tells_the_facts_of_this_machine(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLURIBUS_DATA", str(tmp_path / "not" / "made"))
    monkeypatch.setenv("BROWSER", "/bin/true")
    answer = terminal("doctor", "--json")
    assert answer.code == 0
    found = answer.json
    assert (found["pluribus"], found["torch"]) == (pluribus.__version__, torch.__version__)
    assert (found["cores"], found["threads"]) == (os.cpu_count(), torch.get_num_threads())
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["data"] == {"folder": str(tmp_path / "not" / "made"), "writable": True}
    assert not (tmp_path / "not").exists()
    assert found["extras"]["tune"] == []


def test_it_fits_one_screen_and_names_what_to_set(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PLURIBUS_DATA", "/dev/null/data")
    answer = terminal("doctor")
    assert answer.code == 0
    assert len(answer.out.splitlines()) <= 24
    assert "not writable: set PLURIBUS_DATA" in " ".join(answer.out.split())


def test_a_missing_extra_comes_with_its_command(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.requires
    declared = [*(real("pluribus") or ()), "no-such-package>=2; extra == 'absent'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    assert "pip install 'pluribus[absent]'" in terminal("doctor").out
    assert terminal("doctor", "--json").json["extras"]["absent"] == ["no-such-package"]


def test_extras_are_those_that_are_declared() -> None:
    found = find_extras()
    assert found["tune"] == ["optuna", "sqlalchemy"]
    assert sorted(found["report"]) == ["jinja2", "markupsafe", "matplotlib"]
    assert "test" not in found


def test_missing_packages_are_found() -> None:
    assert missing_packages(["torch", "no-such-package"]) == ["no-such-package"]


def test_a_file_is_no_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert is_writable(tmp_path / "new")
    assert not is_writable(tmp_path / "file" / "below")
