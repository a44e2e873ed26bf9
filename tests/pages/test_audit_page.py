"""The page of an audit in a real browser: it shows the images, fits a phone, is safe, and asks nobody for anything."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import pluribus
from browser import Browser, violations
from conftest import few_digits, new_folder, run_tiny
from pluribus.data.datasets import load, write_npz

pytestmark = pytest.mark.xdist_group("browser")

EVIL = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>"


def evil_digits() -> str:
    """Digits whose classes have scripts for names."""
    digits, path = load("digits"), Path(new_folder()) / "evil.npz"
    x, y = digits.x[:320, 0].numpy(), digits.y[:320].numpy()
    names = np.array([f"{EVIL}{label}" for label in range(10)])
    write_npz(path, {"x_train": x, "y_train": y, "x_test": x[:0], "y_test": y[:0], "classes": names})
    return str(path)


@pytest.fixture(scope="module")
def address() -> str:
    """The page about three runs: means and gradients are inverted, posteriors are not."""
    runs = [
        run_tiny("fedgh", data=evil_digits()),
        run_tiny("fedl2g-l", data=few_digits()),
        run_tiny("fedh2l", public_fraction=0.2),
    ]
    return pluribus.audit(*runs, steps=3).save(Path(new_folder()) / "audit.html").as_uri()


def test_numbers_and_images_are_shown_and_nothing_is_loaded(browser: Browser, address: str) -> None:
    page = browser.open(address, offline=True)
    assert browser.requests == [address]
    assert browser.troubles == []
    assert page.evaluate("document.scripts.length") == 0
    images = "[...document.images]"
    assert page.evaluate(f"{images}.length") > 8
    assert page.evaluate(f"{images}.every(one => one.complete && one.naturalWidth === 8 && one.alt)")
    assert page.evaluate("document.querySelectorAll('#membership svg .dot').length") == 5
    fields = page.text_content("#fields") or ""
    assert all(word in fields for word in ("means", "gradient", "posterior", "Not tried"))
    assert page.evaluate("document.querySelectorAll('section:not([aria-labelledby])').length") == 0


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (375, "dark")])
def test_everybody_can_read_it(browser: Browser, address: str, width: int, scheme: Literal["light", "dark"]) -> None:
    assert violations(browser.open(address, width=width, scheme=scheme)) == []


def test_names_of_classes_are_only_text(browser: Browser, address: str) -> None:
    page = browser.open(address)
    assert page.evaluate("window.stolen") is None
    assert EVIL in (page.text_content("#images") or "")


def test_it_fits_a_phone_and_the_dark(browser: Browser, address: str) -> None:
    page = browser.open(address, width=390, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    background, text = page.evaluate("['backgroundColor', 'color'].map(one => getComputedStyle(document.body)[one])")
    assert sum(map(int, background[4:-1].split(","))) < 200 < 600 < sum(map(int, text[4:-1].split(",")))
    page.emulate_media(media="print", color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
