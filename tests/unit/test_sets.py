"""Data sets by name beside images: embedded ones by facts, downloadable ones from originals in miniature."""

from __future__ import annotations

import io
import json
import socket
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine

from pluribus.data import entries, load
from pluribus.data.datasets import cache_file, kind_of_data
from pluribus.data.embedded import decode_texts, read_embedded
from pluribus.data.reading import DEFAULT
from pluribus.data.sets.wearers import HAR, HAR_CHANNELS
from pluribus.data.split import split_by_time
from pluribus.data.tokens import hash_word, split_words
from pluribus.errors import DamagedDataError, MismatchError, MissingDataError
from refusals import refused


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLURIBUS_DATA", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "original"), [("breast-cancer", load_breast_cancer), ("wine", load_wine), ("iris", load_iris)]
)
def test_tables_are_those_of_scikit_learn(name: str, original: Any) -> None:
    found, there = load(name), original()
    assert np.array_equal(found.x, there.data.astype(np.float32))
    assert np.array_equal(found.y, there.target)
    assert found.classes == tuple(there.target_names)
    assert (found.kind, len(found.columns)) == ("table", there.data.shape[1])


def test_diabetes_has_a_number_to_predict_and_a_category() -> None:
    found, there = load("diabetes"), load_diabetes(scaled=False)
    assert (found.target, found.columns[-1], found.categories) == ("numbers", "sex", (("1", "2"),))
    assert np.allclose(found.y[:, 0] * 100, there.target)
    assert np.array_equal(found.x[:, -1] + 1, there.data[:, 1].astype(np.float32))
    assert np.array_equal(found.x[:, 0], there.data[:, 0].astype(np.float32))
    assert "100" in entries()["diabetes"].about


# ---- embedded --------------------------------------------------------------------------------------------------------


def test_speeches_are_hashed_words() -> None:
    found, arrays = load("speeches"), read_embedded("speeches")
    words = split_words(decode_texts(arrays)[0])[: found.x.shape[1]]
    assert found.x[0, : len(words)].tolist() == [hash_word(word, 8192) for word in words]
    assert int((found.x[0] != 0).sum()) == len(words)
    assert (len(found.classes), len(found.clients), len(set(found.group.tolist()))) == (6, 8, 435)
    assert np.array_equal(found.y, arrays["label"])
    short = load("speeches", reading=DEFAULT._replace(vocabulary=50, length=20))
    assert (short.x.shape, short.vocabulary, int(short.x.max())) == ((2610, 20), 50, 49)
    with refused(MismatchError, "speeches", "--columns"):
        load("speeches", reading=DEFAULT._replace(window=3))


def test_watch_has_wearers_recordings_and_times() -> None:
    found, arrays = load("watch"), read_embedded("watch")
    assert np.allclose(found.x[7, 3], arrays["x"][7, 3] * arrays["scale"][3])
    assert (found.x.dtype, found.clients[0], found.span) == (torch.float32, "wearer 1", 2.56)
    first = found.client == 0
    cut = split_by_time(found.time[first].numpy(), {"train": 0.5, "test": 0.5}, found.group[first].numpy(), found.span)
    assert sum(map(len, cut.values())) == int(first.sum()), "windows do not overlap, so none is left out"


def test_kinds_are_known_without_loading() -> None:
    kinds = {"watch": "signal", "uci-har": "signal", "speeches": "tokens", "ag-news": "tokens", "wine": "table"}
    for name, kind in (kinds | {"femnist": "image", "20newsgroups": "tokens"}).items():
        assert kind_of_data(name, (), False) == kind


# ---- UCI-HAR ---------------------------------------------------------------------------------------------------------

SUBJECTS = {"train": [1, 1, 1, 1, 3, 3], "test": [2, 2, 2]}
ACTIVITIES = {"train": [1, 1, 2, 1, 2, 2], "test": [2, 2, 2]}


def har_files() -> dict[str, str]:
    """Rows in the order of the original; the first sample of channel c in row r is 10 c + r."""
    files = {"activity_labels.txt": "1 WALKING\n2 WALKING_UPSTAIRS\n"}
    for part, subjects in SUBJECTS.items():
        files[f"{part}/subject_{part}.txt"] = "".join(f"{one}\n" for one in subjects)
        files[f"{part}/y_{part}.txt"] = "".join(f"{one}\n" for one in ACTIVITIES[part])
        for number, channel in enumerate(HAR_CHANNELS):
            rows = [f"  {10 * number + row:.7e} " + " ".join(["1.0e-002"] * 127) for row in range(len(subjects))]
            files[f"{part}/Inertial Signals/{channel}_{part}.txt"] = "\n".join(rows) + "\n"
    return files


