"""Answers requests at a real site: its client, its data, and a folder with its state, which survives crashes.

A responder answers one request at a time. It saves state and answer of a request in one file, atomically by rename, and
then sends the answer. So a request that arrives twice is done once and gets the same answer twice. If the server went
back to an earlier round, the site goes back to its state of that round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pluribus.data import Dataset
from pluribus.data.folders import normalize_name
from pluribus.errors import AgreementError, DamagedFileError, OtherRunError, SchemaError
from pluribus.evaluate import Selection
from pluribus.host import Host, Tensors, all_tensors
from pluribus.internal.metrics import METRICS
from pluribus.internal.snapshot import copy_all
from pluribus.method import PeerMethod
from pluribus.request import Enrol, Evaluate, Learn, Measured, Reply, Request, Teach, Work
from pluribus.sites.agreement import Agreement, check_integer, check_model, sanitize
from pluribus.sites.envelope import Envelope, seal, unseal
from pluribus.sites.holdings import OWN, Holdings, Public, relabel
from pluribus.storage.checkpoint import without_predictions
from pluribus.storage.files import write_tensors
from pluribus.task import Card

STATE, ANSWER = "state/", "answer"
STEPS, EVALUATED = "[0-9]*.safetensors", "evaluated.safetensors"
SELECTED = "selected-*.safetensors"
KEPT = 8  # saved requests, so that the server may go back by a round of several exchanges
ENROLMENT = -1  # the round in which a client enrols

Training = Enrol | Work | Teach | Learn  # requests that change a client


class Step(NamedTuple):
    """The position of a request in a run. Steps are ordered."""

    t: int
    stage: int


@dataclass(frozen=True)
class SiteResources:
    """What a site brings."""

    own: Mapping[str, Dataset]  # `train`, `val` and `test`
    public: Public | None
    model: str
    folder: Path  # of its state
    device: torch.device


class Responder:
    """Answers the requests of a server."""

    def __init__(self, means: SiteResources) -> None:
        self._means = means
        self._agreed: tuple[Agreement, int] | None = None
        self._host: Host | None = None
        self._cards: dict[int, Card] = {}
        means.folder.mkdir(parents=True, exist_ok=True)

    def answer(self, blob: bytes) -> bytes:
        """Answer a request. A refused request raises an error, and changes nothing."""
        envelope = unseal(blob)
        agreement = Agreement.of(envelope.head.get("agreement"))
        k, verb = _read_number(envelope.head, "client", agreement.clients), envelope.head.get("verb")
        if verb == "hello":
            self._check(agreement)
            return seal(self._facts(agreement, k), {})
        if verb == "finish":
            return seal({}, {})
        self._accept(agreement, k)
        request = _read_request(envelope, agreement, k)
        try:
            return self._evaluate(request) if isinstance(request, Evaluate) else self._train_once(request, envelope)
        except BaseException:
            self._host = None  # the work may be half done: load the saved state again
            raise

    def _check(self, agreement: Agreement) -> None:
        for name in OWN:
            _check_dataset(self._means.own[name], agreement)
        if self._means.public is not None:
            _check_dataset(self._means.public.dataset, agreement, "public ")

    def _accept(self, agreement: Agreement, k: int) -> None:
        if self._agreed == (agreement, k):
            return
        self._check(agreement)
        sizes, digest = self._public(agreement) or ((), "")
        if (agreement.public, agreement.public_digest) != (sizes, digest):
            raise AgreementError("the public images differ from those of the federation: all sites need the same copy.")
        self._agreed, self._host = (agreement, k), None

    def _facts(self, agreement: Agreement, k: int) -> dict[str, Any]:
        """What the site tells the server at the start, before the server knows whether there are public images."""
        card, public = self._card(agreement, k), self._public(agreement)
        facts = {"model": card.model, "samples": card.samples, "test": len(self._means.own["test"].y)}
        return facts | {"public": None if public is None else dict(zip(("sizes", "digest"), public, strict=True))}

    def _public(self, agreement: Agreement) -> tuple[tuple[int, ...], str] | None:
        """Number of public images of each client, and the digest of all."""
        public = self._means.public
        return None if public is None else (public.sizes(agreement.clients), public.digest(agreement.clients))

    def _card(self, agreement: Agreement, k: int) -> Card:
        return agreement.card(k, self._means.model, len(self._means.own["train"].y))

    def _train_once(self, request: Training, envelope: Envelope) -> bytes:
        step, digest = _step_of(request), envelope.digest()
        saved = self._load_saved()
        if (done := saved.get(step)) is not None and done.digest == digest:
            return done.answer()
        later = [one for one in saved if one >= step]
        if later:  # the server went back to an earlier round, and so does this site
            if len(later) == len(saved) and saved[min(saved)].before:
                raise AgreementError(
                    f"this site cannot go back to round {step.t}: it no longer has its state of that round."
                )
            self._host = None
            for one in later:
                saved.pop(one).path.unlink()
        host = self._get_host(request.client)
        if isinstance(request, Learn):
            self._note_teachers(envelope, request.client)
        reply = host.answer(request)
        assert isinstance(reply, Reply)
        answer = _seal_reply(reply)
        self._save(step, digest, answer, request.client)
        return answer

    def _note_teachers(self, envelope: Envelope, k: int) -> None:
        """Store the cards of the teachers: the schema of a message depends on the model of its sender."""
        assert self._agreed is not None
        agreement, _ = self._agreed
        for j, model in _read_teachers(envelope, agreement, k).items():
            self._cards[j] = agreement.card(j, model, samples=0)

    def _evaluate(self, request: Evaluate) -> bytes:
        k, t, down, best = request.client, request.t, request.down, request.best
        host = self._get_host(k)
        facts = self._origin(k) | {"round": str(t)}
        if (view := host.method.views[0]) != "after":
            # save the adapted model: it depends on a download or on data, and a prediction has neither
            with host.open_view(t, k, view, down) as client:
                write_tensors(self._folder() / EVALUATED, _copies(client.prediction_tensors()), facts)
        answer = host.answer(request)
        assert isinstance(answer, Measured)
        for _, measured in host.take_selected().values():
            write_tensors(self._selected_path(t), _copies(without_predictions(measured)), facts)
        self._drop_selected({t} if best is None else {t, best.round})
        return seal({"figures": answer.figures}, {})

    def _drop_selected(self, needed: set[int]) -> None:
        """Delete selected models of other rounds than these: this round, and the best round that the server knows."""
        paths = {self._selected_path(t) for t in needed}
        for path in self._folder().glob(SELECTED):
            if path not in paths:
                path.unlink()

    def _selected_path(self, t: int) -> Path:
        return self._folder() / SELECTED.replace("*", f"{t:07d}")

    def _get_host(self, k: int) -> Host:
        if self._host is None:
            assert self._agreed is not None
            agreement, _ = self._agreed
            means, self._cards = self._means, {k: self._card(agreement, k)}
            own = {name: relabel(dataset, agreement.classes) for name, dataset in means.own.items()}
            data = Holdings(own, means.public, agreement.clients, means.device)
            where = agreement.local(), means.device, lambda _: None
            self._host = Host(agreement.build_method(), agreement.task(), self._cards, data, *where)
            if saved := self._load_saved():
                self._restore(self._host, k, saved[max(saved)].tensors())
        return self._host

    def _restore(self, host: Host, k: int, kept: Tensors) -> None:
        live = all_tensors(host.client(k))
        if {n: (v.shape, v.dtype) for n, v in live.items()} != {n: (v.shape, v.dtype) for n, v in kept.items()}:
            raise OtherRunError(
                f"{self._folder()} holds the state of another model or method: give the run another name, or move "
                f"that folder away to start again."
            )
        copy_all(live, kept)

    def _save(self, step: Step, digest: str, answer: bytes, k: int) -> None:
        state = _copies(all_tensors(self._get_host(k).client(k)))
        state[ANSWER] = torch.frombuffer(bytearray(answer), dtype=torch.uint8)
        saved = self._load_saved()
        before = saved[max(saved)].before + 1 if saved else 0
        facts = {"round": str(step.t), "step": json.dumps(step), "before": str(before), "digest": digest}
        path = self._folder() / f"{step.t + 1:07d}-{step.stage}.safetensors"
        write_tensors(path, state, self._origin(k) | facts)
        for old in sorted(saved)[: 1 - KEPT]:
            saved[old].path.unlink()

    def _origin(self, k: int) -> dict[str, str]:
        """Metadata of a saved file: enough to build the model again without the data of the site."""
        assert self._agreed is not None
        return {"agreement": json.dumps(self._agreed[0].facts()), "client": str(k), "model": self._means.model}

    def _folder(self) -> Path:
        assert self._agreed is not None
        folder = self._means.folder / self._agreed[0].run
        folder.mkdir(exist_ok=True)
        return folder

    def _load_saved(self) -> dict[Step, _SavedStep]:
        found = (_SavedStep.at(path) for path in sorted(self._folder().glob(STEPS)))
        return {one.step: one for one in found}


@dataclass(frozen=True)
class _SavedStep:
    """A request that was done: the file with state and answer, its step and digest, and how many came before."""

    path: Path
    step: Step
    digest: str
    before: int

    @classmethod
    def at(cls, path: Path) -> _SavedStep:
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata()
            return cls(path, Step(*json.loads(facts["step"])), facts["digest"], int(facts["before"]))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(
                f"{path} is damaged ({error}). Delete it: the site resumes from the state before it."
            ) from error

    def answer(self) -> bytes:
        with safe_open(self.path, framework="pt") as file:
            return bytes(file.get_tensor(ANSWER).numpy())

    def tensors(self) -> Tensors:
        with safe_open(self.path, framework="pt") as file:
            return {n.removeprefix(STATE): file.get_tensor(n) for n in file.keys() if n.startswith(STATE)}  # noqa: SIM118


def _check_dataset(dataset: Dataset, agreement: Agreement, which: str = "") -> None:
    # a site may lack classes of the federation, but have no others; public images have the same labels at all sites
    ours, theirs = (tuple(map(normalize_name, names)) for names in (dataset.classes, agreement.classes))
    if not (ours == theirs if which else set(ours) <= set(theirs)):
        raise AgreementError(
            f"the label space differs: the federation has {', '.join(agreement.classes)}; this site has "
            f"{', '.join(dataset.classes)}{which and ' in its public images'}."
        )
    if tuple(dataset.x.shape[1:]) != agreement.shape:
        there, here = (" x ".join(map(str, shape)) for shape in (agreement.shape, tuple(dataset.x.shape[1:])))
        raise AgreementError(f"the federation has images of {there}; the {which}images of this site are {here}.")


def _copies(tensors: Tensors) -> Tensors:
    return {f"{STATE}{name}": value.detach().cpu().clone() for name, value in tensors.items()}


def _read_request(envelope: Envelope, agreement: Agreement, k: int) -> Request:
    """Read and check a request, before it changes any saved state."""
    head, method = envelope.head, agreement.build_method()
    peers, down = isinstance(method, PeerMethod), envelope.parts.get("down")

    def t() -> int:
        return _read_number(head, "t", agreement.task().rounds)

    match head.get("verb"):
        case "enrol" if method.enrols:
            return Enrol(k)
        case "work" if not peers:
            return Work(k, t(), _read_number(head, "stage", len(method.exchanges)), down)
        case "teach" if peers:
            return Teach(k, t())
        case "learn" if peers:
            return Learn(k, t(), {j: envelope.parts[str(j)] for j in _read_teachers(envelope, agreement, k)})
        case "evaluate":
            return Evaluate(k, t(), down, _read_best(head.get("best"), agreement))
        case verb:
            raise SchemaError(f"method {agreement.method} has no request '{sanitize(verb)}'.")


def _read_teachers(envelope: Envelope, agreement: Agreement, k: int) -> dict[int, str]:
    """Models of the clients whose messages the server sends."""
    models = envelope.head.get("teachers")
    if not envelope.parts or not isinstance(models, dict) or models.keys() != envelope.parts.keys():
        raise SchemaError("the teachers in the request do not match its messages.")
    others = {str(j): j for j in range(agreement.clients) if j != k}
    if unknown := [name for name in models if name not in others]:
        raise SchemaError(f"the request names a teacher '{sanitize(unknown[0])}' that does not exist.")
    return {others[name]: check_model(model) for name, model in models.items()}


def _step_of(request: Training) -> Step:
    if isinstance(request, Enrol):
        return Step(ENROLMENT, 0)
    return Step(request.t, request.stage if isinstance(request, Work) else int(isinstance(request, Learn)))


def _read_best(sent: Any, agreement: Agreement) -> Selection | None:
    """The best round of this site so far, according to the server."""
    if sent is None:
        return None
    val = sent.get("val") if isinstance(sent, dict) else math.nan
    least, most = METRICS[agreement.metrics[0]].range
    if val is not None and not (isinstance(val, int | float) and least <= val <= most):
        raise SchemaError("the request has an invalid 'best'.")
    return Selection(_read_number(sent, "round", agreement.task().rounds), val)


def _read_number(head: Mapping[str, Any], name: str, end: int) -> int:
    try:
        return check_integer(head.get(name), 0, end - 1)
    except ValueError as error:
        raise SchemaError(f"the request has an invalid '{name}': {error}.") from error


def _seal_reply(reply: Reply) -> bytes:
    loss = reply.loss if reply.loss is not None and math.isfinite(reply.loss) else None  # JSON has no NaN
    facts = {"loss": loss, "compute": reply.compute, "communication": reply.communication, "steps": reply.steps}
    return seal(facts, {"up": reply.up} if isinstance(reply.up, bytes) else {})
