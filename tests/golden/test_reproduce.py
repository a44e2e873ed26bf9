"""`pluribus reproduce`: tables of papers as files, figures to the digit, runs that are shared and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pluribus
from conftest import few_digits
from pluribus.assembly import assemble
from pluribus.data import Dataset, load
from pluribus.errors import DamagedFileError, FileAccessError, MissingDataError, RangeError, UnknownNameError
from pluribus.models import assign
from pluribus.study.reproduce import paper, summary
from pluribus.study.reproduce.beside import Beside, Pair
from pluribus.study.reproduce.measures import ACCURACY, TARGET, measure, targets
from pluribus.study.reproduce.paper import PaperTable, Printed
from pluribus.study.reproduce.run import load_table, reproduce
from pluribus.study.reproduce.summary import Finished
from pluribus.study.standings import Run, Spread
from refusals import Kind, refused
from terminal import Terminal

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


# ---- the files -------------------------------------------------------------------------------------------------------


def stand_in(table: PaperTable) -> Dataset:
    """A table's data set, or blank images of the same shape and classes where it is not in the package."""
    data = table.data
    if data.endswith("digits"):
        return load(data, image_size=table.settings.get("image_size"))
    gray = data.startswith("rotated-mnist")
    x = torch.zeros(1000, 1, 28, 28, dtype=torch.uint8) if gray else torch.zeros(1000, 3, 32, 32, dtype=torch.uint8)
    y, names = torch.arange(1000) % 10, tuple(map(str, range(10)))
    if not gray:
        return Dataset("stand-in", x, y, names)
    domains = ("M0", "M20", "M40", "M60")
    return Dataset("stand-in", x, y, names, domain=torch.arange(1000) // 250, domains=domains)


# Eight deep networks take half a minute to put together for every method; two of different widths are checked alike.
FEW = {"htfe8": {"models": "cnn4,mobilenet-v2", "width": 512}, "fedfree": {"models": "fedfree-cnn,mobilenet-v2"}}


@pytest.mark.parametrize("name", paper.names())
def test_every_row_can_be_put_together(name: str) -> None:
    table = paper.find(name)
    assert table.title
    assert table.needs
    data = stand_in(table)
    for row in table.rows:
        one = table.experiment(row, device="cpu")
        assert one.rounds == table.rounds
        assert assign(one.models, one.clients)
        parts = assemble(replace(one, min_samples=1, **FEW.get(one.models, {})), data)
        assert len(parts.cards) == table.settings["clients"]


@pytest.mark.parametrize("name", paper.names())
def test_rows_train_alike(name: str) -> None:
    """No method's own default decides what the table does not say."""
    table = paper.find(name)
    told = [summary.decisive(table.experiment(row)) for row in table.rows]
    own = {setting for row in table.rows for setting in row.settings}
    for setting in set().union(*told) - own - {"method", "hyper"}:
        assert len({json.dumps(one.get(setting)) for one in told}) == 1, setting


@pytest.mark.parametrize("name", paper.names())
def test_every_figure_of_the_paper_has_one_of_ours(name: str) -> None:
    table = paper.find(name)
    for row in table.rows:
        assert set(row.figures) <= set(table.figures)
    assert table.printed != name.startswith("claim-")
    for ours in table.figures.values():
        assert ACCURACY.fullmatch(ours) or TARGET.fullmatch(ours) or ours == "KB per client and round"


@pytest.mark.parametrize(
    ("name", "row", "figures"),
    [
        ("fedh2l-table2", "FedH2L", ("89.13", "93.33", "87.72")),
        ("fedh2l-table2", "FedMD", ("85.09", "91.17", "83.06")),
        ("fedh2l-table2", "IND", ("68.45", "92.56", "60.47")),
        ("fedh2l-table2-alpha5", "FedMD", ("85.09", "89.11", "82.95")),
        ("fedh2l-table2-alpha15", "FedH2L", ("89.63", "92.67", "88.61")),
        ("fedh2l-table5", "FedH2L (no KL)", ("86.79", "91.67", "84.50")),
        ("fedh2l-table6", "FedH2L (E = 10)", ("87.25", "93.17", "85.28")),
        ("fedh2l-table7", "FedH2L (asynchronous)", ("88.21", "92.17", "86.89")),
        ("fedgh-table1-cifar10", "FedGH", ("96.33",)),
        ("fedgh-table3-cifar10", "LG-FedAvg", ("96.37", "39.14", "11", "4305.47")),
        ("fedgh-table3-cifar10", "FML", ("-", "-", "-", "-")),
        ("fedl2g-table1-cifar10-pathological", "FedL2G-f", ("89.3±.2",)),
        ("fedl2g-table1-cifar10-dirichlet", "FedProto", ("82.1±1.7",)),
        ("fedfree-table1-cifar10-n10-homogeneous", "pFedLA", ("90.94",)),
        ("fedfree-table1-cifar10-n20-heterogeneous", "FedTGP", ("38.04",)),
    ],
)
def test_figures_are_those_of_the_paper(name: str, row: str, figures: tuple[str, ...]) -> None:
    (found,) = [one for one in paper.find(name).rows if one.label == row]
    assert tuple(printed.text for printed in found.figures.values()) == figures


def test_printed_figures_are_read() -> None:
    assert [Printed(text).value for text in ("89.13", "86.8±.3", "-", "11")] == [89.13, 86.8, None, 11]


def test_the_papers_accuracy_is_the_mean_of_its_parts() -> None:
    """ACC = (BWT + 3 FWT) / 4 in Table 2, within rounding, but where figures of the paper's nodes do not fit."""
    misprinted = {("", "IND"): 0.05, ("-alpha5", "FedH2L"): 0.26, ("-alpha5", "FedMD"): 0.61, ("-alpha15", "AGG"): 0.06}
    for part in ("", "-alpha5", "-alpha15"):
        for row in (one for one in paper.find(f"fedh2l-table2{part}").rows if one.figures):
            acc, bwt, fwt = (printed.value or 0.0 for printed in row.figures.values())
            apart = misprinted.get((part, row.label.removesuffix(" (pre-trained)")), 0.01)
            assert acc == pytest.approx((bwt + 3 * fwt) / 4, abs=apart), row.label


# ---- figures by hand -------------------------------------------------------------------------------------------------


def made_up(seed: int, accuracy: float, view: str = "after") -> Finished:
    over = {"mean": accuracy, "weighted": accuracy + 0.1, "worst": 0.0}
    result = {
        "summary": {view: {"selected": {"test": over}, "last": {"test": {**over, "mean": accuracy - 0.1}}}},
        "clients": {k: {"selected": {"test": accuracy}} for k in "01"},
        "bytes": {"up": 1024 * 30, "down": 1024 * 10, "evaluation": 99},
    }
    run = Run("fedgh", seed, Path("made-up"), result, [])
    return Finished({"method": "fedgh", "rounds": 4}, run, {"0.9": [3, 2048], "0.95": None}, "a machine", "0")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("selected test mean", 50),
        ("last test mean", 40),
        ("before selected test weighted", 60),
        ("head last test mean", 40),
        ("selected acc mean", None),
        ("KB per client and round", 5),
        ("rounds to 0.9", 3),
        ("KB to 0.9", 2),
        ("rounds to 0.95", None),
    ],
)
def test_figures_by_name(name: str, value: float | None) -> None:
    assert measure(name, made_up(0, 0.5)) == (None if value is None else pytest.approx(value))


