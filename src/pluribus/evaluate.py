"""What is measured, under names that cannot be confused.

A *view* is which model is asked: `after` local training, or `before` it, with the newest download received. A *figure*
is what is asked: `test` and `val` accuracy on the client's own sets, and where there are domains `acc`, `bwt`, `fwt`.
Over clients there are `mean` (each client counts once), `weighted` (each test sample counts once: a client weighs as
much as the test samples behind its figure), `worst` and `best`. Over rounds there are `last` and `selected`: the test
figure of the round in which the same client's validation accuracy was first at its best. The test data never chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.nn import functional as F

from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.internal.steps import Map
from pluribus.internal.views import views_text
from pluribus.method import Method
from pluribus.task import Task

Counts = tuple[int, int, float]  # correct, samples, summed cross-entropy
Figures = dict[str, float | None]
Exams = tuple[int, int]  # test samples of the client's own domain, and of all domains


def rule_of(method: Method, view: str) -> Map:
    """What gives scores in a view."""
    if view == "after" and type(method).predict_after is not Method.predict_after:
        return method.predict_after
    return method.predict  # itself, and no function around it: an engine records each function once


def score(rule: Map, client: Client, data: Data) -> Counts:
    """Correct predictions, samples and summed cross-entropy on a set."""
    if not len(data):
        return 0, 0, 0.0
    scores, labels = client.sweep(rule, data), data.labels()
    correct = (scores.argmax(1) == labels).sum()
    loss = F.cross_entropy(scores, labels, reduction="sum")
    return int(correct), len(data), float(loss)


def figures(rule: Map, client: Client) -> Figures:
    """All figures of a client as it stands."""
    if client.exams:
        return _domain_figures(rule, client)
    val, test = (score(rule, client, client.data[name]) for name in ("val", "test"))
    return {"val": _accuracy(val), "test": _accuracy(test), "test_loss": _mean_loss(test)}


def _domain_figures(rule: Map, client: Client) -> Figures:
    """FedH2L's metrics: BWT on the own domain's test set, FWT on the union of the others', ACC on the union of all."""
    exams, own = client.exams, client.task.domain_of[client.card.id]
    tests = [score(rule, client, exam["test"]) for exam in exams.values()]
    vals = [score(rule, client, exam["val"]) for exam in exams.values()]
    others = [counts for domain, counts in enumerate(tests) if domain != own]
    return {
        "val": _accuracy(*vals),
        "test": _accuracy(*tests),
        "acc": _accuracy(*tests),
        "bwt": _accuracy(tests[own]),
        "fwt": _accuracy(*others),
    }


def exam_sizes(task: Task, client: int) -> Exams | None:
    """How many test samples stand behind a client's figures in a run with domains; None in any other."""
    if not task.exams:
        return None
    sizes = list(task.exams.values())
    return sizes[task.domain_of[client]], sum(sizes)


def _mean_loss(counts: Counts) -> float | None:
    """None also where training diverged: a file of JSON knows no NaN, and a resumed run must read what was written."""
    return counts[2] / counts[1] if counts[1] and math.isfinite(counts[2]) else None


def _accuracy(*counts: Counts) -> float | None:
    samples = sum(c[1] for c in counts)
    return sum(c[0] for c in counts) / samples if samples else None


# ---- over clients --------------------------------------------------------------------------------------------------


def figures_over_clients(
    rows: Mapping[int, Figures], samples: Mapping[int, int], exams: Mapping[int, Exams | None] | None = None
) -> dict[str, Figures]:
    """Every figure over clients: name -> `mean`, `weighted`, `worst` and `best`. Of a loss the smallest is the best.

    `samples` are the sizes of the clients' own test sets. In a run with domains, `exams` says what they are tested on.
    """
    names = next(iter(rows.values()), {}).keys()
    found: dict[str, Figures] = {}
    for name in names:
        behind = {k: _behind(name, samples[k], (exams or {}).get(k)) for k in rows}
        found[name] = over_clients({k: row[name] for k, row in rows.items()}, behind, loss=is_loss(name))
    return found


