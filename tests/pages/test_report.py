"""Reports: the numbers of a run folder are those of its result, and nothing in a folder can break or abuse the page."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pluribus
from conftest import few_digits, new_folder, run_tiny
from pluribus.errors import (
    DamagedFileError,
    DeviceError,
    FileAccessError,
    MissingSettingError,
    PackageError,
    RangeError,
)
from pluribus.report import write_report
from pluribus.report.embeddings import embed
from pluribus.report.figures import draw, write_figures
from pluribus.report.numbers import Parameters, Run, read_runs
from pluribus.report.page import page
from pluribus.report.plots import Plot, Section, sections
from pluribus.report.watch import Watching, make_server
from pluribus.result import Result
from pluribus.storage.folder import RunFolder
from processes import start
from refusals import assert_facts, refused
from terminal import Terminal

pytestmark = pytest.mark.xdist_group("report")  # the runs that tests look at are made once

EVIL = "<b>x</b></script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"


@cache
def ran(method: str = "fedgh", **settings: object) -> Result:
    """A run that tests may look at, but not change."""
    return run_tiny(method, rounds=3, **settings)


@cache
def deciding() -> Result:
    return run_tiny("fedfree", image_size=16)


@cache
def prompted() -> Result:
    return run_tiny("fedhpl", models="tiny", image_size=16, clients=3)


def copy_of(result: Result) -> Path:
    """A run folder that a test may spoil."""
    folder = Path(new_folder()) / "copy"
    shutil.copytree(result.folder, folder)
    return folder


def evil_run() -> Path:
    """A run in whose files every name is a script."""
    folder = copy_of(ran())
    config = (folder / "config.toml").read_text().replace('method = "fedgh"', f'method = "{EVIL}"')
    (folder / "config.toml").write_text(config)
    for name in ("metrics.jsonl", "traffic.jsonl"):
        lines = (folder / name).read_text().replace('"means"', json.dumps(EVIL)).replace('"after"', json.dumps(EVIL))
        (folder / name).write_text(lines.replace('"notes": {}', f'"notes": {{{json.dumps(EVIL)}: 1.0}}'))
    summary = json.loads((folder / "result.json").read_text()) | {"warnings": [EVIL]}
    (folder / "result.json").write_text(json.dumps(summary))
    return folder


def section_of(runs: list[Run], key: str) -> Section:
    return next(one for one in sections(runs) if one.key == key)


def plot_of(runs: list[Run], key: str, name: str) -> Plot:
    return next(plot for plot in section_of(runs, key).plots if plot.name == name)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_folder_are_those_of_its_result() -> None:
    result = ran()
    (run,) = read_runs([result.folder])
    assert run.chosen == result.per_client()
    assert run.score["mean"] == result.accuracy
    for over in ("worst", "best"):
        assert run.score[over] == result.summary["after"]["selected"]["test"][over]
    assert [record["mean"] for record in run.history] == [record["mean"] for record in result.history]
    assert run.cumulate(lambda one: one["seconds"])[-1] == pytest.approx(result.seconds)
    for way in ("up", "down"):
        sums = {tensor: sum(rounds.values()) for (one, tensor), rounds in run.traffic.items() if one == way}
        assert sums == result.ledger.by("tensor", way)
        per_round: Counter[int] = sum((c for (one, _), c in run.traffic.items() if one == way), Counter())
        assert dict(per_round) == result.ledger.by("round", way)
    assert (run.name, run.state, run.view, run.problems) == ("fedgh", "finished", "after", ())
    assert run.classes == tuple("0123456789")
    assert run.models == tuple(facts.model for facts in result.clients.values())
    assert run.counts == json.loads((result.folder / "partition.json").read_text())["counts"]


def test_accuracy_is_drawn_against_rounds_bytes_and_seconds() -> None:
    result = ran()
    runs = read_runs([result.folder])
    means = [record["mean"]["after"]["test"]["mean"] for record in result.history]
    sent = np.cumsum([record["bytes"]["up"] + record["bytes"]["down"] for record in result.history])
    for name, xs in (("rounds", [1, 2, 3]), ("bytes", sent.tolist())):
        mean, worst = plot_of(runs, "accuracy", name).series
        assert (list(mean.x), list(mean.y)) == (xs, means)
        assert list(worst.y) == [record["mean"]["after"]["test"]["worst"] for record in result.history]
    seconds = plot_of(runs, "accuracy", "seconds").series[0].x
    assert seconds[-1] == pytest.approx(result.seconds)


def test_every_client_is_named_and_the_worst_is_first() -> None:
    result = ran()
    section = section_of(read_runs([result.folder]), "clients")
    (plot,) = section.plots
    (series,) = plot.series
    by_accuracy = sorted(result.per_client().items(), key=lambda pair: pair[1].selected["test"] or 0)
    worst = by_accuracy[0][0]
    assert list(series.x) == [chosen.selected["test"] for _, chosen in by_accuracy]
    assert list(series.y) == [0, 1, 2, 3]
    assert sorted(plot.y_names) == sorted(f"{k} {facts.model}" for k, facts in result.clients.items())
    assert plot.y_names[0] == f"{worst} {result.clients[worst].model}"
    assert f"client {plot.y_names[0]} with {series.x[0]:.3f}" in section.says


def test_runs_on_the_same_data_share_a_picture_and_others_do_not() -> None:
    runs = read_runs([ran().folder, ran("local").folder, ran("local", seed=1).folder])
    assert [run.name for run in runs] == ["fedgh, seed 0", "local, seed 0", "local, seed 1"]
    for key in ("clients", "partition"):
        assert [plot.name for plot in section_of(runs, key).plots] == ["seed 0", "seed 1"]
    assert [one.name for one in plot_of(runs, "clients", "seed 0").series] == ["fedgh", "local"]
    alone = read_runs([ran().folder, ran("local", seed=1).folder])
    assert [plot.name for plot in section_of(alone, "clients").plots] == ["fedgh", "local"]


def test_circles_and_bars_hold_every_row_and_every_byte() -> None:
    result = ran()
    runs = read_runs([result.folder])
    (bubbles,) = section_of(runs, "partition").plots[0].series
    counts = np.zeros((4, 10))
    counts[list(bubbles.x), list(bubbles.y)] = bubbles.sizes
    assert counts.tolist() == runs[0].counts
    for way, bars in zip(("up", "down"), plot_of(runs, "traffic", "in all").series, strict=True):
        assert (bars.name, sum(bars.x)) == (way, result.bytes[way])
    stacked = plot_of(runs, "traffic", "fedgh, per round").series
    assert sum(sum(one.y) for one in stacked) == result.bytes["up"] + result.bytes["down"]


def test_tensors_beyond_the_largest_go_together() -> None:
    result = run_tiny("fedavg", models="cnn-16-32", rounds=1)
    plot = plot_of(read_runs([result.folder]), "traffic", "fedavg, per round")
    assert [one.name for one in plot.series].count("up: others") == 1
    assert sum(sum(one.y) for one in plot.series if one.name.startswith("up")) == result.bytes["up"]


def test_losses_are_those_on_record() -> None:
    result = ran()
    runs = read_runs([result.folder])
    assert list(plot_of(runs, "loss", "training loss").series[0].y) == [one["loss"] for one in result.history]
    tests = [one["mean"]["after"]["test_loss"]["mean"] for one in result.history]
    assert list(plot_of(runs, "loss", "test loss").series[0].y) == tests


def test_decisions_about_layers_are_those_on_record() -> None:
    result = deciding()
    (plot,) = section_of(read_runs([result.folder]), "layers").plots
    shown = {(x, y): one.name for one in plot.series for x, y in zip(one.x, one.y, strict=True)}
    said = {
        (record["round"] + 1, int(k)): one if one == "none" else one["layer"]
        for record in result.history
        for k, one in record["notes"]["layers"].items()
    }
    assert shown == said
    assert section_of(read_runs([ran().folder]), "layers").plots == []


def test_numbers_that_a_server_notes_are_drawn() -> None:
    result = ran("fedl2g-f")
    plot = plot_of(read_runs([result.folder]), "notes", "guides_moved")
    assert list(plot.series[0].y) == [one["notes"]["guides_moved"] for one in result.history]


def test_parameters_are_counted_and_frozen_ones_told_apart() -> None:
    (run,) = read_runs([ran().folder])
    for k, row in enumerate(run.parameters):  # four clients, four architectures
        size = sum(p.numel() for p in pluribus.load_model(run.path, k).parameters())
        assert row == Parameters(run.models[k], 1, size, size)
    (run,) = read_runs([prompted().folder])
    for k, row in enumerate(run.parameters):
        model = pluribus.load_model(run.path, k)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert row == Parameters(run.models[k], 1, sum(p.numel() for p in model.parameters()), trained)
        assert row.trainable < row.total / 10


# ---- features --------------------------------------------------------------------------------------------------------


def test_features_are_those_of_the_model_on_the_clients_test_images() -> None:
    run = read_runs([ran().folder])[0]
    pictures, reason = embed([run], "pca")
    assert reason == ""
    assert [one.name for one in pictures] == ["fedgh, together", *(f"fedgh, client {run.client(k)}" for k in range(4))]
    from pluribus.storage.reopen import open_run

    with open_run(run.path) as (parts, _):
        test = parts.data.sets(2)["test"]
        x, y = test.take(torch.arange(len(test)))
    with torch.no_grad():
        features = pluribus.load_model(run.path, 2).features(x).numpy()
    from sklearn.decomposition import PCA  # here, because every process of the tests imports this file

    by_hand = PCA(2).fit_transform(features)
    points = np.array(pictures[3].points)
    assert pictures[3].labels == y.tolist()
    assert np.allclose(np.abs(points), np.abs(by_hand), atol=1e-3)


def test_features_by_tsne_and_of_several_widths() -> None:
    run = read_runs([prompted().folder])[0]
    pictures, _ = embed([run], "tsne")
    assert [one.name for one in pictures] == [f"fedhpl, client {run.client(k)}" for k in range(3)]
    assert np.isfinite(np.array(pictures[0].points)).all()


def test_the_page_says_why_there_are_no_features() -> None:
    folder = copy_of(ran())
    run = read_runs([folder])[0]
    shown, why = embed([run], "none")
    assert shown == []
    assert_facts(why, "--embeddings", "pca", "tsne")
    held = RunFolder.open(folder)
    assert embed([run], "pca")[0]  # to read it takes no lock
    held.close()
    shutil.rmtree(folder / "state")
    pictures, reason = embed([run], "pca")
    assert pictures == []
    assert "holds no trained model" in reason


# ---- any folder ------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_and_one_that_was_stopped() -> None:
    folder = copy_of(ran())
    (folder / "result.json").unlink()
    held = RunFolder.open(folder)
    assert read_runs([folder])[0].state == "running"
    held.close()
    run = read_runs([folder])[0]
    assert run.state == "stopped"
    assert run.commands[0] == f"pluribus resume {folder}"
    for name in ("metrics.jsonl", "traffic.jsonl"):
        (folder / name).unlink()  # before its first round
    runs = read_runs([folder])
    assert runs[0].problems == ()
    assert "No round has been evaluated yet." in page(runs, sections(runs))


def test_the_commands_repeat_the_run() -> None:
    run = read_runs([ran("local", lr=0.125).folder])[0]
    again, flags = run.commands
    assert again == f"pluribus run --config {run.path}/config.toml"
    assert flags.startswith("pluribus run local ")
    assert "--lr 0.125" in flags
    assert f"--data {few_digits()}" in flags


@pytest.mark.parametrize("name", ["metrics.jsonl", "traffic.jsonl", "partition.json", "result.json"])
@pytest.mark.parametrize("text", ["[]\n", "3\n", "{}\n", '{"round": "x"}\n', '{"counts": 3}\n', "\0\xff{\n", "null\n"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(name: str, text: str) -> None:
    folder = copy_of(ran())
    (folder / name).write_bytes(text.encode("latin-1"))
    runs = read_runs([folder])
    assert any(str(folder / name) in sentence for sentence in runs[0].problems), runs[0].problems
    assert str(folder / name) in page(runs, sections(runs))


def test_what_stands_before_a_damaged_line_is_shown() -> None:
    folder = copy_of(ran())
    first, second, third = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(f"{first}\n{second[:40]}\n{third}\n")
    (run,) = read_runs([folder])
    assert [record["round"] for record in run.history] == [0]
    (problem,) = run.problems
    assert_facts(problem, folder / "metrics.jsonl", "line 2")
    (folder / "metrics.jsonl").write_text(f"{first}\n{second[:40]}")  # being written just now
    assert read_runs([folder])[0].problems == ()


def test_a_run_without_its_data_is_shown_with_what_there_is() -> None:
    folder = copy_of(ran())
    config = folder / "config.toml"
    config.write_text(config.read_text().replace(few_digits(), "/nowhere.npz"))
    runs = read_runs([folder])
    assert "/nowhere.npz" in runs[0].problems[0]
    (partition,) = section_of(runs, "partition").plots
    assert partition.y_names == list("0123456789")
    assert "unknown: the experiment cannot be assembled on this machine" in page(runs, sections(runs))


def test_folders_are_looked_into_and_named_by_what_differs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(ran().folder, tmp_path / "deep" / name)
    assert [run.name for run in read_runs([tmp_path])] == ["one", "two"]
    with refused(FileAccessError, tmp_path / "three"):
        read_runs([tmp_path / "three"])
    (tmp_path / "three").mkdir()
    with refused(FileAccessError, tmp_path / "three", "config.toml"):
        read_runs([tmp_path / "three"])


# ---- the page and the files ------------------------------------------------------------------------------------------


def test_nothing_from_a_folder_becomes_markup() -> None:
    runs = read_runs([evil_run()])
    text = page(runs, sections(runs))
    assert len(re.findall("<script", text)) == text.count("<script") == 3 + _in_plotly("<script")
    assert "<img" not in text.replace(_plotly(), "")
    assert "&lt;script&gt;window.stolen" in text


def _plotly() -> str:
    from pluribus.report.page import _plotly

    return _plotly()


def _in_plotly(word: str) -> int:
    return _plotly().count(word)


def test_the_page_holds_all_it_needs() -> None:
    runs = read_runs([ran().folder])
    text = page(runs, sections(runs)).replace(_plotly(), "")
    assert not re.search(r'(src|href)=(?!"data:)', text)
    assert "default-src 'none'" in html.unescape(text)
    assert text.count("Plotly.react") == 1


def test_the_page_has_only_the_part_of_plotly_that_draws_it() -> None:
    script = Path(__file__).parents[2] / "scripts" / "make_plotly.py"
    version = script.read_text().partition('PLOTLY, ESBUILD = "')[2].partition('"')[0]
    licenses = (Path(pluribus.__file__).parent / "report" / "plotly.LICENSES.txt").read_text()
    assert f"plotly.js {version} with bar and heatmap" in _plotly()[:200]
    assert f"plotly.js {version} (MIT)" in licenses
    assert "@plotly/d3 3.8.2 (BSD-3-Clause)" in licenses
    assert "</script" not in _plotly()
    assert len(_plotly()) < 1_500_000


def test_figures_are_written_for_papers(tmp_path: Path) -> None:
    result = ran()
    shown = sections(read_runs([result.folder]))
    files = write_figures([one for one in shown if one.key in ("clients", "traffic")], tmp_path / "figures")
    stems = ["clients-fedgh", "traffic-in-all", "traffic-fedgh-per-round"]
    assert [path.name for path in files] == [f"{stem}.{kind}" for stem in stems for kind in ("png", "pdf")]
    assert sorted(files) == sorted((tmp_path / "figures").iterdir())
    for png, pdf in zip(files[::2], files[1::2], strict=True):
        with Image.open(png) as image:
            assert image.width > 500
        assert pdf.read_bytes().startswith(b"%PDF")


def test_figures_show_the_same_numbers() -> None:
    result = ran()
    runs = read_runs([result.folder])
    (axes,) = draw(plot_of(runs, "accuracy", "rounds")).axes
    means = [record["mean"]["after"]["test"]["mean"] for record in result.history]
    assert axes.lines[0].get_xydata().tolist() == [[t + 1, mean] for t, mean in enumerate(means)]
    (axes,) = draw(plot_of(runs, "traffic", "in all")).axes
    assert sum(bar.get_width() for bar in axes.patches) == result.bytes["up"] + result.bytes["down"]
    (axes,) = draw(plot_of(runs, "traffic", "fedgh, per round")).axes
    tops = Counter[int]()
    for bar in axes.patches:
        tops[round(bar.get_x() + bar.get_width() / 2)] = int(bar.get_y() + bar.get_height())
    per_round = [record["bytes"]["up"] + record["bytes"]["down"] for record in result.history]
    assert tops == {t + 1: size for t, size in enumerate(per_round)}


def test_names_of_figures_stay_in_their_folder(tmp_path: Path) -> None:
    for number in (1, 2):
        shutil.copytree(evil_run(), tmp_path / f"..$x^{number}")
    traffic = section_of(read_runs([tmp_path]), "traffic")
    files = write_figures([replace(traffic, plots=traffic.plots[1:])], tmp_path / "figures")
    assert [path.name for path in files] == [
        f"traffic-x-{n}-per-round.{kind}" for n in (1, 2) for kind in ("png", "pdf")
    ]
    assert {path.parent for path in files} == {tmp_path / "figures"}


# ---- commands --------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page(terminal: Terminal, tmp_path: Path) -> None:
    answer = terminal("report", ran().folder, "--out", tmp_path / "page.html", "--embeddings", "none")
    assert (answer.code, answer.out) == (0, f"wrote {tmp_path / 'page.html'}\n")
    assert pluribus.write_report is write_report


def test_mistakes_get_a_sentence(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.refused("report").check(MissingSettingError, "run")
    terminal.refused("report", tmp_path / "a").check(FileAccessError, tmp_path / "a")
    terminal.refused("watch", tmp_path / "a").check(FileAccessError, tmp_path / "a")
    page = tmp_path / "no" / "page.html"
    terminal.refused("report", ran().folder, "--out", page).check(FileAccessError, page)
    (tmp_path / "file").touch()
    flags = ("--embeddings", "none", "--out", tmp_path / "page.html", "--figures", tmp_path / "file")
    terminal.refused("report", ran().folder, *flags).check(FileAccessError, tmp_path / "file", "File exists")
    terminal.refused("watch", ran().folder, "--port", 70000).check(RangeError, "--port", "0..65535", 70000)
    folder = copy_of(ran())
    (folder / "config.toml").write_text("no = [toml")
    terminal.refused("report", folder).check(DamagedFileError, folder / "config.toml", "TOML")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for command in ("report", "watch"):
        terminal.refused(command, ran().folder).check(PackageError, "jinja2", "pip install 'pluribus[report]'")


# ---- watch -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Watching]:
    with make_server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def served() -> Iterator[tuple[Watching, Path]]:
    folder = copy_of(ran())
    with serving(folder) as server:
        yield server, folder


def asked(server: Watching, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_only_this_machine_by_its_own_name_is_served(served: tuple[Watching, Path]) -> None:
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    port = server.server_port
    assert asked(server, "/")[0] == 200
    for host in (f"localhost:{port}", "localhost:9999", "LOCALHOST", "127.0.0.1:80", "[::1]:9999"):
        assert asked(server, "/data.json", host)[0] == 200
    wrong = ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port}.evil.example", "localhost.evil.example", "::1")
    for host in (*wrong, "evil-localhost:9999", "localhost:9999:1", "localhost:", "user@localhost", "127.0.0.2"):
        assert asked(server, "/data.json", host)[0] == 403
    for path in ("/config.toml", "/../config.toml", "/data.json?x"):
        assert asked(server, path)[0] == 404
    assert asked(server, "/", method="POST")[0] == 501


def test_data_follows_the_folder(served: tuple[Watching, Path]) -> None:
    server, folder = served
    assert json.loads(asked(server, "/data.json")[1])["finished"]
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "result.json").unlink()
    (folder / "metrics.jsonl").write_text(lines[0])
    told = json.loads(asked(server, "/data.json")[1])
    assert not told["finished"]
    assert told["sections"][0]["views"]["after"]["plots"][0]["data"][0]["x"] == [1]
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    assert json.loads(asked(server, "/data.json")[1])["sections"][0]["views"]["after"]["plots"][0]["data"][0]["x"] == [
        1,
        2,
    ]
    shutil.rmtree(folder)
    status, sentence = asked(server, "/data.json")
    assert status == 503
    assert_facts(sentence, "no folder", folder)


def copy_unfinished(folder: Path, rounds: int) -> None:
    """A copy of the run as it was after some rounds, each of 3 seconds."""
    shutil.copytree(ran().folder, folder)
    (folder / "result.json").unlink()
    lines = [json.loads(line) | {"seconds": 3.0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:rounds]))


def cells(server: Watching) -> dict[str, list[str]]:
    """The cells of the list by the name of the run."""
    rows = re.findall("<tr>(.*?)</tr>", json.loads(asked(server, "/list.json")[1])["list"], re.DOTALL)
    texts = [[html.unescape(re.sub("<.*?>", "", cell)).strip() for cell in row.split("<td")] for row in rows[1:]]
    return {row[1].partition(">")[2]: [cell.rpartition(">")[2] for cell in row[2:]] for row in texts}


def test_a_folder_of_runs_is_listed_as_they_go_on(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert "no run in this folder yet" in asked(server, "/")[1]
        shutil.copytree(ran().folder, tmp_path / "deep" / "done & <b>")
        done = cells(server)["deep/done & <b>"]
        assert done == ["fedgh", "0", "finished", "3 of 3", "accuracy", f"{ran().accuracy:.3f}", "–"]
        copy_unfinished(tmp_path / "new", 1)
        assert cells(server)["new"][2:4] == ["stopped", "1 of 3"]
        with contextlib.closing(RunFolder.open(tmp_path / "new")):  # holds the lock, as a run does
            assert list(cells(server)) == ["new", "deep/done & <b>"]  # running ones first
            assert cells(server)["new"][2:] == ["running", "1 of 3", *cells(server)["new"][4:6], "0:00:06"]
            summary = json.loads(asked(server, "/runs/new/data.json")[1])["views"][0]["summary"]
            assert "running, 0:00:06 left" in summary
        (tmp_path / "new" / "config.toml").write_text("no = [toml")
        assert "new" in cells(server)
        assert "TOML" in json.loads(asked(server, "/list.json")[1])["list"]


def test_every_listed_run_has_a_page_and_all_have_one(tmp_path: Path) -> None:
    for name in ("a b", "deep/c"):
        shutil.copytree(ran().folder, tmp_path / name)
    (tmp_path / "secret").write_text("secret")
    with serving(tmp_path) as server:
        for link in re.findall('href="(/.*?)"', asked(server, "/")[1]):
            status, text = asked(server, link)
            assert status == 200
            assert 'href="/">all runs' in text
        assert "/runs/a%20b/" in asked(server, "/")[1]
        sections = {one["key"]: one["views"] for one in json.loads(asked(server, "/all/data.json")[1])["sections"]}
        names = {one["name"] for one in sections["accuracy"]["after"]["plots"][0]["data"]}
        assert {"a b", "c"} <= names
        assert not json.loads(asked(server, "/all/data.json")[1])["finished"]  # another run may start
        assert json.loads(asked(server, "/runs/deep/c/data.json")[1])["finished"]
        wrong = (
            "/runs/",
            "/runs/deep/",
            "/runs/../secret",
            "/runs/%2e%2e/",
            "/a%20b/",
            "/all",
            "/data.json",
            "/runs/x/",
        )
        for path in (*wrong, "/runs/deep/c/config.toml", "/runs/deep%2fc", "/list.json?x"):
            assert asked(server, path)[0] == 404, path
        assert asked(server, "/list.json", "evil.example")[0] == 403


def test_a_port_that_is_taken_is_refused(served: tuple[Watching, Path]) -> None:
    server, folder = served
    with refused(DeviceError, f"127.0.0.1:{server.server_port}", "in use", "--port"):
        make_server(folder, server.server_port)


def test_the_command_serves_until_it_is_stopped() -> None:
    process, found = start("watch", ran().folder), None
    while found is None:
        assert process.poll() is None, process.err
        time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):  # it has only just begun
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.out)
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
    connection.request("GET", "/")
    assert b"</html>" in connection.getresponse().read()
    os.kill(process.pid, signal.SIGINT)
    assert (process.wait(), process.err) == (0, "")