def write_har(file: Path, files: Mapping[str, str]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"UCI HAR Dataset/{name}", text)


def test_the_archive_of_uci_har(cache: Path, tmp_path: Path) -> None:
    write_har(cache / HAR, har_files())
    found = load("uci-har")
    assert (found.name, found.x.shape, found.x.dtype) == ("uci-har", (9, 9, 128), torch.float32)
    assert found.x[:, 4, 0].tolist() == [40, 41, 42, 43, 44, 45, 40, 41, 42]
    assert (found.classes, found.y.tolist()) == (("walking", "walking upstairs"), [0, 0, 1, 0, 1, 1, 1, 1, 1])
    assert (found.clients, found.client.tolist()) == (("1", "2", "3"), [0, 0, 0, 0, 2, 2, 1, 1, 1])
    assert found.group.tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 4]
    assert found.time.tolist() == [0, 1.28, 0, 0, 0, 1.28, 0, 1.28, 2.56]
    assert (found.span, found.official, found.notes) == (2.56, None, ())
    assert cache_file("uci-har").exists()
    (cache / HAR).unlink()
    assert torch.equal(load("uci-har").x, found.x)


def test_windows_that_overlap_are_left_out_of_a_split_by_time(cache: Path) -> None:
    write_har(cache / HAR, har_files())
    found = load("uci-har")
    rows = (found.client == 1).numpy()
    cut = split_by_time(found.time.numpy()[rows], {"train": 0.7, "test": 0.3}, found.group.numpy()[rows], found.span)
    assert {name: part.tolist() for name, part in cut.items()} == {"train": [0], "test": [2]}


def test_an_archive_within_the_archive(cache: Path, tmp_path: Path) -> None:
    write_har(tmp_path / "inner.zip", har_files())
    with zipfile.ZipFile(cache / HAR, "w") as archive:
        archive.write(tmp_path / "inner.zip", HAR)
        archive.writestr("UCI HAR Dataset.names", "about")
    assert load("uci-har").x.shape == (9, 9, 128)


@pytest.mark.parametrize(
    "change",
    [
        {"activity_labels.txt": None},
        {"train/y_train.txt": "1\n2\n"},
        {"train/Inertial Signals/body_acc_x_train.txt": "a b c\n"},
        {"test/subject_test.txt": "2\n2\n", "test/y_test.txt": "2\n2\n"},
        {"test/y_test.txt": "2\n2\n3\n"},
        {"test/y_test.txt": "2\n2\n1.5\n"},
        {"test/subject_test.txt": "2\n2\nnan\n"},
    ],
)
def test_a_damaged_archive_is_named_and_leaves_nothing(cache: Path, change: dict[str, str | None]) -> None:
    write_har(cache / HAR, {name: text for name, text in (har_files() | change).items() if text is not None})
    with refused(DamagedDataError, cache / HAR):
        load("uci-har")
    assert [one.name for one in cache.iterdir()] == [HAR]


# ---- texts -----------------------------------------------------------------------------------------------------------


