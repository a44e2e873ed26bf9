"""Lessons of peers that are learned again without a liar, and saved servers that no client can use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import assemble_tiny, make_host
from pluribus.host import Host
from pluribus.message import Message, decode, encode
from pluribus.method import Exchange
from pluribus.methods.fedmd import FedMD
from pluribus.request import Learn, Reply, Teach
from pluribus.server_half import ServerHalf

MOST = torch.finfo(torch.float32).max
NUMBERS = {"data": "diabetes", "models": "mlp-64", "partition": "iid", "clients": 4, "public_fraction": 0.2}


def taught(host: Host) -> dict[int, bytes]:
    """What every client tells its students in the first round."""
    replies = {k: host.answer(Teach(k, 0)) for k in range(4)}
    return {k: reply.up for k, reply in replies.items() if isinstance(reply, Reply) and isinstance(reply.up, bytes)}


def lie(host: Host, k: int, data: bytes, number: float) -> bytes:
    schema = host.wires(k)[0].up
    message = decode(data, schema, "test")
    return encode(Message({**message, "posterior": torch.full_like(message.tensor("posterior"), number)}), schema, "")


def learned(inbox: dict[int, bytes], **settings: Any) -> tuple[Reply, dict[str, torch.Tensor]]:
    """Client 0 after a lesson, from a fresh host."""
    host = make_host(assemble_tiny("fedh2l", **NUMBERS, **settings))
    taught(host)
    reply = host.answer(Learn(0, 0, inbox))
    assert isinstance(reply, Reply)
    return reply, {name: value.clone() for name, value in host.client(0).all_tensors().items()}


@pytest.mark.parametrize("number", [MOST, 1e30, -1e30])
def test_a_lesson_is_learned_again_without_the_liar(number: float) -> None:
    """The student is as if the liar had said nothing."""
    host = make_host(assemble_tiny("fedh2l", **NUMBERS))
    told = taught(host)
    honest = {k: told[k] for k in (1, 3)}
    reply, state = learned({**honest, 2: lie(host, 2, told[2], number)})
    assert reply.left_out.keys() == {2}
    assert "student" in reply.left_out[2]
    others, expected = learned(honest)
    assert others.left_out == {}
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.parametrize("number", [0.0, 1e-45])
def test_small_numbers_are_no_lies(number: float) -> None:
    host = make_host(assemble_tiny("fedh2l", **NUMBERS))
    told = taught(host)
    assert learned({1: told[1], 2: lie(host, 2, told[2], number)})[0].left_out == {}


def test_if_all_teachers_lie_nothing_is_learned() -> None:
    host = make_host(assemble_tiny("fedh2l", **NUMBERS))
    told = taught(host)
    reply, state = learned({k: lie(host, k, told[k], MOST) for k in (1, 2)})
    assert reply.left_out.keys() == {1, 2}
    before = host.client(0).all_tensors()
    assert all(torch.equal(value, before[name]) for name, value in state.items())


@pytest.mark.parametrize("number", [torch.inf, 1e30])
def test_a_spoiled_state_is_found_in_every_exchange(number: float) -> None:
    """FedMD sends its state in the second exchange only."""
    parts = assemble_tiny("fedmd", pretrain_public=0, pretrain_private=0)
    assert isinstance(parts.method, FedMD)
    assert parts.method.exchanges[0] == Exchange(None, "show", "agree")
    half = ServerHalf(parts.method, parts.task, parts.cards)
    assert half.can_go_on(0)
    half.server.state.consensus.fill_(number)
    assert not half.can_go_on(0)
