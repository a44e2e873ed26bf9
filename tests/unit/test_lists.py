"""A fixed split from lists beside the images, as PACS has them: who trains, validates and tests, and what is public."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import pluribus
from conftest import assemble_tiny
from parties import CPU, noise
from pluribus.assembly import assemble
from pluribus.data import Dataset, load
from pluribus.data.dataset import PARTS
from pluribus.data.federated import Federated, Fractions
from pluribus.data.folders import UNLISTED
from pluribus.data.lists import read_splits
from pluribus.data.reading import DEFAULT
from pluribus.errors import DamagedDataError, DataError, MismatchError, MissingDataError, PartitionError
from pluribus.experiment import experiment
from pluribus.sites.config import SiteFile
from pluribus.sites.trainer import _load_sets
from refusals import Kind, refused

DOMAINS, CLASSES, EACH, HELD = ("photo", "sketch"), ("cat", "dog"), 20, 12


def write_lists(folder: Path, **names: list[str]) -> None:
    """One list of each kind per domain; labels count from 1."""
    for domain in DOMAINS:
        for kind, listed in names.items():
            lines = [f"{name} {CLASSES.index(name.split('/')[1]) + 1}" for name in listed if name.startswith(domain)]
            (folder / f"{domain}_{kind}_kfold.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def pacs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Per domain and class 20 images: 8 in the training list, 12 in the crossval list, all in the test list."""
    monkeypatch.setenv("PLURIBUS_DATA", str(tmp_path))
    folder, names = tmp_path / "pacs", list[str]()
    for at, name in enumerate(f"{d}/{c}/{n:02}.png" for d in DOMAINS for c in CLASSES for n in range(EACH)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), at, np.uint8)).save(folder / name)
        names.append(name)
    held = [name for name in names if int(name[-6:-4]) >= EACH - HELD]
    write_lists(folder, train=[name for name in names if name not in held], crossval=held, test=names)
    return folder


def shades(data: Federated, client: int, part: str) -> set[int]:
    """The images of a set by their color, which is their number."""
    return set(data.dataset.x[data.rows(client)[part], 0, 0, 0].tolist())


def test_who_trains_is_neither_tested_nor_public(pacs: Path) -> None:
    parts = assemble_tiny("agg", data="pacs", image_size=4, partition="domain", clients=2, public_fraction=0.25)
    for client in range(2):
        numbers = range(client * 2 * EACH, (client + 1) * 2 * EACH)
        train = {n for n in numbers if n % EACH < EACH - HELD}
        held = [n for n in numbers if n not in train]
        assert shades(parts.data, client, "train") == train
        assert shades(parts.data, client, "val") == set(held[::2])  # every other one of each class
        test, public = shades(parts.data, client, "test"), shades(parts.data, client, "public")
        assert test | public == set(held[1::2])
        assert (len(test), len(public)) == (9, 3)  # 0.25 of 12 in the test part
        assert not test & public
    assert parts.task.exams == {"photo": 9, "sketch": 9}
    (note,) = [text for text in parts.warnings if "kfold" in text]
    assert "train (32 images), val (24 images), test (24 images)" in note


def test_lists_that_are_disjoint_are_taken_as_they_are(pacs: Path) -> None:
    names = [f"{d}/{c}/{n:02}.png" for d in DOMAINS for c in CLASSES for n in range(EACH)]
    write_lists(pacs, train=names[::4], crossval=names[1::4], test=names[2::4])
    dataset = load("pacs", image_size=4)
    assert dataset.official is None
    assert dataset.part is not None
    by_color = dict(zip(dataset.x[:, 0, 0, 0].tolist(), dataset.part.tolist(), strict=True))
    assert by_color == {n: n % 4 for n in range(80) if n % 4 < 3}  # no list has the others


@pytest.mark.parametrize("test", ["common", "official"])
def test_a_fixed_split_has_its_own_test_part(pacs: Path, test: str) -> None:
    with refused(MismatchError, "pacs", f"--test {test}"):
        assemble(experiment("local", data="pacs", partition="domain", clients=2, image_size=4, test=test))


def test_without_lists_the_shares_hold(pacs: Path) -> None:
    for file in pacs.glob("*.txt"):
        file.unlink()
    assert load("pacs", image_size=4).part is None


