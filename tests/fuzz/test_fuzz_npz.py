"""npz files: read, or refused with a sentence, before their header can ask for memory."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from mutate import TEXTS, fuzzed, mutated

from pluribus.data import Dataset
from pluribus.data.npz import read_kind, read_npz


def packed(compressed: bool = False, **arrays: Any) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


IMAGES = np.arange(4 * 8 * 8, dtype=np.uint8).reshape(4, 8, 8)
LABELS = np.array([0, 1, 0, 1])
NAMES = np.array(["cat", "dog"])
CACHED = {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:2], "y_test": LABELS[:2], "classes": NAMES}
TOKENS = {
    "x": IMAGES[:, 0].astype(np.int32),
    "y": LABELS,
    "lengths": np.array([3, 2, 8, 1]),
    "vocabulary": np.array(300),
}
TABLE = {
    "x": np.ones((4, 3), np.float32),
    "y": LABELS * 0.5,
    "columns": np.array(["a", "b", "c"]),
    "time": np.arange(4.0),
}
TABLE |= {
    "client": np.array(["n", "s", "n", "s"]),
    "part": np.array([0, 1, 2, 0]),
    "group": LABELS,
    "span": np.array(2.0),
}
SIGNALS = {
    "x": np.ones((4, 2, 9), np.float32),
    "y": LABELS,
    "kind": np.array("signal"),
    "domain": LABELS,
    "domains": NAMES,
}
VALID = [packed(**CACHED), packed(**TOKENS), packed(**TABLE), packed(True, **SIGNALS)]


def check_file(content: bytes, label_kind: Any = "auto") -> None:
    with scratch() as folder:
        file = folder / "data.npz"
        file.write_bytes(content)
        found = survives(lambda: read_npz(file, None, label_kind), folder)
        survives(lambda: read_kind(file), folder)
    if isinstance(found, Dataset):
        assert len(found.x) == len(found.y) > 0


label_kinds = st.sampled_from(["auto", "classes", "labels", "numbers"])


@fuzzed()
@given(mutated(VALID), label_kinds)
def test_files_with_changed_bytes(content: bytes, label_kind: str) -> None:
    check_file(content, label_kind)


@st.composite
def members(draw: st.DrawFn) -> bytes:
    """A zip file in good order, whose arrays have changed bytes or forged headers: no checksum saves the reader."""
    arrays = draw(st.sampled_from([CACHED, TOKENS, TABLE, SIGNALS]))
    file, chosen = io.BytesIO(), draw(st.sampled_from(sorted(arrays)))
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            data = content.getvalue()
            if name == chosen:
                data = draw(mutated([data]) | forged())
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


@st.composite
def forged(draw: st.DrawFn) -> bytes:
    """An array whose header claims any type and shape."""
    sizes = st.sampled_from([0, 1, 2, 4, 8, -1, 2**20, 2**31, 2**60, 2**63, 10**30])
    shape = tuple(draw(st.lists(sizes, max_size=5)))
    dtype = draw(
        st.sampled_from(
            ["|u1", "<f4", ">i8", "<f8", "<f2", "|b1", "<U9", "|O", "|V8", "<M8[s]", "<c8", "|S0", "<U0", "x", ""]
        )
    )
    header = f"{{'descr': {dtype!r}, 'fortran_order': {draw(st.booleans())}, 'shape': {shape!r}, }}\n".encode()
    version = draw(st.sampled_from([(1, 0), (2, 0), (3, 0), (9, 9)]))
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + header + draw(st.binary(max_size=64))


@fuzzed()
@given(members(), label_kinds)
def test_files_with_forged_arrays(content: bytes, label_kind: str) -> None:
    check_file(content, label_kind)


any_array = arrays_of.arrays(
    st.sampled_from(
        [np.uint8, np.int64, np.uint64, np.float16, np.float32, np.float64, np.bool_, np.dtype("U3"), np.dtype("M8[s]")]
    ),
    arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)


@fuzzed()
@given(st.data(), label_kinds)
def test_files_with_any_arrays(data: st.DataObject, label_kind: str) -> None:
    arrays: dict[str, Any] = dict(data.draw(st.sampled_from([CACHED, TOKENS, TABLE, SIGNALS])))
    for name in data.draw(st.lists(st.sampled_from(sorted(arrays)), max_size=2)):
        arrays[name] = data.draw(any_array | st.sampled_from(TEXTS[:16]).map(np.array))
    if data.draw(st.booleans()):
        arrays[
            data.draw(st.sampled_from(["identity", "official", "split", "notes", "kind", "categories", "owner"]))
        ] = data.draw(any_array)
    check_file(packed(**arrays), label_kind)
