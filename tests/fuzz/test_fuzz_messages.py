"""Messages and envelopes from other machines: accepted, or refused with a sentence."""

from __future__ import annotations

import json
from typing import Any

import safetensors.torch
import torch
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import documents, fuzzed, mutated

from pluribus.errors import MessageError
from pluribus.message import Dim, Field, Message, Rows, decode, encode
from pluribus.sites.agreement import Agreement
from pluribus.sites.envelope import MAGIC, seal, unseal
from pluribus.sites.remote import _read_metrics, _read_steps

SCHEMA = {
    "head": Field((2, 3)),
    "means": Field((4, 2), form="rows"),
    "count": Field((Dim("held", 4),), torch.int64, least=0, most=100),
    "half": Field((), torch.float16, optional=True),
}
HONEST = encode(
    Message(
        {
            "head": torch.arange(6.0).view(2, 3),
            "means": Rows(torch.ones(4, 2), torch.tensor([True, False, True, False])),
            "count": torch.tensor([1, 2]),
            "half": torch.tensor(0.5, dtype=torch.float16),
        }
    ),
    SCHEMA,
    "client 3",
)
HEADER = json.loads(HONEST[8 : 8 + int.from_bytes(HONEST[:8], "little")])
TENSORS = HONEST[8 + int.from_bytes(HONEST[:8], "little") :]
OTHER = safetensors.torch.save({"head": torch.ones(2, 3)}, metadata={"note": "text"})


def check_message(data: bytes) -> None:
    with scratch() as folder:
        found = survives(lambda: decode(data, SCHEMA, "client 3"), folder)
    if isinstance(found, Message):
        assert found.tensor("head").isfinite().all()
        assert found.rows("means").value.shape == (4, 2)
        assert 0 <= len(found.tensor("count")) <= 4
    else:
        assert isinstance(found, MessageError)
        assert "client 3" in str(found)


@fuzzed()
@given(mutated([HONEST, OTHER]))
def test_messages_with_changed_bytes(data: bytes) -> None:
    check_message(data)


@fuzzed()
@given(documents([HEADER]), st.integers(-3, 8))
def test_messages_with_a_forged_header(header: Any, more: int) -> None:
    text = json.dumps(header).encode()
    tensors = TENSORS[:more] if more < 0 else TENSORS + bytes(more)
    check_message(len(text).to_bytes(8, "little") + text + tensors)


# Envelopes ------------------------------------------------------------------------------------------------------------

AGREEMENT: dict[str, Any] = {
    "run": "fedgh-1", "method": "fedgh", "hyper": {"server_lr": 0.01}, "classes": ["a", "b"],
    "input": {"kind": "image", "shape": [1, 8, 8], "vocabulary": 0, "categories": [], "whole": False},
    "width": 16, "projector": "pool", "clients": 2, "rounds": 3, "seed": 0,
    "rule": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "decay": 1.0},
    "epochs": 1, "batch": 10, "optimizer_life": "round", "augment": ["flip"], "warmup": 0, "public": [3, 4],
    "public_digest": "", "target": {"kind": "classes"}, "columns": [], "categories": [], "class_weights": "equal",
    "metrics": ["accuracy"],
}  # fmt: skip
TABLE = AGREEMENT | {
    "input": {"kind": "table", "shape": [3], "categories": [2]}, "columns": ["a", "b", "c"], "categories": [["x", "y"]],
    "augment": [],
}  # fmt: skip
HEAD = {"verb": "work", "t": 1, "stage": 0, "client": 0, "agreement": AGREEMENT, "figures": {"after": {"val": 0.5}}}
BLOBS = [
    seal(HEAD, {"up": HONEST, "down": b""}),
    seal({"refused": "no"}, {}),
    seal({"steps": 3, "loss": 0.5}, {"up": b"x"}),
]


@fuzzed()
@given(mutated(BLOBS))
def test_envelopes_with_changed_bytes(data: bytes) -> None:
    with scratch() as folder:
        survives(lambda: unseal(data), folder)


@fuzzed()
@given(documents([{"head": HEAD, "parts": {"up": 3, "down": 0}}]))
def test_envelopes_with_a_forged_head(facts: Any) -> None:
    text = json.dumps(facts).encode()
    with scratch() as folder:
        survives(lambda: unseal(MAGIC + len(text).to_bytes(8, "big") + text + b"abc"), folder)


def as_sent(facts: Any) -> Any:
    """What is left of facts after they travelled, or an error if an envelope refuses them."""
    return unseal(seal({"facts": facts}, {})).head["facts"]


@fuzzed()
@given(documents([AGREEMENT, TABLE]))
def test_agreements_of_a_server(facts: Any) -> None:
    from pluribus import __version__

    def read() -> Any:
        agreed = Agreement.of(as_sent(facts | {"version": __version__}))
        return agreed.build_method(), agreed.task(), agreed.local()

    with scratch() as folder:
        survives(read, folder)


@fuzzed()
@given(
    documents([{"after": {"val": 0.5, "test": 0.25}, "before": {"val": None, "test": 1.0}}]), documents([{"steps": 3}])
)
def test_metrics_and_steps_of_a_site(metrics: Any, steps: Any) -> None:
    def read() -> Any:
        _read_metrics(as_sent(metrics), ("after", "before"), ["accuracy"])
        return _read_steps(as_sent(steps).get("steps"))

    with scratch() as folder:
        survives(read, folder)
