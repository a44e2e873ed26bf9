"""CSV, TSV, JSONL and Parquet files with any settings of how they are read: read, or refused with a sentence."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import TEXTS, documents, fuzzed, mutated, scalars, values

from pluribus.data import Dataset
from pluribus.data.columns import read_columns
from pluribus.data.datasets import kind_of_data
from pluribus.data.reading import Reading, parse_columns
from pluribus.data.roles import check_settings, kind_of_rows

ROWS: list[Any] = [
    {"label": "x", "a": 1.5, "b": "red", "text": "one two", "time": "2024-05-31", "client": "n", "split": "train"},
    {"label": "y", "a": 2.5, "b": "blue", "text": "three", "time": "2024-06-01", "client": "s", "split": "test"},
    {"label": "x", "a": 3.5, "b": "red", "text": "four", "time": "2024-06-02", "client": "n", "split": "val"},
    {"label": "y", "a": 4.5, "b": "blue", "text": "five", "time": "2024-06-03", "client": "s", "split": "train"},
]
NAMES = list(ROWS[0])
PLAIN = [[name for name in NAMES if name not in ("text",)], *([row[n] for n in NAMES if n != "text"] for row in ROWS)]


def as_text(cells: list[list[Any]], comma: str) -> bytes:
    return "\n".join(comma.join(map(str, row)) for row in cells).encode("utf-8", "surrogatepass")


def as_jsonl(rows: list[Any]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


VALID = {
    ".csv": [as_text(PLAIN, ","), b'label,a\n"x ""y",1\n\nz,2\n'],
    ".tsv": [as_text(PLAIN, "\t")],
    ".jsonl": [as_jsonl(ROWS)],
    ".parquet": [as_parquet(ROWS), as_parquet([{"label": 1, "a": [1.0, 2.0]}, {"label": 0, "a": None}])],
}
READINGS = [
    Reading(), Reading(columns=parse_columns("text=text,ignore=a+b+time+client+split")), Reading(window=2),
    Reading(columns=parse_columns("label=label,inputs=a,time=time,group=client")),
    Reading(columns=parse_columns("label=a,ignore=text"), label_kind="numbers"), Reading(label_kind="labels"),
    Reading(columns=parse_columns("label=label,inputs=a"), window=2, stride=1), Reading(length=3, vocabulary=8),
]  # fmt: skip


def check_file(suffix: str, content: bytes, reading: Reading) -> None:
    with scratch() as folder:
        file = folder / f"rows{suffix}"
        file.write_bytes(content)
        survives(lambda: kind_of_data(str(file), reading.columns, reading.window is not None), folder)
        found = survives(lambda: read_columns(file, reading=reading), folder)
    if isinstance(found, Dataset):
        assert len(found.x) == len(found.y) > 0


readings = st.sampled_from(READINGS)


@fuzzed()
@given(
    st.sampled_from(sorted(VALID)).flatmap(lambda suffix: st.tuples(st.just(suffix), mutated(VALID[suffix]))), readings
)
def test_files_with_changed_bytes(file: tuple[str, bytes], reading: Reading) -> None:
    check_file(*file, reading)


@fuzzed()
@given(documents([PLAIN]), st.sampled_from([",", "\t"]), readings)
def test_delimited_files_with_changed_cells(cells: Any, comma: str, reading: Reading) -> None:
    rows = [row if isinstance(row, list) else [row] for row in cells]
    check_file(".csv" if comma == "," else ".tsv", as_text(rows, comma), reading)


@fuzzed()
@given(documents([ROWS]), readings)
def test_jsonl_files_with_changed_cells(rows: Any, reading: Reading) -> None:
    check_file(".jsonl", as_jsonl(rows), reading)


@fuzzed()
@given(documents([ROWS]), readings)
def test_parquet_files_with_changed_cells(rows: Any, reading: Reading) -> None:
    try:
        content = as_parquet([{str(key): value for key, value in row.items()} for row in rows])
    except (pa.ArrowException, AttributeError, TypeError, OverflowError, ValueError, UnicodeError):
        return  # nobody can write such a file
    check_file(".parquet", content, reading)


# Settings -------------------------------------------------------------------------------------------------------------

ROLES = ["label", "inputs", "text", "client", "group", "time", "split", "ignore", "labels", ""]
columns_texts = st.lists(
    st.tuples(
        st.sampled_from(ROLES), st.sampled_from(["=", "", "=="]), st.sampled_from([*NAMES, "a+b", "", "+", "none"])
    ),
    max_size=4,
).map(lambda pairs: ",".join("".join(pair) for pair in pairs))


@fuzzed()
@given(
    columns_texts | st.sampled_from(TEXTS) | st.text() | documents([{"label": "label", "inputs": ["a", "b"]}]) | values
)
def test_columns(columns: Any) -> None:
    with scratch() as folder:
        survives(lambda: parse_columns(columns), folder)


numbers = st.none() | st.integers(-2, 6) | st.sampled_from([2**31, 2**63, 10**30])


@fuzzed()
@given(
    columns_texts,
    numbers,
    numbers,
    numbers,
    numbers,
    st.sampled_from(["auto", "classes", "labels", "numbers", "x"]),
    scalars,
)
def test_files_with_any_settings(
    columns: str, window: Any, stride: Any, vocabulary: Any, length: Any, kind: Any, tokenizer: Any
) -> None:
    def read() -> Any:
        words = "words" if not isinstance(tokenizer, str) or "/" in tokenizer else tokenizer
        reading = Reading(
            parse_columns(columns), window, stride, words, 8192 if vocabulary is None else vocabulary, length, kind
        )
        check_settings(kind_of_rows(NAMES, reading), reading)
        return read_columns(file, reading=reading._replace(tokenizer="words"))

    with scratch() as folder:
        file = folder / "rows.jsonl"
        file.write_bytes(as_jsonl(ROWS))
        survives(read, folder)
