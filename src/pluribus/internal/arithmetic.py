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


@contextmanager
def reproducible(threads: int | None, precision: str) -> Iterator[None]:
    """Set the number of CPU threads, and allow only deterministic kernels on a GPU. Both are restored on exit."""
    cudnn = torch.backends.cudnn
    before, flags = torch.get_num_threads(), (cudnn.deterministic, cudnn.allow_tf32)
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
        torch.set_num_threads(before)
        cudnn.deterministic, cudnn.allow_tf32 = flags
