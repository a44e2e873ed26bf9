"""`pluribus data check`: every count by hand, on folders with all that can go wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import pluribus
from conftest import few_digits
from pluribus.data.datasets import write_npz
from pluribus.data.folders import ImageLabels
from pluribus.errors import DamagedDataError, MissingDataError, UnknownNameError
from refusals import assert_facts, refused
from terminal import Terminal


def shade(file: Path, value: int, size: tuple[int, int] = (4, 3), deep: bool = False) -> None:
    """A file that differs from all with another value."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full(size[::-1], value, np.uint16 if deep else np.uint8)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Eight images, of which one is in train and test, and one has two labels; and files that are no images."""
    folder = tmp_path / "messy"
    for number, name in enumerate(("train/cat/1.png", "train/cat/2.png", "train/dog/1.png")):
        shade(folder / name, number)
    shade(folder / "train" / "dog" / "2.png", 9000, deep=True)
    shade(folder / "test" / "dog" / "1.png", 5, size=(8, 6))
    (folder / "test" / "cat").mkdir()
    (folder / "test" / "cat" / "copy.png").write_bytes((folder / "train" / "cat" / "1.png").read_bytes())
    (folder / "train" / "dog" / "other.png").write_bytes((folder / "train" / "cat" / "2.png").read_bytes())
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (4, 3), 77).save(folder / "test" / "dog" / "turned.png", exif=exif)
    (folder / "train" / "notes.txt").write_text("no image")
    (folder / "train" / "cat" / "more.txt").write_text("nor this")
    (folder / ".DS_Store").touch()
    return folder


def test_every_count_by_hand(messy: Path) -> None:
    found = pluribus.check_data(messy)
    assert found.images == 8
    assert found.counts == {
        ImageLabels("cat", split="train"): 2,
        ImageLabels("dog", split="train"): 3,
        ImageLabels("cat", split="test"): 1,
        ImageLabels("dog", split="test"): 2,
    }
    assert found.shapes == {"3 x 4": 6, "6 x 8": 1, "4 x 3": 1}
    assert found.modes == {"L, 8 bit": 7, "I;16, 16 bit": 1}
    assert {kind: (one.files, one.example) for kind, one in found.skipped.items()} == {
        "hidden": (1, ".DS_Store"),
        ".txt": (2, "train/cat/more.txt"),
    }
    assert (found.happened["scaled"], found.happened["turned"], found.happened["transparent"]) == (1, 1, 0)
    copies = found.duplicates
    assert (copies.images, copies.across_splits, copies.across_classes) == (2, 1, 1)
    assert copies.example == ("train/cat/1.png", "test/cat/copy.png")
    assert (found.unreadable, found.problem) == ({}, None)


def test_a_run_warns_of_what_the_check_notes(messy: Path) -> None:
    assert pluribus.check_data(messy).notes == pluribus.data.load(str(messy)).notes


def test_all_files_that_cannot_be_read_are_listed(messy: Path, terminal: Terminal) -> None:
    broken = [messy / "train" / "cat" / "1.png", messy / "test" / "dog" / "1.png"]
    for file in broken:
        file.write_bytes(file.read_bytes()[:30])
    found = pluribus.check_data(messy)
    assert (found.images, list(found.unreadable)) == (6, [str(file) for file in broken])
    answer = terminal("data", "check", messy)
    assert answer.code == 2
    assert_facts(answer.err, "2 of 8 images")
    assert "unreadable" in answer.out
    told = terminal("data", "check", messy, "--json")
    assert told.code == 2
    assert list(told.json["unreadable"]) == [str(file) for file in broken]
    assert told.json["error"] == found.problem
    assert f"error: {found.problem}\n" == told.err
    with refused(DamagedDataError, "1 more file"):
        pluribus.data.load(str(messy))