def test_the_best_client_of_a_run_that_did_not_keep_it() -> None:
    one = made_up(0, 0.5)
    one.run.result["clients"]["1"]["selected"]["test"] = 0.75
    assert measure("selected test best", one) == pytest.approx(75)
    assert measure("last test best", one) is None  # summaries keep no client's last round
    one.run.result["summary"]["after"]["last"]["test"]["best"] = 0.25
    assert measure("last test best", one) == pytest.approx(25)


def test_a_figure_is_of_the_view_that_it_names() -> None:
    one = made_up(0, 0.5, "before")
    one.run.result["summary"]["head"] = {"last": {"test": {"mean": 0.7}}}
    assert measure("head last test mean", one) == pytest.approx(70)
    assert measure("before last test mean", one) == pytest.approx(40)
    assert measure("after last test mean", one) == pytest.approx(40)  # the headline


def test_a_figure_that_nobody_knows() -> None:
    with refused(UnknownNameError, "'best test mean'"):
        measure("best test mean", made_up(0, 0.5))
    assert targets(["rounds to 0.9", "KB to 0.9", "last test mean", "KB to 0.8"]) == ["0.8", "0.9"]


def test_noise_by_hand() -> None:
    """Three seeds with deviation 1: t = 4.303 and sqrt(1 + 1/3) leave 4.968 to one run, sqrt(2/3) 3.513 to three."""
    ours = Spread(90.0, 1.0)
    assert [Pair(ours, 3, Printed(text), 1).beyond_noise for text in ("94.96", "94.98", "85.02")] == [False, True, True]
    assert [Pair(ours, 3, Printed(text), 3).beyond_noise for text in ("93.51", "93.52")] == [False, True]
    assert not Pair(Spread(90.0, None), 1, Printed("10.0"), 1).beyond_noise
    assert [cell.text for cell in Pair(ours, 3, Printed("85.02"), 1).cells] == ["90.00 ± 1.00", "85.02", "+4.98*"]
    assert [cell.text for cell in Pair(ours, 3, Printed("-"), 1).cells] == ["90.00 ± 1.00", "-", "-"]