def write_tar(file: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(file, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_the_archive_of_ag_news(cache: Path) -> None:
    train = b'"3","Wall St. Bears","Short-sellers\\band ""ultra-cynics"""\n"1","War","again"\n'
    write_tar(
        cache / "ag_news_csv.tar.gz",
        {
            "ag_news_csv/train.csv": train,
            "ag_news_csv/test.csv": b'"4","Robots","walk"\n',
            "ag_news_csv/readme.txt": b"",
        },
    )
    found = load("ag-news")
    assert (found.kind, found.vocabulary, found.official) == ("tokens", 8192, 2)
    assert found.y.tolist() == [2, 0, 3]
    words = ["wall", "st", ".", "bears", "short", "-", "sellers", "band", "and"]
    ids = [hash_word(word, 8192) for word in words]
    assert found.x[0, :7].tolist() == ids[:7]
    assert found.x[1].tolist()[:3] == [hash_word("war", 8192), hash_word("again", 8192), 0]


def test_the_archive_of_20_newsgroups(cache: Path) -> None:
    write_tar(
        cache / "20news-bydate.tar.gz",
        {
            "20news-bydate-test/sci.space/9": b"Newsgroups: sci.space\n\nMoon",
            "20news-bydate-train/sci.space/2": b"Subject: Moon\nLines: 1\n\nOrbit \xe9t\xe9",
            "20news-bydate-train/sci.space/3": b"Subject: empty\n\n  \n",
            "20news-bydate-train/alt.atheism/1": b"From: a@b\n\nNo header words",
        },
    )
    found = load("20newsgroups")
    assert (found.classes, found.y.tolist(), found.official) == (("alt.atheism", "sci.space"), [0, 1, 1], 2)
    orbit = [hash_word(word, 8192) for word in ("orbit", "\u00e9t\u00e9")]
    assert found.x[1].tolist() == [*orbit, 0]
    assert ["1 of 4" in note for note in found.notes] == [True]


# ---- FEMNIST ---------------------------------------------------------------------------------------------------------


def leaf(**writers: list[tuple[float, int]]) -> str:
    held = {name: {"x": [[p] * 784 for p, _ in rows], "y": [c for _, c in rows]} for name, rows in writers.items()}
    return json.dumps({"users": [*writers], "num_samples": [len(r) for r in writers.values()], "user_data": held})


def test_the_files_of_leaf(cache: Path) -> None:
    (cache / "femnist" / "data").mkdir(parents=True)
    (cache / "femnist" / "data" / "all_data_1.json").write_text(leaf(f0001_41=[(0.5, 61)]))
    (cache / "femnist" / "data" / "all_data_0.json").write_text(leaf(f0003_12=[(1.0, 0), (0.0, 10)]))
    found = load("femnist")
    assert (found.x.shape, found.x[:, 0, 5, 5].tolist()) == ((3, 1, 28, 28), [255, 0, 128])
    assert (found.clients, found.client.tolist()) == (("f0001_41", "f0003_12"), [1, 1, 0])
    assert [found.classes[y] for y in found.y.tolist()] == ["0", "A", "z"]
    assert found.notes == ()


def test_damaged_files_of_leaf(cache: Path) -> None:
    (cache / "femnist").mkdir()
    with refused(MissingDataError, cache / "femnist", "*.json"):
        load("femnist")
    (cache / "femnist" / "a.json").write_text(leaf(one=[(0.0, 1)])[:-40])
    with refused(DamagedDataError, cache / "femnist" / "a.json"):
        load("femnist")
    (cache / "femnist" / "a.json").write_text(leaf())
    with refused(DamagedDataError, cache / "femnist", "no characters"):
        load("femnist")


@pytest.mark.parametrize("pixel", [255.0, -0.1, float("nan")])
def test_pixels_of_leaf_that_no_byte_can_hold(cache: Path, pixel: float) -> None:
    (cache / "femnist").mkdir()
    (cache / "femnist" / "a.json").write_text(leaf(one=[(0.0, 1)], other=[(pixel, 1)]))
    with refused(DamagedDataError, cache / "femnist" / "a.json", "other"):
        load("femnist")


class Rows(list[dict[str, Any]]):
    """Rows as the package datasets has them: a name gives a column."""

    def __getitem__(self, at: Any) -> Any:
        return [row[at] for row in self] if isinstance(at, str) else super().__getitem__(at)


def test_femnist_of_hugging_face(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(
        {"image": Image.new("L", (28, 28), 9 * at), "character": at, "writer_id": f"w{at % 2}"} for at in range(3)
    )
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(dataset_info=lambda *_, **__: None))
    found = load("femnist")
    assert (found.x[:, 0, 0, 0].tolist(), found.client.tolist()) == ([0, 9, 18], [0, 1, 0])
    assert [one.name for one in cache.iterdir()] == ["femnist.npz"]


# ---- without a network -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "original"),
    [("uci-har", HAR), ("ag-news", "ag_news_csv.tar.gz"), ("20newsgroups", "20news-bydate.tar.gz")],
)
def test_offline_the_sentence_names_both_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, original: str
) -> None:
    def nowhere(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with refused(MissingDataError, name, cache_file(name), original, "Name or service not known"):
        load(name)
    assert list(cache.iterdir()) == []


def test_femnist_names_the_missing_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(MissingDataError, cache / "femnist.npz", "pip install 'pluribus[hf]'", "LEAF"):
        load("femnist")
