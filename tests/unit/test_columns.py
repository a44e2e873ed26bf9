"""Files with columns: what is read by hand, and each defect by its row, line and column."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pluribus
from pluribus.data import Dataset, load
from pluribus.data.datasets import kind_of_data
from pluribus.data.reading import Reading, parse_columns
from pluribus.errors import (
    ConflictError,
    DamagedDataError,
    DataError,
    MismatchError,
    MissingDataError,
    MissingSettingError,
    PackageError,
    PluribusError,
    RangeError,
    UnknownNameError,
)
from refusals import refused
from terminal import Terminal

PATIENTS = """age,ward,label,client
50,a,sick,north
61.5,b,well,south
70,a,sick,south
"""


def read(path: Path, columns: str = "", **how) -> Dataset:
    return load(str(path), reading=Reading(parse_columns(columns), **how))


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "data.csv") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


def write_jsonl(rows: list[object]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


class TestTables:
    def test_by_hand(self, write):
        found = read(write(PATIENTS, "patients.csv"))
        assert (found.name, found.kind, found.columns) == ("patients", "table", ("age", "ward"))
        assert (found.categories, found.classes, found.clients) == ((("a", "b"),), ("sick", "well"), ("north", "south"))
        assert found.x.tolist() == [[50, 0], [61.5, 1], [70, 0]]
        assert (found.y.tolist(), found.client.tolist()) == ([0, 1, 0], [0, 1, 1])
        assert sum("'client'" in note for note in found.notes) == 1
        assert sum("ward (2 values)" in note for note in found.notes) == 1

    def test_categories_go_last(self, write):
        found = read(write("color,size,shape,label\nred,1,round,0\nblue,2,flat,1\n"))
        assert found.columns == ("size", "color", "shape")
        assert found.x.tolist() == [[1, 1, 1], [2, 0, 0]]

    def test_roles(self, write):
        file = write("id,a,b,who,group,out\n1,1,2,x,g,0\n2,3,4,y,g,1\n")
        found = read(file, "label=out, inputs=b+a, client=who")
        assert (found.columns, found.x.tolist(), found.clients) == (("b", "a"), [[2, 1], [4, 3]], ("x", "y"))
        assert found.group.tolist() == [0, 0]
        assert read(file, "label=out,ignore=id+who").columns == ("a", "b")
        assert read(file, "label=out,inputs=a+group").group is None, "an input that the user names is one"

    def test_every_form_gives_the_same_rows(self, write):
        tsv = PATIENTS.replace(",", "\t")
        rows = [("50", "a", "sick", "north"), (61.5, "b", "well", "south"), (70, "a", "sick", "south")]
        lines = write_jsonl([dict(zip(("age", "ward", "label", "client"), row, strict=True)) for row in rows])
        excel = "\ufeff" + PATIENTS.replace("\n", "\r\n")
        files = [(PATIENTS, "a.csv"), (tsv, "a.tsv"), (lines, "a.jsonl"), (excel, "b.CSV")]
        wanted, *others = [read(write(content, name)) for content, name in files]
        for found in others:
            assert torch.equal(found.x, wanted.x)
            assert torch.equal(found.y, wanted.y)
            assert (found.columns, found.categories, found.clients) == (
                wanted.columns,
                wanted.categories,
                wanted.clients,
            )

    def test_quotes_long_cells_and_empty_lines(self, write):
        long = "x" * 200_000
        found = read(write(f'a,label,note\n1,"one, two","two\nlines"\n\n2,"say ""hi""",{long}\n'), "ignore=note")
        assert found.classes == ("one, two", 'say "hi"')
        assert sum("1 empty line " in note for note in found.notes) == 1

    def test_booleans_are_numbers(self, write):
        found = read(write("a,b,label\ntrue,1,0\nFalse,0,1\n"))
        assert (found.x.tolist(), found.categories) == ([[1, 1], [0, 0]], ())
        found = read(write(write_jsonl([{"a": True, "label": "x"}, {"a": False, "label": "y"}]), "b.jsonl"))
        assert found.x.tolist() == [[1], [0]]

    def test_constant_and_empty_columns_stay_and_are_noted(self, write):
        found = read(write("a,same,none,label\n1,3,,0\n2,3,,1\n"))
        assert found.x.tolist() == [[1, 3, 0], [2, 3, 0]]
        assert sum("same" in note for note in found.notes) == 1
        assert sum("'none' has no values" in note for note in found.notes) == 1

    def test_few_numbers_and_words_are_a_category_with_a_note(self, write):
        found = read(write("rooms,label\n1,0\n2,1\n3+,0\n"))
        assert found.categories == (("1", "2", "3+"),)
        assert any("'3+'" in note and "row 3 (line 4)" in note for note in found.notes)

    def test_a_word_with_an_underscore_is_no_number(self, write):
        assert read(write("a,label\n1_2,0\n1_3,1\n")).categories == (("1_2", "1_3"),)

    def test_names_in_order_of_size_and_one_spelling(self, write):
        found = read(write("a,client,label\n1,10,e\u0301\n2,9,\u00e9\n3,9,E\n"))
        assert (found.clients, found.client.tolist()) == (("9", "10"), [1, 0, 0])
        assert found.classes == ("E", "\u00e9")
        assert any("code points" in note for note in found.notes)
        assert read(write("a,label\n1,1.0\n2,0.0\n")).classes == ("0", "1")
        cases = read(write("a,label\n1,Cat\n2,cat\n"))
        assert any("'Cat'" in note and "two names" in note for note in cases.notes)

    @pytest.fixture
    def far_away(self, monkeypatch):
        """A machine in another time zone."""
        with monkeypatch.context() as change:
            change.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            yield
        time.tzset()

    @pytest.mark.usefixtures("far_away")
    def test_times_and_splits(self, write):
        file = write(
            "a,time,split,label\n1,1970-01-02,train,0\n2,1970-01-02T00:00:10+00:00,Validation,1\n"
            "3,1970-01-01T00:00:01Z,test,1\n"
        )
        found = read(file)
        assert found.time.tolist() == [86400, 86410, 1]
        assert found.part.tolist() == [0, 1, 2]
        assert any("train (1 rows), val (1 rows), test (1 rows)" in note for note in found.notes)
        alone = read(write("a,split,label\n1,train,0\n2,train,1\n"))
        assert alone.part is None
        assert any("one split" in note for note in alone.notes)
        assert read(write("a,time,label\n1,0.5,0\n2,3,1\n")).time.tolist() == [0.5, 3]

    def test_files_named_after_splits(self, write, tmp_path):
        write("a,label\n1,x\n2,y\n", "sets/train.csv")
        write("label,a\ny,3\n", "sets/test.csv")
        write("a,label\n4,x\n", "sets/dev.csv")
        found = read(tmp_path / "sets")
        assert (found.name, found.x.flatten().tolist(), found.part.tolist()) == ("sets", [1, 2, 4, 3], [0, 0, 1, 2])
        assert kind_of_data(str(tmp_path / "sets"), (), False) == "table"
        write("a,label\n,x\n", "sets/test.csv")
        with refused(DataError, "row 1 (line 2)", "test.csv", "'a'"):
            read(tmp_path / "sets")
        write("b,label\n1,x\n", "sets/test.csv")
        with refused(DataError, "'a'", "train.csv", "test.csv"):
            read(tmp_path / "sets")

    def test_kinds_without_reading_the_rows(self, write):
        table, text = write(PATIENTS), write("text,label\n", "text.csv")
        assert kind_of_data(str(table), (), False) == "table"
        assert kind_of_data(str(table), (), True) == "signal"
        assert kind_of_data(str(text), (), False) == "tokens"
        assert kind_of_data(str(text), parse_columns("inputs=text"), False) == "table"
        assert kind_of_data(str(table), parse_columns("text=ward"), False) == "tokens"
        assert kind_of_data("nowhere.csv", (), False) == "table"


