"""`pluribus compare`: the same start for all methods, figures by hand, runs that go on, files with the same numbers."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pluribus
from conftest import assemble_tiny, few_digits, make_host, new_folder, run_tiny, tiny
from pluribus.cli.compare import _common_flags
from pluribus.data import Dataset, load
from pluribus.errors import (
    ConflictError,
    FileAccessError,
    FormatError,
    MismatchError,
    MissingSettingError,
    NotFiniteError,
    OtherRunError,
    RangeError,
    UnfinishedError,
    UnknownNameError,
)
from pluribus.experiment import SETTINGS, Experiment, experiment
from pluribus.internal.batches import batch_sizes
from pluribus.method import Method
from pluribus.processes import starting
from pluribus.storage.files import read_json
from pluribus.storage.folder import RunFolder
from pluribus.study.compare import compare
from pluribus.study.grid import default_jobs
from pluribus.study.parallel import Failure, Progress, run_all
from pluribus.study.plan import common_settings, trainable_parameters
from pluribus.study.rows import name_of_any
from pluribus.study.standings import COLUMNS, Comparison, Run
from processes import start
from refusals import assert_facts, refused
from terminal import Terminal

SMALL = ["--data", few_digits(), "--clients", "4", "--rounds", "2", "--device", "cpu", "--models", "mlp-64"]


def compare_tiny(*methods: Any, **settings: Any) -> Comparison:
    settings = {"out": new_folder(), "jobs": 1, "seeds": 2, "models": "mlp-64"} | settings
    return compare(methods, progress=False, **tiny(**settings))


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare_tiny("local", "fedgh", "fedproto")


def without_seconds(folder: Path) -> Any:
    told = read_json(folder / "compare.json")
    for row in told["rows"]:
        del row["seconds"]
    return told


# ---- the same start --------------------------------------------------------------------------------------------------


def test_methods_start_from_the_same_rows_and_weights() -> None:
    """Also those that keep more models than the client's own."""
    parts = {name: assemble_tiny(name, clients=2) for name in ("local", "fedgh", "fedproto", "fedl2g-f", "fml")}
    assert len({one.manifest.digest for one in parts.values()}) == 1
    for k in range(2):
        first, *others = [make_host(one).client(k) for one in parts.values()]
        for other in others:
            assert other.model.state_dict().keys() == first.model.state_dict().keys()
            for name, value in first.model.state_dict().items():
                assert torch.equal(value, other.model.state_dict()[name]), name
            for kind in ("train", "val", "test"):
                assert torch.equal(first.data[kind].labels(), other.data[kind].labels())


def test_another_seed_is_another_start() -> None:
    one, other = (assemble_tiny("local", seed=seed) for seed in (0, 1))
    assert one.manifest.digest != other.manifest.digest
    weights = [next(iter(make_host(parts).client(0).model.parameters())) for parts in (one, other)]
    assert not torch.equal(*weights)


def test_its_runs_are_ordinary_runs(found: Comparison) -> None:
    assert {method: [run.seed for run in runs] for method, runs in found.runs.items()} == {
        "local": [0, 1],
        "fedgh": [0, 1],
        "fedproto": [0, 1],
    }
    alone = run_tiny("fedgh", models="mlp-64", seed=1, threads=1)
    inside = pluribus.resume(found.folder / "fedgh-1", progress=False)
    assert inside.summary == alone.summary
    assert inside.bytes == alone.bytes
    run = found.runs["fedgh"][1]
    assert run.folder == found.folder / "fedgh-1"
    assert run.scores["mean"] == alone.accuracy
    assert run.by_client == {k: chosen.selected["test"] for k, chosen in alone.per_client().items()}


def test_nothing_is_a_methods_own_unless_someone_says_so() -> None:
    """FedL2G would have 40 rounds and a rate of 0.05, FedAvg one model, FedMD public data."""
    told = compare_tiny("local", "fedl2g-f", "fedavg", seeds=1, lr=0.01).experiments
    assert {one.rounds for one in told.values()} == {2}
    assert {one.models for one in told.values()} == {"mlp-64"}
    assert {one.lr for one in told.values()} == {0.01}
    with refused(MismatchError, "fedmd", "--public-fraction"):
        compare_tiny("local", "fedmd")
    with refused(MismatchError, "fedavg", "0 (mlp-64)", "1 (cnn-16)"):
        compare_tiny("local", "fedavg", models="small")


def test_a_method_may_have_settings_of_its_own(tmp_path: Path) -> None:
    own = {"fedgh": {"server_lr": 0.5, "lr": 0.02}}
    told = compare_tiny("local", "fedgh", own=own, seeds=1)
    assert told.to_json()["hyper"]["fedgh"]["server_lr"] == 0.5
    assert [one.lr for one in told.experiments.values()] == [0.05, 0.02]
    config = tmp_path / "mine.toml"
    config.write_text("clients = 3\n[hyper.fedgh]\nserver_lr = 0.5\n")
    settings = {key: value for key, value in tiny(models="mlp-64").items() if key != "clients"}
    file = compare(["local", "fedgh"], config=config, seeds=1, jobs=1, out=tmp_path / "a", progress=False, **settings)
    assert {one.clients for one in file.experiments.values()} == {3}
    assert file.to_json()["hyper"]["fedgh"]["server_lr"] == 0.5
    config.write_text("[hyper]\nserver_lr = 0.5\n")
    with refused(FormatError, config, "[hyper.METHOD]", "server_lr"):
        compare_tiny("local", "fedgh", config=config)


