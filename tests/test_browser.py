"""The page in a real browser: it draws, it can be used, it fits, it is safe, and it asks nobody for anything."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from conftest import new_folder
from pluribus.report import write_report
from pluribus.report.watch import address, server_of
from test_report import EVIL, copy_of, deciding, evil_run, ran

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt install chromium"),
    pytest.mark.xdist_group("browser"),
]

ALWAYS = {"accuracy", "clients", "partition", "traffic", "loss", "embeddings"}
PLOTS = "[...document.querySelectorAll('.js-plotly-plot')]"
DRAWN = (
    f"{PLOTS}.filter(one => one.querySelector('.main-svg .trace, .main-svg .point')).map(one => one.parentElement.id)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def report() -> str:
    """The address of a page about three runs."""
    path = Path(new_folder()) / "report.html"
    write_report([ran().folder, ran("local").folder, deciding().folder], path)
    return path.as_uri()


def trace(section: str, number: int, what: str) -> str:
    return f"document.querySelector('#{section} .plot')._fullData[{number}].{what}"


def test_all_plots_are_there_and_nothing_goes_wrong(browser: Browser, report: str) -> None:
    browser("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    try:
        browser.open(report)
    finally:
        browser(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
    assert set(browser.js(DRAWN)) == ALWAYS | {"layers"}
    assert browser.js("document.getElementById('notes').hidden")
    assert browser.requests == [report]
    assert browser.troubles == []
    assert browser.js("document.querySelectorAll('.plot:not([aria-labelledby])').length") == 0


def test_lines_and_axes_can_be_switched(browser: Browser, report: str) -> None:
    browser.open(report)
    for shown in ("legendonly", True):
        browser.click("#accuracy .legendtoggle")
        browser.until(f"{trace('accuracy', 0, 'visible')} === {json.dumps(shown)}")
    assert browser.js(trace("accuracy", 0, "x")) == [1, 2, 3]
    browser.click("#accuracy .choices label:nth-child(2)")
    browser.until(f"{trace('accuracy', 0, 'x[0]')} > 1000")
    assert browser.js("document.querySelector('#accuracy .xtitle').textContent") == "bytes up and down so far"
    assert browser.troubles == []


def test_dark_mode_changes_the_page_and_its_plots(browser: Browser, report: str) -> None:
    looks = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, "
    looks += f"{trace('accuracy', 0, 'line.color')}, document.querySelector('#accuracy .plot')._fullLayout.font.color]"
    browser.open(report)
    light = browser.js(looks)
    browser.scheme("dark")
    browser.until(f"{trace('accuracy', 0, 'line.color')} !== {json.dumps(light[2])}")
    dark = browser.js(looks)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    background, text = (sum(map(int, look[4:-1].split(","))) for look in dark[:2])
    assert background < 200 < 600 < text


def test_nothing_is_wider_than_a_phone(browser: Browser, report: str) -> None:
    browser.open(report, width=390)
    for width in (390, 320):
        browser.resize(width)
        browser.until(f"innerWidth === {width} && Math.max(...{PLOTS}.map(one => one._fullLayout.width)) < {width}")
        assert browser.js("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('section, h1, h2, p, .plot, .choices')]"
        assert browser.js(f"{wide}.filter(one => one.getBoundingClientRect().right > {width}).map(one => one.id)") == []
        assert browser.js(f"Math.min(...{PLOTS}.map(one => one._fullLayout.width))") > width * 0.7


def test_scripts_in_names_are_only_text(browser: Browser) -> None:
    path = Path(new_folder()) / "report.html"
    write_report([evil_run()], path, embeddings="none")
    browser.open(path.as_uri())
    assert browser.js("window.stolen") is None
    assert browser.js("document.querySelector('h1').textContent") == EVIL
    assert browser.js("document.querySelector('#accuracy .legendtext').textContent") == EVIL
    assert browser.js("document.images.length") == 0
    assert browser.troubles == []
    browser.js("document.body.append(Object.assign(document.createElement('script'), {text: 'window.stolen = 3'}))")
    assert browser.js("window.stolen") is None  # the page's policy knows its own scripts only


def test_a_watched_run_is_drawn_as_it_grows(browser: Browser) -> None:
    folder = copy_of(ran())
    summary = (folder / "result.json").read_text()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "result.json").unlink()
    (folder / "metrics.jsonl").unlink()
    with server_of(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        browser.open(address(server))
        browser.until("document.getElementById('live').textContent === 'live'")
        assert browser.js("document.querySelector('#accuracy .says').textContent") == "No round has been evaluated yet."
        for number in (1, 3):
            (folder / "metrics.jsonl").write_text("".join(lines[:number]))
            browser.until(
                f"(document.querySelector('#accuracy .plot')._fullData || [{{x: []}}])[0].x.length === {number}"
            )
            assert f"{number} of 3" in browser.js("document.getElementById('summary').textContent")
        (folder / "result.json").write_text(summary)
        browser.until("document.getElementById('live').textContent === 'the run has finished'")
        assert {url.rpartition("/")[2] for url in browser.requests} == {"", "data.json"}
        assert browser.troubles == []
        server.shutdown()
        thread.join()
    shutil.rmtree(folder)