class TestLabels:
    def test_numbers(self, write):
        file = write("a,u,v\n1,0.5,1\n2,-3,2\n")
        found = read(file, "label=v+u", label_kind="numbers")
        assert (found.target, found.classes, found.y.tolist()) == ("numbers", ("v", "u"), [[1, 0.5], [2, -3]])

    def test_several_labels_in_one_cell_or_in_columns(self, write):
        found = read(write("a,label\n1,cat|dog\n2,\n3, dog \n"), label_kind="labels")
        assert (found.target, found.classes) == ("labels", ("cat", "dog"))
        assert found.y.tolist() == [[1, 1], [0, 0], [0, 1]]
        lists = [{"a": 1, "label": ["cat", "dog"]}, {"a": 2, "label": []}, {"a": 3, "label": ["dog"]}]
        assert read(write(write_jsonl(lists), "b.jsonl"), label_kind="labels").y.tolist() == found.y.tolist()
        columns = read(write("a,cat,dog\n1,1,1\n2,0,0\n3,0,1\n"), "label=cat+dog", label_kind="labels")
        assert (columns.classes, columns.y.tolist()) == (found.classes, found.y.tolist())

    @pytest.mark.parametrize(
        ("content", "columns", "how", "kind", "facts"),
        [
            ("a,label\n1,3.27\n", "", {}, DataError, ("row 1 (line 2)", "3.27", "'label'", "--label-kind numbers")),
            ("a,b,c\n1,2,3\n", "label=b+c", {}, ConflictError, ("--label-kind",)),
            ("a,label\n1,x\n", "", {"label_kind": "numbers"}, DataError, ("row 1 (line 2)", "'x'", "'label'")),
            ("a,b,c\n1,1,2\n", "label=b+c", {"label_kind": "labels"}, DataError, ("row 1 (line 2)", "'c'", "0 or 1")),
            ("a,label\n1,\n", "", {"label_kind": "labels"}, DataError, ("'label'", "no label")),
            ("a,label\n1,x\n2,\n", "", {}, DataError, ("row 2 (line 3)", "'label'")),
            (
                "a,label\n" + "".join(f"1,{row}\n" for row in range(30)),
                "",
                {},
                DataError,
                ("'label'", "30 different values", "--label-kind numbers"),
            ),
        ],
        ids=["fraction", "two columns", "words", "not 0 or 1", "none at all", "missing", "identifiers"],
    )
    def test_refused(self, write, content, columns, how, kind, facts):
        with refused(kind, *facts):
            read(write(content), columns, **how)


