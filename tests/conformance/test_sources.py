"""Every method of the library declares where each field of its uploads comes from, and its family."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

import pluribus
from conftest import assemble_tiny
from pluribus.listing import list_methods, name_sources
from pluribus.message import NOT_DECLARED, Field, Source, Wire, sources_of
from pluribus.method import Method, Need, methods
from pluribus.task import Card, Task

LIBRARY = [name for name, cls in methods().items() if cls.__module__.startswith("pluribus.")]

# method, settings, and the sources of fields that the method's equations name
KNOWN: list[tuple[str, dict[str, Any], dict[str, list[str]]]] = [
    ("local", {}, {}),
    ("fedgh", {}, {"class sums": ["means"]}),
    ("fedproto", {"weighting": "samples"}, {"class sums": ["prototypes"], "statistic": ["counts"]}),
    ("fedmd", {}, {"public": ["logits"]}),
    ("fccl", {}, {"public": ["logits"]}),
    ("kt-pfl", {}, {"public": ["soft"]}),
    ("fedh2l", {}, {"public": ["posterior", "accuracy"]}),
    ("fedl2g-l", {}, {"gradient": ["gradient"]}),
    ("fedhpl", {}, {"class sums": ["logits"], "statistic": ["counts"]}),
    ("fedhpl", {"denominator": "all"}, {"class sums": ["logits"], "statistic": ["counts", "sizes"]}),
    ("fedhpl", {"upload": "full"}, {"rows": ["logits", "labels"]}),
    ("fedhpl", {"upload": "none"}, {}),
    ("hetlora", {"alone": True}, {}),
]


def declared(method: str, **settings: Any) -> dict[str, list[str]]:
    parts = assemble_tiny(method, **settings)
    return sources_of(parts.method.wires(parts.task, parts.cards[0]))


@pytest.mark.parametrize("method", LIBRARY)
def test_every_field_has_a_source(method: str) -> None:
    found = declared(method, **({"rounds": 20} if "matched" in method else {}))
    assert set(found) <= set(get_args(Source))


@pytest.mark.parametrize(("method", "settings", "expected"), KNOWN)
def test_sources_are_those_of_the_equations(
    method: str, settings: dict[str, Any], expected: dict[str, list[str]]
) -> None:
    assert declared(method, **settings) == expected


def test_what_is_sent_once_counts_too() -> None:
    assert declared("fedgen")["statistic"] == ["counts"]
    assert all(name.startswith("head.") for name in declared("fedgen")["weights"])


def test_parts_of_models_are_weights() -> None:
    assert {*declared("flora")} == {*declared("flexlora")} == {*declared("hetlora")} == {"weights"}
    assert set(declared("fedhpl", share_head=True, share_prompts=True)) == {"class sums", "statistic", "weights"}


@dataclasses.dataclass(frozen=True)
class Undeclared(Method):
    """A user's own method, which declares no source."""

    def schema(self, task: Task, card: Card) -> Wire:
        return Wire(up={"mean": Field((2,))})


def test_a_field_without_a_source_is_shown_as_such() -> None:
    parts = assemble_tiny(Undeclared)
    assert sources_of(parts.method.wires(parts.task, parts.cards[0])) == {NOT_DECLARED: ["mean"]}


def test_the_list_has_fields_by_source() -> None:
    (row,) = list_methods("fedgh")
    assert row["sources"] == {"class sums": ["means"]}
    assert name_sources(row["sources"]) == "class sums"
    (refused,) = pluribus.list_methods("fedavg", models="tiny,mlp-64")
    assert refused["refused"]
    assert name_sources(refused["sources"]) == "-"


# ---- families --------------------------------------------------------------------------------------------------------


def test_every_method_of_the_library_has_a_family() -> None:
    assert [name for name in LIBRARY if methods()[name].family == "own"] == []
    assert Undeclared.family == "own"


@pytest.mark.parametrize(
    ("method", "family"),
    [("local", "baseline"), ("fedrep", "one model"), ("fedgh", "knowledge"), ("fedrolex", "sub-models")],
)
def test_the_list_has_the_family(method: str, family: str) -> None:
    (row,) = list_methods(method)
    assert row["family"] == family


def test_a_family_that_shares_one_model_needs_one() -> None:
    """Families are about what may differ between clients, which needs declare."""
    for name in LIBRARY:
        cls = methods()[name]
        if cls.family in ("one model", "knowledge", "layers", "second model"):
            assert (Need.SAME_MODEL in cls.needs) == (cls.family == "one model"), name
