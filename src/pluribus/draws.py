"""Keyed randomness: each draw has a key of client, round and purpose, so no generator state is saved or shared.

The same seed and key give the same numbers on any machine. Generators draw on the CPU; inside a step, `uniform_bits`
draws on the CPU or a CUDA GPU, with integers only. Nothing here changes the state of the global generators.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pluribus.internal.devices import CPU, is_apple

Key = str | int
Made = TypeVar("Made")  # what `make` of a task, client or server gives back

# The mixing steps of SplitMix64, in two's complement: torch has 64-bit integers with a sign only.
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_global = threading.RLock()  # held while a thread has the global generators
BITS = 24  # bits of the hash that are used; float32 holds them exactly


def number(*key: Key) -> int:
    """A 63-bit number that depends on every part of the key and on their order and types.

    >>> number(0, "init", 3) == number(0, "init", 3), number(0, "init", 3) == number(0, "init", "3")
    (True, False)
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*key: Key) -> torch.Generator:
    """A fresh CPU generator for this key."""
    return torch.Generator().manual_seed(number(*key))


def numpy_rng(*key: Key) -> np.random.Generator:
    """A fresh numpy generator for this key."""
    return np.random.default_rng(number(*key))


def python_rng(*key: Key) -> random.Random:
    """A fresh generator of the standard library for this key: the cost of `sample` depends on the sample alone."""
    return random.Random(number(*key))


@contextmanager
def seeded(*key: Key, device: torch.device | None = None) -> Iterator[None]:
    """Run code that can only use torch's global generators (layer initializers, dropout) under a key.

    The caller's generator states are restored on exit: that of the CPU, and that of the GPU if the code runs there.
    One thread at a time has them.
    """
    gpu = [device] if device is not None and device.type == "cuda" else []
    apple = _seeded_apple(number(*key)) if device is not None and is_apple(device) else nullcontext()
    with _global, torch.random.fork_rng(devices=gpu), apple:
        # not torch.manual_seed: it would also reseed every GPU, which fork_rng does not restore here
        torch.default_generator.manual_seed(number(*key))
        for one in gpu:
            torch.cuda.default_generators[one.index or 0].manual_seed(number(*key))
        yield


@contextmanager
def _seeded_apple(seed: int) -> Iterator[None]:
    """Seed the generator of an Apple GPU, and restore its state on exit."""
    before = torch.mps.get_rng_state()
    torch.mps.manual_seed(seed)
    try:
        yield
    finally:
        torch.mps.set_rng_state(before)


def uniform_bits(key: Tensor, size: int, device: torch.device) -> Tensor:
    """`size` integers below 2**24, by key and position; one row per key if `key` is a column of keys."""
    if is_apple(device):  # whether its integers overflow in the same way is not known
        return uniform_bits(key.cpu(), size, CPU).to(device)
    mixed = torch.arange(size, device=device) + _mix(key * _STRIDE)
    bits: Tensor = (_mix(mixed * _STRIDE) >> (63 - BITS)) & (2**BITS - 1)
    return bits


def _mix(x: Tensor) -> Tensor:
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # the mask makes it an unsigned shift
    return x ^ ((x >> 31) & (2**33 - 1))