class TestBadFiles:
    @pytest.mark.parametrize(
        ("content", "kind", "facts"),
        [
            ("", DataError, ("empty",)),
            ("a,label\n", DataError, ("no rows",)),
            ("a,label\n1,0\n2\n", DataError, ("row 2 (line 3)", "1 cells", "2 columns")),
            ('a,label\n"1\n",0\n2,0,5\n', DataError, ("row 2 (line 4)", "3 cells")),
            ("a,a,label\n1,2,0\n", DataError, ("two columns", "'a'")),
            (",a,label\n0,1,0\n", DataError, ("column 1", "no name", "index=False")),
            ('a,label\n"1,0\n', DamagedDataError, ("line 2",)),
            (b"a,label\n1,caf\xe9\n", DamagedDataError, ("UTF-8", "line 2", "0xe9")),
            ("a,target\n1,0\n", MissingSettingError, ("'label'", "a, target", "--columns label=NAME")),
            ("a;label\n1;0\n", MissingSettingError, ("'label'", "commas")),
            ("label\n1\n", DataError, ("no column", "label")),
            ("a,label\n1,0\n,1\n", DataError, ("row 2 (line 3)", "'a'", "--columns ignore=a")),
            ("a,label\n1,0\nNaN,1\n", DataError, ("row 2 (line 3)", "'a'", "no value")),
            ("a,label\nx,0\n ,1\n", DataError, ("row 2 (line 3)", "'a'", "no value")),
            ("a,label\n1,0\ninf,1\n", DataError, ("row 2 (line 3)", "'a'", "finite")),
            ("a,label\n1e300,0\n", DataError, ("row 1 (line 2)", "1e+300")),
            (
                "a,label\n" + "".join(f"{row},0\n" for row in range(40)) + "old,1\n",
                DataError,
                ("'a'", "row 41 (line 42)", "'old'", "--columns ignore=a"),
            ),
            (
                "my id,label\n" + "".join(f"w{row},{row % 2}\n" for row in range(1001)),
                DataError,
                ("'my id'", "1001", "--columns 'ignore=my id'"),
            ),
            ("a,split,label\n1,train,0\n2,tets,1\n", DataError, ("row 2 (line 3)", "'split'", "'tets'")),
            ("a,time,label\n1,noon,0\n", DataError, ("row 1 (line 2)", "'time'", "'noon'")),
            ("a,client,label\n1,,0\n", DataError, ("row 1 (line 2)", "'client'")),
        ],
        ids=lambda value: str(value)[:30].replace("\n", "/") if isinstance(value, str | bytes) else "",
    )
    def test_csv(self, write, content, kind, facts):
        with refused(kind, *facts):
            read(write(content))

    @pytest.mark.parametrize(
        ("content", "kind", "facts"),
        [
            ("\n\n", DataError, ("empty",)),
            ('{"a": 1, "label": 0}\n[1]\n', DamagedDataError, ("line 2", "object", "[1]")),
            ('{"a": 1, "label": 0}\n\n{"a": 1\n', DamagedDataError, ("line 3", "JSON")),
            ("[" * 100_000, DamagedDataError, ("line 1", "JSON")),
            ('{"a": 1, "label": 0}\n{"label": 1}\n', DataError, ("row 2 (line 2)", "'a'", "no value")),
            ('{"a": 1, "label": 0}\n\n{"a": null, "label": 1}\n', DataError, ("row 2 (line 3)", "'a'")),
            ('{"a": [1], "label": 0}\n', DataError, ("row 1 (line 1)", "'a'", "a list")),
            ('{"a": {}, "label": 0}\n', DataError, ("row 1 (line 1)", "'a'", "an object")),
            ('{"a": "\\ud800", "label": 0}\n', DataError, ("row 1 (line 1)", "'a'", "Unicode")),
        ],
        ids=lambda value: str(value)[:30].replace("\n", "/") if isinstance(value, str) else "",
    )
    def test_jsonl(self, write, content, kind, facts):
        with refused(kind, *facts):
            read(write(content, "a.jsonl"))

    def test_columns_that_are_not_there_or_have_two_roles(self, write, tmp_path):
        file = write(PATIENTS)
        with refused(UnknownNameError, "'wards'", "age, ward, label, client"):
            read(file, "client=wards")
        with refused(ConflictError, "'ward'", "client", "group"):
            read(file, "client=ward,group=ward")
        with refused(ConflictError, "text", "inputs"):
            read(file, "text=ward,inputs=age")
        with refused(ConflictError, "--stride", "--window"):
            read(file, stride=3)
        with refused(MismatchError, "--length", "text"):
            read(file, length=3)
        with refused(MissingDataError, tmp_path / "none.csv"):
            read(tmp_path / "none.csv")
        with refused(MismatchError, "--image-size"):
            load(str(file), image_size=8)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=60),
        st.text("ab,\n\"1. {}[]:|'\\", max_size=60).map(lambda text: f"a,label\n{text}".encode()),
        st.text('ab1.,:{}[]" \n\\tnul', max_size=60).map(lambda text: f'{{"a": 1, "label": 2}}\n{text}'.encode()),
    ),
    suffix=st.sampled_from([".csv", ".tsv", ".jsonl"]),
    how=st.sampled_from(
        [
            Reading(),
            Reading(parse_columns("text=a")),
            Reading(window=2),
            Reading(label_kind="labels"),
            Reading(label_kind="numbers"),
            Reading(parse_columns("time=a,inputs=label,label=b")),
        ]
    ),
)
def test_any_bytes_are_read_or_refused(tmp_path, content, suffix, how):
    file = tmp_path / f"any{suffix}"
    file.write_bytes(content)
    with suppress(PluribusError):
        assert len(load(str(file), reading=how).y) > 0


