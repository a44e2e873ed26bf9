"""Data sets of Hugging Face: from folders, which need no network, and what is said without one."""

from __future__ import annotations

import socket
import sys

import pytest
from PIL import Image

from pluribus.data import load
from pluribus.data.datasets import kind_of_data
from pluribus.data.reading import Reading, parse_columns
from pluribus.errors import DataError, FormatError, MissingDataError, PackageError
from refusals import refused


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(PackageError, "hf:ag_news", "pluribus[hf]"):
        load("hf:ag_news")
    with refused(FormatError, "hf:NAME"):
        load("hf:")


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        datasets.disable_progress_bars()

    def test_texts_with_splits(self, tmp_path):
        folder = tmp_path / "news"
        folder.mkdir()
        (folder / "train.csv").write_text("text,label\nhello you,a\nhello,b\n")
        (folder / "test.csv").write_text("text,label\nyou,b\n")
        found = load(f"hf:{folder}")
        assert (found.kind, found.x.shape, found.part.tolist()) == ("tokens", (3, 2), [0, 0, 2])
        assert (found.classes, found.y.tolist()) == (("a", "b"), [0, 1, 1])
        assert kind_of_data(f"hf:{folder}", (), False) == "tokens"
        (folder / "test.csv").write_text("text,label\n,b\n")
        with refused(DataError, "row 1", "(test)", "'text'"):
            load(f"hf:{folder}")

    def test_a_table(self, tmp_path):
        folder = tmp_path / "table"
        folder.mkdir()
        (folder / "all.csv").write_text("a,b,kind\n1,2.5,x\n3,4.5,y\n")
        found = load(f"hf:{folder}", reading=Reading(parse_columns("label=kind")))
        assert (found.columns, found.x.tolist(), found.part) == (("a", "b"), [[1, 2.5], [3, 4.5]], None)
        assert kind_of_data(f"hf:{folder}", parse_columns("label=kind"), False) == "table"

    def test_images(self, tmp_path):
        folder = tmp_path / "pets"
        for number, (part, name) in enumerate((("train", "cat"), ("train", "dog"), ("test", "cat"))):
            (folder / part / name).mkdir(parents=True)
            Image.new("RGB", (5, 4), (10 * number, 0, 7)).save(folder / part / name / "1.png")
        found = load(f"hf:{folder}")
        assert (found.kind, found.x.shape, found.classes) == ("image", (3, 3, 4, 5), ("cat", "dog"))
        assert found.x[:, :, 1, 1].tolist() == [[0, 0, 7], [10, 0, 7], [20, 0, 7]]
        assert (found.y.tolist(), found.part.tolist()) == ([0, 1, 0], [0, 0, 2])
        assert load(f"hf:{folder}", image_size=8).x.shape == (3, 3, 8, 8)
        assert kind_of_data(f"hf:{folder}", (), False) == "image"
        Image.new("RGB", (9, 9)).save(folder / "test" / "cat" / "1.png")
        mixed = load(f"hf:{folder}")
        assert mixed.x.shape == (3, 3, 64, 64)
        assert any("2 sizes" in note for note in mixed.notes)

    def test_labels_that_are_not_published(self, tmp_path):
        import datasets

        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["n", "p"])})
        parts = {"train": [0, 1], "test": [-1, -1]}
        rows = {
            part: datasets.Dataset.from_dict({"text": ["a", "b"], "label": labels}, features=features)
            for part, labels in parts.items()
        }
        folder = tmp_path / "glue"
        for part, one in rows.items():
            folder.mkdir(exist_ok=True)
            one.to_parquet(folder / f"{part}.parquet")
        found = load(f"hf:{folder}")
        assert (found.classes, found.y.tolist(), found.part) == (("n", "p"), [0, 1], None)
        assert any("test is not read" in note for note in found.notes)

    def test_offline_fails_fast_with_one_sentence(self, monkeypatch):
        def nowhere(*_args, **_kwargs):
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", nowhere)
        with refused(MissingDataError, "hf:nobody/nothing", "HF_HUB_OFFLINE=1"):
            load("hf:nobody/nothing")
        assert kind_of_data("hf:nobody/nothing", (), False) == "image"
        assert kind_of_data("hf:nobody/nothing", parse_columns("text=a"), False) == "tokens"