def without_rate(*methods: str, **settings: Any) -> Comparison:
    """Nobody gives a learning rate."""
    settings = {name: value for name, value in tiny(models="mlp-64", rounds=1).items() if name != "lr"} | settings
    return compare(methods, seeds=1, jobs=1, out=new_folder(), progress=False, **settings)


def test_one_learning_rate_and_a_methods_own_default_gives_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    """FML and FedKD would have 0.05; local, FedGH and whoever says nothing have 0.01."""
    free = without_rate("local", "fml", "fedkd", "fedgh")
    assert {one.lr for one in free.experiments.values()} == {0.01}
    assert [one.verdict for one in free.differences][:2] == ["own default differs"] * 2
    *strange, fedgh = free.differences
    assert [(one.difference, one.p) for one in strange] == [(None, None)] * 2
    assert fedgh.difference is not None
    assert fedgh.p == fedgh.difference.p  # one test, nothing to correct for
    (caution,) = free.cautions
    assert all(word in caution for word in ("fml, fedkd: lr= is 0.05", "0.01", 'own={"fml": {"lr": 0.05}}'))
    free.table()
    shown = " ".join(capsys.readouterr().out.split())
    for text in (shown, free.to_markdown().replace("\\", ""), free.to_latex()):
        assert -1 < text.index("fml, fedkd: lr= is 0.05") < text.index("weighted")
    assert free.to_json()["cautions"] == [caution]