# ---- a small table, end to end ---------------------------------------------------------------------------------------


def tiny_table(**changes: Any) -> PaperTable:
    settings = {"data": few_digits(), "clients": 4, "models": "mlp-64", "rounds": 2, "lr": 0.1, "batch_size": 10}
    written = {
        "title": "A small table",
        "paper": "nobody",
        "needs": "nothing",
        "seeds": 1,
        "baseline": "Standalone",
        "settings": settings | {"epochs": 1},
        "figures": {"Acc": "selected test mean", "CO": "KB per client and round", "Rounds": "rounds to 0.2"},
        "rows": {
            "Standalone": {"method": "local", "paper": {"Acc": "50.0", "CO": "0", "Rounds": "-"}},
            "FedProto": {"method": "fedproto", "settings": {"lr": 0.05}, "paper": {"Acc": "60.0±.1"}},
        },
    }
    return paper.parse("tiny", {**written, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reproduced")
    reproduce(tiny_table(), out=place, jobs=1, device="cpu", progress=False)
    return place


def test_rows_run_and_stand_beside_the_paper(folder: Path) -> None:
    found = load_table(tiny_table(), folder)
    assert isinstance(found, Beside)
    assert list(found.pairs) == ["Standalone", "FedProto"]
    result = json.loads((folder / f"{runs_of(folder, 'local')[0]}/result.json").read_text())
    accuracy = found.pairs["Standalone"]["Acc"]
    assert accuracy.ours.mean == pytest.approx(100 * result["accuracy"], abs=1e-3)
    assert accuracy.difference == pytest.approx(accuracy.ours.mean - 50)
    assert found.pairs["Standalone"]["CO"].ours.mean == 0
    assert found.heading == "A small table   2 rounds"
    assert [one.label for one in found.differences] == ["FedProto"]
    assert "A small table" not in found.to_markdown()
    assert "| FedProto | 1 |" in found.to_markdown()


def test_what_is_tested_is_named_where_rows_differ_in_it(folder: Path) -> None:
    told = "".join(load_table(tiny_table(), folder, view="own").notes)
    assert "after local training (Standalone), before local training (FedProto), per client and seed" in told


def test_rows_are_tested_in_one_view(tmp_path: Path) -> None:
    """FedAvg's headline is before training; what is tested is after it, and what is kept are both."""
    rows = {name: {"method": name, "paper": {"Acc": "50.0"}} for name in ("local", "fedavg", "fedproto")}
    table = tiny_table(rows=rows, baseline="local", figures={"Acc": "before selected test mean"})
    options: dict[str, Any] = {"jobs": 1, "device": "cpu", "progress": False}
    ran = reproduce(table, out=tmp_path, **options)
    kept = load_table(table, tmp_path)
    run = pluribus.resume(tmp_path / runs_of(tmp_path, "fedavg")[0], progress=False)
    base = pluribus.resume(tmp_path / runs_of(tmp_path, "local")[0], progress=False)
    for found in (ran, kept):
        fedavg, fedproto = found.differences
        assert fedavg.difference is not None
        mean = run.summary["after"]["selected"]["test"]["mean"] - base.accuracy
        assert fedavg.difference.mean == pytest.approx(mean, abs=1e-5)
        assert fedproto.difference is not None
        assert found.pairs["fedavg"]["Acc"].ours.mean == pytest.approx(100 * run.accuracy, abs=1e-3)
        assert any("local (after)" in note for note in found.notes)  # it has no view `before`
    assert [one.verdict for one in load_table(table, tmp_path, view="own").differences] == ["different views"] * 2
    file = tmp_path / "tiny.json"
    told = json.loads(file.read_text())
    for client in (client for group in told["groups"] for one in group["runs"] for client in one["clients"].values()):
        client.pop("views", None)  # as summaries were
    file.write_text(json.dumps(told))
    old = load_table(table, file)
    assert [one.verdict for one in old.differences] == ["not kept", "not kept"]
    assert [one.verdict for one in reproduce(table, out=tmp_path, **options).differences] == [
        one.verdict for one in ran.differences
    ]


def test_a_column_of_ours_alone_has_no_paper_beside_it(folder: Path) -> None:
    table = tiny_table(figures={"Acc": "selected test mean", "last": "last test mean"})
    figures, *_ = load_table(table, folder).tables
    assert figures.columns == ("", "seeds", "Acc", "paper", "difference", "last")
    assert {len(row) for row in figures.rows} == {6}
    assert "| last |" in load_table(table, folder).to_markdown()


def test_a_table_without_figures_of_a_paper_names_no_paper(folder: Path) -> None:
    rows = {row.label: {"method": row.method, "settings": row.settings} for row in tiny_table().rows}
    table = tiny_table(rows=rows)
    found = load_table(table, folder)
    assert isinstance(found, Beside)
    figures, *_ = found.tables
    assert figures.columns == ("", "seeds", "Acc", "CO", "Rounds")
    assert [row[0].text for row in figures.rows] == ["Standalone", "FedProto"]
    assert [one.label for one in found.differences] == ["FedProto"]
    assert found.heading == "A small table   2 rounds"
    assert replace(found, rounds=1).heading == "A small table   1 of 2 rounds"
    assert "paper" not in found.to_markdown()
    assert "Acc is 'selected test mean'" in found.notes[0]


def runs_of(folder: Path, method: str) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith(f"{method}-"))


def test_what_is_finished_is_not_run_again(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    assert len(before) == 2
    reproduce(tiny_table(), out=folder, jobs=1, device="cpu", progress=False)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")} == before


def test_a_row_that_another_table_has_is_shared(folder: Path) -> None:
    rows = {"IND": {"method": "local", "paper": {"Acc": "1.0"}}}
    other = replace(tiny_table(rows=rows, baseline=""), name="other")
    found = reproduce(other, out=folder, jobs=1, device="cpu", progress=False)
    assert len(runs_of(folder, "local")) == 1
    assert [one.run.seed for one in found.runs["IND"]] == [0]
    assert (folder / "other.json").exists()


def test_a_table_that_asks_for_more_looks_into_the_folders_again(folder: Path) -> None:
    rows = {"IND": {"method": "local", "paper": {"Rounds": "1"}}}
    other = replace(tiny_table(rows=rows, baseline="", figures={"Rounds": "rounds to 0.15"}), name="more")
    found = reproduce(other, out=folder, jobs=1, device="cpu", progress=False)
    assert len(runs_of(folder, "local")) == 1
    assert found.pairs["IND"]["Rounds"].ours.mean in (1, 2)
    assert {"0.15", "0.2"} in [set(one.reached) for one in summary.read(folder).values()]


def test_summaries_outlive_the_runs_and_more_seeds_add_to_them(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text((folder / "tiny.json").read_text())
    options: dict[str, Any] = {"only": ["standalone"], "jobs": 1, "device": "cpu", "progress": False}
    found = reproduce(tiny_table(), seeds=2, out=tmp_path / "runs", save=file, **options)
    assert runs_of(tmp_path / "runs", "local")[0].endswith("-1")
    assert len(runs_of(tmp_path / "runs", "local")) == 1
    assert [one.run.seed for one in found.runs["Standalone"]] == [0, 1]
    again = load_table(tiny_table(), file)
    assert {name: len(runs) for name, runs in again.runs.items()} == {"Standalone": 2, "FedProto": 1}
    kept = {one.key: one for one in summary.read(file).values()}
    assert kept.keys() >= {one.key for one in summary.read(folder / "tiny.json").values()}


def test_fewer_rounds_are_another_table_which_says_so(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text((folder / "tiny.json").read_text())
    options: dict[str, Any] = {"only": ["Standalone"], "jobs": 1, "device": "cpu", "progress": False}
    found = reproduce(tiny_table(), rounds=1, out=tmp_path / "runs", save=file, **options)
    assert found.heading == "A small table   1 of the paper's 2 rounds"
    assert load_table(tiny_table(), file).heading == "A small table   2 rounds"  # the longer runs are still there
    assert list(load_table(tiny_table(), file, rounds=1).runs) == ["Standalone"]
    assert "Not measured: FedProto." in found.notes


def test_other_settings_are_other_runs() -> None:
    table = tiny_table()
    one = table.experiment(table.rows[0])
    for changed in ({"lr": 0.2}, {"rounds": 3}, {"precision": "float32"}):
        assert summary.key(replace(one, **changed)) != summary.key(one)
    for changed in ({"threads": 2}, {"device": "cuda"}, {"workers": 2}, {"out": "elsewhere"}):
        assert summary.key(replace(one, **changed)) == summary.key(one)
        assert summary.label(replace(one, **changed)) == summary.label(one)
    assert summary.label(replace(one, seed=1)) == summary.label(one).removesuffix("0") + "1"


def test_a_summary_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    file.write_text("[]")
    with refused(DamagedFileError, file, "pluribus reproduce"):
        summary.read(file)
    assert summary.read(tmp_path) == {}  # results of other kinds may lie beside them
    file.write_text('{"groups": [{"settings": {"method": "local"}, "runs": [{"seed": 0}]}]}')
    with refused(DamagedFileError, file, "'summary'"):
        summary.read(file)
    with refused(FileAccessError, tmp_path / "nowhere"):
        summary.read(tmp_path / "nowhere")


@pytest.mark.parametrize("name", [name for name in paper.names() if paper.find(name).printed])
def test_fedproto_runs_with_the_lambda_of_the_paper(name: str) -> None:
    """10 in Table A2 of FedFree, and by assumption in FedL2G; FedGH names none, and FedProto's authors have 1."""
    table = paper.find(name)
    for row in (row for row in table.rows if row.method == "fedproto"):
        assert table.experiment(row).build_method().pull == (1 if name.startswith("fedgh") else 10)


# ---- what was measured -----------------------------------------------------------------------------------------------


# Rows that no run of ours has the settings of yet; the tables say so.
UNMEASURED = {
    "fedh2l-table2-alpha5": ["FedMD"],
    "fedh2l-table2-alpha15": ["FedMD"],
    "fedfree-table1-cifar10-n10-heterogeneous": ["Local", "FedFree"],
    "fedfree-table1-cifar10-n20-heterogeneous": ["Local", "FedFree"],
}


def least_seeds(name: str, row: str) -> int:
    if name.startswith("fedh2l"):
        return 2 if row == "FedMD" else 5
    return 3 if name.startswith("claim-") else 1


@pytest.mark.parametrize("name", [name for name in paper.names() if (RESULTS / f"{name}.json").exists()])
def test_committed_results_are_of_the_table_as_it_is(name: str) -> None:
    table = paper.find(name)
    found, alone = load_table(table, RESULTS), load_table(table, RESULTS / f"{name}.json")
    assert found.pairs == alone.pairs
    assert list(found.runs) == [row.label for row in table.rows if row.label not in UNMEASURED.get(name, [])]
    assert sum(map(len, found.runs.values())) == len(summary.read(RESULTS / f"{name}.json"))
    for row, runs in found.runs.items():
        assert len(runs) >= least_seeds(name, row)
        for one in runs:
            assert one.device
            assert one.run.result["seconds"] > 0
            clients = (one.run.by_client or {}).values()
            told = one.run.result["summary"][one.run.view]["selected"]["test"]["mean"]
            assert sum(clients) / len(clients) == pytest.approx(told, abs=1e-5)
    for one in found.differences:
        views = {finished.run.result["summary"].keys() >= {"after"} for finished in found.runs[one.label]}
        assert (one.verdict == "different views") == (views == {False})


def test_measured_figures_that_the_documentation_names() -> None:
    fedmd = load_table("fedh2l-table2", RESULTS).runs["FedMD (pre-trained)"]
    last = Spread.of([measure("last acc mean", one) or 0.0 for one in fedmd])
    assert (round(last.mean, 1), round(last.std or 0.0, 1)) == (85.4, 2.4)
    chosen = [client["selected_round"] for one in fedmd for client in one.run.result["clients"].values()]
    assert (sum(t < 1000 for t in chosen), len(chosen)) == (17, 20)


def test_prototypes_of_all_architectures_do_not_fit_some() -> None:
    """FedL2G Table 1 after ten rounds, as the documentation explains FedProto's figure."""
    (proto,) = load_table("fedl2g-table1-cifar10-pathological", RESULTS, rounds=10).runs["FedProto"]
    worst: dict[str, float] = {}
    for client in proto.run.result["clients"].values():
        worst[client["model"]] = min(worst.get(client["model"], 1.0), client["selected"]["test"])
    assert [round(worst[name], 2) for name in ("googlenet", "mobilenet-v2", "resnet18")] == [0.0, 0.0, 0.8]


def test_measured_figures_by_hand() -> None:
    """FedH2L's seeds 0 to 3 at alpha = 10 %."""
    found = load_table("fedh2l-table2", RESULTS, seeds=4)
    values = [measure("selected acc mean", one) for one in found.runs["FedH2L"]]
    assert values[0] == pytest.approx(91.4583, abs=1e-3)
    assert found.pairs["FedH2L"]["ACC"].ours.mean == pytest.approx(sum(map(float, values)) / 4)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_list(terminal: Terminal) -> None:
    told = terminal("reproduce", "--json").json["tables"]
    assert [row["name"] for row in told] == paper.names()
    assert all(row["needs"] for row in told)
    answer = terminal("reproduce")
    assert answer.code == 0
    lines = [line.strip() for line in answer.out.splitlines()]
    assert lines[lines.index("fedh2l-table7") + 1] == paper.find("fedh2l-table7").title  # below long names


def test_summaries_are_shown_without_running(terminal: Terminal, tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    answer = terminal("reproduce", "fedh2l-table7", "--summary", RESULTS, "--markdown", table)
    assert answer.code == 0
    assert "FedH2L (asynchronous)" in answer.out
    assert table.read_text() == load_table("fedh2l-table7", RESULTS).to_markdown()
    told = terminal("reproduce", "fedh2l-table7", "--summary", RESULTS, "--seeds", "2", "--json").json
    assert [row["seeds"] for row in told["rows"]] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("words", "kind", "facts"),
    [
        (["fedh2l-tabel2"], UnknownNameError, ["'fedh2l-tabel2'", "'fedh2l-table2'"]),
        (["fedh2l-table2", "--only", "FedH2L,FedM"], UnknownNameError, ["fedh2l-table2", "'FedM'", "'FedMD'"]),
        (["fedh2l-table2", "--seeds", "0"], RangeError, ["--seeds", 1, 0]),
        (["fedh2l-table2", "--save", "no/such/file.json"], FileAccessError, ["no/such/file.json", "no/such "]),
        (["fedh2l-table2", "--markdown", "no/such/file.md"], FileAccessError, ["no/such/file.md", "no/such "]),
        (["fedh2l-table2", "--summary", "nowhere"], FileAccessError, ["nowhere"]),
        (["fedh2l-table2", "--device", "cpu"], MissingDataError, ["mnist"]),
    ],
)
def test_mistakes_get_a_sentence(
    terminal: Terminal, words: list[str], kind: Kind, facts: list[object], tmp_path: Path
) -> None:
    terminal.refused("reproduce", *words, "--out", tmp_path).check(kind, *facts)
