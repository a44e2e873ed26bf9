"""One blob per message: a head of plain facts, and attachments. Checked whole before anything in it is used."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pluribus.errors import UnreadableMessageError

MAGIC = b"pluribus\x01"
LENGTH = 8  # bytes of the number that says how long the head is
MOST_HEAD = 1 << 20
MOST_NUMBER = 1 << 63


class Envelope(NamedTuple):
    """What a blob says."""

    head: dict[str, Any]
    parts: dict[str, bytes]

    def digest(self) -> str:
        """The same for the same content."""
        return hashlib.sha256(seal(self.head, self.parts)).hexdigest()


def seal(head: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """Facts and attachments as one blob.

    >>> unseal(seal({"round": 3}, {"up": b"abc"}))
    Envelope(head={'round': 3}, parts={'up': b'abc'})
    """
    names = sorted(parts)  # one spelling for one content
    facts = json.dumps({"head": head, "parts": {name: len(parts[name]) for name in names}}, sort_keys=True).encode()
    return b"".join([MAGIC, len(facts).to_bytes(LENGTH, "big"), facts, *(parts[name] for name in names)])


def unseal(data: bytes) -> Envelope:
    """The content of a blob; anything else is refused with a sentence."""
    start = len(MAGIC) + LENGTH
    if data[: len(MAGIC)] != MAGIC:
        raise UnreadableMessageError("this is no message of Pluribus, or one of another version.")
    length = int.from_bytes(data[len(MAGIC) : start], "big")
    if len(data) < start or not 0 < length <= min(MOST_HEAD, len(data) - start):
        raise UnreadableMessageError("the message is cut off.")
    try:
        said = json.loads(data[start : start + length], parse_float=_finite, parse_constant=_finite, parse_int=_whole)
        head, sizes = said["head"], said["parts"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableMessageError(f"the head of the message cannot be read ({type(error).__name__}).") from error
    if not (isinstance(head, dict) and isinstance(sizes, dict) and all(_is_size(size) for size in sizes.values())):
        raise UnreadableMessageError("the head of the message is not what it should be.")
    if start + length + sum(sizes.values()) != len(data):
        raise UnreadableMessageError("the message has another length than its head says.")
    parts, at = {}, start + length
    for name, size in sizes.items():
        parts[name] = data[at : at + size]
        at += size
    return Envelope(head, parts)


def _finite(text: str) -> float:
    """Python reads NaN and Infinity, which JSON has no word for, and takes 1e999 for infinity."""
    if not math.isfinite(value := float(text)):
        raise ValueError("a number that is not finite")
    return value


def _whole(text: str) -> int:
    if not -MOST_NUMBER <= (value := int(text)) < MOST_NUMBER:
        raise ValueError("a number beyond 64 bits")
    return value


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0