@pytest.mark.parametrize("given", ["flag", "own", "config"])
def test_what_someone_gave_is_tested(given: str, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("lr = 0.01\n")
    how = {"flag": {"lr": 0.01}, "own": {"own": {"fml": {"lr": 0.05}}}, "config": {"config": config}}[given]
    found = without_rate("local", "fml", **how)
    assert found.cautions == []
    assert found.differences[0].difference is not None
    differs = "lr: local 0.01, fml 0.05"
    assert any(differs in note for note in found.notes) == (given == "own")
    assert [one.lr for one in found.experiments.values()] == [0.01, 0.05 if given == "own" else 0.01]


def test_a_baseline_that_was_not_run_as_it_is_used_to_gives_no_verdict_at_all() -> None:
    assert [one.verdict for one in without_rate("fml", "local").differences] == ["own default differs"]


def test_trainable_parameters_by_hand() -> None:
    """A perceptron of 64 units on 8 x 8 pixels and 10 classes; FML trains a second model beside it."""
    perceptron = 64 * 64 + 64 + 64 * 10 + 10
    assert trainable_parameters(assemble_tiny("local", models="mlp-64")) == perceptron
    assert trainable_parameters(assemble_tiny("fedgh", models="mlp-64")) == perceptron
    assert trainable_parameters(assemble_tiny("fml", models="mlp-64", aux_model="mlp-64")) == 2 * perceptron
    frozen = assemble_tiny("fedhpl", models="tiny", image_size=16, momentum=0.9)
    model = make_host(frozen).client(0).model
    assert 0 < trainable_parameters(frozen) < sum(p.numel() for p in model.parameters()) / 10


# ---- figures by hand -------------------------------------------------------------------------------------------------


def made_up(method: str, seed: int, accuracies: list[list[float]], sizes: tuple[int, int] = (5, 7)) -> Run:
    """A run whose clients had these accuracies, round by round; the last round is selected by everyone."""
    last = accuracies[-1]
    over = {"mean": sum(last) / len(last), "weighted": last[0], "worst": min(last)}
    moments = {"last": {"test": over}, "selected": {"test": over}}
    result = {
        "summary": {"after": moments},
        "clients": {str(k): {"selected": {"val": 0.5, "test": value}} for k, value in enumerate(last)},
        "bytes": {"up": sizes[0] * len(accuracies), "down": sizes[1] * len(accuracies), "evaluation": 1000},
        "seconds": 2.0 + seed,
        "warnings": ["careful."] if seed else [],
    }
    history = [
        {
            "round": t,
            "bytes": {"up": sizes[0], "down": sizes[1], "evaluation": 500},
            "mean": {"after": {"test": {"mean": sum(now) / len(now)}}},
        }
        for t, now in enumerate(accuracies)
    ]
    return Run(method, seed, Path(f"{method}-{seed}"), result, history)


def comparison(runs: dict[str, tuple[Run, ...]], baseline: str, target: float = 0.5) -> Comparison:
    described = {name: replace(experiment("local"), lr=0.01) for name in runs}
    return Comparison(described, runs, baseline, target, dict.fromkeys(runs, 1234.5), Path("out"))


WEAK = tuple(made_up("weak", s, [[0.1, 0.3], [0.2 + 0.2 * s, 0.4 + 0.2 * s]]) for s in (0, 1))
STRONG = tuple(made_up("strong", s, [[0.4, 0.5], [0.8, 0.9]], sizes=(50, 70)) for s in (0, 1))


def test_figures_by_hand() -> None:
    weak, strong = comparison({"weak": WEAK, "strong": STRONG}, "weak").rows
    assert weak.scores["mean"].mean == pytest.approx(0.4)
    assert weak.scores["mean"].std == pytest.approx(0.2 / 2**0.5)  # 0.3 and 0.5
    assert weak.scores["worst"].mean == pytest.approx(0.3)
    assert weak.scores["best"].mean == pytest.approx(0.5)  # 0.4 and 0.6, of clients: the runs did not keep it
    assert (weak.up, weak.down, weak.seconds, weak.parameters) == (10, 14, 2.5, 1234.5)
    assert (weak.rounds_to_target, weak.bytes_to_target, weak.reached) == (None, None, 1)
    assert (strong.rounds_to_target, strong.bytes_to_target, strong.reached) == (
        2,
        240,
        2,
    )  # what evaluation took aside
    assert comparison({"weak": WEAK, "strong": STRONG}, "weak", 0.45).rows[1].rounds_to_target == 1


def test_rounds_without_an_evaluation_reach_nothing_but_their_bytes_count() -> None:
    run = made_up("strong", 0, [[0.9], [0.9], [0.9]])
    run.history[0]["mean"] = {}
    assert run.reached(0.8) == (2, 24)
    assert run.reached(0.95) is None


def test_differences_by_hand() -> None:
    """0.6, 0.5, 0.4, 0.3: the mean is 0.45, and of 16 ways to set four signs two are as far from 0."""
    (one,) = comparison({"weak": WEAK, "strong": STRONG}, "weak").differences
    assert (one.label, one.difference.pairs, one.difference.seeds) == ("strong", 4, 2)
    assert one.difference.mean == pytest.approx(0.45)
    assert one.p == one.difference.p == pytest.approx(2 / 16)
    assert one.verdict == "no difference shown"  # four pairs cannot show more
    (other,) = comparison({"weak": WEAK, "strong": STRONG}, "strong").differences
    assert (other.label, other.difference.mean) == ("weak", -one.difference.mean)
    assert other.p == one.p


def test_several_methods_are_corrected_for() -> None:
    clients = [0.5 + 0.01 * k for k in range(6)]
    runs = {"base": (made_up("base", 0, [clients]),)}
    for name, gain in (("a", 0.1), ("b", 0.2)):
        runs[name] = (made_up(name, 0, [[value + gain + 0.001 * k for k, value in enumerate(clients)]]),)
    alone = comparison({name: runs[name] for name in ("base", "a")}, "base").differences[0]
    assert (alone.p, alone.verdict) == (2 / 64, "better")
    together = comparison(runs, "base")
    assert [(one.difference.p, one.p) for one in together.differences] == [(2 / 64, 4 / 64)] * 2
    assert {one.verdict for one in together.differences} == {"no difference shown"}
    assert any("corrected for 2 rows" in note for note in together.notes)


def test_a_client_that_only_one_method_measured_makes_no_pair() -> None:
    short = made_up("short", 0, [[0.5, 0.5]])
    short.result["clients"]["1"]["selected"]["test"] = None
    (one,) = comparison({"short": (short,), "strong": STRONG[:1]}, "short").differences
    assert (one.difference.pairs, one.difference.mean) == (1, pytest.approx(0.3))


def test_notes_say_what_is_not_covered() -> None:
    two, one = (comparison({"weak": WEAK[:n], "strong": STRONG[:n]}, "weak").notes for n in (2, 1))
    for fact in (
        "deviation over 2 seeds (0 to 1)",
        "2 seeds are few",
        "0.500",
        "weak 1 of 2",
        "weak-1 and 1 more: careful",
    ):
        assert sum(fact in note for note in two) == 1, fact
    for fact in ("One seed (0)", "With one seed only clients"):
        assert sum(fact in note for note in one) == 1, fact


# ---- one view --------------------------------------------------------------------------------------------------------


def of_views(method: str, views: dict[str, list[float]], wanted: str, kept: bool = True) -> Run:
    """A run of one round whose clients had these accuracies, by view; the headline first."""
    moments = {
        view: {"test": {"mean": sum(all_) / len(all_), "weighted": 0.5, "worst": min(all_)}}
        for view, all_ in views.items()
    }
    headline, clients = next(iter(views.values())), range(len(next(iter(views.values()))))
    result = {
        "summary": {view: {"last": one, "selected": one} for view, one in moments.items()},
        "clients": {str(k): {"selected": {"val": 0.5, "test": headline[k]}} for k in clients},
        "bytes": {"up": 1, "down": 1},
        "seconds": 1.0,
        "warnings": [],
    }
    if kept:
        for k in clients:
            result["clients"][str(k)]["views"] = {view: {"selected": {"test": all_[k]}} for view, all_ in views.items()}
    return Run(method, 0, Path(f"{method}-0"), result, [], wanted)


LOW, MIDDLE, HIGH = ([base + 0.01 * k for k in range(8)] for base in (0.2, 0.7, 0.8))


def viewed(wanted: str, kept: bool = True) -> Comparison:
    """Before training `global` is far below, after it above; `proto` has no model after training."""
    views = {
        "alone": {"after": MIDDLE},
        "global": {"before": LOW, "after": HIGH},
        "both": {"after": LOW, "before": HIGH},
        "proto": {"before": LOW, "head": HIGH},
    }
    return replace(
        comparison({name: (of_views(name, of, wanted, kept),) for name, of in views.items()}, "alone"), view=wanted
    )


@pytest.mark.parametrize(
    ("wanted", "verdicts"),
    [
        ("after", ["better", "worse", "different views"]),
        ("before", ["different views"] * 3),  # alone has no view `before`
        ("own", ["different views", "worse", "different views"]),
    ],
)
def test_only_equal_views_are_tested_against_each_other(wanted: str, verdicts: list[str]) -> None:
    found = viewed(wanted)
    assert [one.verdict for one in found.differences] == verdicts
    for one in found.differences:
        assert (one.difference is None) == (one.p is None) == (one.verdict == "different views")
    if wanted == "after":
        above, below, _ = found.differences
        assert above.difference is not None
        assert above.difference.mean == pytest.approx(0.1)
        assert above.p == 2 * above.difference.p == pytest.approx(4 / 256)  # Holm: two tests, not three
        assert below.difference is not None
        assert below.difference.mean == pytest.approx(-0.5)
    assert found.to_json()["view"] == wanted


def test_every_view_is_a_column_and_none_is_the_best_of_different_ones() -> None:
    accuracy, views, *_ = viewed("after").tables
    assert views.columns == ("row", "shown above", "after", "before", "head")
    assert [[cell.text for cell in row] for row in views.rows] == [
        ["alone", "after", "0.735", "-", "-"],
        ["global", "after", "0.835", "0.235", "-"],
        ["both", "after", "0.235", "0.835", "-"],
        ["proto", "before", "-", "0.235", "0.835"],
    ]
    assert [cell.text for row in views.rows for cell in row if cell.best] == ["0.835", "0.835"]
    assert not any(cell.best for row in accuracy.rows for cell in row)
    alike = comparison({"weak": WEAK, "strong": STRONG}, "weak")
    assert len(alike.tables) == 4
    assert any(cell.best for row in alike.tables[0].rows for cell in row)


def test_figures_that_were_not_kept_are_not_replaced_by_others() -> None:
    found = viewed("after", kept=False)
    assert [one.verdict for one in found.differences] == ["not kept", "worse", "different views"]
    assert [row.scores["mean"].mean for row in found.rows] == pytest.approx([0.735, 0.835, 0.235, 0.235])


def test_a_view_of_ones_own(terminal: Terminal, found: Comparison) -> None:
    """Means in every view are those of the runs, per client too."""
    out = str(shutil.copytree(found.folder, new_folder(), dirs_exist_ok=True))
    after, before = (compare_tiny(*found.runs, out=out, view=view) for view in ("after", "before"))
    assert [row.view for row in before.rows] == ["after", "before", "before"]
    for comparison in (after, before):
        for run in comparison.runs["fedgh"]:
            mine = pluribus.resume(run.folder, progress=False)
            assert run.by_client == {k: chosen.selected["test"] for k, chosen in mine.per_client(run.view).items()}
            told = run.result["clients"]["0"]["views"]
            assert list(told) == ["after", "before"]
            assert told["before"]["selected_round"] == mine.per_client("before")[0].selected_round
            for client in run.result["clients"].values():
                del client["views"]
            assert run.by_client == {k: chosen.selected["test"] for k, chosen in mine.per_client(run.view).items()}
    with refused(UnknownNameError, "--view", "after, before, global, group, own", "'head'"):
        compare_tiny("local", view="head")
    own = ["--view", "own", "--seeds", "1", "--json", "--out", new_folder()]
    told = terminal("compare", "local", *SMALL, *own).json
    assert (told["view"], told["rows"][0]["view"]) == ("own", "after")


# ---- equal budgets ---------------------------------------------------------------------------------------------------


def trained(base: float, *others: float | None) -> Comparison:
    """Methods whose clients took so many steps, all better than the first."""
    runs = {"base": (of_views("base", {"after": LOW}, "after"),)}
    runs |= {f"m{n}": (of_views(f"m{n}", {"after": HIGH}, "after"),) for n in range(len(others))}
    for (run,), steps in zip(runs.values(), (base, *others), strict=True):
        run.result["steps"] = {"total": 1, "per_client": steps}
    return comparison(runs, "base")


def test_a_verdict_is_marked_where_steps_differ_by_more_than_a_tenth() -> None:
    found = trained(400.0, 440.0, 441.0, 1240.0, 359.0, None)
    assert {one.verdict for one in found.differences} == {"better"}
    assert [one.unequal for one in found.differences] == [False, True, True, True, False]
    shown = [row[-1].text for row in found.tables[-1].rows]
    assert shown == ["better", "better †", "better †", "better †", "better"]
    (sentence,) = [note for note in found.notes if note.startswith("†")]
    assert "base's 400" in sentence
    assert "m2 1,240 (3.1 times as many)" in sentence
    assert "equal_steps=" in sentence
    assert "m0" not in sentence
    assert [row[1].text for row in found.tables[1].rows] == ["400", "440", "441", "1,240", "359", "-"]
    assert "$\\dagger$" in found.to_latex()
    assert "better †" in found.to_markdown()
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["steps"] for row in rows] == ["400.0", "440.0", "441.0", "1240.0", "359.0", ""]
    assert [row["unequal_steps"] for row in rows] == ["", "False", "True", "True", "True", "False"]
    assert [one["unequal_steps"] for one in found.to_json()["differences"]] == [False, True, True, True, False]
    assert not any(note.startswith("†") for note in trained(400.0, 400.0).notes)


