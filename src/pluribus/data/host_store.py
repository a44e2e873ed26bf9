"""A store for data that do not fit on the device: rows stay on the host, and those of a batch are copied in time."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pluribus.data.augment import Augment
from pluribus.data.federated import Store
from pluribus.data.scaling import Scale

Where = Literal["auto", "device", "host"]
MOST_SHARE = 0.5  # of the free memory of a device: the rest is for models


class HostStore(Store):
    """All rows and targets of an experiment, on the host."""

    resident = False

    def __init__(self, x: Tensor, y: Tensor, device: torch.device, channels_last: bool = False) -> None:
        super().__init__(x, y, torch.device("cpu"), channels_last)
        self.device = device

    def take(self, rows: Tensor, augment: Augment | None = None, scale: Scale | None = None) -> tuple[Tensor, Tensor]:
        """These rows as a model gets them, and their targets, on the device."""
        x, y = (self._copy(column, rows.cpu()) for column in (self.x, self.y))
        return self.finish(x, y, augment, scale)

    def labels(self, rows: Tensor) -> Tensor:
        return super().labels(rows).to(self.device)

    def _copy(self, column: Tensor, rows: Tensor) -> Tensor:
        """Gather rows in pinned memory, from which a GPU copies while it computes."""
        gathered = torch.empty(
            (len(rows), *column.shape[1:]), dtype=column.dtype, pin_memory=self.device.type == "cuda"
        )
        torch.index_select(column, 0, rows, out=gathered)
        return gathered.to(self.device, non_blocking=True)


def make_store(x: Tensor, y: Tensor, device: torch.device, channels_last: bool, where: Where) -> Store:
    """A store on the device, or on the host if the rows would take more than half of the device's free memory."""
    if where == "auto":
        where = "host" if device.type == "cuda" and x.nbytes > most_bytes(device) else "device"
    return (HostStore if where == "host" else Store)(x, y, device, channels_last)


def most_bytes(device: torch.device) -> int:
    """The largest data that are kept on a GPU."""
    return int(MOST_SHARE * torch.cuda.mem_get_info(device)[0])
