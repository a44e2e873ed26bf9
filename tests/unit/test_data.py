"""Data sets: what is loaded, from where, and how damage is told."""

from __future__ import annotations

import os
import socket
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import assemble_tiny
from pluribus.assembly import assemble
from pluribus.data import Dataset, datasets, entries, load, register_data
from pluribus.data.datasets import cache_file, read_npz, write_npz
from pluribus.data.domains import rotate_images
from pluribus.errors import DamagedDataError, DataError, MissingDataError, RangeError, UnknownNameError, UserCodeError
from pluribus.experiment import experiment
from refusals import refused


def small(**changes) -> Dataset:
    given = {
        "name": "small",
        "x": torch.zeros(4, 1, 2, 2, dtype=torch.uint8),
        "y": torch.tensor([0, 1, 0, 1]),
        "classes": ("a", "b"),
    }
    return Dataset(**{**given, **changes})


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLURIBUS_DATA", str(folder))
    return folder


@pytest.fixture
def offline(monkeypatch) -> None:
    def nowhere(*_args, **_kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)


class TestDataset:
    def test_a_sound_one_is_accepted(self):
        whole = small(
            official=3, domain=torch.tensor([0, 0, 1, 1]), domains=("p", "q"), identity=torch.tensor([7, 8, 7, 8])
        )
        assert whole.official == 3

    @pytest.mark.parametrize(
        ("changes", "facts"),
        [
            ({"x": torch.zeros(4, 1, 2, 2).double()}, ("x ", "uint8", "float64 (4, 1, 2, 2)")),
            ({"x": torch.tensor([0.0, 0, torch.nan, 0]).view(4, 1, 1, 1)}, ("x ", "NaN", "row 2")),
            ({"x": torch.zeros(4, 2, 2, dtype=torch.uint8)}, ("x ", "uint8 (4, 2, 2)")),
            (
                {"x": torch.zeros(0, 1, 2, 2, dtype=torch.uint8), "y": torch.zeros(0, dtype=torch.int64)},
                ("no images", "uint8 (0, 1, 2, 2)"),
            ),
            ({"x": np.zeros((4, 1, 2, 2), np.uint8)}, ("x ", "uint8", "ndarray")),
            ({"y": [0, 1, 0, 1]}, ("y ", "int64 (4,)", "list")),
            ({"y": torch.tensor([0, 1, 0])}, ("y ", "int64 (4,)", "int64 (3,)")),
            ({"y": torch.tensor([0, 1, 0, 1], dtype=torch.int32)}, ("y ", "int64 (4,)", "int32 (4,)")),
            ({"y": torch.tensor([0, 1, 0, 2])}, ("y ", "0..1", "0 to 2")),
            ({"y": torch.tensor([-1, 1, 0, 1])}, ("y ", "0..1", "-1 to 1")),
            ({"classes": (), "y": torch.zeros(4, dtype=torch.int64)}, ("no classes",)),
            ({"official": 4}, ("official", "4 of 4")),
            ({"official": 0}, ("official", "0 of 4")),
            ({"domains": ("p",)}, ("domain and domains",)),
            ({"domain": torch.zeros(4, dtype=torch.int64)}, ("domain and domains",)),
            ({"domain": torch.full((4,), 2), "domains": ("p", "q")}, ("domain ", "0..1", "2 to 2")),
            ({"identity": torch.zeros(3, dtype=torch.int64)}, ("identity ", "int64 (4,)", "int64 (3,)")),
        ],
    )
    def test_an_unsound_one_is_refused_by_name(self, changes, facts):
        with refused(DataError, "data set small", *facts):
            small(**changes)


