"""A federation of real sites, seen from its server: who they are, and the round loop over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pluribus.assembly import Assembly, common_width
from pluribus.errors import ConfigError, MessageError
from pluribus.experiment import Experiment
from pluribus.federation import Federation, Observer
from pluribus.flower.agreement import Agreement
from pluribus.flower.envelope import seal, unseal
from pluribus.flower.remote import Missing, Remote, Transport
from pluribus.folder import RunFolder
from pluribus.method import Wires, check_needs
from pluribus.task import Cards

PATIENCE = 20.0  # seconds until sites that are not there are looked for again


class Told:
    """What sites tell of their data: sizes, and nothing else."""

    def __init__(self, facts: Mapping[int, Mapping[str, Any]], classes: int) -> None:
        self._facts = facts
        self._classes = classes

    def samples(self, k: int) -> int:
        """Size of the site's training set, n_k."""
        return int(self._facts[k]["samples"])

    def rows(self, k: int) -> dict[str, range]:
        """As long as the site's test set."""
        return {"test": range(int(self._facts[k]["test"]))}

    def counts(self, k: int) -> list[int]:
        """Who holds which class is nobody's business."""
        return [0] * self._classes


def greet(
    agreement: Agreement,
    names: Mapping[int, str],
    transport: Transport,
    seconds: float,
    tell: Callable[[str], None] = lambda sentence: None,
) -> dict[int, Any]:
    """What every site tells of itself. All must answer once before the first round."""
    end = time.monotonic() + seconds
    facts: dict[int, Any] = {}
    while missing := [k for k in range(agreement.clients) if k not in facts]:
        request = {k: seal({"verb": "hello", "client": k, "agreement": agreement.facts()}, {}) for k in missing}
        answers = transport.exchange(request, min(PATIENCE, max(0.0, end - time.monotonic())))
        for k in missing:
            answer = answers.get(k, Missing("no answer"))
            if not isinstance(answer, Missing):
                facts[k] = _introduced(answer, names[k])
                tell(f"{names[k]} is here: {facts[k]['model']}, {facts[k]['samples']} images to train on")
            elif time.monotonic() >= end:
                raise ConfigError(f"site {names[k]} did not come within {seconds:.0f} s: {answer.reason}.")
    return facts


def _introduced(answer: bytes, name: str) -> dict[str, Any]:
    try:
        head = unseal(answer).head
    except MessageError as error:
        raise ConfigError(f"site {name}: {error}") from error
    if "refused" in head:
        raise ConfigError(f"site {name}: {head['refused']}")
    return _checked(head, name)


def _checked(head: Mapping[str, Any], name: str) -> dict[str, Any]:
    try:
        samples, test, model = int(head["samples"]), int(head["test"]), str(head["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"site {name} tells of itself what cannot be read ({error}).") from error
    if samples < 1 or test < 0:
        raise ConfigError(f"site {name} has no training data.")
    return {"samples": samples, "test": test, "model": model}


def settled(offer: Agreement, facts: Mapping[int, Mapping[str, Any]]) -> Agreement:
    """The agreement, once it is known what the sites bring."""
    models = tuple(facts[k]["model"] for k in range(offer.clients))
    return replace(offer, width=common_width(offer.width, offer.projector, offer.shape, len(offer.classes), models))


def federation(
    experiment: Experiment,
    agreement: Agreement,
    names: Mapping[int, str],
    facts: Mapping[int, Mapping[str, Any]],
    transport: Transport,
    folder: RunFolder,
    seconds: float,
    observers: Sequence[Observer] = (),
) -> Federation:
    """The round loop over these sites, from its first round or its last checkpoint."""
    sizes: Any = {k: range(size) for k, size in enumerate(agreement.public)}  # all that the server knows of them
    method, task = agreement.build_method(), replace(agreement.task(), public=sizes)
    data: Any = Told(facts, task.classes)
    models = {k: one["model"] for k, one in facts.items()}
    cards = Cards(task, models, data)
    check_needs(method, task, cards, cards.architectures(), agreement.rule)
    nothing: Any = None  # no data set and no partition on this side
    parts = Assembly(
        experiment, method, nothing, data, nothing, task, cards, agreement.local(), torch.device("cpu"), warnings=[]
    )
    told: list[str] = []
    engine = Remote(agreement, names, models, Wires(method, task, cards), transport, seconds, told.append)
    made = Federation(parts, folder, observers, engine)
    made.warnings = told  # the engine goes on telling
    return made


def dismiss(agreement: Agreement, names: Mapping[int, str], transport: Transport) -> None:
    """Tell the sites that it is over. Whoever does not hear it may stop by itself."""
    farewell = {k: seal({"verb": "finish", "client": k, "agreement": agreement.facts()}, {}) for k in names}
    transport.exchange(farewell, PATIENCE)
