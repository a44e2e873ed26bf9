"""The lessons of FedH2L: the public samples of a round, and the teachers' messages by sample."""

from __future__ import annotations

import torch

from pluribus.client import Client, Data
from pluribus.errors import SchemaError
from pluribus.message import Inbox


def public_batch(client: Client, teacher: int) -> Data:
    """The public samples that a teacher uses in this round. All clients derive them from the common seed."""
    public = client.public[teacher]
    order = torch.randperm(len(public), generator=client.task.draw("public batch", client.t, teacher))
    return public[order[: client.local.batch]]


def row_by_row(inbox: Inbox, sizes: list[int]) -> Inbox:
    """Arrange the teachers' messages by sample. Sums weighted by `share` are means over teachers of batch means."""
    posterior, accuracy = inbox.got["posterior"], inbox.got["accuracy"]
    if posterior.shape[1] < max(sizes):
        raise SchemaError(f"a teacher has {max(sizes)} public samples, but sent {posterior.shape[1]} rows.")
    size = torch.tensor(sizes, device=posterior.device)[:, None]
    real = torch.arange(posterior.shape[1], device=posterior.device) < size  # the other rows are padding
    by_teacher = {"accuracy": accuracy[:, None], "share": 1 / (len(sizes) * size)}
    by_sample = {name: value.expand_as(real)[real] for name, value in by_teacher.items()}
    return Inbox(inbox.ids, {"posterior": posterior[real], **by_sample})