def test_the_check_says_which_split_is_used(pacs: Path) -> None:
    (pacs / "photo" / "cat" / "new.png").write_bytes((pacs / "photo" / "cat" / "00.png").read_bytes())
    found = pluribus.check_data("pacs")
    assert {split: sum(n for place, n in found.counts.items() if place.split == split) for split in PARTS} == {
        "train": 32,
        "val": 24,
        "test": 24,
    }
    assert any("kfold" in note for note in found.notes)
    assert {kind: (one.files, one.example) for kind, one in found.skipped.items()} == {
        UNLISTED: (1, "photo/cat/new.png")
    }


def test_a_site_keeps_to_the_lists_too(pacs: Path) -> None:
    host = SiteFile("north", "localhost:1", pacs, "mlp-64", pacs, data=str(pacs), image_size=4)
    assert {name: len(one.y) for name, one in _load_sets(host, DEFAULT).items()} == {"train": 32, "val": 24, "test": 24}


@pytest.mark.parametrize(
    ("file", "text", "kind", "facts"),
    [
        ("sketch_test_kfold.txt", None, MissingDataError, ()),
        ("photo_train_kfold.txt", "photo/cat/00.png\n", DamagedDataError, ("line 1 ",)),
        ("photo_train_kfold.txt", "\nphoto/cat/00.png one\n", DamagedDataError, ("line 2 ",)),
        ("photo_train_kfold.txt", b"\xff\xfe", DamagedDataError, ()),
    ],
    ids=["missing", "no label", "no number", "no text"],
)
def test_lists_that_cannot_be_read(
    pacs: Path, file: str, text: str | bytes | None, kind: Kind, facts: tuple[str, ...]
) -> None:
    if text is None:
        (pacs / file).unlink()
    else:
        (pacs / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused(kind, pacs / file, *facts):
        load("pacs", image_size=4)


def test_lists_that_leave_nothing_to_train_on(pacs: Path) -> None:
    write_lists(pacs, train=[])
    with refused(DataError, pacs, "train"):
        load("pacs", image_size=4)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sets(st.sampled_from(["train", "crossval", "test"])), min_size=1, max_size=30))
def test_every_image_has_one_split_and_a_training_image_no_other(
    tmp_path_factory: pytest.TempPathFactory, listed: list[set[str]]
) -> None:
    folder = tmp_path_factory.mktemp("lists")
    files = [folder / "a" / "b" / f"{n}.png" for n in range(len(listed))]
    lists = {kind: [folder / f"a_{kind}_kfold.txt"] for kind in ("train", "crossval", "test")}
    for kind, (file,) in lists.items():
        file.write_text("".join(f"a/b/{n}.png 1\n" for n, kinds in enumerate(listed) if kind in kinds))
    try:
        splits = read_splits(folder, files, lists)
    except DataError:
        return
    for kinds, split in zip(listed, splits, strict=True):
        assert (split == "") == (not kinds)
        assert (split == "train") == ("train" in kinds)
        assert split != "val" or "crossval" in kinds
        assert split != "test" or "test" in kinds


def fixed(**changes: torch.Tensor | int | None) -> Dataset:
    made = Dataset("fixed", noise(12), torch.arange(12) % 2, ("a", "b"), part=torch.arange(12) % 3)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"part": torch.arange(12)}, {"official": 6}, {"identity": torch.arange(12)}, {"part": torch.zeros(12)}]
)
def test_a_split_that_makes_no_sense(changes: dict[str, torch.Tensor | int]) -> None:
    with refused(DataError, "data set fixed", "part"):
        fixed(**changes)


def test_fractions_do_not_move_a_fixed_split() -> None:
    for val, test in ((0.1, 0.2), (0.4, 0.5)):
        data = Federated(fixed(), [np.arange(12)], Fractions(val, test), 0, CPU)
        assert [data.rows(0)[name].tolist() for name in PARTS] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
        assert len(data.rows(0)["public"]) == 0


def test_a_client_without_training_rows_is_refused(pacs: Path) -> None:
    names = [f"{d}/{c}/{n:02}.png" for d in DOMAINS for c in CLASSES for n in range(EACH)]
    photos = [name for name in names if name.startswith("photo")]
    write_lists(pacs, train=photos[::2], crossval=photos[1::2], test=names)
    with refused(PartitionError, "client 1", "train", "pacs", "--clients", "--partition"):
        assemble_tiny("local", data="pacs", image_size=4, partition="domain", clients=2)
