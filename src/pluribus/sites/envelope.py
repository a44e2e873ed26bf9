"""A message as one blob: a head in JSON, and binary parts. A blob is checked as a whole before it is used."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pluribus.errors import UnreadableMessageError

MAGIC = b"pluribus\x01"
LENGTH = 8  # bytes of the head's length
MOST_HEAD = 1 << 20
MOST_NUMBER = 1 << 63


class Envelope(NamedTuple):
    """The content of a blob."""

    head: dict[str, Any]
    parts: dict[str, bytes]

    def digest(self) -> str:
        return hashlib.sha256(seal(self.head, self.parts)).hexdigest()


def seal(head: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """Write a head and parts as one blob.

    >>> unseal(seal({"round": 3}, {"up": b"abc"}))
    Envelope(head={'round': 3}, parts={'up': b'abc'})
    """
    names = sorted(parts)  # equal content gives equal bytes
    facts = json.dumps({"head": head, "parts": {name: len(parts[name]) for name in names}}, sort_keys=True).encode()
    return b"".join([MAGIC, len(facts).to_bytes(LENGTH, "big"), facts, *(parts[name] for name in names)])


def unseal(data: bytes) -> Envelope:
    """Read a blob. Refuse bytes that are not a complete, valid blob."""
    start = len(MAGIC) + LENGTH
    if data[: len(MAGIC)] != MAGIC:
        raise UnreadableMessageError("this is not a message of Pluribus, or it is from another version.")
    length = int.from_bytes(data[len(MAGIC) : start], "big")
    if len(data) < start or not 0 < length <= min(MOST_HEAD, len(data) - start):
        raise UnreadableMessageError("the message is cut off.")
    try:
        facts = data[start : start + length]
        content = json.loads(facts, parse_float=_parse_float, parse_constant=_parse_float, parse_int=_parse_int)
        head, sizes = content["head"], content["parts"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableMessageError(f"the head of the message cannot be read ({type(error).__name__}).") from error
    is_sized = isinstance(sizes, dict) and all(type(size) is int and size >= 0 for size in sizes.values())
    if not (isinstance(head, dict) and is_sized):
        raise UnreadableMessageError("the head of the message has the wrong structure.")
    if start + length + sum(sizes.values()) != len(data):
        raise UnreadableMessageError("the length of the message differs from the length in its head.")
    parts, at = {}, start + length
    for name, size in sizes.items():
        parts[name] = data[at : at + size]
        at += size
    return Envelope(head, parts)


def _parse_float(text: str) -> float:
    """Refuse NaN and Infinity. Python accepts them, though JSON does not have them, and reads 1e999 as infinity."""
    if not math.isfinite(value := float(text)):
        raise ValueError("a number that is not finite")
    return value


def _parse_int(text: str) -> int:
    if not -MOST_NUMBER <= (value := int(text)) < MOST_NUMBER:
        raise ValueError("a number beyond 64 bits")
    return value
