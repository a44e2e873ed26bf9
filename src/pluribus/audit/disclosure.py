"""What uploads tell by construction: classes, counts and sizes, compared with the rows behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pluribus.audit.rehearsal import Rehearsal
from pluribus.message import NOT_DECLARED, Field, Message, Rows, Schema

MANY = {
    "weights": "Weights after training on private rows.",
    "class sums": "Sums or means over the private rows of each class.",
    "public": "Outputs of the client's model for public rows.",
    "gradient": "A gradient of private rows.",
    "statistic": "Numbers about private rows.",
    "rows": "A vector or a label for each of many private rows.",
    NOT_DECLARED: "The method does not declare where it comes from.",
}


class Group(NamedTuple):
    """Fields of one exchange that are looked at together: all tensors of weights, and every other field alone."""

    stage: int
    source: str
    fields: dict[str, Field]

    @property
    def name(self) -> str:
        names = list(self.fields)
        if len(names) == 1:
            return names[0]
        parts = dict.fromkeys(name.partition(".")[0] for name in names)
        if len(parts) <= 3 and not any(part.isdecimal() for part in parts):
            return ", ".join(part if part in names else f"{part}.*" for part in parts)
        return f"{len(names)} tensors"


def groups_of(stage: int, schema: Schema) -> list[Group]:
    """The fields of a schema in groups."""
    weights = {name: one for name, one in schema.items() if one.source == "weights"}
    others = {name: one for name, one in schema.items() if name not in weights}
    found = [Group(stage, "weights", weights)] if weights else []
    return found + [Group(stage, one.source or NOT_DECLARED, {name: one}) for name, one in others.items()]


def merge(groups: Sequence[Group]) -> list[Group]:
    """One group for the fields of all architectures, whose weights have other names."""
    found: dict[tuple[int, str, str], Group] = {}
    for one in groups:
        key = one.stage, one.source, "" if one.source == "weights" else one.name
        fields = found[key].fields | one.fields if key in found else one.fields
        found[key] = Group(one.stage, one.source, dict(fields))
    return list(found.values())


def train_counts(rehearsal: Rehearsal, k: int) -> Tensor:
    """The training rows of each class. If nothing is classified, their number alone."""
    return torch.tensor(rehearsal.parts.data.counts(k))


def describe_card(rehearsal: Rehearsal) -> str:
    """What every client tells when it joins."""
    first = rehearsal.parts.cards[rehearsal.clients[0]]
    if not rehearsal.parts.task.share_counts:
        return (
            f"Every client tells the name of its model and the width of its features, such as {first.model} and "
            f"{first.width}. It does not tell how many rows it has."
        )
    return (
        f"Every client tells the name of its model, its number of training rows and the width of its features, such as "
        f"{first.model}, {first.samples} and {first.width}."
    )


def describe(rehearsal: Rehearsal, group: Group, messages: Mapping[int, Message]) -> str:
    """What a group of fields tells by construction, checked against the rows of the clients that sent it."""
    told = [MANY[group.source]]
    for name, declared in group.fields.items():
        sent = {k: message[name] for k, message in messages.items() if name in message}
        told += _describe_field(rehearsal, declared, sent)
    if any(one.optional for one in group.fields.values()):
        told.append("Which of its fields a client sends is seen too.")
    return " ".join(dict.fromkeys(told))


def _describe_field(rehearsal: Rehearsal, declared: Field, sent: Mapping[int, Tensor | Rows]) -> list[str]:
    told = []
    counts = {k: train_counts(rehearsal, k) for k in sent}
    rows = {k: value for k, value in sent.items() if isinstance(value, Rows)}
    tensors = {k: value for k, value in sent.items() if isinstance(value, Tensor)}
    if rows:
        exact = sum(torch.equal(value.held, counts[k] > 0) for k, value in rows.items())
        told.append(f"It names classes: for {exact} of {len(rows)} clients exactly those of its training rows.")
        if declared.source == "class sums":
            alone = sum(int(((counts[k] == 1) & value.held).sum()) for k, value in rows.items())
            told.append(f"Of these classes, {alone} have a single training row: the vector is that of the row alone.")
    elif declared.source == "statistic" and tensors:
        exact = sum(torch.equal(value.long(), counts[k]) for k, value in tensors.items())
        told.append(f"For {exact} of {len(tensors)} clients they are the number of training rows of each class.")
    if declared.source == "rows":
        told.append("Its size is the number of these rows.")
    return told
