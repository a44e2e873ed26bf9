"""Settings that decide the last bits of a result: threads, precision and allowed kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Arithmetic(NamedTuple):
    """Settings that decide the last bits of a result on a CPU."""

    threads: int
    deterministic: bool
    precision: str

    @classmethod
    def here(cls) -> Arithmetic:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(torch.get_num_threads(), deterministic, torch.get_float32_matmul_precision())

    def set(self) -> None:
        torch.set_num_threads(self.threads)
        torch.set_num_interop_threads(1)
        if self.deterministic:  # the call takes seconds, even with False
            torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision(self.precision)


_outside: int | None = None  # torch's threads outside of the run that is under way


def allowed_threads() -> int:
    """The threads that torch may use: one per core, unless the user or the system allows fewer. A run sets its own."""
    return torch.get_num_threads() if _outside is None else _outside


@contextmanager
def reproducible(threads: int | None, precision: str) -> Iterator[None]:
    """Set the number of CPU threads, and allow only deterministic kernels on a GPU. Both are restored on exit."""
    global _outside
    cudnn = torch.backends.cudnn
    before, flags, outside = torch.get_num_threads(), (cudnn.deterministic, cudnn.allow_tf32), _outside
    _outside = allowed_threads()
    # cuBLAS reads this when it starts. With other workspaces, the order of summation depends on concurrent kernels.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # CUDA reads this when it starts. With the default of 8, the streams of 20 clients wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    cudnn.deterministic, cudnn.allow_tf32 = True, precision != "float32"
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        _outside = outside
        torch.set_num_threads(before)
        cudnn.deterministic, cudnn.allow_tf32 = flags
