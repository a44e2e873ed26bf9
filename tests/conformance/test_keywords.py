"""Settings as keyword arguments: editors complete them, and mypy refuses those that do not exist."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import pluribus
from pluribus.experiment import Experiment
from pluribus.internal import keywords
from pluribus.method import methods

PACKAGE = Path(pluribus.__file__).parent
sys.path.insert(0, str(PACKAGE.parents[1] / "docs"))

import generate  # noqa: E402

GOOD = """
from typing import Unpack

import pluribus

def run_twice(**settings: Unpack[pluribus.Settings]) -> None:
    pluribus.run("fedgh", **settings)

def work(method: pluribus.Method) -> None:
    pluribus.run("fedgh", data="digits", rounds=3, server_lr=0.1, test="common", seed=1)
    pluribus.run(method, lr=1, out=None)
    pluribus.run("my_file.Mine", hyper={"beta": 3})
    pluribus.compare(["fedgh"], seeds=2, seed=1, rounds=3, mu=0.1)
    pluribus.tune(["fedgh"], trials=2, rounds=3)
    pluribus.bench("fedgh", rounds=3, clients=2, out="here")
"""
WRONG = {
    'run("fedgh", rouns=3)': "rouns",
    'run("fedgh", rounds="3")': "rounds",
    'run("fedgh", test="comon")': "test",
    'run("fedgh", server_lrr=0.1)': "server_lrr",
    'compare(["fedgh"], rouns=3)': "rouns",
    'tune(["fedgh"], rouns=3)': "rouns",
    'bench("fedgh", rouns=3)': "rouns",
}
# mypy reads what the calls need, and nothing of torch: that would take a minute
READ = (
    *("", ".api", ".data", ".data.datasets", ".internal", ".internal.keywords"),
    *(".study", ".study.compare", ".study.tune", ".study.bench"),
)
CONFIG = "[mypy]\nfollow_imports = skip\nignore_missing_imports = true\n" + "".join(
    f"[mypy-pluribus{name}]\nfollow_imports = silent\n" for name in READ
)


def test_the_types_are_those_of_the_code() -> None:
    text = generate.KEYWORDS.read_text(encoding="utf-8")
    assert text == generate.keywords(text), "python docs/generate.py refreshes it"


def test_a_run_takes_every_setting_and_hyper_parameter() -> None:
    known = {field.name for cls in (Experiment, *methods().values()) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    assert set(get_type_hints(keywords.Settings)) == known - {"method"}


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (pluribus.run, keywords.Settings),
        (pluribus.compare, keywords.StudySettings),
        (pluribus.tune, keywords.StudySettings),
        (pluribus.bench, keywords.BenchSettings),
    ],
)
def test_no_keyword_of_a_run_is_missing(function: Callable[..., Any], settings: type) -> None:
    named = set(inspect.signature(function).parameters)
    assert not named & set(get_type_hints(settings))
    assert set(get_type_hints(keywords.Settings)) <= named | set(get_type_hints(settings))


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_mypy_refuses_a_setting_that_does_not_exist(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = ["import pluribus", *(f"pluribus.{call}" for call in WRONG)]
    (tmp_path / "wrong.py").write_text("\n".join(lines))
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "good.py", "wrong.py"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(PACKAGE.parent)}, capture_output=True, text=True
    )
    told = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert [line.partition(": error:")[0] for line in told] == [f"wrong.py:{n}" for n in range(2, 2 + len(WRONG))], told
    for line, name in zip(told, WRONG.values(), strict=True):
        assert f'"{name}"' in line
