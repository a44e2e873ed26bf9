"""Chooses the attacks for a field by where it comes from, and says why others are not tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from pluribus import draws
from pluribus.audit import membership
from pluribus.audit.disclosure import Group, train_counts
from pluribus.audit.findings import MODEL, Finding, Picture
from pluribus.audit.inversion import Guess, Span, invert_gradient, invert_means, task_gradient
from pluribus.audit.measures import Interval, Scores, mean_auc
from pluribus.audit.rehearsal import Rehearsal, Upload, as_it_was
from pluribus.audit.weights import MODEL as IN_MODEL
from pluribus.audit.weights import Known, find_weights, rebuilt
from pluribus.client import Batch, Client
from pluribus.evaluate import rule_of
from pluribus.inputs import MANY
from pluribus.internal.steps import Fit, Map
from pluribus.message import Rows
from pluribus.ops import ONLY_ONCE

Try = Callable[[Group, list[Upload]], Finding]  # an attack on fields; raises NotTriedError if it does not apply

MOST_ATTACKED = 2  # clients whose images are reconstructed
MOST_CLASSES = 4  # of each
MOST_BATCH = 32  # rows behind a gradient that is inverted
MOST_STEPS = 4  # local steps behind weights that are inverted

NO_SOURCE = "Not tried: its source is not declared."
NOTHING_SENT = "Not tried: no audited client sent it."
NO_PAIRS = "Not tried: no class has both training and test rows at a client."
NOT_FINITE = "Not tried: scores are not finite, because training diverged."
MODEL_SAYS = (
    "A row counts as a training row if its loss under the client's own model is small. Whoever has the model can do "
    "this; a server often has not."
)
PUBLIC_SAYS = (
    "Not tried: outputs for public rows follow from the client's model, so no attack on them finds more than the best "
    "attack on the model."
)
STATISTIC_SAYS = "Not tried: a number about all rows hardly depends on one of them, but shows what it counts."


WEIGHTS_SAYS = "The loss-threshold attack under the uploaded weights, with what the server itself has sent."
ALL_WEIGHTS = "They are all that the clients train."
SOME_WEIGHTS = (
    "They are a part of what the clients train; the rest is as a new client has it. An attacker who has the rest, too, "
    "finds what the row of the model says."
)


class NotTriedError(Exception):
    """Why an attack does not apply. Its text is a sentence for the reader."""


@dataclass(frozen=True)
class Attacks:
    """The attacks on the uploads of one round. `steps`: of the descent that looks for images."""

    rehearsal: Rehearsal
    steps: int

    def on_model(self) -> Finding:
        """Membership inference on the models that the run has left."""
        rule = rule_of(self.rehearsal.parts.method, "after")
        scores = []
        for k in self.rehearsal.clients:
            with self.rehearsal.trained(k) as client:
                scores.append(membership.by_loss(client, rule))
        return self._membership(MODEL, "-", scores, MODEL_SAYS)

    def on(self, group: Group) -> list[Finding]:
        """Membership inference and inversion for a group of fields."""
        uploads = [one for one in self.rehearsal.of(group.stage) if any(name in one.message for name in group.fields)]
        found = []
        for attack, tries in (("membership", self._members(group)), ("inversion", self._inversion(group))):
            about = group.name, group.source, attack
            try:
                if not uploads:
                    raise NotTriedError(NOTHING_SENT)
                found.append(tries(group, uploads))
            except NotTriedError as reason:
                found.append(Finding(*about, str(reason)))  # type: ignore[arg-type]
        return found

    def _members(self, group: Group) -> Try:
        chosen: dict[str, Try] = {
            "weights": self._members_of_weights,
            "class sums": self._members_of_means,
            "gradient": self._members_of_gradient,
            "rows": self._members_of_rows,
            "public": partial(_refuse, PUBLIC_SAYS),
            "statistic": partial(_refuse, STATISTIC_SAYS),
        }
        return chosen.get(group.source, partial(_refuse, NO_SOURCE))

    def _inversion(self, group: Group) -> Try:
        kind = self.rehearsal.parts.task.input.kind
        if group.source in ("public", "statistic", "rows"):
            return partial(
                _refuse, "Not tried: nothing here was made from few private rows by a known gradient or mean."
            )
        if kind != "image":
            return partial(_refuse, f"Not tried: the attack reconstructs images, and the data are {MANY[kind]}.")
        if self.rehearsal.parts.task.target.kind != "classes":
            return partial(_refuse, "Not tried: the attack needs one class per row.")
        chosen: dict[str, Try] = {
            "weights": self._invert_weights,
            "class sums": self._invert_means,
            "gradient": self._invert_sent,
        }
        return chosen.get(group.source, partial(_refuse, NO_SOURCE))

    def _membership(self, field: str, source: str, scores: Sequence[Scores], says: str) -> Finding:
        if any(bool(part.isnan().any()) for one in scores for part in (one.members, one.others)):
            return Finding(field, source, "membership", NOT_FINITE)
        found = mean_auc(scores, self.rehearsal.parts.task.seed, field)
        return Finding(field, source, "membership", NO_PAIRS if found is None else says, found)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def _known(self, group: Group, uploads: Sequence[Upload]) -> list[tuple[Upload, Known]]:
        found = []
        for one in uploads:
            fields = {name: one.message.tensor(name) for name in group.fields if name in one.message}
            if (known := find_weights(self.rehearsal, one, fields)) is not None:
                found.append((one, known))
        if not found:
            raise NotTriedError("Not tried: no field has the shape of a tensor of the client's model.")
        return found

    def _members_of_weights(self, group: Group, uploads: list[Upload]) -> Finding:
        scores, whole = [], True
        for upload, known in self._known(group, uploads):
            whole = whole and known.is_whole
            with rebuilt(self.rehearsal, upload, known) as (client, rule):
                scores.append(membership.by_loss(client, rule))
        says = f"{WEIGHTS_SAYS} {ALL_WEIGHTS if whole else SOME_WEIGHTS}"
        return self._membership(group.name, group.source, scores, says)

    def _invert_weights(self, group: Group, uploads: list[Upload]) -> Finding:
        found = []
        for upload, known in self._known(group, uploads)[:MOST_ATTACKED]:
            fit = _only_fit(upload)
            names = [name.removeprefix(IN_MODEL) for name in known.tensors if name.startswith(IN_MODEL)]
            changes = {name: upload.start[IN_MODEL + name] - known.tensors[IN_MODEL + name] for name in names}
            with self._started(upload) as client:
                trained = dict(client.model.named_parameters())
                moved = {name: value for name, value in changes.items() if name in trained and bool(value.any())}
                if not moved:
                    raise NotTriedError("Not tried: no weight of the client's own model is sent.")
                if client.optimizers[next(iter(client.optimizers))].rule.name != "sgd":
                    raise NotTriedError("Not tried: only the steps of SGD have the direction of a gradient.")
                gradient = task_gradient(client, list(moved))
                found.append((upload, self._invert(client, fit, gradient, list(moved.values()))))
        says = (
            f"Images whose gradient has the direction in which the weights moved, by cosine and total variation, in "
            f"{self.steps} steps. The attacker is given the labels and the weights before."
        )
        return self._inverted(group, found, says)

    def _started(self, upload: Upload) -> AbstractContextManager[Client]:
        """A client as it was before its first step."""
        return as_it_was(self.rehearsal.host.client(upload.client), upload.start)

    # ---- class sums --------------------------------------------------------------------------------------------------

    def _rule_of_means(self, client: Client, means: Rows) -> Map:
        """The function whose means were sent: features or scores, whichever is nearer."""
        data = client.data["train"]
        labels = data.labels()
        rules: list[Map] = [Client.features, rule_of(self.rehearsal.parts.method, "after")]
        gaps = {}
        for at, rule in enumerate(rules):
            values = client.sweep(rule, data).flatten(1)
            if values.shape[1:] == means.value.flatten(1).shape[1:] and bool(torch.isfinite(values).all()):
                own = torch.stack([values[labels == c].mean(0) for c in means.held.nonzero().flatten().tolist()])
                gaps[at] = float((own - means.value.flatten(1)[means.held]).nan_to_num().norm())
        if not gaps:
            raise NotTriedError("Not tried: the vectors are neither features nor scores of the client's model.")
        return rules[min(gaps, key=lambda at: gaps[at])]

    def _means(self, group: Group, upload: Upload) -> Rows:
        value = upload.message[next(iter(group.fields))]
        if not isinstance(value, Rows):
            raise NotTriedError("Not tried: it has no vector per class.")
        return value

    def _members_of_means(self, group: Group, uploads: list[Upload]) -> Finding:
        scores = []
        for upload in uploads:
            means = self._means(group, upload)
            with self.rehearsal.at_upload(upload) as client:
                scores.append(membership.by_distance(client, self._rule_of_means(client, means), means))
        says = (
            "A row counts as a training row if its vector is near the uploaded one of its class. The vectors of rows "
            "come from the client's own model, which the server has not: an upper bound for this attack."
        )
        return self._membership(group.name, group.source, scores, says)

    def _invert_means(self, group: Group, uploads: list[Upload]) -> Finding:
        found = []
        for upload in uploads[:MOST_ATTACKED]:
            means = self._means(group, upload)
            held = means.held & (train_counts(self.rehearsal, upload.client) > 0)
            classes = held.nonzero().flatten().tolist()[:MOST_CLASSES]
            if classes:
                with self.rehearsal.at_upload(upload) as client:
                    rule, key = self._rule_of_means(client, means), (client.task.seed, upload.client)
                    found.append((upload, invert_means(client, rule, means, classes, self.steps, *key)))
        says = (
            f"Images whose vector is the uploaded one, beside the mean image of the class, in {self.steps} steps. The "
            f"attacker is given the client's own model: an upper bound for this attack."
        )
        return self._inverted(group, found, says)

    # ---- gradients and rows ------------------------------------------------------------------------------------------

    def _sent_gradient(self, group: Group, client: Client) -> Callable[[Batch], list[Tensor]]:
        method = self.rehearsal.parts.method

        def gradient(batch: Batch) -> list[Tensor]:
            found = method.private_gradient(client, batch)
            if not group.fields.keys() <= found.keys():
                raise NotTriedError("Not tried: the method does not say how it depends on rows (private_gradient).")
            return [found[name] for name in group.fields]

        return gradient

    def _targets(self, group: Group, upload: Upload) -> list[Tensor]:
        values = [upload.message[name] for name in group.fields]
        return [value.value if isinstance(value, Rows) else value for value in values]

    def _members_of_gradient(self, group: Group, uploads: list[Upload]) -> Finding:
        scores = []
        for upload in uploads:
            fit = _last_fit(upload)
            with self.rehearsal.at_upload(upload) as client:
                gradient, target = self._sent_gradient(group, client), self._targets(group, upload)
                batch = fit.data[fit.order[: sum(fit.sizes)]]
                scores.append(membership.by_gradient(client, gradient, target, batch))
        says = (
            "A row of the batch behind the gradient is told from a test row by the angle between the gradient that it "
            "gives alone and the uploaded one. The attacker is given the client's own model: an upper bound for this "
            "attack."
        )
        return self._membership(group.name, group.source, scores, says)

    def _invert_sent(self, group: Group, uploads: list[Upload]) -> Finding:
        found = []
        for upload in uploads[:MOST_ATTACKED]:
            with self.rehearsal.at_upload(upload) as client:
                gradient, target = self._sent_gradient(group, client), self._targets(group, upload)
                found.append((upload, self._invert(client, _last_fit(upload), gradient, target)))
        says = (
            f"Images whose gradient has the direction of the uploaded one, by cosine and total variation, in "
            f"{self.steps} steps. The attacker is given the labels and the client's own model: an upper bound for this "
            f"attack."
        )
        return self._inverted(group, found, says)

    def _members_of_rows(self, group: Group, uploads: list[Upload]) -> Finding:
        scores = []
        for upload in uploads:
            (value,) = self._targets(group, upload)
            with self.rehearsal.at_upload(upload) as client:
                rule = rule_of(self.rehearsal.parts.method, "after")
                if value.dim() != 2 or value.shape[1] != client.task.classes or not len(value):
                    raise NotTriedError("Not tried: it has no scores of rows.")
                scores.append(membership.by_nearest(client, rule, value))
        says = "A row counts as a training row if its scores under the client's own model are among the uploaded ones."
        return self._membership(group.name, group.source, scores, says)

    # ---- images ------------------------------------------------------------------------------------------------------

    def _invert(
        self, client: Client, fit: Fit, gradient: Callable[[Batch], Sequence[Tensor]], target: Sequence[Tensor]
    ) -> list[Guess]:
        """Invert a gradient of the rows of a fit, in train mode."""
        rows = fit.order[: sum(fit.sizes)]
        if len(rows) > MOST_BATCH:
            raise NotTriedError(
                f"Not tried: {len(rows)} rows are behind it, and the attack is for {MOST_BATCH} at most."
            )
        key, batch = (client.task.seed, client.card.id), Batch(*fit.data.take(rows), rows, len(rows))
        try:
            with _in_training(client, *key):
                return invert_gradient(client, batch, gradient, target, self.steps, *key)
        except RuntimeError as error:
            if not any(words in str(error) for words in (*ONLY_ONCE, "does not require grad")):
                raise
            raise NotTriedError("Not tried: torch cannot differentiate a layer of the model twice.") from error

    def _inverted(self, group: Group, found: Sequence[tuple[Upload, list[Guess]]], says: str) -> Finding:
        pictures = [
            Picture(upload.client, self._class(guess.label), guess, self._span(upload.client))
            for upload, guesses in found
            for guess in guesses
        ]
        if not pictures:
            raise NotTriedError(NOTHING_SENT)
        values = [one.guess.psnr for one in pictures]
        others = [one.guess.without for one in pictures if one.guess.without is not None]
        interval = Interval(fmean(values), min(values), max(values))
        return Finding(
            group.name, group.source, "inversion", says, interval, fmean(others) if others else None, pictures
        )

    def _class(self, label: int) -> str:
        names = self.rehearsal.parts.task.names
        return names[label] if names else str(label)

    def _span(self, k: int) -> Span:
        return Span.of(self.rehearsal.host.client(k).data["train"])


def _refuse(reason: str, group: Group, uploads: list[Upload]) -> Finding:
    raise NotTriedError(reason)


@contextmanager
def _in_training(client: Client, *key: draws.Key) -> Iterator[None]:
    """Layers as in a training step. Not by `client.fit`: a private run would take the attack for training."""
    modes = [(module, module.training) for module in (client.model, client.state)]
    try:
        with draws.seeded("audit", *key):
            for module, _ in modes:
                module.train()
            yield
    finally:
        for module, training in modes:
            module.train(training)


def _last_fit(upload: Upload) -> Fit:
    if not upload.fits:
        raise NotTriedError("Not tried: the client computed nothing from rows in this exchange.")
    return upload.fits[-1]


def _only_fit(upload: Upload) -> Fit:
    """The fit behind a change of weights, if few steps on few rows made it."""
    steps, rows = (sum(map(count, (fit.sizes for fit in upload.fits))) for count in (len, sum))
    if len(upload.fits) != 1 or steps > MOST_STEPS or rows > MOST_BATCH:
        raise NotTriedError(
            f"Not tried: {steps} steps on {rows} rows are behind the weights, and the attack is for at most "
            f"{MOST_STEPS} steps on {MOST_BATCH} rows."
        )
    return upload.fits[0]
