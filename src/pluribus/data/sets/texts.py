"""Texts by name. Words are hashed to token ids."""

from __future__ import annotations

import csv
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pluribus.data.dataset import Dataset
from pluribus.data.datasets import fetch_url, load_original, reading_original, register_data
from pluribus.data.embedded import decode_texts, read_embedded
from pluribus.data.npz import Arrays
from pluribus.data.reading import DEFAULT, Reading
from pluribus.data.tokens import split_words, tokenize
from pluribus.errors import DataError, MismatchError

NEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
NEWS = ("World", "Sports", "Business", "Science and technology")
GROUPS = "20news-bydate.tar.gz"
GROUPS_URL = "http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz"


@register_data(
    "speeches",
    "2,610 passages of addresses by 6 presidents, the authors; 8 natural clients by year in office: no download",
    "tokens",
)
def _speeches(reading: Reading) -> Dataset:
    if reading.columns or reading.window or reading.stride:
        raise MismatchError("speeches has no columns to choose from: leave out --columns, --window and --stride.")
    arrays = read_embedded("speeches")
    texts = decode_texts(arrays)
    found = tokenize(texts, reading.tokenizer, reading.vocabulary, reading.length, _no_words)
    return Dataset(
        name="speeches",
        x=torch.from_numpy(found.ids),
        y=torch.from_numpy(arrays["label"].astype(np.int64)),
        classes=tuple(map(str, arrays["classes"])),
        kind="tokens",
        vocabulary=found.vocabulary,
        client=torch.from_numpy(arrays["client"].astype(np.int64)),
        clients=tuple(map(str, arrays["clients"])),
        group=torch.from_numpy(arrays["group"].astype(np.int64)),
        notes=tuple(_note_cut(found.cut, found.ids)),
    )


def _no_words(row: int) -> DataError:
    return DataError(f"the text of row {row} has no tokens.")


def _note_cut(cut: int, ids: np.ndarray) -> list[str]:
    return [f"{cut:,} of {len(ids):,} texts are longer than {ids.shape[1]} tokens, and are cut."] if cut else []


@register_data(
    "ag-news", "127,600 headlines of news with their first lines, 4 classes, words hashed to 8,192 ids", "tokens"
)
def _ag_news() -> Dataset:
    return load_original("ag-news", "ag_news_csv.tar.gz", read_news, _fetch_news)


def _fetch_news(folder: Path) -> Arrays:
    files = [fetch_url(f"{NEWS_URL}/{part}.csv", folder / f"{part}.csv") for part in ("train", "test")]
    return _news([file.read_text(encoding="utf-8") for file in files])


def read_news(file: Path) -> Arrays:
    """Read an archive with train.csv and test.csv, as Zhang, Zhao and LeCun (2015) published it."""
    with reading_original(file), tarfile.open(file) as archive:
        members = {Path(member.name).name: member for member in archive if member.isfile()}
        return _news([_content(archive, members[f"{part}.csv"]).decode() for part in ("train", "test")])


def _news(parts: Sequence[str]) -> Arrays:
    """Rows are a class from 1 to 4, a title and the first lines. A backslash marks the end of a line."""
    rows = [list(csv.reader(io.StringIO(part))) for part in parts]
    texts = [" ".join(row[1:]).replace("\\", " ") for part in rows for row in part]
    labels = np.array([int(row[0]) - 1 for part in rows for row in part])
    return _pack(texts, labels, NEWS, len(rows[0]))


@register_data(
    "20newsgroups",
    "18,846 posts without headers, 20 classes, an official test set, words hashed to 8,192 ids",
    "tokens",
)
def _newsgroups() -> Dataset:
    return load_original(
        "20newsgroups", GROUPS, read_newsgroups, lambda folder: read_newsgroups(fetch_url(GROUPS_URL, folder / GROUPS))
    )


def read_newsgroups(file: Path) -> Arrays:
    """Read the archive with posts at 20news-bydate-train/GROUP/NUMBER. The header of a post names its group."""
    with reading_original(file), tarfile.open(file) as archive:
        posts = sorted((member.name, member) for member in archive if member.isfile() and member.name.count("/") == 2)
        posts.sort(key=lambda post: "bydate-test" in post[0])  # stable: training posts come first
        texts = [_content(archive, member).decode("latin-1").partition("\n\n")[2] for _, member in posts]
        groups = [name.split("/")[1] for name, _ in posts]
        classes = sorted(set(groups))
        labels = np.array([classes.index(group) for group in groups])
        return _pack(texts, labels, classes, sum("bydate-train" in name for name, _ in posts))


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = archive.extractfile(member)
    assert content is not None, "members are files"
    return content.read()


def _pack(texts: Sequence[str], labels: np.ndarray, classes: Sequence[str], official: int) -> Arrays:
    """Token ids as a cache file has them. Texts without words are left out."""
    kept = np.array([bool(split_words(text)) for text in texts])
    rows = np.flatnonzero(kept)
    found = tokenize([texts[row] for row in rows.tolist()], DEFAULT.tokenizer, DEFAULT.vocabulary, None, _no_words)
    empty = len(texts) - len(rows)
    notes = [f"{empty:,} of {len(texts):,} texts without words are left out."] if empty else []
    return {
        "x": found.ids,
        "y": labels[rows],
        "classes": np.array(classes),
        "kind": np.array("tokens"),
        "vocabulary": np.array(found.vocabulary),
        "official": np.array(int(kept[:official].sum())),
        "notes": np.array([*notes, *_note_cut(found.cut, found.ids)], str),
    }
