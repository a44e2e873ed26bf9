"""A federation of real sites, at its server: the facts about the sites, and the round loop over them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pluribus.assembly import Parts, common_width, native_widths
from pluribus.errors import AgreementError, DataError, MessageError, MismatchError, SchemaError, WorkerError
from pluribus.experiment import Experiment
from pluribus.federation import Federation, Observer
from pluribus.internal.robustness import check_robustness
from pluribus.method import (
    Method,
    Need,
    PeerMethod,
    Wires,
    check_needs,
    describe_completed,
    hyperparameters,
    note_weights,
)
from pluribus.models.capacity import architecture_of
from pluribus.models.unseen import Unseen
from pluribus.privacy.check import why_unbounded
from pluribus.sites.agreement import Agreement, check_integer, check_model, own_name, read_unseen, sanitize
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.norms import LearnedNorms
from pluribus.sites.remote import Missing, Remote, Transport
from pluribus.storage.checks import is_text, read_checked_lines
from pluribus.storage.files import append_lines
from pluribus.storage.folder import RunFolder
from pluribus.task import Cards, Task

PATIENCE = 20.0  # seconds until missing sites are asked again
MOST_ROWS = 2**40  # of a set
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class SiteFacts:
    """What a site reports at the start."""

    model: str
    samples: int | None  # None: sites do not tell how many rows they have
    test: int | None
    public: tuple[tuple[int, ...], str] | None  # number of public rows of each client, and the digest of all
    own: Unseen | None = None  # about a model that only the site can build
    pretrained: bool = False

    @classmethod
    def of(cls, saved: Mapping[str, Any], k: int, clients: int) -> SiteFacts:
        """Make the facts of client k from the output of `dataclasses.asdict`, read from a file and checked again."""
        public, own = saved["public"], saved.get("own")
        sent = {name: saved[name] for name in ("model", "samples", "test")} | {
            "pretrained": saved.get("pretrained", False),
            "public": None if public is None else dict(zip(("sizes", "digest"), public, strict=True)),
        }
        if own is not None:
            sent["own"] = dict(zip(Unseen._fields, own, strict=True))
        return _read_facts(sent, k, clients, told=saved["samples"] is not None)


def unseen_models(facts: Mapping[int, SiteFacts]) -> dict[str, Unseen]:
    """The models that only their sites can build."""
    return {one.model: one.own for one in facts.values() if one.own is not None}


class ReportedSizes:
    """What the server knows about the data of the sites: only sizes."""

    def __init__(self, facts: Mapping[int, SiteFacts]) -> None:
        self._facts = facts

    def samples(self, client: int) -> int | None:
        return self._facts[client].samples

    def test_samples(self, client: int) -> int | None:
        return self._facts[client].test

    def counts(self, client: int) -> None:
        """None: sites do not report their classes."""


def greet(
    agreement: Agreement,
    names: Mapping[int, str],
    transport: Transport,
    seconds: float,
    tell: Callable[[str], None] = lambda sentence: None,
) -> dict[int, SiteFacts]:
    """Ask every site for its facts. All sites must answer before the first round."""
    end = time.monotonic() + seconds
    facts: dict[int, SiteFacts] = {}
    while missing := [k for k in range(agreement.clients) if k not in facts]:
        request = {k: seal({"verb": "hello", "client": k, "agreement": agreement.facts()}, {}) for k in missing}
        answers = transport.exchange(request, min(PATIENCE, max(0.0, end - time.monotonic())))
        for k in missing:
            answer = answers.get(k, Missing("no answer"))
            if not isinstance(answer, Missing):
                facts[k] = _read_hello(answer, k, names[k], agreement)
                model = facts[k].model if facts[k].own is None else "a model of its own"
                rows = "" if facts[k].samples is None else f", {facts[k].samples} training rows"
                tell(f"{names[k]} is connected: {model}{rows}")
            elif time.monotonic() >= end:
                raise WorkerError(f"site {names[k]} did not connect within {seconds:.0f} s: {sanitize(answer.reason)}.")
    return facts


def _read_hello(answer: bytes, k: int, name: str, agreement: Agreement) -> SiteFacts:
    try:
        head = unseal(answer).head
        if "refused" in head:
            raise AgreementError(sanitize(head["refused"]))
        facts = _read_facts(head, k, agreement.clients, agreement.share_counts)
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"site {name} sent invalid facts about itself ({sanitize(error)}).") from error
    except MessageError as error:
        raise type(error)(f"site {name}: {error.sentence}") from error
    if facts.samples == 0:
        raise DataError(f"site {name} has no training data.")
    return facts


def _read_facts(sent: Mapping[str, Any], k: int, clients: int, told: bool) -> SiteFacts:
    """Check what a site reports. `told`: it tells how many rows it has."""
    samples, test = (check_integer(sent[which], 0, MOST_ROWS) if told else None for which in ("samples", "test"))
    own = read_unseen(sent["own"]) if "own" in sent else None
    model = check_model(sent["model"]) if own is None else own_name(k)
    return SiteFacts(model, samples, test, _read_public(sent["public"], clients), own, sent["pretrained"] is True)


def _read_public(sent: Any, clients: int) -> tuple[tuple[int, ...], str] | None:
    """Check what a site reports about public rows: the number of each client, and the digest of all."""
    if sent is None:
        return None
    sizes, digest = tuple(check_integer(size, 0, MOST_ROWS) for size in sent["sizes"]), sent["digest"]
    if len(sizes) != clients or not sum(sizes) or not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ValueError("invalid public rows")
    return sizes, digest


def _check_same_public(facts: Mapping[int, SiteFacts], names: Mapping[int, str]) -> tuple[tuple[int, ...], str]:
    """Check that all sites have the same public rows. Returns their sizes and digest."""
    first = facts[0].public
    for k, one in facts.items():
        if (one.public is None) != (first is None):
            has, lacks = (names[0], names[k]) if one.public is None else (names[k], names[0])
            raise AgreementError(
                f"site {has} has public rows, but site {lacks} has none: give all sites the same ones, as 'public' "
                f"in site.toml."
            )
        if one.public != first:
            raise AgreementError(
                f"the public rows of sites {names[0]} and {names[k]} differ: all sites need the same copy."
            )
    return ((), "") if first is None else first


def complete_agreement(offer: Agreement, facts: Mapping[int, SiteFacts], names: Mapping[int, str]) -> Agreement:
    """Complete the agreement with the facts of the sites."""
    own = unseen_models(facts)
    models = tuple(facts[k].model for k in range(offer.clients))
    known = tuple(model for model in models if model not in own)
    widths = {one.width for one in own.values()}  # sites report native widths, unless one is declared
    built = (*known, *map(architecture_of, known))  # whole models, too, as in a simulation
    native = partial(native_widths, offer.input, len(offer.classes), built)
    width = common_width(offer.width, offer.projector, lambda: native() | widths)
    sizes, digest = _check_same_public(facts, names)
    agreed = replace(offer, width=width, public=sizes, public_digest=digest)
    method = agreed.build_method(None)
    if known:
        method = method.complete(agreed.task(), dict.fromkeys(known))
    return replace(agreed, hyper=hyperparameters(method))


def make_federation(
    experiment: Experiment,
    agreement: Agreement,
    names: Mapping[int, str],
    facts: Mapping[int, SiteFacts],
    transport: Transport,
    folder: RunFolder,
    seconds: float,
    observers: Sequence[Observer] = (),
    largest_norm: float | Literal["learned"] | None = None,
) -> Federation:
    """Make the round loop over these sites, from the first round or the last checkpoint."""
    method, task = agreement.build_method(None), agreement.task(unseen=unseen_models(facts))
    if Need.PUBLIC_DATA in method.needs and not task.public:
        raise MismatchError(
            f"{agreement.method} needs public rows: give all sites the same ones, as 'public' in site.toml."
        )
    if Need.PRETRAINED in method.needs:
        for k, one in facts.items():
            if not (one.pretrained or task.has_weights(one.model)):
                raise MismatchError(
                    f"{agreement.method} needs pretrained backbones, but the model of site {names[k]} has random "
                    f"weights: name their source as 'weights' in its site.toml."
                )
    models, data = {k: one.model for k, one in facts.items()}, ReportedSizes(facts)
    cards = Cards(task, models, data, {k for k, one in facts.items() if one.pretrained})
    check_needs(method, task, cards, agreement.rule)
    terms = agreement.privacy
    if terms is not None and (reason := why_unbounded(method, task, cards.firsts(), terms.level)):
        raise MismatchError(f"{agreement.method} cannot run with dp_epsilon: {reason}")
    known = [model for model in cards.architectures() if model not in task.unseen]
    notes = method.warnings(task, known) + describe_completed(experiment.build_method(), method)
    notes += note_weights(method, task)
    notes += _check_defense(experiment, method, task, cards)
    parts = Parts(experiment, method, task, cards, data, notes)
    absences = Absences(folder.path / "missing.jsonl")
    wires = Wires(method, task, cards)
    for k in cards:
        wires(k)  # a model that only its site can build is refused now, if the method must know its parts
    engine = Remote(
        agreement,
        names,
        {k: _name_or_facts(one) for k, one in facts.items()},
        method.views,
        wires,
        transport,
        seconds,
        absences.add,
        None if largest_norm == "learned" else largest_norm,
        LearnedNorms(folder.path / "norms.json", task.warmup) if largest_norm == "learned" else None,
    )
    made = Federation(parts, folder, observers, engine)
    made.names, made.report, made.call = names, absences.add, lambda k: f"site {names[k]}"
    made.warnings = absences.notes + made.warnings
    absences.notes = made.warnings  # the engine adds to this list during the run
    return made


def _check_defense(experiment: Experiment, method: Method, task: Task, cards: Cards) -> list[str]:
    if experiment.defense != "none" and isinstance(method, PeerMethod):
        raise MismatchError(
            f"{experiment.method} has no server that could defend sites from each other: leave out 'defense'."
        )
    return check_robustness(experiment, method, task, cards)


def _name_or_facts(site: SiteFacts) -> str | dict[str, Any]:
    """What other sites need to know about a model: they build it by its name, or know what its site says."""
    return site.model if site.own is None else site.own._asdict()


class Absences:
    """Notes on missing sites: for the result, and in a file for a run that is resumed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.notes: list[str] = read_checked_lines(file, _problem_of_note, "Delete it: the run needs it no more.")

    def add(self, sentence: str) -> None:
        self.notes.append(sentence)
        append_lines(self._file, [sentence])


def _problem_of_note(line: Any) -> str | None:
    return None if is_text(line) else f"it is {line!r:.40}"


def dismiss(agreement: Agreement, names: Mapping[int, str], transport: Transport) -> None:
    """Tell the sites that the federation has ended. A site that misses this message keeps running."""
    farewell = {k: seal({"verb": "finish", "client": k, "agreement": agreement.facts()}, {}) for k in names}
    transport.exchange(farewell, PATIENCE)