def test_steps_of_a_comparison_by_hand() -> None:
    """FedRep takes eleven epochs where local takes one."""
    told = compare_tiny("local", "fedrep", seeds=1, own={"fedrep": {"head_epochs": 10}})
    local, fedrep = told.rows
    batches = [len(batch_sizes(client["train"], 10)) for client in told.runs["local"][0].result["clients"].values()]
    assert local.steps == 2 * sum(batches) / 4
    assert fedrep.steps == 11 * local.steps
    assert told.differences[0].unequal


def test_equal_steps_give_more_rounds_to_those_who_take_fewer() -> None:
    """Two rounds of 3 epochs are six of 1, or three after 3 epochs before the first round."""
    own = {"fedrep": {"head_epochs": 2}, "fedmd": {"pretrain_public": 0, "pretrain_private": 3, "digest_steps": 0}}
    settings = {"own": own, "public_fraction": 0.1, "equal_steps": True, "seeds": 2, "out": (out := new_folder())}
    told = compare_tiny("local", "fedrep", "fedmd", **settings)
    assert {row.label: row.rounds for row in told.rows} == {"local": 6, "fedrep": 2, "fedmd": 3}
    assert [run.result["rounds"] for run in told.runs["local"]] == [6, 6]
    assert len({row.steps for row in told.rows}) == 1
    assert not any(one.unequal for one in told.differences)
    assert any("local 6, fedrep 2, fedmd 3" in note for note in told.notes)
    again = compare_tiny("local", "fedrep", "fedmd", **settings)  # the same rounds again, so nothing runs
    assert without_seconds(again.folder) == without_seconds(told.folder)
    assert again.folder == Path(out)


