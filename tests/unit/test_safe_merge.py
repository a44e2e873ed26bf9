"""Merges that are done again without a client: who is left out, what is put back, and what is raised as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from conftest import assemble_tiny
from pluribus.errors import NotFiniteError
from pluribus.internal.blame import blame_of
from pluribus.internal.safe_merge import SafeMerge, sizes_of
from pluribus.message import Message
from pluribus.server import Server

MOST = torch.finfo(torch.float32).max


def server_with(start: float = 0.0) -> Server:
    parts = assemble_tiny("local")
    server = Server(parts.task, parts.cards)
    server.state.total = torch.tensor([start, 0.0])
    server.state.fix()
    return server


def add(server: Server, uploads: Mapping[int, Message]) -> None:
    """Sum the squares, and note who was there."""
    server.state.total = server.state.total + sum(up.tensor("x") ** 2 for up in uploads.values())
    server.fits += 1
    server.notes["who"] = sorted(uploads)


def sent(*numbers: float) -> dict[int, Message]:
    return {k: Message({"x": torch.tensor([number, 1.0])}) for k, number in enumerate(numbers)}


def merge(server: Server, uploads: Mapping[int, Message], how: Any = add) -> dict[int, str]:
    return SafeMerge(server, how, lambda clients: None)(uploads)


def test_honest_clients_are_merged_once() -> None:
    server = server_with()
    assert merge(server, sent(1, 2, 3)) == {}
    assert server.state.total.tolist() == [14, 3]
    assert server.fits == 1


@pytest.mark.parametrize("number", [MOST, 1e30, -1e30, 1e10])
def test_the_merge_is_done_again_without_the_liar(number: float) -> None:
    server = server_with(5.0)
    left_out = merge(server, sent(1, number, 3))
    assert left_out.keys() == {1}
    assert "'total'" in left_out[1]
    assert server.state.total.tolist() == [15, 2]
    assert (server.fits, server.notes) == (1, {"who": [0, 2]})


def test_several_liars_are_left_out() -> None:
    server = server_with()
    assert merge(server, sent(1, MOST, 3, 1e30, 2)).keys() == {1, 3}
    assert server.state.total.tolist() == [14, 3]


def test_if_all_lie_nothing_changes() -> None:
    server = server_with(5.0)
    assert merge(server, sent(MOST, 1e30)).keys() == {0, 1}
    assert server.state.total.tolist() == [5, 0]


def test_a_message_that_raises_an_error_is_left_out() -> None:
    def histogram(server: Server, uploads: Mapping[int, Message]) -> None:
        add(server, uploads)
        sum(torch.histc(up.tensor("x") * 2) for up in uploads.values())

    server = server_with()
    left_out = merge(server, sent(1, 2, MOST), histogram)
    assert left_out.keys() == {2}
    assert "fail" in left_out[2]
    assert server.state.total.tolist() == [5, 2]


def test_a_mistake_of_the_method_is_nobodys_lie() -> None:
    """It fails for one client alone, but that one has sent nothing strange."""

    def fails(server: Server, uploads: Mapping[int, Message]) -> None:
        if 1 in uploads:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit") as caught:
        merge(server_with(), sent(1, 2, 3), fails)
    blame = blame_of(caught.value)
    assert blame is not None
    assert blame.where == ("server",)


def test_a_state_that_nobody_spoiled_alone_is_the_methods_own() -> None:
    """A method may keep infinity. If it would have to send it, the run stops before it is saved."""

    def forget(server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.total = torch.full((2,), torch.inf)

    def refuse(clients: Any) -> None:
        raise NotFiniteError("the download of client 0 is not finite.")

    server = server_with()
    assert merge(server, sent(1, 2), forget) == {}
    assert server.state.total.isinf().all()
    assert merge(server, sent(1, 2), add) == {}  # it was so before
    with pytest.raises(NotFiniteError):
        SafeMerge(server_with(), forget, refuse)(sent(1, 2))


def test_downloads_are_tried_if_the_state_is_large() -> None:
    server = server_with()

    def refuse(clients: Any) -> None:
        if server.state.total[0] > 1e12:
            raise NotFiniteError("the download of client 0 is not finite.")

    left_out = SafeMerge(server, add, refuse)(sent(1, 1e7, 3))
    assert left_out.keys() == {1}
    assert server.state.total.tolist() == [10, 2]


def test_sizes_are_of_floating_point_numbers() -> None:
    tensors = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([7]), "c": torch.zeros(0)}
    assert sizes_of(tensors) == {"a": 3}
    assert math.isnan(sizes_of({"d": torch.tensor([1.0, torch.nan])})["d"])
