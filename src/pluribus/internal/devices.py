"""Devices that clients train on, and what they lack.

An Apple GPU (`mps`) has no float64, and draws other random numbers: both are done on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")
NAMES = "cpu, cuda, mps or auto"


def find_device(name: str | torch.device) -> torch.device | None:
    """The device of this name, or None if clients cannot train on it. auto: a CUDA GPU if there is one, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        return None
    return device if device.type in ("cpu", "cuda", "mps") else None


def is_present(device: torch.device) -> bool:
    """Whether torch finds a device of this kind."""
    if device.type == "cuda":
        return torch.cuda.is_available()
    return device.type == "cpu" or torch.backends.mps.is_available()


def is_apple(device: torch.device) -> bool:
    """Whether it is an Apple GPU."""
    return device.type == "mps"


def device_of_server(device: torch.device) -> torch.device:
    """Where the server of a simulation is: on a CUDA GPU, or on the CPU."""
    return device if device.type == "cuda" else CPU


def double(value: Tensor) -> Tensor:
    """A tensor in double precision: on its device, or on the CPU if that has none."""
    return (value.cpu() if is_apple(value.device) else value).double()


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device. What is in double precision stays on the CPU if the device has none."""

    def move(value: Tensor) -> Tensor:
        return value if is_apple(device) and value.dtype == torch.float64 else value.to(device)

    module._apply(move)  # type: ignore[no-untyped-call]
