"""Rows of a comparison: settings of one method side by side, under labels, from Python, files and the command line."""

from __future__ import annotations

import csv
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import pluribus
from conftest import few_digits, new_folder, tiny
from pluribus.data import load
from pluribus.errors import (
    ConflictError,
    FormatError,
    MissingSettingError,
    PluribusError,
    UnfinishedError,
    UnknownNameError,
)
from pluribus.method import Method
from pluribus.methods.fedgh import FedGH
from pluribus.study.grid import data_label
from pluribus.study.rows import Row, to_rows
from pluribus.study.standings import Comparison
from refusals import refused
from terminal import Terminal

SMALL = ["--data", few_digits(), "--clients", "3", "--rounds", "1", "--device", "cpu", "--models", "mlp-64"]
SMALL += ["--lr", "0.05", "--seeds", "1", "--jobs", "1"]


def compare_rows(rows: Any, **settings: Any) -> Comparison:
    settings = {"out": new_folder(), "seeds": 1, "models": "mlp-64", "clients": 3, "rounds": 1} | settings
    return pluribus.compare(rows, jobs=1, progress=False, **tiny(**settings))


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare_rows({"per class": FedGH(), "per client": FedGH(server_step="client"), "alone": "local"})


def test_settings_of_one_method_are_rows(found: Comparison) -> None:
    assert list(found.runs) == list(found.experiments) == ["per class", "per client", "alone"]
    assert [one.method for one in found.experiments.values()] == ["fedgh", "fedgh", "local"]
    assert [one.hyper.get("server_step") for one in found.experiments.values()] == ["class", "client", None]
    assert [(row.label, row.method) for row in found.rows] == [
        ("per class", "fedgh"),
        ("per client", "fedgh"),
        ("alone", "local"),
    ]
    assert found.folder is not None
    assert {path.name for path in found.folder.iterdir()} == {"per class-0", "per client-0", "alone-0", "compare.json"}
    plain = compare_rows(["fedgh", "local"])
    assert found.runs["per class"][0].result["summary"] == plain.runs["fedgh"][0].result["summary"]
    assert found.runs["per client"][0].result["summary"] != plain.runs["fedgh"][0].result["summary"]


def test_tables_show_labels_and_say_what_they_are(found: Comparison) -> None:
    assert all(table.columns[0] in ("row", "against per class") for table in found.tables)
    assert [row[0].text for row in found.tables[0].rows] == ["per class", "per client", "alone"]
    assert "per client is fedgh, server_step=client; alone is local." in found.notes[0]
    mixed = compare_rows({"local": "local", "gh": ("fedgh", {"server_lr": 0.2})})
    assert mixed.notes[0] == "Rows: gh is fedgh, server_lr=0.2."
    told = found.to_json()
    assert told["labels"] == ["per class", "per client", "alone"]
    assert told["methods"] == ["fedgh", "fedgh", "local"]
    assert [(one["label"], one["method"]) for one in told["differences"]] == [
        ("per client", "fedgh"),
        ("alone", "local"),
    ]
    assert told["hyper"]["per client"]["server_step"] == "client"
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [(row["label"], row["method"]) for row in rows][1] == ("per client", "fedgh")
    assert "Rows:" not in " ".join(compare_rows(["local"]).notes)