def is_loss(figure: str) -> bool:
    """Whether less of a figure is better."""
    return figure.endswith("loss")


def _behind(figure: str, samples: int, exams: Exams | None) -> int:
    """How many test samples a figure of a client was measured on."""
    if exams is None:
        return samples
    own, everything = exams
    return {"bwt": own, "fwt": everything - own}.get(figure, everything)


def over_clients(values: Mapping[int, float | None], samples: Mapping[int, int], loss: bool = False) -> Figures:
    """Mean, sample-weighted mean, worst and best of one figure. Clients without it (no test data) are left out."""
    known = {k: v for k, v in values.items() if v is not None}
    weight = sum(samples[k] for k in known)
    if not known:
        return {"mean": None, "weighted": None, "worst": None, "best": None}
    least, most = min(known.values()), max(known.values())
    return {
        "mean": sum(known.values()) / len(known),
        "weighted": sum(v * samples[k] for k, v in known.items()) / weight if weight else None,
        "worst": most if loss else least,
        "best": least if loss else most,
    }


# ---- over rounds ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """A client's figures in the last round that evaluated it, and in the round that its validation data selects."""

    last: Figures
    selected: Figures
    selected_round: int


class Selection(NamedTuple):
    """The round that a client's validation data selects so far, and its validation accuracy in that round."""

    round: int
    val: float | None

    @classmethod
    def of(cls, chosen: Chosen) -> Selection:
        """What the history so far selects."""
        return cls(chosen.selected_round, chosen.selected["val"])


def selects(now: Figures, best: Selection | None) -> bool:
    """Whether validation data prefers these figures to those of the best round so far."""
    return best is None or _better(now["val"], best.val)


def choose(history: Iterable[Mapping[str, Any]], view: str) -> dict[int, Chosen]:
    """Last and selected figures of every client that was evaluated."""
    chosen: dict[int, Chosen] = {}
    for record in history:
        for key, views in record.get("clients", {}).items():
            now, before = views[view], chosen.get(int(key))
            if before is None or selects(now, Selection.of(before)):
                chosen[int(key)] = Chosen(now, now, record["round"])
            else:
                chosen[int(key)] = Chosen(now, before.selected, before.selected_round)
    return dict(sorted(chosen.items()))


def _better(val: float | None, best: float | None) -> bool:
    """Strictly better, so that ties keep the earliest round. Without validation data the last round stands."""
    return best is None if val is None else best is None or val > best


def summarise(
    history: Sequence[Mapping[str, Any]],
    views: Sequence[str],
    samples: Mapping[int, int],
    exams: Mapping[int, Exams | None] | None = None,
) -> dict[str, dict[str, dict[str, Figures]]]:
    """view -> `last` or `selected` -> figure -> over clients."""
    summary: dict[str, dict[str, dict[str, Figures]]] = {}
    for view in views:
        chosen = choose(history, view)
        summary[view] = {}
        for moment in ("last", "selected"):
            rows: dict[int, Figures] = {k: getattr(c, moment) for k, c in chosen.items()}
            summary[view][moment] = figures_over_clients(rows, samples, exams)
    return summary


def selection_text(validation: Iterable[float | None]) -> str:
    """How rounds were chosen, in words, from the validation accuracies of clients; None of one that has no such data.

    >>> selection_text([0.9, 0.8]), selection_text([None])
    ('selected on validation', 'in the last round, without validation data')
    """
    known = {value is not None for value in validation}
    if known == {True, False}:
        return "selected on validation (clients without validation data: the last round)"
    return "in the last round, without validation data" if known == {False} else "selected on validation"


def headline(views: Mapping[str, str], chosen: Iterable[Mapping[int, Chosen]]) -> str:
    """What the accuracies of a table are; views by method, and what each method's rounds were chosen for."""
    selection = selection_text(one.selected["val"] for rows in chosen for one in rows.values())
    return f"test accuracy, {selection}, {views_text(views)}"