def test_as_text_at_80_columns(messy: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(messy.parent)
    answer = terminal("data", "check", "messy")
    assert (answer.code, answer.err) == (0, "")
    assert max(map(len, answer.out.splitlines())) <= 80
    lines = [line.split() for line in answer.out.splitlines()]
    assert lines[0] == ["messy", "8", "images,", "2", "classes,", "2", "splits"]
    assert ["class", "train", "test", "images"] in lines
    assert ["dog", "3", "2", "5"] in lines
    for fact in ("3 x 4: 6", "I;16, 16 bit: 1", "1 in another split", "2 .txt", "EXIF"):
        assert fact in answer.out


def test_as_json(messy: Path, terminal: Terminal) -> None:
    told = terminal("data", "check", messy, "--json")
    assert (told.code, told.err) == (0, "")
    found = pluribus.check_data(str(messy))
    assert told.json == json.loads(json.dumps(found.to_json()))
    assert told.json["counts"][0] == {"class": "cat", "domain": None, "split": "train", "images": 2}
    assert (told.json["turned"], told.json["error"]) == (1, None)


def test_a_file_and_a_name(tmp_path: Path, terminal: Terminal) -> None:
    found = pluribus.check_data(few_digits())
    assert (found.images, found.shapes, found.modes) == (320, {"8 x 8": 320}, {"1 channel, 8 bit": 320})
    x = np.arange(6 * 4 * 4 * 3).reshape(6, 4, 4, 3).astype(np.uint8)
    x[5] = x[0]
    y = np.array([0, 1, 0, 1, 0, 1])
    parts = {"x_train": x[:4], "y_train": y[:4], "x_test": x[4:], "y_test": y[4:], "classes": np.array(["a", "b"])}
    write_npz(tmp_path / "mine.npz", parts)
    mine = pluribus.check_data(tmp_path / "mine.npz")
    assert mine.counts[ImageLabels("a", split="train")] == 2
    copies = mine.duplicates
    assert (copies.images, copies.across_splits, copies.across_classes) == (1, 1, 1)
    assert copies.example == ("row 0", "row 5")
    assert terminal("data", "check", "rotated-digits").out.split()[:5] == [
        "rotated-digits",
        "4000",
        "images,",
        "10",
        "classes,",
    ]


def test_sets_placed_by_hand_are_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLURIBUS_DATA", str(tmp_path))
    with refused(MissingDataError, "pacs", tmp_path / "pacs"):
        pluribus.check_data("pacs")
    for number, name in enumerate(("art/dog/1.png", "photo/cat/1.png")):
        shade(tmp_path / "pacs" / name, number, deep=True)
    found = pluribus.check_data("pacs")
    assert (found.path, found.shapes, found.happened["scaled"]) == ("pacs", {"3 x 4": 2}, 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert pluribus.check_data("digits").images == 1797, "a registered name wins, as in a run"


def test_spellings_and_single_classes(tmp_path: Path) -> None:
    shade(tmp_path / "e\u0301" / "1.png", 1)
    shade(tmp_path / "\u00e9" / "2.png", 2)
    found = pluribus.check_data(tmp_path)
    assert found.merged == {"\u00e9": ["e\u0301", "\u00e9"]}
    assert found.counts == {ImageLabels("\u00e9"): 2}
    assert any("one class" in note for note in found.notes)


def test_mistakes_get_one_sentence(tmp_path: Path, terminal: Terminal) -> None:
    terminal.refused("data", "check", tmp_path / "nowhere").check(MissingDataError, tmp_path / "nowhere")
    terminal.refused("data", "check", tmp_path).check(MissingDataError, tmp_path, "images")
    terminal.refused("data", "check", "digit").check(UnknownNameError, "'digit'", "'digits'")
    terminal.refused("data", "chek", "digits").check(UnknownNameError, "'data chek'", "'data check'")
    told = terminal("data", "check", tmp_path, "--json")
    assert (told.code, list(told.json)) == (2, ["error", "kind"])
    assert terminal("data", "--help").out.startswith("usage: pluribus data check")
    with refused(UnknownNameError, "'digit'", "'digits'"):
        pluribus.check_data("digit")
