"""What decides the last bits of a number: threads, precision and which kernels may run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Arithmetic(NamedTuple):
    """What decides on the last bits of a number on a CPU."""

    threads: int
    deterministic: bool
    precision: str

    @classmethod
    def here(cls) -> Arithmetic:
        """As it is in this process."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(torch.get_num_threads(), deterministic, torch.get_float32_matmul_precision())

    def set(self) -> None:
        """For the rest of this process."""
        torch.set_num_threads(self.threads)
        torch.set_num_interop_threads(1)
        if self.deterministic:  # also to say no takes torch seconds
            torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision(self.precision)


@contextmanager
def reproducible(threads: int | None, precision: str) -> Iterator[None]:
    """So many CPU threads, and on a GPU only kernels that give the same bits every time; as it was, on exit."""
    cudnn = torch.backends.cudnn
    before, flags = torch.get_num_threads(), (cudnn.deterministic, cudnn.allow_tf32)
    # read when cuBLAS starts: with its other workspaces the order of summation depends on what runs beside it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn.deterministic, cudnn.allow_tf32 = True, precision != "float32"
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        cudnn.deterministic, cudnn.allow_tf32 = flags
