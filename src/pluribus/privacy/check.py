"""What a private run refuses before round 0: whatever would break a bound without anyone seeing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from pluribus.errors import ConflictError, MismatchError, PluribusError
from pluribus.internal.batches import Batch
from pluribus.internal.blame import first_line
from pluribus.internal.steps import Step
from pluribus.message import NOT_DECLARED, sources_of
from pluribus.method import Method, name_of
from pluribus.models import entries
from pluribus.models.group_norm import SUFFIX, twin_of
from pluribus.models.layers import recurrent
from pluribus.privacy.accountant import require_accountant
from pluribus.privacy.central import why_no_mean
from pluribus.privacy.messages import why_not_noised
from pluribus.privacy.plan import Plan
from pluribus.privacy.rows import RowSums, collecting, optimizers_of, tallies
from pluribus.privacy.terms import Level
from pluribus.task import Card, Task

if TYPE_CHECKING:
    from pluribus.client import Client, Data, Local

RELEASED = ("class sums", "statistic")  # sources that the guard noises
BOUNDED = {
    "weights": "training: per-row gradients are clipped and noised",
    "class sums": "each row's vector is clipped; sums and counts are noised",
    "statistic": "noised",
    "public": "free: computed from private weights and public rows",
}


def check_private(method: Method, task: Task, cards: Sequence[Card], local: Local, normalization: str) -> None:
    """Refuse settings, models and messages that no mechanism bounds."""
    require_accountant()
    assert local.privacy is not None
    if reason := why_unbounded(method, task, cards, local.privacy.level):
        flag = "--dp-epsilon" if local.privacy.level == "row" else f"--dp-level {local.privacy.level}"
        raise MismatchError(f"{name_of(type(method))} cannot run with {flag}: {reason}")
    if local.privacy.level != "row":
        if normalization == "dataset":
            raise ConflictError(
                "numbers of the whole dataset tell every client about the rows of all others. With --dp-level client, "
                "use another --normalize, such as client."
            )
        return
    if normalization in ("client", "dataset"):
        raise ConflictError(
            "rows that are normalized by the rows of clients let one row act on all others. A private run needs "
            "another --normalize: none, or MEAN/DEVIATION with numbers that do not come from these rows."
        )
    if local.class_weights == "balanced":
        raise ConflictError("--class-weights balanced counts private rows: use equal with --dp-epsilon.")


def why_unbounded(method: Method, task: Task, cards: Sequence[Card], level: Level) -> str:
    """Why the messages of a method cannot be bounded. Empty: they can."""
    if level != "row":
        enrolments = [wire.once for card in cards for wire in method.wires(task, card)]
        no_mean = why_no_mean(method, enrolments) if level == "client-central" else ""
        return why_not_noised(method, task, cards) or no_mean
    if reason := method.why_unbounded():
        return reason
    for card in cards:
        for source, fields in sources_of(method.wires(task, card)).items():
            if source == "rows":
                return f"it sends something of each private row ('{fields[0]}')."
            if source in ("gradient", NOT_DECLARED):
                return f"nothing bounds '{fields[0]}', whose source is {source}."
    return ""


def check_client(client: Client) -> None:
    """Refuse models in which rows act on each other, or whose layers have no gradients of single rows."""
    name, who = client.card.model, f"client {client.card.id}"
    client.set_mode(True)
    for module in (client.model, client.state):
        if any(isinstance(layer, _BatchNorm) and layer.training for layer in module.modules()):
            raise MismatchError(
                f"{who} has '{name}', whose batch norm mixes the rows of a batch, so that no row can be bounded. "
                f"{_instead_of(name)}"
            )
        if recurrent(module):
            raise MismatchError(
                f"{who} has '{name}', whose recurrent layers have no gradients of single rows in torch: use a model "
                f"without them with --dp-epsilon."
            )


def _instead_of(model: str) -> str:
    if twin := twin_of(model):
        return f"Use {twin}, its twin with group norm."
    known = ", ".join(one for one in entries() if one.endswith(SUFFIX))
    return f"Use a model without it, such as {known}."


def try_step(client: Client, step: Step, data: Data) -> None:
    """Compute the gradients of two rows. MismatchError: the step has none. Nothing changes."""
    positions = torch.arange(min(2, len(data)), device=client.device)
    batch = Batch(*data.take(positions), positions, len(positions))
    try:
        with collecting(tallies(client)), client.autocast():
            RowSums(client, optimizers_of(client, step)).row_gradients(client, step, batch)
    except PluribusError:
        raise
    except Exception as error:
        raise MismatchError(
            f"a step of this method has no gradients of single rows, which --dp-epsilon needs ({first_line(error)})."
        ) from error


def check_releases(method: Method, client: Client, plan: Plan) -> None:
    """Refuse sums of private rows that do not go through `class_sums`, `class_counts` or a `Tally`."""
    if plan.unbounded > 0:
        raise MismatchError(
            f"{name_of(type(method))} reads private rows with client.sweep, and nothing bounds what it makes of them: "
            f"use class_means, class_sums or Tally of pluribus.ops."
        )
    sources = sources_of(method.wires(client.task, client.card))
    if plan.releases or not (found := [source for source in RELEASED if source in sources]):
        return
    raise MismatchError(
        f"{name_of(type(method))} sends {found[0]} ('{sources[found[0]][0]}') that nothing bounds: compute them with "
        f"class_means, class_sums, class_counts or Tally of pluribus.ops."
    )
