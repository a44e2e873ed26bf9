"""The public samples that the nodes of FedH2L teach on, and what their teachers say of each."""

from __future__ import annotations

import torch

from pluribus.client import Client, Data
from pluribus.errors import SchemaError
from pluribus.message import Inbox


def public_batch(client: Client, node: int) -> Data:
    """The public samples that a node teaches on this round: everyone derives them from the common seed."""
    public = client.public[node]
    order = torch.randperm(len(public), generator=client.task.draw("public batch", client.t, node))
    return public[order[: client.local.batch]]


def row_by_row(inbox: Inbox, sizes: list[int]) -> Inbox:
    """The teaching signals by public sample, and the share of each in the mean over teachers of means over batches."""
    posterior, accuracy = inbox.got["posterior"], inbox.got["accuracy"]
    if posterior.shape[1] < max(sizes):
        raise SchemaError(f"a teacher of {max(sizes)} public samples teaches {posterior.shape[1]} rows.")
    size = torch.tensor(sizes, device=posterior.device)[:, None]
    real = torch.arange(posterior.shape[1], device=posterior.device) < size  # the other rows are padding
    by_teacher = {"accuracy": accuracy[:, None], "share": 1 / (len(sizes) * size)}
    by_sample = {name: value.expand_as(real)[real] for name, value in by_teacher.items()}
    return Inbox(inbox.ids, {"posterior": posterior[real], **by_sample})
