"""`pluribus bench`: its figures add up, its bare loop does what a round does, and it leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import resource
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import pluribus
from conftest import assemble_tiny, few_digits, run_tiny, tiny
from kit import assert_same
from pluribus.cli.flags import begin, parse_experiment
from pluribus.conformance.kinds import SAMPLES
from pluribus.errors import (
    ConflictError,
    FileAccessError,
    MismatchError,
    NotFiniteError,
    OtherRunError,
    RangeError,
    UnknownNameError,
)
from pluribus.experiment import Experiment, experiment, flags
from pluribus.models import TwoPartModel
from pluribus.study import bench as benchmark
from pluribus.study.bare import BareLoop
from pluribus.study.bench import Bench, bench
from refusals import Kind, refused
from terminal import Terminal

pytestmark = pytest.mark.xdist_group("bench")  # one report for all

ROUNDS = 3
SMALL = ["--data", few_digits(), "--clients", "4", "--rounds", "1", "--device", "cpu"]


def bench_tiny(method: str = "fedgh", **settings: Any) -> Bench:
    return bench(method, progress=False, **tiny(rounds=1) | settings)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A report whose run folder is still there."""
    return bench_tiny(rounds=ROUNDS, epochs=2, out=str(tmp_path_factory.mktemp("bench") / "run"))


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_the_report_adds_up(kept: Bench) -> None:
    assert len(kept.each) == ROUNDS
    assert sum(kept.shares.values()) == pytest.approx(1)
    assert list(kept.shares) == ["compute", "communication", "server", "evaluation", "other"]
    assert min(kept.shares.values()) > 0
    for one in kept.each:
        assert sum(one.spans.values()) == pytest.approx(one.seconds)
    told = kept.to_json()
    assert told["samples_per_second"] == told["samples"] / told["seconds"]
    assert told["seconds"] == sorted(one["seconds"] for one in told["each"])[1]
    assert told["ratio"] == sorted(one["seconds"] / one["bare"] for one in told["each"])[1]
    assert told["bare_seconds"] == sorted(one["bare"] for one in told["each"])[1]


def test_samples_and_bytes_are_those_of_the_run(kept: Bench) -> None:
    result = pluribus.resume(kept.experiment.out or "", progress=False)
    assert kept.samples == 2 * sum(facts.train for facts in result.clients.values())
    for way in ("up", "down", "evaluation"):
        booked = result.ledger.by("round", way)
        assert [one.bytes[way] for one in kept.each] == [booked[t] for t in range(1, ROUNDS + 1)]
        assert kept.bytes[way] == booked[1]


def test_rounds_hold_their_checkpoints_too(kept: Bench) -> None:
    """The last round is saved after its record is made, so its record does not know."""
    history = pluribus.resume(kept.experiment.out or "", progress=False).history
    for one, record in zip(kept.each, history[1:], strict=True):
        assert record["spans"].items() <= one.spans.items()
    last = history[-1]
    assert kept.each[-1].seconds > last["seconds"]
    assert kept.each[-1].spans["other"] > last["seconds"] - sum(last["spans"].values())


def test_only_those_who_take_part_count() -> None:
    report = bench_tiny("local", rounds=4, participation=0.5, straggler_rate=0.5, models="mlp-64")
    held = [facts.train for facts in run_tiny("local", rounds=1).clients.values()]
    pairs = {a + b for i, a in enumerate(held) for b in held[:i]}
    assert {one.samples for one in report.each} <= pairs


def test_it_says_what_it_was_measured_on(kept: Bench) -> None:
    assert (kept.machine.engine, kept.machine.threads, kept.machine.workers) == ("serial", 1, 1)
    assert kept.machine.torch == torch.__version__
    assert kept.machine.device
    assert kept.memory["gpu"] is None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0 < (kept.memory["host"] or 0) <= most


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what another process takes")
def test_worker_processes_count_in_memory() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        theirs = benchmark._high_water(child.pid)
        assert theirs > 0
        assert benchmark._host_memory() >= own + theirs
    finally:
        child.kill()
        child.join()
    assert benchmark._high_water(child.pid) == 0


