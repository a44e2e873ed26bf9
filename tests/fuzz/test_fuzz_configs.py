"""Config files: experiments, studies, comparisons, federation.toml and site.toml, with wrong values at every key."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guard import scratch, survives
from hypothesis import given
from mutate import TRAP, documents, fuzzed, mutated, to_toml_bytes

from conftest import few_digits
from pluribus.assembly import assemble
from pluribus.errors import PluribusError
from pluribus.experiment import Experiment, experiment, from_toml
from pluribus.sites.config import SiteFile, read_site
from pluribus.sites.keys import read_site_keys
from pluribus.sites.serve import read_federation
from pluribus.storage.toml import read_toml, to_toml
from pluribus.study.definition import to_study
from pluribus.study.plan import common_settings, plan_comparison, read_rows
from pluribus.study.rows import Row

EXPERIMENT = {name: value for name, value in Experiment().settings().items() if value is not None}
EXPERIMENT |= {"data": few_digits(40, 3), "clients": 2, "device": "cpu", "threads": 1, "workers": 1, "min_samples": 1}
EXPERIMENT |= {"models": "mlp-64", "lr_steps": [2, 4], "alpha": 1.0, "width": 8, "image_size": 8}
OTHERS: list[dict[str, Any]] = [
    {"method": "fedproto", "models": {"0": "mlp-64", "1": "cnn-16"}, "clients": 2, "hyper": {"pull": 0.5}},
    {
        "method": "fedgh",
        "data": "digits",
        "models": ["mlp-64"],
        "columns": {"label": "a", "inputs": ["b"]},
        "window": 4,
    },
]
STUDY: dict[str, Any] = {
    "title": "A study", "seeds": 2, "seed": 0, "baseline": "alone", "view": "after",
    "settings": {"clients": 4, "rounds": 5, "models": "mlp-64", "lr": 0.1, "data": few_digits(40, 3)},
    "axes": {"alpha": [0.1, 1.0], "server_lr": [0.1]},
    "rows": {"alone": {"method": "local"}, "client": {"method": "fedgh", "settings": {"server_step": "client"}}},
}  # fmt: skip
FEDERATION: dict[str, Any] = {
    "sites": ["north", "south"], "classes": ["0", "1"], "image": [1, 8, 8], "label_kind": "classes", "keys": "keys",
    "listen": "0.0.0.0:9092", "deadline": 600.0, "wait": 3600.0, "largest_message": 256, "largest_norm": 1000.0,
    "out": "federation", "rounds": 3, "lr": 0.1, "batch_size": 10, "server_lr": 0.1, "augment": "flip", "width": 8,
}  # fmt: skip
TABLE = {name: value for name, value in FEDERATION.items() if name not in ("image", "augment")} | {
    "input": {"kind": "table", "columns": ["a", "b"], "categories": {"b": ["x", "y"]}, "shape": [2]}
}
SUPERLINK = FEDERATION | {
    "superlink": "127.0.0.1:9093", "superlink_ca": "ca.crt", "nodes": {"north": 1, "south": "12345678901234567890"},
}  # fmt: skip
SITE: dict[str, Any] = {
    "name": "north", "server": "localhost:9092", "keys": "keys", "model": "mlp-64", "state": "state", "data": "digits",
    "train": "a", "val": "b", "test": "c", "public": "d", "image_size": 8, "val_fraction": 0.1, "test_fraction": 0.2,
    "split_by": "rows", "columns": {"label": "a"}, "label_kind": "auto", "window": 4, "stride": 2, "tokenizer": "words",
    "vocabulary": 100, "length": 5, "normalize": "auto", "classes": ["a"], "weights": "timm", "allow": ["a.b"],
    "device": "cpu", "threads": 1, "wait": 60.0,
}  # fmt: skip
COMPARED: dict[str, Any] = {"clients": 2, "lr": 0.1, "hyper": {}, "rows": {"a": {"method": "fedgh", "server_lr": 0.1}}}
KEYS = {"north": "ecdsa-sha2-nistp384 AAAA", "south": "x"}

Read = Callable[[Path], Any]
READERS: dict[str, tuple[list[dict[str, Any]], Read]] = {
    "experiment": ([EXPERIMENT, *OTHERS], lambda path: Experiment(**from_toml(path))),
    "study": ([STUDY], lambda path: to_study(path)),
    "federation": ([FEDERATION, TABLE, SUPERLINK], lambda path: read_federation(path, "fedgh")),
    "site": ([SITE], read_site),
    "keys": ([KEYS], read_site_keys),
    "comparison": ([COMPARED], lambda path: (common_settings(path), read_rows(path))),
}


def check_file(content: bytes, read: Read) -> Any:
    with scratch() as folder:
        path = folder / "config.toml"
        path.write_bytes(content)
        return survives(lambda: read(path), folder)


@pytest.mark.parametrize("kind", READERS)
def test_files_with_changed_bytes(kind: str) -> None:
    valid, read = READERS[kind]

    @fuzzed(0.5)
    @given(mutated([to_toml_bytes(one) for one in valid]))
    def check(content: bytes) -> None:
        check_file(content, read)

    check()


@pytest.mark.parametrize("kind", READERS)
def test_files_with_wrong_values(kind: str) -> None:
    valid, read = READERS[kind]

    @fuzzed()
    @given(documents(valid))
    def check(document: dict[str, Any]) -> None:
        found = check_file(to_toml_bytes(document), read)
        if not isinstance(found, PluribusError):
            assert not any(math.isnan(one) for one in _floats(found)), "no setting is NaN"

    check()


def _floats(found: Any) -> list[float]:
    parts = found if isinstance(found, tuple) else (found,)
    settings = [value for part in parts if isinstance(part, Experiment | SiteFile) for value in vars(part).values()]
    return [value for value in settings if isinstance(value, float)]


@fuzzed()
@given(documents([EXPERIMENT]))
def test_experiments_are_assembled_or_refused(document: dict[str, Any]) -> None:
    content = to_toml_bytes(document)

    def read(path: Path) -> Any:
        described = experiment(None, path)
        if described.data == EXPERIMENT["data"]:  # others may be downloaded
            assemble(described)
        return described.settings()

    if f"{TRAP}.".encode() not in content:  # the user names this file, and its code with it
        check_file(content, read)


@fuzzed()
@given(documents([COMPARED | {"data": few_digits(40, 3), "models": "mlp-64", "device": "cpu"}]))
def test_comparisons_are_planned_or_refused(document: dict[str, Any]) -> None:
    content = to_toml_bytes(document)

    def read(path: Path) -> Any:
        if from_toml(path, ["rows"]).get("data") == few_digits(40, 3):
            how: dict[str, Any] = {"seeds": 1, "seed": 0, "baseline": None, "target": None, "view": "after"}
            rows = [Row("alone", "local"), *read_rows(path)]
            return plan_comparison(rows, equal_steps=False, config=path, own={}, settings={}, **how)
        return None

    if f"{TRAP}.".encode() not in content:
        check_file(content, read)


def without_empty(value: Any) -> Any:
    """Without empty tables, which are not written. NaN, which is not equal to itself, as text."""
    if isinstance(value, dict):
        kept = {name: without_empty(one) for name, one in value.items()}
        return {name: one for name, one in kept.items() if one != {}}
    return [without_empty(one) for one in value] if isinstance(value, list) else repr(value)


@fuzzed()
@given(documents([EXPERIMENT, STUDY, FEDERATION]))
def test_toml_is_read_as_it_was_written(document: dict[str, Any]) -> None:
    with scratch() as folder:
        path = folder / "config.toml"
        path.write_bytes(to_toml_bytes(document))
        found = survives(lambda: read_toml(path), folder)
        if not isinstance(found, PluribusError):
            path.write_text(to_toml(found), encoding="utf-8")
            again = survives(lambda: read_toml(path), folder)
            assert without_empty(again) == without_empty(found)
