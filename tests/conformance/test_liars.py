"""A client whose well-formed messages hold impossible numbers: it is left out and named, and the server goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from conftest import new_folder
from pluribus.conformance.cases import Case
from pluribus.conformance.hands import present
from pluribus.errors import SchemaError
from pluribus.host import make_host
from pluribus.internal.safe_merge import sizes_of
from pluribus.message import LARGEST, Message, Rows, Schema, Value, decode, encode
from pluribus.method import PeerMethod, methods
from pluribus.request import Enrol, Reply, Work
from pluribus.server_half import ServerHalf
from refusals import refused

NAMES = [name for name, cls in methods().items() if not issubclass(cls, PeerMethod)]
HUGE = {"the largest float": torch.finfo(torch.float32).max, "1e30": 1e30}
TINY = {"denormals": 1e-45, "zeros": 0.0}


@dataclass
class Rounds:
    """The rounds of a tiny case, as its server sees them."""

    half: ServerHalf
    stage: int = 0
    uploads: Mapping[int, Message] = field(default_factory=dict)


def rounds_of(name: str, enrolment: Callable[[Schema, bytes], bytes] = lambda schema, up: up) -> Iterator[Rounds]:
    """Stop before every merge of two rounds, with the uploads of honest clients. The last one may lie at enrolment."""
    parts = Case(name, Path(new_folder())).parts()
    host = make_host(parts, lambda k: None)
    half = ServerHalf(parts.method, parts.task, parts.cards, public=parts.public_at_server)

    def answer(request: Enrol | Work) -> bytes | None:
        reply = host.answer(request)
        assert isinstance(reply, Reply)
        assert isinstance(reply.up, bytes | None)
        return reply.up

    for t in range(parts.task.rounds):
        half.begin(t)
        clients = present(parts, t)
        for k in [k for k in clients if parts.method.enrols and k not in half.enrolled]:
            up = answer(Enrol(k)) or b""
            half.enrol(k, up if k < max(clients) else enrolment(half.wires(k)[0].once, up))
        for stage in range(len(parts.method.exchanges)):
            sent = {k: answer(Work(k, t, stage, half.download(stage, k))) for k in clients}
            uploads = {k: half.read(stage, k, up) for k, up in sent.items() if up is not None}
            if uploads:
                yield Rounds(half, stage, uploads)
                assert half.aggregate(stage, uploads) == {}


def filled(value: Value, number: float) -> Value:
    """The same value with this number everywhere."""
    if isinstance(value, Rows):
        return Rows(value.value.masked_fill(value.held.view(-1, *[1] * (value.value.dim() - 1)), number), value.held)
    return torch.full_like(value, number)


def lies_of(upload: Message, numbers: Mapping[str, float]) -> Iterator[tuple[str, Message]]:
    """The upload with each number in each field, and in all of them."""
    fields = [name for name, value in upload.items() if _data(value).is_floating_point()]
    for what, number in numbers.items():
        for some in [*([name] for name in fields), fields]:
            lie = {name: filled(value, number) if name in some else value for name, value in upload.items()}
            yield f"{what} in {', '.join(some)}", Message(lie)


def _data(value: Value) -> Tensor:
    return value.value if isinstance(value, Rows) else value


def merged(now: Rounds, liar: int, lie: Message) -> dict[int, str]:
    """Merge a lie, look at the server, and put it back."""
    server = now.half.server
    before = {name: value.clone() for name, value in now.half.state().items()}
    notes, fits = dict(server.notes), server.fits
    try:
        left_out = now.half.aggregate(now.stage, {**now.uploads, liar: lie})
        assert all(size <= LARGEST for size in sizes_of(now.half.state()).values())
        now.half.try_downloads((now.stage + 1) % len(now.half.method.exchanges), now.uploads)
        return left_out
    finally:
        with torch.no_grad():
            for name, value in now.half.state().items():
                value.copy_(before[name])
        server.notes, server.fits = notes, fits


@pytest.mark.parametrize("name", NAMES)
def test_no_message_spoils_the_server(name: str) -> None:
    """Each number is tried in each field. Only the liar is left out, and only if its numbers are impossible."""
    for now in rounds_of(name):
        liar = max(now.uploads)
        for what, lie in lies_of(now.uploads[liar], HUGE):
            assert merged(now, liar, lie).keys() == {liar}, what
        for what, lie in lies_of(now.uploads[liar], TINY):
            assert merged(now, liar, lie) == {}, what


ENROLS = [name for name, cls in methods().items() if cls.enrols]


@pytest.mark.parametrize("name", ENROLS)
@pytest.mark.parametrize("number", [0, 1, 2**31 - 1])
def test_no_enrolment_spoils_the_server(name: str, number: int) -> None:
    def lie(schema: Schema, up: bytes) -> bytes:
        fields = decode(up, schema, "enrolment").items()
        return encode(Message({field: filled(value, number) for field, value in fields}), schema, "enrolment")

    for now in rounds_of(name, lie):
        assert merged(now, max(now.uploads), now.uploads[max(now.uploads)]) == {}


def test_counts_at_enrolment_are_not_negative() -> None:
    def lie(schema: Schema, up: bytes) -> bytes:
        counts = decode(up, schema, "enrolment").tensor("counts")
        return safetensors.torch.save({"counts": counts.fill_(-1)})

    with refused(SchemaError, "enrolment of client 3", "'counts'", -1):
        next(rounds_of("fedgen", lie))


@pytest.mark.parametrize("name", NAMES)
def test_a_merge_leaves_the_uploads_as_they_are(name: str) -> None:
    """Otherwise it could not be done again."""
    for now in rounds_of(name):
        before = {k: Message(upload) for k, upload in now.uploads.items()}
        merged(now, min(now.uploads), now.uploads[min(now.uploads)])
        for k, upload in now.uploads.items():
            assert all(torch.equal(_data(upload[field]), _data(before[k][field])) for field in upload), (k, name)