# ---- the bare loop ---------------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter[tuple[Any, ...]]]:
    """Every forward pass of a model by mode and rows, and every step by rule, whoever makes them.

    A look at shapes does not count: its images are all zero, which is gray, and no image here is.
    """
    found: Counter[tuple[Any, ...]] = Counter()

    def forward(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, TwoPartModel) and args[0].any():
            found["forward", module.training, torch.is_grad_enabled(), len(args[0])] += 1

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rule = {name: optimizer.defaults.get(name) for name in ("lr", "momentum", "weight_decay", "amsgrad")}
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        found["step", type(optimizer).__name__, *rule.items(), *sizes] += 1

    hooks = register_module_forward_pre_hook(forward), register_optimizer_step_post_hook(step)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def doubled(counts: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    return Counter({key: 2 * number for key, number in counts.items()})


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedgh", {"epochs": 2}),  # two views
        ("local", {"optimizer": "amsgrad", "weight_decay": 0.1, "models": "cnn-16"}),
        ("local", {"optimizer": "adamw", "weight_decay": 0.1, "models": "mlp-64", "evaluate_every": 2}),
        ("local", {"momentum": 0.9, "participation": 0.5, "evaluate": "participants", "drop_rate": 0.3, "rounds": 4}),
        ("local", {"clients": 40, "partition": "iid", "models": "mlp-64"}),  # seven training rows each, no val rows
        (
            "local",
            {"data": "rotated-digits", "partition": "domain", "clients": 6, "models": "mlp-64", "batch_size": 100},
        ),
        ("local", SAMPLES[1].settings_for(same_model=False) | {"augment": "drop"}),
        ("fedavg", SAMPLES[4].settings_for(same_model=True)),
    ],
    ids=["fedgh", "amsgrad", "adamw", "few", "tiny", "domains", "tokens", "numbers"],
)
def test_the_bare_loop_does_the_same_work(method: str, settings: dict[str, Any]) -> None:
    with counted() as alone:
        bench_tiny(method, bare=False, **settings)
    with counted() as beside:
        bench_tiny(method, **settings)
    assert sum(number for key, number in alone.items() if key[0] == "step") > 0
    assert sum(number for key, number in alone.items() if key[:2] == ("forward", False)) > 0
    assert beside == doubled(alone)


def test_a_client_with_one_sample_is_no_trouble_for_the_bare_loop() -> None:
    """Batch normalization has no variance of it."""
    few = {"data": few_digits(80), "clients": 40, "partition": "iid"}
    report = bench_tiny("local", models="test_bench.normed", width=16, **few)
    assert report.samples < 2 * 40  # of two rows each, some keep only one to train on
    assert report.ratio is not None


def normed(shape: tuple[int, int, int]) -> nn.Module:
    """A backbone that cannot train on a single sample, and that draws from torch's generator."""
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))


def test_the_run_is_the_same_with_and_without_it(kept: Bench) -> None:
    plain = run_tiny("fedgh", rounds=ROUNDS + 1, epochs=2)
    assert_same(pluribus.resume(kept.experiment.out or "", progress=False), plain)


