"""Clients that lie, simulated: an attacker's message is changed after it is built and before it is sent.

An attacker trains as its method says. Its message stays valid, except with the attack `nan`: it has the declared
fields, shapes and bounds, and finite numbers. Attackers and noise are keyed, so every engine sends the same lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pluribus import draws
from pluribus.internal.vectors import bounded, starts
from pluribus.message import Message, Rows, Schema, Value, payload

Kind = Literal["none", "label-flip", "sign-flip", "noise", "scale", "nan", "replay"]
ATTACKS: tuple[str, ...] = get_args(Kind)[1:]
STRONG = ("noise", "scale")  # attacks with a strength
STRENGTH = 10.0
ATTACKERS = 0.2
OF_NUMBERS = ("sign-flip", "noise", "scale", "nan")  # attacks that change numbers of messages
MOST_REPLAYED = 2**28  # bytes of a message that every client remembers
HEADER_BYTES = 256  # most bytes of the header of a message for each tensor, without its name


class Attack(NamedTuple):
    """What attackers do, and who they are."""

    kind: Kind
    strength: float
    clients: frozenset[int]
    seed: int

    @property
    def replays(self) -> bool:
        return self.kind == "replay"

    def lies(self, client: int) -> bool:
        """Whether a client changes its messages."""
        return self.kind != "label-flip" and client in self.clients

    def falsify(self, message: Message, schema: Schema, about: Message | None, *key: draws.Key) -> Message:
        """The message that an attacker sends in place of this one, on the CPU.

        Plain tensors that the attacker downloaded with the same name and shape are changed relative to the download.
        """
        if self.kind not in OF_NUMBERS:
            return message
        begun = starts(message.part(), {} if about is None else about.part())
        lies: dict[str, Value] = {}
        for name, value in message.items():
            declared, draw = schema[name], draws.generator(self.seed, "lie", *key, name)
            if isinstance(value, Rows):
                lie, known = value.value.clone(), value.value[value.held]
                changed = self._lie(known, torch.zeros_like(known), draw)
                lie[value.held] = self._bounded(changed, declared.least, declared.most)
                lies[name] = Rows(lie, value.held)
            elif value.is_floating_point():
                lie = self._lie(value, begun.get(name, torch.zeros_like(value)), draw)
                lies[name] = self._bounded(lie, declared.least, declared.most)
            else:
                lies[name] = value
        return Message(lies)

    def _lie(self, value: Tensor, start: Tensor, draw: torch.Generator) -> Tensor:
        if self.kind == "nan":
            return torch.full_like(value, torch.nan)
        if self.kind == "noise":
            spread = self.strength * (value - start).square().mean().sqrt() if value.numel() else 0.0
            return value + spread * torch.randn(value.shape, generator=draw, dtype=value.dtype)
        return start + (value - start) * (-1.0 if self.kind == "sign-flip" else self.strength)

    def _bounded(self, value: Tensor, least: float | None, most: float | None) -> Tensor:
        return value if self.kind == "nan" else bounded(value, least, most)


def choose_attackers(clients: int, wanted: float, seed: int) -> frozenset[int]:
    """The attackers: a share of the clients if `wanted` is below 1, otherwise so many."""
    number = max(1, round(wanted * clients)) if wanted < 1 else int(wanted)
    return frozenset(draws.python_rng(seed, "attackers").sample(range(clients), min(number, clients)))


# ---- replay ----------------------------------------------------------------------------------------------------------


def replay_bytes(schema: Schema, classes: int, sizes: Mapping[str, int]) -> int:
    """Bytes that a serialized message of this schema and its length take at most."""
    headers = sum(2 * (HEADER_BYTES + 2 * len(name.encode())) for name in schema)
    return 8 + payload(schema, classes, sizes) + headers


def remember(buffer: Tensor, data: bytes) -> None:
    """Write a message, after its length."""
    content = len(data).to_bytes(8, "little") + data
    assert len(content) <= len(buffer), "a message is longer than its schema allows"
    buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(buffer.device)


def recall(buffer: Tensor) -> bytes | None:
    """The remembered message. None: there is none yet."""
    content = buffer.cpu().numpy().tobytes()
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length] if length else None
