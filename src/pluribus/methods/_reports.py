"""The reports of FedHPL: the mean and number of a client's logits per class, or each logit with its label.

A server that sums logits per class computes the same from both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.message import Dim, Field, Message, Value
from pluribus.ops import class_counts, class_sums, onehot, row_means

MOST_LOGITS = 2**20  # in the full report of one client


def fields(classes: int, *, full: bool, sizes: bool) -> dict[str, Field]:
    """The schema of a report. `full`: every logit with its label. `sizes`: also the number of samples per class."""
    counts, samples = Field((classes,), torch.int32, least=0, source="statistic"), Dim("samples", MOST_LOGITS)
    average = {"logits": Field((classes, classes), form="rows", source="class sums"), "counts": counts}
    labels = Field((samples,), torch.int32, least=0, most=classes - 1, source="rows")
    each = {"logits": Field((samples, classes), source="rows"), "labels": labels}
    return (each if full else average) | ({"sizes": counts} if sizes else {})


def packed(client: Client, logits: Tensor, chosen: Tensor, *, full: bool, sizes: bool) -> dict[str, Value]:
    """Write a report of the chosen logits of a client's training rows."""
    labels = client.data["train"].labels()
    known: dict[str, Value] = {"sizes": class_counts(client).int()} if sizes else {}
    if full:
        return known | {"logits": logits[chosen], "labels": labels[chosen].int()}
    sums, counts = class_sums(client, onehot(labels, client.task.classes) * chosen[:, None], logits)
    return known | {"logits": row_means(sums, counts), "counts": counts.int()}


def totals(report: Message, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per class: the sum and number of logits, and the number of samples (default: the number of logits)."""
    if "labels" in report:
        members = onehot(report.tensor("labels"), classes).double()
        sums, counts = members.T @ report.tensor("logits").double(), members.sum(0)
    else:
        counts = report.tensor("counts").double()
        sums = report.rows("logits").value.double() * counts[:, None]
    return sums, counts, report.tensor("sizes").double() if "sizes" in report else counts