class TestParquet:
    def test_without_the_package(self, write, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with refused(PackageError, "pluribus[parquet]"):
            read(write(b"", "a.parquet"))

    def test_by_hand(self, tmp_path):
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        columns = {
            "age": arrow.array([50, 61, 70]),
            "dose": arrow.array([0.5, 1.5, 2.5], arrow.float32()),
            "smokes": arrow.array([True, False, True]),
            "ward": arrow.array(["a", "b", "a"]).dictionary_encode(),
            "time": arrow.array(np.array(["1970-01-02", "1970-01-03", "1970-01-04"], "datetime64[ms]")),
            "label": ["sick", "well", "sick"],
        }
        file = tmp_path / "a.parquet"
        parquet.write_table(arrow.table(columns), file)
        found = read(file)
        assert (found.columns, found.categories) == (("age", "dose", "smokes", "ward"), (("a", "b"),))
        assert found.x.tolist() == [[50, 0.5, 1, 0], [61, 1.5, 0, 1], [70, 2.5, 1, 0]]
        assert found.time.tolist() == [86400, 172800, 259200]
        assert kind_of_data(str(file), (), False) == "table"
        parquet.write_table(arrow.table({"a": [1, None], "label": [0, 1]}), file)
        with refused(DataError, "row 2 of", "'a'", "no value"):
            read(file)
        file.write_bytes(b"PAR1 and then nothing")
        with refused(DamagedDataError, file):
            read(file)


class TestCheck:
    def test_facts_of_a_table(self, write):
        found = pluribus.check_data(write(PATIENTS))
        assert found.facts["roles"] == {"inputs": ["age", "ward"], "label": ["label"], "client": ["client"]}
        assert found.facts["clients"] == {"north": 1, "south": 2}
        assert found.facts["labels_of_one_client"] == {"well": "south"}
        assert {place.label: rows for place, rows in found.counts.items()} == {"sick": 2, "well": 1}

    def test_settings_as_flags(self, write, terminal: Terminal):
        file = write("x,who,act\n" + "".join(f"{at},{at // 5},{at // 7}\n" for at in range(10)))
        told = terminal("data", "check", file, "--columns", "label=act,client=who", "--window", 2, "--json")
        assert (told.code, told.err) == (0, "")
        assert (told.json["facts"]["kind"], told.json["facts"]["shape"]) == ("signal", [1, 2])
        assert told.json["facts"]["clients"] == {"0": 2, "1": 2}
        assert "2 of 10 samples" in " ".join(told.json["notes"])
        answer = terminal("data", "check", file, "--columns", "text=act,label=who")
        for fact in ("10 rows", "2 classes", "tokens", "text act"):
            assert fact in " ".join(answer.out.split())
        terminal.refused("data", "check", file, "--columns", "label=acts").check(UnknownNameError, "'acts'", "x, who")
        small = terminal.refused("data", "check", file, "--columns", "label=act", "--window", 1)
        small.check(RangeError, "--window", 2)

    def test_a_run_of_natural_clients(self, write):
        rows = "".join(f"{at % 3},{at},{'pq'[at % 2]},{at % 4 // 2}\n" for at in range(80))
        file = write("a,b,client,label\n" + rows)
        result = pluribus.run("local", data=file, models="mlp-64", partition="natural", rounds=1, progress=False)
        assert len(result.clients) == 2
        assert any("'client'" in note for note in result.warnings)