class TestNames:
    def test_digits(self):
        digits = load("digits")
        assert digits.x.shape == (1797, 1, 8, 8)
        assert torch.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
        assert digits.classes == tuple("0123456789")
        assert digits.official is None
        # the first row of scikit-learn's first image is 0 0 5 13 9 1 0 0 of 16
        assert digits.x[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
        assert int(digits.x.max()) == 255

    def test_image_size_resizes(self):
        digits = load("digits", image_size=32)
        assert digits.x.shape == (1797, 1, 32, 32)
        assert digits.x.dtype == torch.uint8
        assert float(digits.x.float().mean()) == pytest.approx(float(load("digits").x.float().mean()), rel=0.02)

    def test_image_size_must_be_positive(self):
        with refused(RangeError, "--image-size", 1, 0):
            load("digits", image_size=0)

    def test_a_mistyped_name_gets_a_hint(self):
        with refused(UnknownNameError, "'digit'", "'digits'", "pluribus list data"):
            load("digit")

    def test_every_entry_says_what_it_is(self):
        known = entries()
        assert {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "flowers102"} <= set(known)
        assert {"tiny-imagenet", "rotated-mnist", "rotated-digits", "pacs", "office-home"} <= set(known)
        assert all(entry.about and "\n" not in entry.about for entry in known.values())

    def test_a_registered_loader_gets_what_it_asks_for(self, monkeypatch):
        monkeypatch.setattr(datasets, "_entries", {})
        asked = {}

        @register_data("my_set", "a test")
        def mine(seed):
            asked["seed"] = seed
            return small()

        assert load("my-set", seed=5).name == "small"
        assert asked == {"seed": 5}
        register_data("my-set", "again")(mine)
        assert entries()["my-set"].about == "again"
        with refused(UserCodeError, "'my-set'", "registered", "test_data"):
            register_data("my-set", "of another function")(small)

    def test_a_users_own_function(self, tmp_path, monkeypatch):
        (tmp_path / "own_loaders.py").write_text(
            "import torch\n"
            "from pluribus.data import Dataset\n"
            "x = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)\n"
            "def good(): return Dataset('mine', x, torch.tensor([0, 1]), ('a', 'b'))\n"
            "def bad(): return 3\n"
            "def needy(path): return good()\n"
            "thing = 3\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert load("own_loaders.good", image_size=8).x.shape == (2, 1, 8, 8)
        for name, facts in {
            "own_loaders.bad": ("Dataset", "int"),
            "own_loaders.needy": ("image_size", "seed", "'path'"),
            "own_loaders.thing": ("function",),
            "own_loaders.absent": ("'own_loaders'", "'absent'"),
            "no_such_module.load": ("No module named 'no_such_module'",),
        }.items():
            with refused(UserCodeError, name, *facts):
                load(name)


def arrays(**changes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    given = {
        "x_train": rng.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "x_test": rng.integers(0, 256, (3, 5, 4, 3), dtype=np.uint8),
        "y_test": np.array([2, 1, 0], np.uint8),
        "classes": np.array(["a", "b", "c"]),
    }
    return {key: value for key, value in {**given, **changes}.items() if value is not None}


class TestCache:
    def test_where_it_lies(self, cache, monkeypatch):
        assert cache_file("fashion-mnist") == cache_file("fashion_mnist") == cache / "fashion_mnist.npz"
        monkeypatch.delenv("PLURIBUS_DATA")
        assert cache_file("cifar10") == Path.home() / ".cache" / "pluribus" / "cifar10.npz"

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_color_images_by_path(self, tmp_path, save):
        source = arrays()
        save(tmp_path / "mine.npz", **source)
        mine = load(str(tmp_path / "mine.npz"))
        assert (mine.name, mine.official, mine.classes) == ("mine", 6, ("a", "b", "c"))
        assert mine.x.shape == (9, 3, 5, 4)
        assert mine.x.is_contiguous()
        assert mine.y.tolist() == [0, 1, 2, 0, 1, 2, 2, 1, 0]
        np.testing.assert_array_equal(mine.x[7].permute(1, 2, 0), source["x_test"][1])

    def test_gray_images_and_no_test_set(self, tmp_path):
        gray = arrays(
            x_train=np.full((6, 5, 4), 9, np.uint8), x_test=np.zeros((0, 5, 4), np.uint8), y_test=np.zeros(0, int)
        )
        write_npz(tmp_path / "gray.npz", gray)
        dataset = read_npz(tmp_path / "gray.npz")
        assert dataset.x.shape == (6, 1, 5, 4)
        assert dataset.official is None

    def test_the_order_of_the_bytes_does_not_matter(self, tmp_path):
        write_npz(tmp_path / "c.npz", arrays())
        write_npz(tmp_path / "f.npz", {key: np.asfortranarray(value) for key, value in arrays().items()})
        assert torch.equal(read_npz(tmp_path / "c.npz").x, read_npz(tmp_path / "f.npz").x)

    def test_a_registered_name_is_read_from_the_cache(self, cache, offline):
        cache.mkdir()
        write_npz(cache_file("cifar10"), arrays())
        assert load("cifar10").official == 6
        write_npz(cache_file("flowers102"), arrays())
        assert load("flowers102").official is None

    def test_both_spellings(self, cache, offline):
        cache.mkdir()
        write_npz(cache / "fashion_mnist.npz", arrays())
        assert load("fashion-mnist").name == load("fashion_mnist").name == "fashion-mnist"

    @pytest.mark.parametrize(
        ("changes", "kind", "facts"),
        [
            ({"x_test": None}, DamagedDataError, ("lacks x_test:", "x_train, y_train, x_test, y_test, classes")),
            ({"classes": None, "y_train": None}, DamagedDataError, ("lacks y_train, classes:",)),
            ({"x_train": np.zeros((6, 5, 4, 3))}, DamagedDataError, ("x_train", "uint8", "float64 (6, 5, 4, 3)")),
            ({"x_train": np.zeros((6, 5, 4, 2), np.uint8)}, DamagedDataError, ("x_train", "uint8 (6, 5, 4, 2)")),
            ({"y_train": np.zeros(6)}, DamagedDataError, ("y_train", "float64 (6,)")),
            ({"y_test": np.zeros((3, 1), int)}, DamagedDataError, ("y_test", "int64 (3, 1)")),
            ({"y_train": np.zeros(5, int)}, DamagedDataError, ("x_train", "6 images", "y_train", "5 labels")),
            ({"x_test": np.zeros((3, 9, 9, 3), np.uint8)}, DamagedDataError, ("x_train", "x_test", "shape")),
            (
                {"x_train": np.zeros((6, 0, 4), np.uint8), "x_test": np.zeros((3, 0, 4), np.uint8)},
                DataError,
                ("no images",),
            ),
            ({"y_test": np.array([0, 1, 3])}, DataError, ("y ", "0..2", "0 to 3")),
            ({"y_test": np.array([0, 1, -1])}, DataError, ("y ", "0..2", "-1 to 2")),
            ({"classes": np.array("abc")}, DamagedDataError, ("classes", "names")),
            ({"classes": np.array(["a", None, "c"], object)}, DamagedDataError, ("Object arrays",)),
        ],
    )
    def test_wrong_content_is_told_with_the_file(self, tmp_path, changes, kind, facts):
        file = tmp_path / "bad.npz"
        np.savez(file, **arrays(**changes))
        with refused(kind, file, *facts):
            load(str(file))

    @pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 nor this"])
    def test_something_else_under_that_name(self, tmp_path, content):
        file = tmp_path / "bad.npz"
        file.write_bytes(content)
        with refused(DamagedDataError, file, "npz"):
            load(str(file))

    def test_a_truncated_file(self, tmp_path):
        file = tmp_path / "cut.npz"
        np.savez(file, **arrays())
        file.write_bytes(file.read_bytes()[:-100])
        with refused(DamagedDataError, file, "npz"):
            load(str(file))

    def test_no_flipped_byte_passes_as_good_data_or_ends_in_another_error(self, tmp_path):
        file = tmp_path / "flipped.npz"
        source = arrays()
        np.savez_compressed(file, **source)
        good, pixels = file.read_bytes(), read_npz(file).x
        refusals = []
        for at in range(0, len(good), 7):
            file.write_bytes(good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :])
            try:
                assert torch.equal(read_npz(file).x, pixels)
            except DataError as refusal:
                refusals.append(str(refusal))
        assert len(refusals) > 50
        assert all(str(file) in refusal for refusal in refusals)

    def test_a_zip_without_arrays(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "z.npz", "w") as archive:
            archive.writestr("readme", "hello")
        with refused(DamagedDataError, tmp_path / "z.npz", "lacks x_train, y_train, x_test, y_test, classes:"):
            load(str(tmp_path / "z.npz"))

    def test_a_missing_file_or_folder(self, tmp_path):
        with refused(MissingDataError, tmp_path / "none.npz"):
            load(str(tmp_path / "none.npz"))
        with refused(MissingDataError, tmp_path / "none", "pluribus list data"):
            load(str(tmp_path / "none"))

    def test_a_failed_write_leaves_the_old_file_and_no_rest(self, tmp_path, monkeypatch):
        file = tmp_path / "a.npz"
        write_npz(file, arrays())
        before = file.read_bytes()

        def full_disk(_):
            raise OSError("No space left on device")

        monkeypatch.setattr("os.fsync", full_disk)
        with pytest.raises(OSError, match="No space"):
            write_npz(file, arrays(classes=np.array(["x", "y", "z"])))
        assert file.read_bytes() == before
        assert list(tmp_path.iterdir()) == [file]


def fake_torchvision(monkeypatch, **kinds) -> None:
    monkeypatch.setattr(datasets, "_torchvision_datasets", lambda: SimpleNamespace(**kinds))


class TestDownloads:
    def test_cifar10_is_downloaded_once(self, cache, monkeypatch):
        made = []

        class CIFAR10:
            classes = ("cat", "dog")

            def __init__(self, root, train, download):
                assert download
                assert Path(root).parent == cache
                print("chatter")
                made.append(train)
                self.data = np.full((4 if train else 2, 32, 32, 3), 7, np.uint8)
                self.targets = [0, 1] * (2 if train else 1)

        fake_torchvision(monkeypatch, CIFAR10=CIFAR10)
        for _ in range(2):
            cifar10 = load("cifar10")
            assert (cifar10.x.shape, cifar10.official, cifar10.classes) == ((6, 3, 32, 32), 4, ("cat", "dog"))
        assert made == [True, False]
        assert list(cache.iterdir()) == [cache / "cifar10.npz"]

    def test_downloaders_do_not_write_to_the_programs_output(self, cache, monkeypatch, capsys):
        class MNIST:
            def __init__(self, root, train, download):
                print("chatter")
                self.data = torch.zeros(2, 28, 28, dtype=torch.uint8)
                self.targets = torch.tensor([3, 9])

        fake_torchvision(monkeypatch, MNIST=MNIST)
        mnist = load("mnist")
        assert (mnist.x.shape, mnist.y.tolist(), mnist.classes) == ((4, 1, 28, 28), [3, 9, 3, 9], tuple("0123456789"))
        assert capsys.readouterr().out == ""

    def test_svhn_has_channels_first(self, cache, monkeypatch):
        def svhn(root, split, download):
            data = np.zeros((2, 3, 32, 32), np.uint8)
            data[:, 1, 5] = 200
            return SimpleNamespace(data=data, labels=np.array([1, 0]))

        fake_torchvision(monkeypatch, SVHN=svhn)
        assert load("svhn").x[0, :, 5, 9].tolist() == [0, 200, 0]
        assert load("svhn").x[0, :, 9, 5].tolist() == [0, 0, 0]

    def test_flowers_are_merged_and_small(self, cache, monkeypatch):
        class Flowers(list):
            classes = ("rose", "daisy")

        def flowers(root, split, download):
            return Flowers((Image.new("RGB", (90, 70), (10, 20, 30)), label) for label in (0, 1))

        fake_torchvision(monkeypatch, Flowers102=flowers)
        merged = load("flowers102")
        assert (merged.x.shape, merged.official) == ((6, 3, 64, 64), None)
        assert merged.x[5, :, 9, 9].tolist() == [10, 20, 30]
        assert len(np.load(cache / "flowers102.npz")["x_train"]) == 4

    def test_tiny_imagenet(self, cache, monkeypatch):
        class Rows(list):
            features = {"label": SimpleNamespace(names=["fish", "toad"])}  # noqa: RUF012

        def load_dataset(source, split, cache_dir):
            rows = {"train": 4, "valid": 2}[split]
            return Rows({"image": Image.new("L", (64, 64), 90), "label": at % 2} for at in range(rows))

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(dataset_info=lambda *_, **__: None))
        tiny = load("tiny_imagenet")
        assert (tiny.x.shape, tiny.official, tiny.classes) == ((6, 3, 64, 64), 4, ("fish", "toad"))

    def test_tiny_imagenet_names_the_missing_package(self, cache, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with refused(MissingDataError, cache / "tiny_imagenet.npz", "pip install 'pluribus[hf]'"):
            load("tiny-imagenet")

    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "flowers102"])
    def test_offline_fails_fast_with_one_sentence(self, cache, offline, name):
        datasets._torchvision_datasets()
        start = time.monotonic()
        with refused(MissingDataError, name, cache_file(name), "Name or service not known") as refusal:
            load(name)
        assert time.monotonic() - start < 5
        assert "\n" not in str(refusal.value)
        assert list(cache.iterdir()) == []
        assert socket.getdefaulttimeout() is None