@pytest.mark.parametrize(
    "value",
    [
        FedGH(server_lr=0.1),
        ("fedgh", {"server_lr": 0.1}),
        (FedGH, {"server_lr": 0.1}),
        {"method": "fedgh", "server_lr": 0.1},
        {"method": FedGH, "settings": {"server_lr": 0.1}},
        Row("other", "fedgh", {"server_lr": 0.1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_row_is_written_in_many_ways(value: Any) -> None:
    from pluribus.study.plan import describe_rows

    described = describe_rows(to_rows({"mine": value}), None, {}, {})
    assert described["mine"].build_method() == FedGH(server_lr=0.1)


def test_a_row_may_train_in_its_own_way() -> None:
    found = compare_rows({"slow": ("local", {"lr": 0.01}), "fast": "local"}, own={"fast": {"lr": 0.1}})
    assert [one.lr for one in found.experiments.values()] == [0.01, 0.1]
    assert any("lr: slow 0.01, fast 0.1" in note for note in found.notes)


BAD: list[tuple[Any, type[PluribusError], list[object]]] = [
    ([FedGH(), FedGH(server_lr=0.1)], FormatError, ["fedgh", "label", "--row"]),
    ({"A": "local", "a": "local"}, FormatError, ["a ", "label"]),
    ({"": "local"}, FormatError, ["''", "label"]),
    ({"a/b": "local"}, FormatError, ["'a/b'", "label"]),
    ({"..": "local"}, FormatError, ["'..'", "label"]),
    ({"a" * 101: "local"}, FormatError, ["100"]),
    ({3: "local"}, FormatError, ["3 ", "label"]),
    ({"a": "fedg"}, UnknownNameError, ["'fedg'", "'fedgh'"]),
    ({"a": 3}, FormatError, ["'a'", "3"]),
    ([3], FormatError, ["3"]),
    ({"a": int}, FormatError, ["'a'", "int"]),
    ({"a": {"server_lr": 0.1}}, MissingSettingError, ["'a'", "method"]),
    ({"a": ("fedgh", 0.1)}, FormatError, ["'a'", "0.1"]),
    ({"a": ("fedgh", {"server_l": 0.1})}, UnknownNameError, ["'server_l'", "'server_lr'"]),
    ({"a": ("fedgh", {"clients": 3})}, ConflictError, ["clients"]),
    ({}, MissingSettingError, ["method"]),
]


@pytest.mark.parametrize(("rows", "kind", "facts"), BAD)
def test_bad_rows_are_refused_before_anything_runs(
    rows: Any, kind: type[PluribusError], facts: list[object], tmp_path: Path
) -> None:
    with refused(kind, *facts):
        compare_rows(rows, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_has_rows(terminal: Terminal, tmp_path: Path) -> None:
    rows = ["--row", "class=fedgh", "--row", "client=fedgh:server-step=client,server_lr=0.1,lr=0.02"]
    argv = ["compare", "local", *rows, *SMALL, "--baseline", "class", "--set", "class.server_lr=0.3"]
    told = terminal(*argv, "--out", tmp_path / "a", "--json").json
    assert told["labels"] == ["local", "class", "client"]
    assert told["hyper"]["client"] | {"server_step": "client", "server_lr": 0.1} == told["hyper"]["client"]
    assert told["hyper"]["class"]["server_lr"] == 0.3
    assert told["training"]["client"]["lr"] == 0.02
    assert (told["baseline"], told["runs"]["client"]) == ("class", [str(tmp_path / "a" / "client-0")])
    shown = terminal(*argv, "--out", tmp_path / "a").out
    assert "against class" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if not line.startswith(("Pluribus", " Saved")))
    assert "--row" in terminal("compare", "--help").out
    for bad in ("fedgh", "a=", "a=fedgh:server_lr", "a=fedgh:=3", "a=fedgh:"):
        terminal.refused("compare", "--row", bad, *SMALL).check(FormatError, "--row", f"'{bad}'")


def test_a_file_has_rows(tmp_path: Path, terminal: Terminal) -> None:
    config = tmp_path / "mine.toml"
    text = 'clients = 2\n[hyper.fedgh]\nserver_lr = 0.5\n[rows.class]\nmethod = "fedgh"\n'
    config.write_text(
        f'{text}[rows.client]\nmethod = "fedgh"\nsettings = {{server_step = "client", server_lr = 0.1}}\n'
    )
    small = [word for word in SMALL if word not in ("--clients", "3")]
    told = terminal("compare", "local", *small, "--config", config, "--out", tmp_path / "a", "--json").json
    assert told["labels"] == ["local", "class", "client"]
    assert [told["hyper"][label].get("server_lr") for label in told["labels"]] == [None, 0.5, 0.1]
    assert told["clients"] == 2
    config.write_text("rows = 3\n")
    terminal.refused("compare", *SMALL, "--config", config).check(FormatError, config, "[rows.LABEL]")


# ---- no folder unless asked ------------------------------------------------------------------------------------------


def test_without_out_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = compare_rows(["local", "fedgh"], out=None)
    assert list(tmp_path.iterdir()) == []
    assert found.folder is None
    assert [run.folder for run in found.runs["fedgh"]] == [None]
    kept = compare_rows(["local", "fedgh"], out=new_folder())
    assert found.runs["fedgh"][0].result["summary"] == kept.runs["fedgh"][0].result["summary"]
    assert len(found.runs["fedgh"][0].history) == 1
    assert found.to_json()["folder"] is None
    found.table()


def test_a_failure_without_out_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with refused(UnfinishedError, "bad-0 failed", "--out") as caught:
        compare_rows({"good": "local", "fine": "local", "bad": ("fedgh", {"lr": 1e30})}, out=None)
    assert str(tmp_path) not in str(caught.value)
    assert list(caught.value.partial.runs) == ["good", "fine"]
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Stopped(Method):
    """Somebody presses Ctrl-C."""

    def local_update(self, client: Any) -> Any:
        raise KeyboardInterrupt


def test_an_interrupted_comparison_names_its_folder_if_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt) as caught:
        compare_rows({"a": Stopped}, out=None)
    assert str(caught.value) == ""
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt, match=f"--out {tmp_path / 'a'}"):
        compare_rows({"a": Stopped}, out=tmp_path / "a")


def test_trackers_follow_every_run(tmp_path: Path) -> None:
    compare_rows({"a": "local", "b": "local"}, track="tensorboard", out=tmp_path / "runs")
    assert all(list((tmp_path / "runs" / name / "tensorboard").iterdir()) for name in ("a-0", "b-0"))
    with refused(UnknownNameError, "'tensorbord'", "'tensorboard'"):
        compare_rows(["local"], track="tensorbord")
    with refused(MissingSettingError, "trackers", "--out"):
        compare_rows(["local"], track="tensorboard", out=None)


def test_the_label_of_data_is_part_of_a_folders_name() -> None:
    data = "digits", "a/b/mine.npz", "my.module.load", Path("b/scans"), load(few_digits()), few_digits, object()
    assert [data_label(one) for one in data] == [
        *("digits", "mine", "load", "scans"),
        *("digits-320-10", "few_digits", "data"),
    ]