def test_nobodys_random_numbers_and_threads_are_touched() -> None:
    before = torch.get_rng_state(), torch.get_num_threads()
    bench_tiny("local", models="test_bench.normed", width=16, threads=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_it_has_the_threads_of_all_workers() -> None:
    parts, seen = assemble_tiny("local", workers=2, models="mlp-64"), set()
    hook = register_module_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        assert BareLoop(parts).round([0], [0]) > 0
    finally:
        hook.remove()
    assert seen == {2 * before}
    assert torch.get_num_threads() == before


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made meanwhile; also where we stand."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_is_left_behind(temporary: Path, terminal: Terminal) -> None:
    report = bench_tiny("local", models="mlp-64")
    assert report.to_json()["folder"] is None
    assert list(temporary.iterdir()) == []
    with refused(NotFiniteError, "'means'", "--lr"):
        bench_tiny("fedgh", lr=1e30)
    assert list(temporary.iterdir()) == []
    terminal.refused("resume", temporary / "pluribus-bench-0").check(FileAccessError, "pluribus-bench-0", "config.toml")


def test_a_named_folder_is_a_finished_run(kept: Bench, terminal: Terminal) -> None:
    out = kept.experiment.out
    assert kept.to_json()["folder"] == out
    assert terminal("resume", out, "--json").json["rounds"] == ROUNDS + 1
    terminal.refused("bench", "fedgh", *SMALL, "--out", out).check(OtherRunError, f"pluribus resume {out}")


# ---- the command line ------------------------------------------------------------------------------------------------


def test_as_json_it_is_one_object(terminal: Terminal) -> None:
    answer = terminal("bench", "fedgh", *SMALL, "--json")
    assert (answer.code, answer.err) == (0, "")
    told = answer.json
    assert (told["method"], told["clients"], told["rounds"], told["warm_up"]) == ("fedgh", 4, 1, 1)
    assert told["ratio"] == told["each"][0]["seconds"] / told["each"][0]["bare"]
    assert told["command"] == shlex.join(["pluribus", "bench", "fedgh", *SMALL])


def test_as_a_table_it_has_every_figure(terminal: Terminal) -> None:
    answer = terminal("bench", "fedgh", *SMALL, "--no-bare")
    assert answer.code == 0
    assert "bench fedgh" in answer.out.splitlines()[0]
    labels = ["round", "training", "compute", "communication", "server", "evaluation", "everything else", "up", "down"]
    for label in [*labels, "memory"]:
        assert f"\n {label} " in answer.out
    assert "bare loop" not in answer.out
    assert "serial engine, 1 thread   " in answer.out
    assert answer.out.endswith(f" again: pluribus bench fedgh {shlex.join(SMALL)} --no-bare\n")
    assert "\n bare loop " in terminal("bench", "fedgh", *SMALL).out


@pytest.mark.parametrize(
    ("argv", "kind", "facts"),
    [
        (["fedg"], UnknownNameError, ["'fedg'", "'fedgh'"]),
        (["fedgh", "--rounds", "0"], RangeError, ["--rounds", 1, 0]),
        (["fedgh", "--data", "digit"], UnknownNameError, ["'digit'", "'digits'"]),
        (["fedavg", "--models", "small"], MismatchError, ["fedavg", "0 (mlp-64)", "1 (cnn-16)"]),
        (["--config", "no.toml"], FileAccessError, ["no.toml", "No such file"]),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    terminal: Terminal, temporary: Path, argv: list[str], kind: Kind, facts: list[object]
) -> None:
    terminal.refused("bench", *argv).check(kind, *facts)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("flag", ["--client", "--against"])
def test_a_flag_that_is_none_is_refused(terminal: Terminal, flag: str) -> None:
    answer = terminal("bench", "fedgh", flag, "3", "--json")
    assert answer.code == 2
    assert flag in answer.err
    assert list(answer.json) == ["error", "kind"]


def test_help_says_what_the_ratio_means(terminal: Terminal) -> None:
    told = " ".join(terminal("bench", "fedgh", "--help").out.split())
    assert "cost of the framework" in told
    assert "--no-bare" in told
    assert "T: number of rounds. At least 1. (default: 5)" in told


# ---- Python ----------------------------------------------------------------------------------------------------------


def test_python_has_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # a module of the name would take its place once it is imported
        assert pluribus.bench is bench
    report = pluribus.bench("local", progress=False, **tiny(rounds=1, models="mlp-64"))
    assert isinstance(report, pluribus.Bench)
    report.table()
    assert "bench local" in capsys.readouterr().out


def test_rounds_are_its_own(tmp_path: Path) -> None:
    """A file or an experiment is of a whole run."""
    config = tmp_path / "mine.toml"
    config.write_text(f'method = "local"\ndata = "{few_digits()}"\nclients = 2\nrounds = 500\nmodels = "mlp-64"\n')
    for described in ({"config": config}, {"method": experiment(None, config)}):
        report = bench(progress=False, bare=False, **described)
        assert (len(report.each), report.to_json()["rounds"]) == (benchmark.ROUNDS, benchmark.ROUNDS)
    with refused(ConflictError, "Experiment", "dataclasses.replace"):
        bench(experiment("local"), seed=1)


COMMANDS: list[Experiment] = [
    experiment("local"),
    experiment("fedgh", clients=3, lr=0.5, server_lr=0.125, alpha=None, width=32, rounds=5),
    experiment("local", unequal=True, capture=False, channels_last=True, data="a file with spaces.npz"),
    experiment("fedh2l", kl=False, pairs=True),
    experiment("fedh2l", clients=3),
    experiment("fedh2l", data="rotated-mnist", rounds=7),
    experiment("fedhpl", data="digits", models="tiny-cnn-64"),  # no flag says that images keep their size
    experiment("fedhpl", image_size=24, models="tiny-cnn-64"),
    experiment("fedavg", models="mlp-64", weight_decay=1e-5),
    experiment("fedl2g-l", data="digits"),
    experiment("fedl2g-l", models="mlp-64", server_lr=1.0),  # what is usual only where no model is named
    experiment("fedl2g-l", server_lr=0.1),
    experiment("local", clients=4, models=["mlp-64", "cnn-16"]),
    experiment("local", clients=2, models={0: "cnn-16", 1: "mlp-64"}),
]


@pytest.mark.parametrize("described", COMMANDS, ids=lambda one: " ".join(flags(one))[:30])
def test_the_flags_of_an_experiment_are_the_experiment(described: Experiment) -> None:
    begun, rest = begin([described.method, *flags(described)])
    parsed, _ = parse_experiment("run", begun, rest, [])
    names = [",".join(pluribus.models.assign(one.models, one.clients)) for one in (described, parsed)]
    assert names[0] == names[1]
    assert parsed.settings() == replace(described, models=parsed.models).settings()


def test_what_is_usual_needs_no_flag() -> None:
    assert flags(experiment("fedavg")) == []
    assert flags(experiment("fedhpl")) == []
    assert flags(experiment("fedh2l", clients=3)) == ["--clients", "3"]
    assert flags(experiment("fedh2l", data="pacs")) == ["--data", "pacs"]
    assert flags(experiment("fedavg", models="small", out="runs/a")) == ["--models", "small"]
