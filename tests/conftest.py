"""What tests share: one thread, no data cache of the user's, and experiments small enough to run by the hundred.

from conftest import assemble_tiny, run_tiny, make_host
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Some machines forbid bytecode. Then every process would compile all modules anew, and rewrite the asserts of tests.
if _forbidden := sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
# Threads that wait sleep. By default they spin, which takes the CPU from other tests: torch reads this at its import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch

import pluribus
from pluribus.assembly import Assembly, assemble
from pluribus.conformance.cases import SHORT
from pluribus.data.datasets import load, write_npz
from pluribus.experiment import experiment
from pluribus.host import Host, Tensors
from pluribus.method import Method, find, hyperparameters
from pluribus.result import Result
from terminal import Terminal

if TYPE_CHECKING:
    from browser import Browser

NO_BROWSER = "no browser on this machine"
GET_ONE = "Install one: sudo apt-get install chromium"

LOOPS = SHORT | {"warmup": 1}  # hyper-parameters: a method takes those that are lower than its own

AnyMethod = str | Method | type[Method]

_scratch = tempfile.TemporaryDirectory(prefix="pluribus-tests-")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that nobody waits for it at the end.

    Some pytest and pytest-xdist do not fit, and then one federation runs in every process at the same time.
    """
    items.sort(key=lambda item: [item.get_closest_marker(mark) is None for mark in ("network", "slow")])
    if config.getoption("loadgroup", False):
        grouped = [item for item in items if item.get_closest_marker("xdist_group")]
        if not all("@" in item.nodeid for item in grouped):
            raise pytest.UsageError("this pytest ignores groups of pytest-xdist: pip install -c constraints.txt pytest")


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of collected tests are not garbage, but would be looked through again and again
    gc.set_threshold(20_000, 20, 100)
    sys.dont_write_bytecode = _forbidden  # a test may write a module twice in a second, and then its bytecode is old


def pytest_unconfigure() -> None:
    _scratch.cleanup()  # the processes of pytest-xdist end without it


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost, so that its line comes last
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say which tests a machine without a browser has left out."""
    yield
    reports = terminalreporter.getreports("skipped")
    if skipped := [one for one in reports if isinstance(one.longrepr, tuple) and NO_BROWSER in one.longrepr[2]]:
        terminalreporter.write_line(f"Page tests skipped: {len(skipped)}, {NO_BROWSER}. {GET_ONE}", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def _same_conditions_for_all() -> Iterator[None]:
    """Bits are equal per number of threads; and no test may read or fill the user's own data folder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLURIBUS_DATA", str(Path(_scratch.name) / "data"))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole session: an event loop runs as long as it is open."""
    from browser import CHROMIUM, Browser  # here, because most tests do without Playwright

    if CHROMIUM is None and os.environ.get("PLURIBUS_REQUIRE_BROWSER"):
        pytest.fail(f"{NO_BROWSER}, and PLURIBUS_REQUIRE_BROWSER is set. {GET_ONE}")
    if CHROMIUM is None:
        pytest.skip(NO_BROWSER)
    with Browser() as one:
        yield one


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One cluster of Ray for all tests of the group `ray`, because it takes seconds to start one."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  by default, actors get the CPU last
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # whatever else runs on this machine
    yield
    ray.shutdown()


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """The command line, in this process."""
    return Terminal(capsys, monkeypatch)


@cache
def few_digits(rows: int = 320, classes: int = 10) -> str:
    """Path of an .npz file with the first rows of `digits` that have a label below `classes`."""
    digits = load("digits")
    chosen = np.flatnonzero(digits.y.numpy() < classes)[:rows]
    x, y = digits.x[:, 0].numpy()[chosen], digits.y.numpy()[chosen]
    path = Path(_scratch.name) / f"digits-{rows}-{classes}.npz"
    names = np.array([str(label) for label in range(classes)])
    write_npz(path, {"x_train": x, "y_train": y, "x_test": x[:0], "y_test": y[:0], "classes": names})
    return str(path)


def tiny(**settings: Any) -> dict[str, Any]:
    """Settings of a run that takes a fraction of a second; whatever is given wins."""
    return {"data": few_digits(), "clients": 4, "rounds": 2, "lr": 0.05, "device": "cpu"} | settings


def suiting(method: AnyMethod, **settings: Any) -> dict[str, Any]:
    """Settings that suit a method: images of the size that it has by default, and short loops. An instance keeps its
    hyper-parameters, and whatever is given wins."""
    cls = find(method) if isinstance(method, str) else method
    usual = {"image_size": cls.defaults["image_size"]} if "image_size" in cls.defaults else {}
    if isinstance(cls, type):
        own = hyperparameters(cls())
        usual |= {name: value for name, value in LOOPS.items() if value < own.get(name, 0)}
    return usual | settings


def new_folder() -> str:
    """An empty folder of its own."""
    return tempfile.mkdtemp(dir=_scratch.name)


def run_tiny(method: AnyMethod = "fedgh", out: str | os.PathLike[str] | None = None, **settings: Any) -> Result:
    """Run a small federation to its end: 4 clients with 4 architectures on 320 digits, 2 rounds."""
    return pluribus.run(method, progress=False, out=str(out or new_folder()), **tiny(**suiting(method, **settings)))


def assemble_tiny(method: AnyMethod = "fedgh", **settings: Any) -> Assembly:
    """The parts of the same federation, before anything trains."""
    return assemble(experiment(method, **tiny(**suiting(method, **settings))))


def make_host(parts: Assembly, load: Callable[[int], Tensors | None] = lambda k: None) -> Host:
    """A host that hosts its clients; what was saved of them comes from `load`."""
    same_init = parts.experiment.same_init
    return Host(parts.method, parts.task, parts.cards, parts.data, parts.local, parts.device, load, same_init)