def paint(file: Path, color: tuple[int, int, int] = (1, 2, 3), size: tuple[int, int] = (10, 8)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(file)


class TestFolders:
    def test_classes(self, tmp_path):
        for file, red in {
            "dog/b.png": 20,
            "dog/a.PNG": 10,
            "cat/x.jpeg": 30,
            "cat/y.webp": 40,
            "cat/z.bmp": 50,
        }.items():
            paint(tmp_path / "pets" / file, (red, 0, 0))
        (tmp_path / "pets" / "dog" / "notes.txt").write_text("no image")
        paint(tmp_path / "pets" / ".thumbnails" / "a.png")
        pets = load(str(tmp_path / "pets"))
        assert (pets.name, pets.classes, pets.domain, pets.official) == ("pets", ("cat", "dog"), None, None)
        assert pets.x.shape == (5, 3, 64, 64)
        assert pets.y.tolist() == [0, 0, 0, 1, 1]
        assert pets.x[3:, 0, 5, 5].tolist() == [10, 20]
        assert load(str(tmp_path / "pets"), image_size=16).x.shape == (5, 3, 16, 16)

    def test_domains_may_lack_classes(self, tmp_path):
        for file in ("photo/dog/1.png", "photo/cat/1.png", "art/dog/1.png", "art/dog/2.png"):
            paint(tmp_path / file)
        animals = load(str(tmp_path))
        assert (animals.domains, animals.classes) == (("art", "photo"), ("cat", "dog"))
        assert animals.domain.tolist() == [0, 0, 1, 1]
        assert animals.y.tolist() == [1, 1, 0, 1]

    def test_gray_and_transparent_images_become_rgb(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        Image.new("L", (4, 4), 77).save(tmp_path / "a" / "1.png")
        Image.new("RGBA", (4, 4), (5, 6, 7, 0)).save(tmp_path / "b" / "1.png")
        assert load(str(tmp_path), image_size=4).x[:, :, 0, 0].tolist() == [[77, 77, 77], [5, 6, 7]]

    def test_an_empty_folder(self, tmp_path):
        with refused(MissingDataError, tmp_path, "no images", "class/*.jpg"):
            load(str(tmp_path))

    def test_mixed_depths(self, tmp_path):
        paint(tmp_path / "dog" / "1.png")
        paint(tmp_path / "photo" / "dog" / "1.png")
        with refused(DataError, tmp_path, "dog/1.png", "photo/dog/1.png"):
            load(str(tmp_path))

    def test_images_at_another_depth_are_counted(self, tmp_path):
        for file in ("dog/1.png", "cat/1.png", "cover.png", "cat/a/b/c.png"):
            paint(tmp_path / file)
        pets = load(str(tmp_path))
        assert len(pets.y) == 2
        assert [("2 files" in note, "cover.png" in note) for note in pets.notes] == [(True, True)]

    @pytest.mark.parametrize(
        ("train", "test"), [("train", "test"), ("Training", "TESTING"), ("train", "Test"), ("TRAIN", "testing")]
    )
    def test_train_and_test_are_splits(self, tmp_path, train, test):
        for file, red in {"dog/1": 10, "dog/2": 20, "cat/1": 30}.items():
            paint(tmp_path / train / f"{file}.png", (red, 0, 0))
        for file, red in {"dog/1": 40, "ape/1": 50}.items():
            paint(tmp_path / test / f"{file}.png", (red, 0, 0))
        pets = load(str(tmp_path))
        assert (pets.domain, pets.official, pets.classes) == (None, 3, ("ape", "cat", "dog"))
        assert pets.x[:, 0, 5, 5].tolist() == [30, 10, 20, 50, 40]
        assert pets.y.tolist() == [1, 2, 2, 0, 2]
        assert "train (3 images), test (2 images)" in pets.notes[0]
        assert "pooled" in pets.notes[1]

    @pytest.mark.parametrize("val", ["val", "valid", "Validation"])
    def test_validation_images_are_training_images_and_that_is_said(self, tmp_path, val):
        for split, number in {"train": 2, val: 3, "test": 1}.items():
            for name in ("cat", "dog"):
                for at in range(number):
                    paint(tmp_path / split / name / f"{at}.png")
        pets = load(str(tmp_path))
        assert (len(pets.y), pets.official) == (12, 10)
        assert "val (6 images)" in pets.notes[0]
        assert sum("val is part" in note for note in pets.notes) == 1

    def test_one_split_alone_is_the_whole_set(self, tmp_path):
        for name in ("cat", "dog"):
            paint(tmp_path / "test" / name / "1.png")
        pets = load(str(tmp_path))
        assert (pets.official, pets.domain, len(pets.notes)) == (None, None, 1)

    @pytest.mark.parametrize("pattern", ["{split}/{domain}/{name}/1.png", "{domain}/{split}/{name}/1.png"])
    def test_splits_of_domains(self, tmp_path, pattern):
        for at, split in enumerate(("train", "test")):
            for domain in ("art", "photo"):
                for name in ("cat", "dog"):
                    paint(tmp_path / pattern.format(split=split, domain=domain, name=name), (100 * at, 0, 0))
        pets = load(str(tmp_path))
        assert (pets.official, pets.domains, pets.classes) == (4, ("art", "photo"), ("cat", "dog"))
        assert pets.domain.tolist() == [0, 0, 1, 1] * 2
        assert pets.y.tolist() == [0, 1] * 4
        assert pets.x[:, 0, 5, 5].tolist() == [0] * 4 + [100] * 4

    @pytest.mark.parametrize(
        ("files", "kind", "facts"),
        [
            (("train/cat/1.png", "photo/cat/1.png"), DataError, ("'train'", "'photo'")),
            (("train/1.png", "test/1.png"), DataError, ("test/class",)),
            (("a/b/c/1.png", "a/b/d/1.png"), MissingDataError, ("class/*.jpg",)),
            (("dog/1.png", "Dog/1.png"), DataError, ("'Dog'", "'dog'")),
            (("art/dog/1.png", "photo/Dog/1.png"), DataError, ("'Dog'", "'dog'")),
            (
                ("train/\u00c9t\u00e9/1.png", "test/e\u0301te\u0301/1.png"),
                DataError,
                ("'\u00c9t\u00e9'", "'\u00e9t\u00e9'"),
            ),
            (("art/dog/1.png", "ART/cat/1.png"), DataError, ("'art'", "'ART'")),
        ],
        ids=["split and domain", "no classes", "too deep", "case", "case across domains", "case and accent", "domains"],
    )
    def test_folders_that_could_mean_two_things_are_refused(self, tmp_path, files, kind, facts):
        for file in files:
            paint(tmp_path / file)
        with refused(kind, tmp_path, *facts):
            load(str(tmp_path))

    def test_spellings_of_one_name_are_one_class(self, tmp_path):
        """Decomposed in one domain, composed in the other, as two file systems have it."""
        for file in ("art/e\u0301te\u0301/1.png", "photo/\u00e9t\u00e9/1.png", "photo/zoo/1.png"):
            paint(tmp_path / file)
        seasons = load(str(tmp_path))
        assert seasons.classes == ("zoo", "\u00e9t\u00e9")
        assert seasons.y.tolist() == [1, 0, 1]
        assert ["2 spellings" in note and "'\u00e9t\u00e9'" in note for note in seasons.notes] == [True]

    def test_a_name_that_is_no_text_is_refused_for_a_class_and_shown_for_a_file(self, tmp_path):
        for name in ("cat", "dog"):
            paint(tmp_path / name / "1.png")
        (tmp_path / "cat" / os.fsdecode(b"caf\xe9.txt")).touch()
        (note,) = load(str(tmp_path)).notes
        assert "caf" in note
        assert note.encode()
        paint(tmp_path / os.fsdecode(b"caf\xe9") / "1.png")
        with refused(DataError, "caf") as refusal:
            load(str(tmp_path))
        assert str(refusal.value).encode()

    def test_letters_that_lower_case_does_not_join_stay_two_classes(self, tmp_path):
        for name in ("Masse", "Ma\u00dfe"):
            paint(tmp_path / name / "1.png")
        assert load(str(tmp_path)).classes == ("Masse", "Ma\u00dfe")

    def test_the_official_test_set_of_a_folder_is_what_everyone_is_tested_on(self, tmp_path):
        for split, number in {"train": 12, "test": 5}.items():
            for at, name in enumerate(("dark", "light")):
                for row in range(number):
                    paint(tmp_path / split / name / f"{row}.png", (100 * at + row,) * 3)
        settings = {"data": str(tmp_path), "clients": 2, "partition": "iid", "models": "mlp-64", "image_size": 4}
        parts = assemble_tiny("local", test="official", **settings)
        assert [parts.data.rows(k)["test"].tolist() for k in range(2)] == [list(range(24, 34))] * 2
        pooled = assemble_tiny("local", **settings)
        assert sum(len(rows) for k in range(2) for rows in pooled.data.rows(k).values()) == 34
        assert [sum("pooled" in text for text in one.warnings) for one in (pooled, parts)] == [1, 0]

    def test_one_class_is_enough_for_a_site_but_not_for_a_simulation(self, tmp_path):
        paint(tmp_path / "dog" / "1.png")
        assert load(str(tmp_path)).classes == ("dog",)
        with refused(DataError, tmp_path.name, "2 classes", 1):
            assemble(experiment("local", data=str(tmp_path), device="cpu"))

    @pytest.mark.parametrize("keep", [0, 20, 60])
    def test_a_damaged_image_is_named(self, tmp_path, keep):
        paint(tmp_path / "cat" / "1.png")
        paint(tmp_path / "dog" / "1.png", size=(64, 64))
        broken = tmp_path / "dog" / "1.png"
        broken.write_bytes(broken.read_bytes()[:keep])
        with refused(DamagedDataError, broken):
            load(str(tmp_path))

    @pytest.mark.parametrize("name", ["pacs", "office-home"])
    def test_sets_placed_by_hand(self, cache, name):
        with refused(MissingDataError, name, cache / name, "domain/class/*.jpg"):
            load(name)
        for file in ("art/dog/1.png", "art/cat/1.png", "photo/dog/1.png"):
            paint(cache / name / file)
        assert load(name).x.shape == (3, 3, 224, 224)
        assert load(name, image_size=8).x.shape == (3, 3, 8, 8)
        assert (load(name, image_size=8).name, load(name, image_size=8).domains) == (name, ("art", "photo"))


class TestRotations:
    def base(self, official=None, size=9):
        """Ten images of two classes, each bright in the middle of its top row; the pixel's value is the row number."""
        x = torch.zeros(10, 1, size, size, dtype=torch.uint8)
        x[:, 0, 0, size // 2] = torch.arange(100, 110, dtype=torch.uint8)
        return Dataset("tops", x, torch.arange(10) % 2, ("a", "b"), official)

    def test_a_quarter_turn_clockwise_brings_top_to_right(self):
        turned = rotate_images(self.base(), 5, (0, 90, 180), seed=0, independent=False)
        for at, (row, column) in enumerate([(0, 4), (4, 8), (8, 4)]):
            image = turned.x[at * 10, 0]
            assert (image == image.max()).nonzero().tolist() == [[row, column]]

    def test_small_angles_turn_the_same_way(self):
        turned = rotate_images(self.base(), 5, (0, 20, 40, 60), seed=0, independent=False)
        columns = torch.arange(9.0)
        centres = [
            float((turned.x[at * 10, 0].float().sum(0) * columns).sum() / turned.x[at * 10].sum()) for at in range(4)
        ]
        assert centres == sorted(centres)
        assert centres[3] > centres[0] + 2

    def test_domains_hold_copies_of_the_same_images(self):
        turned = rotate_images(self.base(), 3, (0, 20.5), seed=0, independent=False)
        assert turned.domains == ("M0", "M20.5")
        assert turned.domain.tolist() == [0] * 6 + [1] * 6
        assert turned.y.tolist() == [0, 0, 0, 1, 1, 1] * 2
        assert turned.identity[:6].tolist() == turned.identity[6:].tolist()
        assert turned.identity[:6].tolist() == (turned.x[:6].amax((1, 2, 3)).int() - 100).tolist()
        assert len(set(turned.identity[:6].tolist())) == 6

    def test_only_training_images_are_used(self):
        for seed in range(20):
            assert int(rotate_images(self.base(official=6), 2, (0,), seed, independent=False).identity.max()) < 6

    def test_the_seed_decides(self):
        one, same, other = (rotate_images(self.base(), 2, (0,), seed, independent=False).identity for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)

    def test_independent_forgets_identity(self):
        shared, independent = (
            rotate_images(self.base(), 2, (0, 20), 0, independent=choice) for choice in (False, True)
        )
        assert independent.identity is None
        assert torch.equal(shared.x, independent.x)

    def test_color_images(self):
        x = torch.zeros(4, 3, 5, 5, dtype=torch.uint8)
        x[:, 1, 0, 2] = 200
        turned = rotate_images(Dataset("c", x, torch.tensor([0, 0, 1, 1]), ("a", "b")), 1, (90,), 0, independent=False)
        assert turned.x.shape == (2, 3, 5, 5)
        assert turned.x[0].nonzero().tolist() == [[1, 2, 4]]

    def test_too_few_images(self):
        with refused(DataError, "tops", "3 training images", "class a", 4):
            rotate_images(self.base(official=6), 4, (0,), 0, independent=False)

    def test_rotated_digits(self):
        turned = load("rotated-digits")
        assert (turned.name, turned.x.shape) == ("rotated-digits", (4000, 1, 16, 16))
        assert torch.bincount(turned.domain * 10 + turned.y).tolist() == [100] * 40
        assert not torch.equal(turned.x, load("rotated-digits", seed=1).x)

    def test_rotated_mnist_comes_from_the_cached_mnist(self, cache, offline):
        cache.mkdir()
        y = np.arange(1200) % 10
        x = np.arange(1200 * 16).reshape(1200, 4, 4).astype(np.uint8)
        write_npz(
            cache_file("mnist"),
            {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "classes": np.array(list("0123456789"))},
        )
        turned, independent = load("rotated-mnist"), load("rotated-mnist-independent")
        assert (turned.name, independent.name) == ("rotated-mnist", "rotated-mnist-independent")
        assert turned.domains == ("M0", "M20", "M40", "M60")
        assert len(turned.x) == 4000
        assert int(turned.identity.max()) < 1200
        assert independent.identity is None
