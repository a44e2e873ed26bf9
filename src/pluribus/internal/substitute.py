"""A client with other tensors than its own, for functions of tensors such as per-row gradients and stacked steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from pluribus.client import Client


@contextmanager
def substitute(client: Client, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the client's model and state these parameters and buffers instead of their own: `model.NAME`,
    `state.NAME`."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for part, module in (("model", client.model), ("state", client.state)):
        for prefix, child in module.named_modules():
            for own in (child._parameters, child._buffers):
                for name, value in own.items():
                    given = tensors.get(".".join(filter(None, (part, prefix, name))))
                    if given is not None:
                        before.append((own, name, value))
                        own[name] = given
    try:
        yield
    finally:
        for own, name, value in before:
            own[name] = value