def test_equal_steps_that_no_rounds_can_give() -> None:
    with refused(ConflictError, "Idle", "--equal-steps"):
        compare_tiny("local", Idle, equal_steps=True)
    with refused(NotFiniteError, "--equal-steps", "fedgh", "'means'"):  # the kind of what stopped the measurement
        compare_tiny("fedgh", equal_steps=True, lr=1e30)


@dataclass(frozen=True)
class Idle(Method):
    """Trains in its first round alone."""

    def local_update(self, client: Any) -> Any:
        return super().local_update(client) if client.t == 0 else None


# ---- files -----------------------------------------------------------------------------------------------------------


def test_every_format_has_the_same_numbers(found: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    found.table()
    printed = " ".join(capsys.readouterr().out.split())
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [row["method"] for row in rows] == list(found.runs)
    for row in rows:
        for name in COLUMNS:
            figure = f"{float(row[name]):.3f} ± {float(row[f'{name}_std']):.3f}"
            assert figure in printed
            assert figure in found.to_markdown()
            assert figure.replace("±", "$\\pm$") in found.to_latex()
        if row["difference_mean"]:
            figure = f"{float(row['difference_mean']):+.3f}"
            assert figure in printed
            assert figure in found.to_markdown()
        assert row["verdict"] in printed
        for view in ("after", "before"):
            figure = f"{float(row[view]):.3f}" if row[view] else "-"
            assert figure in printed
            assert f"| {figure}" in found.to_markdown() or f"**{figure}**" in found.to_markdown()
    assert [bool(row["difference_mean"]) for row in rows] == [False, True, True]
    assert found.to_markdown().count("| --- |") == found.to_latex().count("\\toprule") == 5
    assert all(note.split()[0] in printed for note in found.notes)


def test_the_folder_has_the_numbers_too(found: Comparison) -> None:
    told = read_json(found.folder / "compare.json")
    assert told == json.loads(json.dumps(found.to_json()))
    assert told["target"] == told["rows"][0]["scores"]["mean"]["mean"]
    assert {path.name for path in found.folder.iterdir()} == {
        "compare.json",
        *(f"{method}-{seed}" for method in found.runs for seed in (0, 1)),
    }


def test_a_baseline_and_a_target_of_ones_own(found: Comparison) -> None:
    told = compare_tiny(*found.runs, out=str(found.folder), baseline="fedgh", target=0.99)
    assert [one.label for one in told.differences] == ["local", "fedproto"]
    assert {row.reached for row in told.rows} == {0}
    mirrored = compare_tiny(*found.runs, out=str(found.folder)).differences[0]
    assert told.differences[0].difference.mean == -mirrored.difference.mean


# ---- going on --------------------------------------------------------------------------------------------------------


def test_it_goes_on_where_it_was_stopped() -> None:
    whole = compare_tiny("local", "fedgh")
    told = without_seconds(whole.folder)
    kept = (whole.folder / "fedgh-0" / "metrics.jsonl").read_text()
    shutil.rmtree(whole.folder / "local-0")  # not begun
    (whole.folder / "fedgh-1" / "result.json").unlink()  # stopped
    (whole.folder / "local-1" / "config.toml").unlink()  # stopped before round 0
    (whole.folder / "local-1" / "result.json").unlink()
    again = compare_tiny("local", "fedgh", out=str(whole.folder))
    assert without_seconds(again.folder) == told
    assert (whole.folder / "fedgh-0" / "metrics.jsonl").read_text() == kept  # its seconds too: it was only read


def test_other_settings_are_refused_in_one_sentence(found: Comparison) -> None:
    out = str(found.folder)
    for settings, run, *facts in (
        ({"lr": 0.1}, "local-0", "--lr 0.05", "0.1"),
        ({"width": 32}, "local-0", "--width", "32"),
        ({"own": {"fedgh": {"server_lr": 0.7}}}, "fedgh-0", "--server-lr 0.01", "0.7"),
    ):
        with refused(OtherRunError, f"{out}/{run} ", *facts, "--out"):
            compare_tiny("local", "fedgh", out=out, **settings)
    taken = found.runs["local"][0].folder
    with refused(OtherRunError, f"pluribus resume {taken}"):
        compare_tiny("local", "fedgh", out=str(taken))


def test_runs_on_other_data_are_not_compared(found: Comparison, tmp_path: Path) -> None:
    shutil.copytree(found.folder, tmp_path / "moved")
    path = tmp_path / "moved" / "fedgh-1" / "partition.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"digest": "0" * 64}))
    with refused(OtherRunError, "local-1 ", "fedgh-1 ", "partitions", "--out"):
        compare_tiny("local", "fedgh", out=str(tmp_path / "moved"))


def test_a_run_that_fails_does_not_disturb_the_others(terminal: Terminal, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "a", "--seeds", "2", "--jobs", "1"]
    told = terminal.refused("compare", "local", "fedgh", *SMALL, *out, "--set", "fedgh.lr=1e30")
    told.check(UnfinishedError, "fedgh-0 ", "round 0, client 0: 'means'", "--lr", "fedgh-1", f"--out {tmp_path / 'a'} ")
    assert "local-" not in told
    assert (tmp_path / "a" / "local-1" / "result.json").exists()
    assert terminal("compare", "local", *SMALL, *out).code == 0


@dataclass(frozen=True)
class Mortal(Method):
    """Its process is killed in seed 1."""

    def local_update(self, client: Any) -> Any:
        if client.task.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_update(client)


def test_processes_give_the_same_bits_and_may_die() -> None:
    alone = compare_tiny("local", "fedgh", seeds=1, rounds=1)
    with refused(UnfinishedError, "test_comparison.Mortal-1 ", "killed", "memory", "--jobs") as error:
        compare_tiny("local", Mortal, "fedgh", rounds=1, jobs=2, out=(out := new_folder()))
    assert re.search(r"process \(\d+\)", str(error.value))
    beside = compare_tiny("local", "fedgh", out=out, rounds=1)
    for method in ("local", "fedgh"):
        one, other = alone.runs[method][0], beside.runs[method][0]
        assert one.result["summary"] == other.result["summary"]
        assert one.result["bytes"] == other.result["bytes"]


@dataclass(frozen=True)
class Careless(Method):
    """Fails in its second round with seed 1, in a way that nobody foresaw."""

    def local_update(self, client: Any) -> Any:
        if client.task.seed == 1 and client.t == 1:
            raise ValueError("no such thing\nand more")  # the line that is told
        return super().local_update(client)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_failure_of_any_kind_leaves_the_other_runs_alone(jobs: str, terminal: Terminal, tmp_path: Path) -> None:
    name, out = name_of_any(Careless), tmp_path / "a"
    argv = ["compare", "local", name, "fedgh", *SMALL, "--seeds", "2", "--jobs", jobs, "--out", out]
    answer = terminal(*argv)
    assert answer.code == 2
    assert "Traceback" not in answer.err
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("that is told"))
    sentence = answer.err.splitlines()[-1]
    where = f"round 1, client 0: ValueError: no such thing (test_comparison.py, line {line}, in "
    assert_facts(sentence, f"{name}-1 ", where)
    assert "and more" in (out / f"{name}-1.error.txt").read_text()
    finished = {path.parent.name for path in out.glob("*/result.json")}
    assert finished == {"local-0", "local-1", "fedgh-0", "fedgh-1", f"{name}-0"}
    assert_facts(" ".join(answer.out.split()), f"failed: {name}.", "against local")
    assert not (out / "compare.json").exists()
    with pytest.raises(UnfinishedError) as error:
        compare_tiny(Careless, "local", "fedgh", jobs=int(jobs), out=tmp_path / "b")
    assert error.value.partial is None  # its baseline is the one that failed
    assert list(error.value.failed) == [str(tmp_path / "b" / f"{name}-1")]


