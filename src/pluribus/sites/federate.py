"""A federation of real sites, seen from its server: who they are, and the round loop over them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pluribus.assembly import Parts, common_width
from pluribus.errors import AgreementError, DataError, MessageError, MismatchError, SchemaError, WorkerError
from pluribus.experiment import Experiment
from pluribus.federation import Federation, Observer
from pluribus.method import Need, Wires, check_needs, decided, hyperparameters
from pluribus.sites.agreement import Agreement, known_model, shown, whole
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.remote import Missing, Remote, Transport
from pluribus.storage.files import append_lines, read_lines
from pluribus.storage.folder import RunFolder
from pluribus.task import Cards

PATIENCE = 20.0  # seconds until sites that are not there are looked for again
MOST_ROWS = 2**40  # of a set of images
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class SiteFacts:
    """What a site tells of itself: its model, the sizes of its training and test sets, and its public images (how many
    each client gave, and a digest of all)."""

    model: str
    samples: int
    test: int
    public: tuple[tuple[int, ...], str] | None

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> SiteFacts:
        """From a file that `dataclasses.asdict` filled."""
        public = saved["public"]
        known = None if public is None else (tuple(public[0]), public[1])
        return cls(saved["model"], saved["samples"], saved["test"], known)


class Told:
    """What sites tell of their data: sizes, and nothing else."""

    def __init__(self, facts: Mapping[int, SiteFacts]) -> None:
        self._facts = facts

    def samples(self, client: int) -> int:
        """Size of the site's training set, n_k."""
        return self._facts[client].samples

    def test_samples(self, client: int) -> int:
        """Size of the site's test set."""
        return self._facts[client].test

    def counts(self, client: int) -> None:
        """Sites do not tell which classes they hold."""


def greet(
    agreement: Agreement,
    names: Mapping[int, str],
    transport: Transport,
    seconds: float,
    tell: Callable[[str], None] = lambda sentence: None,
) -> dict[int, SiteFacts]:
    """What every site tells of itself. All must answer once before the first round."""
    end = time.monotonic() + seconds
    facts: dict[int, SiteFacts] = {}
    while missing := [k for k in range(agreement.clients) if k not in facts]:
        request = {k: seal({"verb": "hello", "client": k, "agreement": agreement.facts()}, {}) for k in missing}
        answers = transport.exchange(request, min(PATIENCE, max(0.0, end - time.monotonic())))
        for k in missing:
            answer = answers.get(k, Missing("no answer"))
            if not isinstance(answer, Missing):
                facts[k] = _introduced(answer, names[k], agreement.clients)
                tell(f"{names[k]} is here: {facts[k].model}, {facts[k].samples} images to train on")
            elif time.monotonic() >= end:
                raise WorkerError(f"site {names[k]} did not come within {seconds:.0f} s: {shown(answer.reason)}.")
    return facts


def _introduced(answer: bytes, name: str, clients: int) -> SiteFacts:
    try:
        head = unseal(answer).head
    except MessageError as error:
        raise type(error)(f"site {name}: {error}") from error
    if "refused" in head:
        raise AgreementError(f"site {name}: {shown(head['refused'])}")
    return _checked(head, name, clients)


def _checked(head: Mapping[str, Any], name: str, clients: int) -> SiteFacts:
    try:
        samples, test = (whole(head[which], 0, MOST_ROWS) for which in ("samples", "test"))
        facts = SiteFacts(known_model(head["model"]), samples, test, _public(head["public"], clients))
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"site {name} tells of itself what cannot be read ({shown(error)}).") from error
    except MessageError as error:
        raise type(error)(f"site {name}: {error}") from error
    if not facts.samples:
        raise DataError(f"site {name} has no training data.")
    return facts


def _public(said: Any, clients: int) -> tuple[tuple[int, ...], str] | None:
    """What a site tells of its public images: how many each client gave, and which they are."""
    if said is None:
        return None
    sizes, digest = tuple(whole(size, 0, MOST_ROWS) for size in said["sizes"]), said["digest"]
    if len(sizes) != clients or not sum(sizes) or not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ValueError("its public images")
    return sizes, digest


def _same_public(facts: Mapping[int, SiteFacts], names: Mapping[int, str]) -> tuple[tuple[int, ...], str]:
    """What all sites tell of their public images, for the agreement."""
    first = facts[0].public
    for k, one in facts.items():
        if (one.public is None) != (first is None):
            has, lacks = (names[0], names[k]) if one.public is None else (names[k], names[0])
            raise AgreementError(
                f"site {has} has public images, but site {lacks} has none: give all sites the same ones, as 'public' "
                f"in site.toml."
            )
        if one.public != first:
            raise AgreementError(
                f"the public images of sites {names[0]} and {names[k]} differ: all sites need the same copy."
            )
    return ((), "") if first is None else first


def settled(offer: Agreement, facts: Mapping[int, SiteFacts], names: Mapping[int, str]) -> Agreement:
    """The agreement, once it is known what the sites bring."""
    models = tuple(facts[k].model for k in range(offer.clients))
    width = common_width(offer.width, offer.projector, offer.shape, len(offer.classes), models)
    sizes, digest = _same_public(facts, names)
    agreed = replace(offer, width=width, public=sizes, public_digest=digest)
    method = agreed.build_method().settled(agreed.task(), dict.fromkeys(models))
    return replace(agreed, hyper=hyperparameters(method))


def federation(
    experiment: Experiment,
    agreement: Agreement,
    names: Mapping[int, str],
    facts: Mapping[int, SiteFacts],
    transport: Transport,
    folder: RunFolder,
    seconds: float,
    observers: Sequence[Observer] = (),
) -> Federation:
    """The round loop over these sites, from its first round or its last checkpoint."""
    method, task = agreement.build_method(), agreement.task()
    if Need.PUBLIC_DATA in method.needs and not task.public:
        raise MismatchError(
            f"{agreement.method} needs public images: give all sites the same ones, as 'public' in site.toml."
        )
    models, data = {k: one.model for k, one in facts.items()}, Told(facts)
    cards = Cards(task, models, data)
    check_needs(method, task, cards, agreement.rule)
    told = method.warnings(task, cards.architectures())
    told += decided(experiment.build_method(), method)
    parts = Parts(experiment, method, task, cards, data, told)
    missing = Absences(folder.path / "missing.jsonl")
    wires = Wires(method, task, cards)
    engine = Remote(agreement, names, models, method.views, wires, transport, seconds, missing.add)
    made = Federation(parts, folder, observers, engine)
    made.names = names
    made.warnings = missing.told + made.warnings
    missing.told = made.warnings  # the engine goes on telling
    return made


class Absences:
    """Who was missing when, and why: told in the result, and kept for a server that goes on later."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.told: list[str] = read_lines(file)

    def add(self, sentence: str) -> None:
        """One more."""
        self.told.append(sentence)
        append_lines(self._file, [sentence])


def dismiss(agreement: Agreement, names: Mapping[int, str], transport: Transport) -> None:
    """Tell the sites that it is over. Whoever does not hear it may stop by itself."""
    farewell = {k: seal({"verb": "finish", "client": k, "agreement": agreement.facts()}, {}) for k in names}
    transport.exchange(farewell, PATIENCE)
