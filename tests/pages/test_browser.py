"""The page in a real browser: it draws, it can be used, it fits, it is safe, and it asks nobody for anything."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from test_report import EVIL, copy_of, copy_unfinished, deciding, evil_run, plot_of, ran, serving
from test_report_groups import compared

from browser import Browser, until, violations
from conftest import new_folder
from pluribus.report import write_report
from pluribus.report.numbers import read_runs
from pluribus.report.watch import address, make_server

pytestmark = pytest.mark.xdist_group("browser")

ALWAYS = {"accuracy", "clients", "distribution", "partition", "traffic", "time", "loss", "embeddings"}
PLOTS = "[...document.querySelectorAll('.js-plotly-plot')]"
DRAWN = (
    f"{PLOTS}.filter(one => one.querySelector('.main-svg .trace, .main-svg .point')).map(one => one.parentElement.id)"
)


@pytest.fixture(scope="module")
def report() -> str:
    """The address of a page about three runs."""
    path = Path(new_folder()) / "report.html"
    write_report([ran().folder, ran("local").folder, deciding().folder], path)
    return path.as_uri()


@pytest.fixture(scope="module")
def comparison() -> str:
    """The address of a page about a comparison over two seeds."""
    path = Path(new_folder()) / "report.html"
    write_report([compared().folder], path, embeddings="none")
    return path.as_uri()


def trace(section: str, number: int, what: str) -> str:
    return f"document.querySelector('#{section} .plot')._fullData[{number}].{what}"


def test_all_plots_are_there_and_nothing_goes_wrong(browser: Browser, report: str) -> None:
    page = browser.open(report, offline=True)
    assert set(page.evaluate(DRAWN)) == ALWAYS | {"layers"}
    assert page.evaluate("document.getElementById('notes').hidden")
    assert browser.requests == [report]
    assert browser.troubles == []
    assert page.evaluate("document.querySelectorAll('.plot:not([aria-labelledby])').length") == 0


def test_every_kind_of_plot_that_pages_need_is_drawn(browser: Browser, report: str) -> None:
    page = browser.open(report)
    for trace, mark in (
        ({"type": "scatter", "y": [1, 3, 2], "mode": "lines+markers", "fill": "tozeroy"}, ".js-fill[d], .js-line[d]"),
        ({"type": "bar", "y": [1, 3, 2]}, ".bars .point path"),
        ({"type": "heatmap", "z": [[1, 2], [3, 4]]}, ".heatmaplayer image"),
    ):
        page.evaluate(f"Plotly.newPlot(document.querySelector('#loss .plot'), {json.dumps([trace])})")
        until(page, f"document.querySelectorAll('#loss .plot {mark}').length > 0")
        assert page.evaluate("document.querySelector('#loss .plot')._fullData[0].type") == trace["type"]
    assert browser.troubles == []


def test_lines_and_axes_can_be_switched(browser: Browser, report: str) -> None:
    page = browser.open(report)
    for shown in ("legendonly", True):
        page.click("#accuracy .legendtoggle")
        until(page, f"{trace('accuracy', 0, 'visible')} === {json.dumps(shown)}")
    assert page.evaluate(trace("accuracy", 0, "x")) == [1, 2, 3]
    page.click("#accuracy .choices label:nth-child(2)")
    until(page, f"{trace('accuracy', 0, 'x[0]')} > 1000")
    assert page.text_content("#accuracy .xtitle") == "bytes up and down so far"
    assert browser.troubles == []


def test_dark_mode_changes_the_page_and_its_plots(browser: Browser, report: str) -> None:
    looks = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, "
    looks += f"{trace('accuracy', 0, 'line.color')}, document.querySelector('#accuracy .plot')._fullLayout.font.color]"
    page = browser.open(report)
    light = page.evaluate(looks)
    page.emulate_media(color_scheme="dark")
    until(page, f"{trace('accuracy', 0, 'line.color')} !== {json.dumps(light[2])}")
    dark = page.evaluate(looks)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    background, text = (sum(map(int, look[4:-1].split(","))) for look in dark[:2])
    assert background < 200 < 600 < text


def test_nothing_is_wider_than_a_phone(browser: Browser, report: str) -> None:
    page = browser.open(report, width=390)
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 900})
        until(page, f"innerWidth === {width} && Math.max(...{PLOTS}.map(one => one._fullLayout.width)) < {width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        parts = "[...document.querySelectorAll('section, h1, h2, p, .plot, .choices')]"
        wide = f"{parts}.filter(one => one.getBoundingClientRect().right > {width}).map(one => one.id)"
        assert page.evaluate(wide) == []
        assert page.evaluate(f"Math.min(...{PLOTS}.map(one => one._fullLayout.width))") > width * 0.7


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (375, "dark")])
def test_everybody_can_read_it(browser: Browser, report: str, width: int, scheme: Literal["light", "dark"]) -> None:
    page = browser.open(report, width=width, scheme=scheme)
    until(page, f"{DRAWN}.length === {len(ALWAYS) + 1}")
    assert violations(page) == []


def test_scripts_in_names_are_only_text(browser: Browser) -> None:
    path = Path(new_folder()) / "report.html"
    write_report([evil_run()], path, embeddings="none")
    page = browser.open(path.as_uri())
    assert page.evaluate("window.stolen") is None
    assert page.text_content("h1") == EVIL
    assert page.text_content("#accuracy .legendtext") == EVIL
    assert page.evaluate("document.images.length") == 0
    assert browser.troubles == []
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.stolen = 3'}))")
    assert page.evaluate("window.stolen") is None  # the page's policy knows its own scripts only


def test_a_watched_run_is_drawn_as_it_grows(browser: Browser) -> None:
    folder = copy_of(ran())
    summary = (folder / "result.json").read_text()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "result.json").unlink()
    (folder / "metrics.jsonl").unlink()
    with make_server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        page = browser.open(address(server))
        until(page, "document.getElementById('live').textContent === 'live'")
        assert page.text_content("#accuracy .says") == "No round has been evaluated yet."
        for number in (1, 3):
            (folder / "metrics.jsonl").write_text("".join(lines[:number]))
            until(
                page, f"(document.querySelector('#accuracy .plot')._fullData || [{{x: []}}])[0].x.length === {number}"
            )
            assert f"{number} of 3" in page.text_content("#summary")
        (folder / "result.json").write_text(summary)
        until(page, "document.getElementById('live').textContent === 'the run has finished'")
        assert {url.rpartition("/")[2] for url in browser.requests} == {"", "data.json"}
        assert browser.troubles == []
        server.shutdown()
        thread.join()
    shutil.rmtree(folder)


def test_the_list_of_runs_grows_and_leads_to_their_pages(browser: Browser, tmp_path: Path) -> None:
    copy_unfinished(tmp_path / "first", 1)
    with serving(tmp_path) as server:
        page = browser.open(address(server), width=390)
        assert "1 of 3" in page.text_content("tbody")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.focus("a[href='/runs/first/']")
        shutil.copytree(ran().folder, tmp_path / "second <b>")
        until(page, "document.querySelectorAll('tbody tr').length === 2")
        assert page.evaluate("document.activeElement.textContent") == "first"  # though the list is new
        drawn = "((document.querySelector('#accuracy .plot') || {})._fullData || [])"  # empty until it is drawn
        page.click("text='second <b>'")
        page.wait_for_url("**/runs/second*/")
        until(page, f"{drawn}.some(one => one.x.length === 3)")
        page.click("text='all runs'")
        page.click("text='All 2 runs in the same plots'")
        page.wait_for_url("**/all/")
        until(page, f"new Set({drawn}.map(one => one.name)).size >= 2")
        assert page.text_content("#live") == "live"
        assert browser.troubles == []


def test_the_view_can_be_switched(browser: Browser, comparison: str) -> None:
    page = browser.open(comparison)
    assert page.text_content("#views label:has(:checked)") == "after local training"
    assert page.evaluate("document.getElementById('about-view').hidden")
    before = page.text_content("#summary"), page.text_content("#comparison .tables")
    page.click("#views label:nth-child(2)")
    until(page, "!document.getElementById('about-view').hidden")
    assert "before local training (class, client)" in page.text_content("#accuracy .says")
    assert "different views" in page.text_content("#comparison .tables")
    assert (page.text_content("#summary"), page.text_content("#comparison .tables")) != before
    page.click("#views label:nth-child(1)")
    until(page, "document.getElementById('about-view').hidden")
    assert (page.text_content("#summary"), page.text_content("#comparison .tables")) == before
    assert browser.troubles == []


def test_a_method_is_one_color_with_a_band_that_hides_with_its_line(browser: Browser, comparison: str) -> None:
    page = browser.open(comparison)
    look = "one => [one.name, one.fill || '', one.line.color || one.fillcolor, one.fillcolor || '']"
    bands, lines = [], []
    for name, fill, color, inside in page.evaluate(f"document.querySelector('#accuracy .plot')._fullData.map({look})"):
        (bands if fill == "toself" else lines).append((name, inside if fill == "toself" else color))
    assert bands == lines
    assert len({color for _, color in lines}) == len(lines) == 3
    page.click("#accuracy .legendtoggle")
    visible = "document.querySelector('#accuracy .plot')._fullData.map(one => one.visible)"
    until(page, f"{visible}.filter(one => one === 'legendonly').length === 2")


def test_the_data_of_a_plot_can_be_saved(browser: Browser, comparison: str) -> None:
    page = browser.open(comparison, offline=True)
    runs = read_runs([compared().folder])

    def saved(section: str) -> tuple[str, list[list[str]]]:
        with page.expect_download() as download:
            page.click(f"#{section} .download")
        text = download.value.path().read_text(encoding="utf-8")
        return download.value.suggested_filename, list(csv.reader(text.splitlines()))

    name, (heading, *rows) = saved("accuracy")
    assert (name, heading) == ("accuracy-rounds-after.csv", ["series", "round", "test accuracy", "low", "high"])
    series = plot_of(runs, "accuracy", "rounds").series
    points = [(one.name, *point) for one in series for point in zip(one.x, one.y, one.low, one.high, strict=True)]
    assert [(row[0], *map(float, row[1:])) for row in rows] == points
    page.click("#confusion .choices label:nth-child(2)")
    name, (heading, *rows) = saved("confusion")
    assert (name, heading) == ("confusion-local.csv", ["true class", "predicted class", "share of rows", "rows"])
    marks = plot_of(runs, "confusion", "local").series[0].marks
    assert [row[3] for row in rows] == [mark for line in marks for mark in line]
    names = page.evaluate("[...document.querySelectorAll('.download:not([hidden])')].map(one => one.ariaLabel)")
    assert names[0] == "Data as CSV: Accuracy, rounds"
    assert len({*names}) == len(names)
    assert browser.troubles == []


def test_a_dark_page_is_printed_on_white(browser: Browser, comparison: str) -> None:
    page = browser.open(comparison, scheme="dark")
    looks = f"[document.querySelector('#accuracy .plot')._fullLayout.font.color, {trace('accuracy', -1, 'line.color')}]"
    looks = looks.replace("_fullData[-1]", "_fullData.at(-1)")
    dark = page.evaluate(looks)
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {looks}; }})")
    assert page.pdf().startswith(b"%PDF")
    printed = page.evaluate("window.printed")
    assert printed[0] == "#000000"
    assert printed[1] != dark[1]
    assert page.evaluate(looks) == dark  # on the screen it is as before
    page.emulate_media(media="print", color_scheme="dark")
    body = "getComputedStyle(document.body)"
    assert page.evaluate(f"[{body}.backgroundColor, {body}.color]") == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    assert not page.is_visible("#accuracy .download")


WITHOUT_A_BROWSER = """
import contextlib, io, json, os, pytest, sys
told = {}
for required in ("", "1"):
    os.environ["PLURIBUS_REQUIRE_BROWSER"] = required
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main(sys.argv[1:])
    told[required] = [code, printed.getvalue()]
print(json.dumps(told))
"""


@cache
def without_a_browser() -> dict[str, tuple[int, str]]:
    """How a page test ends on such a machine, and what is printed: where a browser is required, and elsewhere."""
    test, tests = Path(new_folder()) / "test_page.py", Path(__file__).parents[1]
    test.write_text("def test_page(browser):\n    pass\n")
    words = ["-p", "conftest", "-c", str(tests.parent / "pyproject.toml"), str(test)]
    paths = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_BROWSER, *words],
        env=os.environ | {"PATH": "", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(("required", "code", "fact"), [("", 0, "Page tests skipped: 1,"), ("1", 1, "1 error")])
def test_a_machine_without_a_browser_is_told(required: str, code: int, fact: str) -> None:
    ended, printed = without_a_browser()[required]
    assert ended == code
    assert fact in printed
    assert "apt-get install chromium" in printed
