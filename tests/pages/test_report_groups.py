"""Reports of several methods and seeds: what belongs together, numbers by hand, and the tables of a comparison."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_report import copy_of, plot_of, ran, section_of

import pluribus
from conftest import new_folder, run_tiny, tiny
from pluribus.evaluate import Chosen
from pluribus.internal.metrics import METRICS
from pluribus.internal.tables import Table
from pluribus.report.figures import draw
from pluribus.report.groups import group_runs, name_runs
from pluribus.report.numbers import Run, read_runs
from pluribus.report.page import content, page
from pluribus.report.plots import Section, sections
from pluribus.report.plots.clients import distribution, per_client
from pluribus.report.plots.curves import headline
from pluribus.report.plots.targets import targets
from pluribus.report.plots.tuning import tuning
from pluribus.report.views import about_view, known_views
from pluribus.study.standings import Comparison
from refusals import assert_facts


@cache
def compared() -> Comparison:
    """A comparison that tests may look at, but not change."""
    rows = {"local": "local", "class": "fedgh", "client": ("fedgh", {"server_step": "client"})}
    settings = tiny(models="mlp-64", metrics="accuracy,confusion")
    return pluribus.compare(rows, seeds=2, jobs=1, out=new_folder(), progress=False, **settings)


def texts(tables: Sequence[Table]) -> list[Any]:
    return [(table.columns, [[(cell.text, cell.best) for cell in row] for row in table.rows]) for table in tables]


@cache
def template() -> Run:
    return read_runs([ran("local").folder])[0]


def made(method: str, seed: int, means: Sequence[float | None], clients: Sequence[float] = (), **more: Any) -> Run:
    """A run with these means by round, 100 bytes up and 200 down in each, and these selected metrics of clients."""
    history = [
        {
            "round": t,
            "metric": "accuracy",
            "seconds": 2.0,
            "bytes": {"up": 100, "down": 200},
            "loss": None,
            "mean": {} if mean is None else {"after": {"test": {"mean": mean, "worst": mean}}},
            "clients": {},
            "notes": {},
            "spans": {"compute": 1.0, "server": 0.5},
            "epsilon": {},
        }
        for t, mean in enumerate(means)
    ]
    chosen = {k: Chosen({"test": value}, {"test": value}, 0) for k, value in enumerate(clients)}
    about = {"path": Path(f"runs/{method}-{seed}"), "history": history, "chosen": chosen, "by_view": {"after": chosen}}
    described = replace(template().experiment, method=method, seed=seed)
    return replace(template(), experiment=described, partition=f"seed {seed}", **about | more)


# ---- what belongs together -------------------------------------------------------------------------------------------


def test_runs_that_differ_in_the_seed_are_one_group() -> None:
    runs = read_runs([compared().folder])
    groups = group_runs(runs)
    assert [group.name for group in groups] == ["local", "class", "client"]  # as in the comparison, not by name
    assert [[run.experiment.seed for run in group.runs] for group in groups] == [[0, 1]] * 3
    assert {run.name for run in runs} >= {"local, seed 0", "client, seed 1"}
    assert [one.name for one in plot_of(runs, "accuracy", "rounds").series] == ["local", "class", "client"]


def test_groups_are_named_by_what_tells_them_apart() -> None:
    one, other = made("fedgh", 0, [0.1]), made("fedgh", 1, [0.1])
    assert [group.name for group in group_runs([one, other])] == ["fedgh"]
    faster = replace(one.experiment, lr=0.123456789)
    apart = [replace(one, path=Path("a")), replace(one, path=Path("b"), experiment=faster)]
    assert [group.name for group in group_runs(apart)] == [f"fedgh, lr={one.experiment.lr}", "fedgh, lr=0.1235"]
    twins = [replace(one, path=Path("a")), replace(one, path=Path("b"))]
    assert [group.name for group in group_runs(twins)] == ["a", "b"]
    rows = [replace(run, path=Path(f"{label}-{run.experiment.seed}")) for label in "xy" for run in (one, other)]
    assert [(group.name, len(group.runs)) for group in group_runs(rows)] == [("x", 2), ("y", 2)]


def test_partitions_are_named_by_the_data_and_the_seed() -> None:
    runs = [
        replace(
            run,
            partition=f"{alpha}, {seed}",
            experiment=replace(run.experiment, alpha=alpha),
            path=Path(f"{alpha}/{method}-{seed}"),
        )
        for method in ("local", "fedgh")
        for seed in (0, 1)
        for alpha in (0.1, 1.0)
        for run in [made(method, seed, [0.5], [0.4])]
    ]
    names = ["alpha=0.1, seed 0", "alpha=0.1, seed 1", "alpha=1.0, seed 0", "alpha=1.0, seed 1"]
    assert [plot.name for plot in per_client(group_runs(runs)).plots] == names


# ---- numbers by hand -------------------------------------------------------------------------------------------------


def test_a_band_is_one_standard_deviation_over_the_rounds_of_all_seeds() -> None:
    runs = name_runs([made("local", 0, [0.2, None, 0.4, 0.9]), made("local", 1, [0.4, 0.5, 0.8])])
    section = headline(group_runs(runs))
    (line,) = next(plot for plot in section.plots if plot.name == "rounds").series
    assert (line.x, line.y) == ([1, 3], pytest.approx([0.3, 0.6]))
    assert line.low == pytest.approx([0.3 - 0.02**0.5, 0.6 - 0.08**0.5])  # the sample's: two values, one degree
    assert line.high == pytest.approx([0.3 + 0.02**0.5, 0.6 + 0.08**0.5])
    (line,) = next(plot for plot in section.plots if plot.name == "bytes").series
    assert line.x == [300, 900]
    assert_facts(section.says, "2 seeds", "standard deviation")
    (alone,) = headline(group_runs(runs[:1])).plots[0].series[:1]
    assert alone.low == ()


def test_a_logarithmic_axis_names_those_that_send_nothing() -> None:
    runs = read_runs([compared().folder])
    plot = plot_of(runs, "accuracy", "bytes (log)")
    assert (plot.log, [one.name for one in plot.series]) == ("x", ["class", "client"])
    assert "local" in plot.says
    assert all(x > 0 for one in plot.series for x in one.x)


def test_the_distribution_counts_the_clients_of_all_seeds() -> None:
    runs = [made("local", 0, [0.5], [0.5, 0.25]), made("local", 1, [0.5], [0.5, 1.0])]
    (plot,) = distribution(group_runs(runs)).plots
    (steps,) = plot.series
    assert (steps.kind, steps.x, steps.y) == ("steps", [0.25, 0.25, 0.5, 1.0], [0, 0.25, 0.75, 1])


def test_fairness_is_measured_over_clients_and_averaged_over_seeds() -> None:
    runs = [made("local", 0, [0.5], [0.2, 0.6]), made("local", 1, [0.5], [0.4, 0.4])]
    (table,) = section_of(name_runs(runs), "fairness").tables
    assert table.columns == ("method", "mean", "worst", "worst decile", "best", "deviation")
    assert [cell.text for cell in table.rows[0]] == [
        "local", "0.400 ± 0.000", "0.300 ± 0.141", "0.300 ± 0.141", "0.500 ± 0.141", "0.100 ± 0.141",
    ]  # fmt: skip


def test_rounds_and_bytes_to_a_share_of_the_best() -> None:
    slow = [made("local", 0, [0.0, 0.5, 0.6, 0.7]), made("local", 1, [0.0, 0.3, 0.5, 0.7])]
    runs = [*slow, made("fedgh", 0, [0.4, 0.8, 0.9, 1.0]), made("fedgh", 1, [0.6, 0.8, 0.9, 1.0])]
    (table,) = targets(group_runs(name_runs(runs))).tables
    # from 0, the first round of local, to 1, the last of fedgh
    assert table.columns[1::2] == ("rounds to 0.500", "rounds to 0.800", "rounds to 0.900", "rounds to 0.950")
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["local"] == ["2.5", "750 B", *["never", "-"] * 3]
    assert rows["fedgh"] == ["1.5", "450 B", "2", "600 B", "3", "900 B", "4", "1.2 kB"]


def test_a_target_of_an_error_is_below() -> None:
    runs = [made("local", seed, means, metric=METRICS["rmse"]) for seed, means in enumerate([[9, 5], [7, 1]])]
    (table,) = targets(group_runs(runs)).tables  # from 8 to 3
    assert [cell.text for cell in table.rows[0][:4]] == ["local", "2", "600 B", "1 of 2 seeds"]
    assert table.columns[1] == "rounds to 5.500"


def test_seconds_are_added_up_by_span() -> None:
    (plot,) = section_of([made("local", 0, [0.1, 0.2])], "time").plots
    assert {one.name: one.x for one in plot.series} == {
        "compute": [2.0], "communication": [0.0], "server": [1.0], "evaluation": [0.0], "rest": [1.0],
    }  # fmt: skip
    (axes,) = draw(plot).axes
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == 4.0


def test_confusion_is_added_up_over_seeds() -> None:
    confusions = [[[3, 1], [0, 2]], [[1, 1], [2, 0]]]
    runs = [made("local", seed, [0.1], confusion=one, classes=("a", "b")) for seed, one in enumerate(confusions)]
    by_class, matrix = section_of(runs, "confusion").plots
    assert matrix.series[0].marks == [["4", "2"], ["2", "2"]]
    assert matrix.series[0].cells == [[4 / 6, 2 / 6], [0.5, 0.5]]
    assert by_class.series[0].x == [4 / 6, 0.5]
    (axes,) = draw(matrix).axes
    assert [text.get_text() for text in axes.texts] == ["4", "2", "2", "2"]


def test_a_client_has_the_model_of_its_own_run() -> None:
    runs = name_runs(
        [
            made("local", 0, [0.1], [0.2, 0.3], models=("cnn-16", "mlp-64")),
            made("fedgh", 0, [0.1], [0.2, 0.3], models=("mlp-128-64", "mlp-64")),
        ]
    )
    (plot,) = per_client(group_runs(runs)).plots
    assert plot.y_names == ["0", "1 mlp-64"]
    assert [one.text[0].startswith(f"{name}, client 0 {model}: 0.200") for one, name, model in zip(
        plot.series, ("local", "fedgh"), ("cnn-16", "mlp-128-64"), strict=True
    )] == [True, True]  # fmt: skip


# ---- views -----------------------------------------------------------------------------------------------------------


def seen(method: str, *views: str) -> Run:
    return made(method, 0, [0.1], by_view={view: {} for view in views})


def test_the_first_view_is_one_that_all_methods_have() -> None:
    both, alone, other = seen("fedgh", "before", "after"), seen("local", "after"), seen("heterofl", "global")
    assert list(known_views(group_runs([both]))) == ["before", "after"]
    assert list(known_views(group_runs([both, alone]))) == ["after", "before", "own"]
    groups = group_runs([both, other])
    assert list(known_views(groups)) == ["own", "before", "after", "global"]
    assert_facts(about_view(groups, "own"), "before local training (fedgh)", "the server's model (heterofl)")
    assert about_view(group_runs([both, alone]), "after") == ""


def test_numbers_follow_the_view() -> None:
    runs = read_runs([compared().folder])
    section = section_of(runs, "accuracy")
    assert set(section.views) == {"before"}
    for view, one in (("after", section), ("before", section.views["before"])):
        line = one.plots[0].series[1]
        means = [run.history[-1]["mean"][view]["test"]["mean"] for run in compared().runs["class"]]
        assert line.y[-1] == pytest.approx(sum(means) / 2)
    shown = {one["key"]: one for one in content(runs, sections(runs))["views"]}
    assert shown["after"]["says"] == ""
    assert "local" in shown["before"]["says"]
    assert shown["after"]["summary"] != shown["before"]["summary"]


# ---- the comparison --------------------------------------------------------------------------------------------------


def test_the_page_has_the_tables_and_notes_of_the_comparison() -> None:
    runs = read_runs([compared().folder])
    section = section_of(runs, "comparison")
    assert texts(section.tables) == texts(compared().tables)
    assert section.notes == [*compared().cautions, *compared().notes]
    (plot,) = section.plots
    assert [one.x for one in plot.series] == [[one.difference.mean] for one in compared().differences]
    assert [(one.low, one.high) for one in plot.series] == [
        ([one.difference.low], [one.difference.high]) for one in compared().differences
    ]
    shown = page(runs, sections(runs))
    for cell in (cell for table in compared().tables for row in table.rows for cell in row):
        assert f"{cell.text}<" in shown or f"{cell.text}</b>" in shown


def test_another_view_has_the_tables_of_a_comparison_in_that_view(tmp_path: Path) -> None:
    shutil.copytree(compared().folder, tmp_path / "runs")
    section = section_of(read_runs([tmp_path / "runs"]), "comparison")
    rows = {"local": "local", "class": "fedgh", "client": ("fedgh", {"server_step": "client"})}
    settings = tiny(models="mlp-64", metrics="accuracy,confusion")
    before = pluribus.compare(
        rows, seeds=2, jobs=1, out=tmp_path / "runs", progress=False, view="before", target=0.3, **settings
    )
    assert texts(section.views["before"].tables[:3]) == texts(before.tables[:3])
    again = section_of(read_runs([tmp_path / "runs"]), "comparison")  # the page follows compare.json
    assert texts(again.tables) == texts(before.tables)


def test_replaced_defaults_are_remembered(tmp_path: Path) -> None:
    settings = {name: value for name, value in tiny(models="mlp-64", rounds=1).items() if name != "lr"}
    found = pluribus.compare(["local", "fml"], seeds=1, jobs=1, out=tmp_path, progress=False, **settings)
    section = section_of(read_runs([tmp_path]), "comparison")
    assert_facts(found.cautions[0], "fml", "lr", 0.05)
    assert texts(section.tables) == texts(found.tables)
    assert section.notes == [*found.cautions, *found.notes]


def test_without_a_comparison_local_is_the_baseline() -> None:
    runs = read_runs([ran().folder, ran("local").folder])
    tables = section_of(runs, "comparison").tables
    assert tables[-1].columns[0] == "against local"
    assert [row[0].text for row in tables[-1].rows] == ["fedgh"]
    more = section_of(read_runs([ran().folder, ran("local").folder, ran("local", seed=1).folder]), "comparison")
    assert texts(more.tables[-1:]) == texts(tables[-1:])
    assert "left out" in more.notes[0]
    other = section_of(read_runs([ran().folder, run_tiny("local", rounds=2).folder]), "comparison")
    assert "rounds" in other.notes[0]


def missing(runs: list[Run]) -> str:
    section: Section = section_of(runs, "comparison")
    assert section.tables == section.plots == []
    return section.text


def test_runs_that_cannot_be_compared_are_not() -> None:
    assert missing(read_runs([ran().folder])) == ""
    assert_facts(missing(read_runs([ran().folder, ran("local", seed=1).folder])), "seed")
    other = copy_of(ran("local"))
    manifest = json.loads((other / "partition.json").read_text())
    (other / "partition.json").write_text(json.dumps(manifest | {"digest": "other"}))
    assert_facts(missing(read_runs([ran().folder, other])), "fedgh", "local", "partitions")
    shutil.copy(ran("local").folder / "partition.json", other)
    (other / "result.json").unlink()
    assert_facts(missing(read_runs([ran().folder, other])), "local", "stopped")
    (other / "result.json").write_text("{}")
    assert_facts(missing(read_runs([ran().folder, other])), other / "result.json")
    wider = run_tiny("local", rounds=3, min_samples=9)
    assert_facts(missing(read_runs([ran().folder, wider.folder])), "min_samples")


def test_a_damaged_plan_is_named_and_not_used(tmp_path: Path) -> None:
    shutil.copytree(compared().folder, tmp_path / "runs")
    for text in ("{", "[]", '{"labels": 3}'):
        (tmp_path / "runs" / "compare.json").write_text(text)
        section = section_of(read_runs([tmp_path / "runs"]), "comparison")
        assert str(tmp_path / "runs" / "compare.json") in section.notes[0]
        assert section.tables[-1].columns[0] == "against local"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e308"])
def test_a_number_without_a_deviation_is_damage(tmp_path: Path, value: str) -> None:
    shutil.copytree(compared().folder, tmp_path / "runs")
    file = tmp_path / "runs" / "class-1" / "metrics.jsonl"
    file.write_text(re.sub(r'"test": [\d.]+', f'"test": {value}', file.read_text(), count=1))
    runs = read_runs([tmp_path / "runs"])
    assert any(str(file) in text for run in runs for text in run.problems)
    assert page(runs, sections(runs))


def test_settings_that_differ_are_in_a_table() -> None:
    (table,) = (section := section_of(read_runs([compared().folder]), "settings")).tables
    assert table.columns == ("row", "method", "server_lr", "server_step")
    assert [cell.text for cell in table.rows[2]] == ["client", "fedgh", "0.01", "client"]
    assert [cell.text for cell in table.rows[0]][2:] == ["–", "–"]
    (equal,) = section.folded.values()
    assert "rounds = 2" in equal.splitlines()
    assert not any(line.startswith("method") for line in equal.splitlines())


# ---- searches --------------------------------------------------------------------------------------------------------


def search(folder: Path, lines: Sequence[dict[str, Any]]) -> list[Run]:
    """A search with these trials, of one real run."""
    for number in range(2):
        shutil.copytree(ran("local").folder, folder / "local" / f"trial-{number}")
    (folder / "local" / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "local" / "search.json").write_text(json.dumps({"space": "lr=1e-3:1:log,optimizer=sgd|adam", "new": 3}))
    return read_runs([folder])


def test_a_search_is_drawn_by_trial_and_by_setting(tmp_path: Path) -> None:
    scores: list[float | None] = [0.3, 0.2, 0.5, -1.8e308, None, 0.9]
    lines = [
        {"trial": number, "settings": {"lr": 0.1, "optimizer": "adam"}, "score": score, "seeds": [score]}
        for number, score in enumerate(scores)
    ]
    lines[3]["score"] = -1.7e308  # what a search writes if training diverged
    lines[5]["state"] = "PRUNED"  # its score is that of a round
    runs = search(tmp_path, lines)
    section = tuning(group_runs(runs))
    trials, lr, optimizer = section.plots
    dots, best = trials.series
    assert (dots.x, dots.y) == ([0, 1, 2], [0.3, 0.2, 0.5])
    assert best.y == [0.3, 0.3, 0.5]
    assert "3 trials" in section.says
    assert (lr.log, lr.series[0].x) == ("x", [0.1, 0.1, 0.1])
    assert (optimizer.log, optimizer.x_names, optimizer.series[0].x) == ("", ["adam"], [0, 0, 0])
    assert_facts(missing(runs), tmp_path / "local", "search")
    assert page(runs, sections(runs))


def test_damaged_trials_are_named(tmp_path: Path) -> None:
    runs = search(tmp_path, [{"trial": "x"}, {"trial": 1, "settings": {"lr": 0.1}, "score": 0.5}])
    section = tuning(group_runs(runs))
    assert len(section.plots[0].series[0].x) == 1
    assert str(tmp_path / "local" / "trials.jsonl") in section.notes[0]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_figures_have_bands_intervals_and_a_logarithmic_axis() -> None:
    runs = read_runs([compared().folder])
    (axes,) = draw(plot_of(runs, "accuracy", "bytes (log)")).axes
    assert axes.get_xscale() == "log"
    assert len(axes.collections) == len(axes.lines) == 2  # a band for each line
    (axes,) = draw(plot_of(runs, "comparison", "differences")).axes
    ends = [segment.tolist() for one in axes.collections[::2] for segment in one.get_segments()]
    assert ends == [[[one.difference.low, y], [one.difference.high, y]] for y, one in enumerate(compared().differences)]