def test_a_method_that_exits_does_not_end_the_comparison() -> None:
    with refused(UnfinishedError, "Leaver-0 ", "SystemExit: 3"):
        compare_tiny(Leaver, "local", seeds=1, out=(out := new_folder()))
    assert (Path(out) / "local-0" / "result.json").exists()


@dataclass(frozen=True)
class Leaver(Method):
    """Ends the process that it runs in."""

    def local_update(self, client: Any) -> Any:
        raise SystemExit(3)


def counted() -> Dataset:
    """Digits; every time that they are decoded is noted."""
    with Path(os.environ["COUNTED"]).open("a") as file:
        file.write("decoded\n")
    return load(few_digits())


def counted_by_seed(seed: int) -> Dataset:
    """The same, of a set that is drawn."""
    return replace(counted(), name=f"drawn {seed}")


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(("function", "times"), [(counted, 1), (counted_by_seed, 2)])
def test_data_are_decoded_once(
    function: Any, times: int, jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods and two seeds are four runs."""
    monkeypatch.setenv("COUNTED", str(file := tmp_path / "counted"))
    told = compare_tiny("local", "fedgh", data=f"test_comparison.{function.__name__}", jobs=jobs, rounds=1)
    assert file.read_text().count("decoded") == times
    plain = compare_tiny("local", "fedgh", rounds=1)
    for method, runs in told.runs.items():
        for mine, other in zip(runs, plain.runs[method], strict=True):
            assert mine.result["summary"] == other.result["summary"]
    compare_tiny("local", data=f"test_comparison.{function.__name__}", seeds=1, rounds=1)
    assert file.read_text().count("decoded") == times + 1  # nothing is kept beyond a comparison


class Impatient:
    """Interrupts as soon as a run has begun."""

    def update(self, out: str, progress: Progress) -> None:
        raise KeyboardInterrupt

    def finish(self, out: str, failure: Failure | None) -> None:
        raise AssertionError("no run should have ended")


def interrupt(*methods: str) -> None:
    """Run these methods side by side until Ctrl-C, and look for what is left of them."""
    grid = [experiment(name, **tiny(out=new_folder(), rounds=10_000, models="mlp-64")) for name in methods]
    with pytest.raises(KeyboardInterrupt):
        run_all(grid, 2, Impatient())
    for one in grid:
        assert [child for child in multiprocessing.active_children() if child.name.endswith(one.out or "")] == []
        if (Path(one.out or "") / "config.toml").exists():
            RunFolder.open(one.out or "").close()  # nobody holds its lock


def test_no_process_outlives_an_interruption() -> None:
    interrupt("local", "fedgh")


def test_no_process_outlives_an_interruption_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C waits until a process has started, and comes before anything else."""

    @contextmanager
    def interrupted() -> Iterator[None]:
        with starting():
            yield
        raise KeyboardInterrupt

    monkeypatch.setattr("pluribus.study.parallel.starting", interrupted)
    interrupt("local")


@pytest.mark.slow
def test_ctrl_c_leaves_everything_resumable(terminal: Terminal, tmp_path: Path) -> None:
    flags = [*SMALL, "--rounds", "30", "--seeds", "1", "--out", tmp_path / "a", "--jobs", "1"]
    process = start("compare", "local", "fedgh", *flags)
    while not list((tmp_path / "a").glob("*/state/round-*")):
        assert process.poll() is None, process.err
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert f" --out {tmp_path / 'a'}\n" in process.err
    assert "Traceback" not in process.err
    assert not (tmp_path / "a" / "compare.json").exists()
    answer = terminal("compare", "local", "fedgh", *flags, "--json")
    assert answer.code == 0
    assert [row["method"] for row in answer.json["rows"]] == ["local", "fedgh"]


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_prints_saves_and_writes(terminal: Terminal, tmp_path: Path) -> None:
    files = [("--markdown", "a.md"), ("--csv", "a.csv"), ("--latex", "a.tex")]
    where = [word for flag, name in files for word in (flag, tmp_path / name)]
    argv = ["compare", "local", "fedgh", *SMALL, "--seeds", "2", "--seed", "5", "--out", tmp_path / "runs"]
    answer = terminal(*argv, "--jobs", "1", "--set", "fedgh.server_lr=0.5", "--set", "fedgh.server-step=client", *where)
    assert answer.code == 0
    assert re.match(r"Pluribus \S+   compare local, fedgh   \S+   4 clients   2 rounds   seeds 5 to 6\n", answer.out)
    assert "against local" in answer.out
    assert f" Saved {tmp_path / 'runs'}\n" in answer.out
    assert re.search(r"local-5: 2 of 2 rounds, done", answer.err)
    told = json.loads((tmp_path / "runs" / "compare.json").read_text())
    assert told["hyper"]["fedgh"] | {"server_lr": 0.5, "server_step": "client"} == told["hyper"]["fedgh"]
    assert (told["seeds"], told["methods"]) == ([5, 6], ["local", "fedgh"])
    assert (tmp_path / "a.md").read_text().startswith("| method | mean |")
    assert (tmp_path / "a.csv").read_text().startswith("label,method,mean,mean_std,")
    assert (tmp_path / "a.tex").read_text().startswith("\\begin{tabular}{lrrrr}\n\\toprule\n")
    same = terminal(*argv, "--set", "fedgh.server_lr=0.5", "--set", "fedgh.server-step=client", "--json")
    assert (same.err, same.json) == ("", told)


def test_without_a_folder_it_has_a_name_of_its_own(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert terminal("compare", "local", *SMALL, "--seeds", "1", "--rounds", "1").code == 0
    first, second = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-compare-digits-320-10", first)
    assert second == f"{first}-2"


BOTH = ["local", "fedgh", *SMALL]
BAD: dict[str, tuple[Any, ...]] = {
    "nothing": ([], MissingSettingError, "methods", "pluribus list methods"),
    "method": (["local", "fedg"], UnknownNameError, "'fedg'", "'fedgh'"),
    "twice": (["local", "local"], FormatError, "local"),
    "seeds": ([*BOTH, "--seeds", "0"], RangeError, "--seeds", 1, 0),
    "jobs": ([*BOTH, "--jobs", "0"], RangeError, "--jobs", 1, 0),
    "target": ([*BOTH, "--target", "80"], RangeError, "--target", "[0, 1]", 80.0),
    "baseline": ([*BOTH, "--baseline", "fedproto"], UnknownNameError, "--baseline", "local, fedgh", "fedproto"),
    "set what": ([*BOTH, "--set", "server_lr"], FormatError, "--set", "METHOD.NAME=VALUE", "'server_lr'"),
    "set whom": ([*BOTH, "--set", "fedg.mu=1"], UnknownNameError, "'fedg'", "'fedgh'"),
    "set name": ([*BOTH, "--set", "fedgh.server_l=1"], UnknownNameError, "'server_l'", "'server_lr'"),
    "set value": ([*BOTH, "--set", "fedgh.server_lr=x"], FormatError, "--server-lr", "'x'"),
    "set for all": ([*BOTH, "--set", "fedgh.clients=3"], ConflictError, "clients ", "--clients"),
    "flag": ([*BOTH, "--lr", "-1"], RangeError, "--lr", -1.0),
    "data": ([*BOTH, "--data", "digit"], UnknownNameError, "'digit'", "'digits'"),
    "needs": (["local", "fedavg", *SMALL, "--models", "small"], MismatchError, "fedavg", "0 (mlp-64)", "1 (cnn-16)"),
    "no test": ([*BOTH, "--test-fraction", "0"], RangeError, "--test-fraction", 0),
    "no file": ([*BOTH, "--csv", "no/such/a.csv"], FileAccessError, "no/such/a.csv", "no/such "),
    "no config": ([*BOTH, "--config", "no.toml"], FileAccessError, "no.toml", "No such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    argv, kind, *facts = BAD[case]
    terminal.refused("compare", *argv).check(kind, *facts)
    assert list(tmp_path.iterdir()) == []


def test_every_setting_is_a_flag_once(terminal: Terminal) -> None:
    flags = [name for group in _common_flags(common_settings(None)).values() for name, *_ in group]
    assert len(flags) == len(set(flags))
    assert {name for names in SETTINGS.values() for name in names} == {*flags, "seed", "out"}
    told = " ".join(terminal("compare", "--help").out.split())
    for word in (
        "--seeds",
        "--set",
        "--lr FLOAT eta: local learning rate. Above 0 and at most 1e+30. (default: 0.01)",
        "no metric but seconds depends on --jobs",
    ):
        assert word in told
    assert "compare METHOD" in terminal("--help").out


def test_jobs_are_as_many_as_the_machine_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert default_jobs([Experiment(device="cpu", threads=1)]) == 8
    assert default_jobs([Experiment(device="cpu", threads=1, workers=4)]) == 2
    assert default_jobs([Experiment(device="cpu", threads=16)]) == 1
    assert default_jobs([Experiment(device="cuda", threads=1)]) == 1
    assert default_jobs([Experiment(engine="ray", threads=1)]) == 1
    assert default_jobs([Experiment(device="cpu", threads=1, data=lambda: None)]) == 1


def test_python_has_it_too(found: Comparison) -> None:
    assert pluribus.compare is compare
    assert isinstance(found, pluribus.Comparison)
    assert found.experiments["local"].threads == 1


def test_without_validation_data_nothing_is_said_to_be_selected_on_it() -> None:
    found = compare_tiny("local", "fedgh", seeds=1, val_fraction=0.0)
    assert not any("selected on validation" in note for note in found.notes)
    assert any("last round, without validation data" in note for note in found.notes)
