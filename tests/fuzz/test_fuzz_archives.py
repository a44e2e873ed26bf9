"""Archives and files of data sets by name, put there by hand: read, or refused with a sentence that names the file."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Mapping
from unittest import mock

from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import TEXTS, documents, fuzzed, mutated

from pluribus.data import Dataset, load
from pluribus.data.sets.texts import GROUPS
from pluribus.data.sets.wearers import HAR, HAR_CHANNELS

Files = Mapping[str, bytes]

NEWS = {"ag_news_csv/train.csv": b'"3","Wall","sell"\n"1","War","again"\n', "ag_news_csv/test.csv": b'"4","R","walk"\n'}
POSTS = {
    "20news-bydate-train/sci.space/2": b"Subject: Moon\n\nOrbit \xe9t\xe9",
    "20news-bydate-train/alt.atheism/1": b"From: a@b\n\nNo header words",
    "20news-bydate-test/sci.space/9": b"Newsgroups: sci.space\n\nMoon",
}
WINDOW = b" ".join([b"1.0e-002"] * 128) + b"\n"
HAR_FILES = {
    "UCI HAR Dataset/activity_labels.txt": b"1 WALKING\n2 SITTING\n",
    **{
        f"UCI HAR Dataset/{part}/{name}": content
        for part in ("train", "test")
        for name, content in {
            f"subject_{part}.txt": b"1\n2\n",
            f"y_{part}.txt": b"1\n2\n",
            **{f"Inertial Signals/{channel}_{part}.txt": 2 * WINDOW for channel in HAR_CHANNELS},
        }.items()
    },
}
NAMES = [text for text in TEXTS if text.strip() and text.isprintable()]
LEAF = {"users": ["w"], "num_samples": [2], "user_data": {"w": {"x": [[0.5] * 784, [1.0] * 784], "y": [3, 61]}}}


def tarred(files: Files) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(file.getvalue(), 1, mtime=0)  # without the time, so that a case can be repeated


def zipped(files: Files) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # without the time, too
    return file.getvalue()


SETS = {  # name: the file that a user puts there, its members, and how they are packed
    "ag-news": ("ag_news_csv.tar.gz", NEWS, tarred),
    "20newsgroups": (GROUPS, POSTS, tarred),
    "uci-har": (HAR, HAR_FILES, zipped),
}


def check(name: str, original: str, content: bytes) -> None:
    """Load a data set of which the folder of the user has the original file and nothing else."""
    with scratch() as folder, mock.patch.dict(os.environ, PLURIBUS_DATA=str(folder)):
        (folder / original).parent.mkdir(exist_ok=True)
        (folder / original).write_bytes(content)
        found = survives(lambda: load(name), folder)
        if isinstance(found, Dataset):
            assert len(found.x) == len(found.y) > 0
        else:
            assert original.partition("/")[0] in str(found), "a refusal names the file"


def test_archives_in_good_order_are_read() -> None:
    for name, (original, files, pack) in SETS.items():
        with scratch() as folder, mock.patch.dict(os.environ, PLURIBUS_DATA=str(folder)):
            (folder / original).write_bytes(pack(files))
            assert len(load(name).y) > 0


@fuzzed(0.5)
@given(st.sampled_from(sorted(SETS)), st.data())
def test_archives_with_changed_bytes(name: str, data: st.DataObject) -> None:
    original, files, pack = SETS[name]
    check(name, original, data.draw(mutated([pack(files)])))


@fuzzed(0.5)
@given(st.sampled_from(["ag-news", "20newsgroups"]), st.data())
def test_tar_files_with_changed_bytes_in_a_good_gzip(name: str, data: st.DataObject) -> None:
    original, files, _ = SETS[name]
    check(name, original, gzip.compress(data.draw(mutated([gzip.decompress(tarred(files))])), 1, mtime=0))


@fuzzed(0.5)
@given(st.sampled_from(sorted(SETS)), st.data())
def test_archives_whose_members_are_wrong(name: str, data: st.DataObject) -> None:
    original, files, pack = SETS[name]
    chosen = data.draw(st.sampled_from(sorted(files)))
    content = data.draw(mutated([files[chosen]]) | st.sampled_from([b"", b"\0", b"nan\n", b"1e999\n", b"\n" * 1000]))
    called = data.draw(st.just(chosen) | st.sampled_from([f"../{chosen}", f"/{chosen}", *NAMES]))
    check(name, original, pack({**{k: v for k, v in files.items() if k != chosen}, called: content}))


@fuzzed(0.5)
@given(mutated([zipped({HAR: zipped(HAR_FILES)})]) | mutated([zipped(HAR_FILES)]).map(lambda one: zipped({HAR: one})))
def test_an_archive_within_an_archive(content: bytes) -> None:
    check("uci-har", HAR, content)


@fuzzed(0.5)
@given(documents([LEAF]).map(json.dumps).map(str.encode) | mutated([json.dumps(LEAF).encode()]))
def test_files_of_leaf(content: bytes) -> None:
    check("femnist", "femnist/all_data_0.json", content)
