"""Answers requests at a real site: its client, its data, and a folder with its state, which survives crashes.

A responder answers one request at a time. It saves state and answer of a request in one file, atomically by rename, and
then sends the answer. So a request that arrives twice is done once and gets the same answer twice. If the server went
back to an earlier round, the site goes back to its state of that round. What it has spent of its privacy budget stays
spent: its messages were sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pluribus.data import Dataset
from pluribus.data.scaling import Normalize, Scale
from pluribus.errors import (
    AgreementError,
    DamagedFileError,
    DataError,
    OtherRunError,
    PluribusError,
    SchemaError,
    UserCodeError,
    WeightsError,
)
from pluribus.evaluate import Selection
from pluribus.host import Host, Tensors
from pluribus.internal.blame import first_line
from pluribus.internal.metrics import METRICS
from pluribus.internal.snapshot import copy_all
from pluribus.internal.views import SERVER_VIEWS
from pluribus.method import Method, Need, PeerMethod, check_counts
from pluribus.models.unseen import Unseen
from pluribus.privacy.account import choose_larger
from pluribus.privacy.check import check_private
from pluribus.request import Enrol, Evaluate, Learn, Measured, Published, Reply, Request, Teach, Work
from pluribus.sites.agreement import (
    Agreement,
    check_integer,
    check_model,
    is_own,
    make_card,
    own_name,
    read_unseen,
    sanitize,
)
from pluribus.sites.envelope import Envelope, seal, unseal
from pluribus.sites.holdings import Holdings, Public, fit
from pluribus.storage.checkpoint import without_predictions
from pluribus.storage.files import write_tensors
from pluribus.task import Card, Task

STATE, ANSWER = "state/", "answer"
STEPS, EVALUATED = "[0-9]*.safetensors", "evaluated.safetensors"
SELECTED = "selected-*.safetensors"
SPENT = "spent"  # the account of a private site that went back, in a file of this name
KEPT = 8  # saved requests, so that the server may go back by a round of several exchanges
CHOOSE = Normalize("auto")
ENROLMENT = -1  # the round in which a client enrols

Training = Enrol | Work | Teach | Learn  # requests that change a client


class Step(NamedTuple):
    """The position of a request in a run. Steps are ordered."""

    t: int
    stage: int


@dataclass(frozen=True)
class SiteResources:
    """What a site brings."""

    own: Mapping[str, Dataset]  # `train`, and `val` and `test` if there are such rows
    public: Public | None
    model: str
    folder: Path  # of its state
    device: torch.device
    normalize: Normalize = CHOOSE
    weights: str | None = None  # source of pretrained weights of its model
    allow: tuple[str, ...] = ()  # models that the server may name by their dotted path
    share_counts: bool = True  # whether it tells how many rows it has, if the federation asks


class Responder:
    """Answers the requests of a server."""

    def __init__(self, means: SiteResources) -> None:
        self._means = means
        self._agreed: tuple[Agreement, int] | None = None
        self._host: Host | None = None
        self._cards: dict[int, Card] = {}
        self._unseen: dict[str, Unseen] = {}  # of teachers
        self._fitted: tuple[Agreement, dict[str, Dataset], Public | None] | None = None
        self._scale: Scale | None = None
        means.folder.mkdir(parents=True, exist_ok=True)

    def answer(self, blob: bytes) -> bytes:
        """Answer a request. A refused request raises an error, and changes nothing."""
        envelope = unseal(blob)
        agreement = Agreement.of(envelope.head.get("agreement"))
        k, verb = _read_number(envelope.head, "client", agreement.clients), envelope.head.get("verb")
        if agreement.share_counts and not self._means.share_counts:
            raise AgreementError(
                "this site does not tell how many rows it has: set share_counts = false in federation.toml."
            )
        if verb == "hello":
            self._fit(agreement)
            return seal(self._facts(agreement, k), {})
        if verb == "finish":
            return seal({}, {})
        self._accept(agreement, k)
        request = _read_request(envelope, agreement, self._method(agreement), k)
        try:
            return self._evaluate(request) if isinstance(request, Evaluate) else self._train_once(request, envelope)
        except BaseException:
            self._host = None  # the work may be half done: load the saved state again
            raise

    def explain(self, error: PluribusError) -> str:
        """Why a request is refused, for the server: without rows, paths and code of the site, which its log shows."""
        if isinstance(error, DataError | UserCodeError | WeightsError):
            return "this site cannot use its own data or model here: the log of the site says why."
        return error.sentence.replace(self._means.model, "(own)") if is_own(self._means.model) else error.sentence

    def _fit(self, agreement: Agreement) -> tuple[dict[str, Dataset], Public | None]:
        """The site's own rows and the public ones as agreed. Rows that do not fit are refused."""
        if self._fitted is None or self._fitted[0] != agreement:
            own = {name: fit(dataset, agreement) for name, dataset in self._means.own.items()}
            public = self._means.public
            if public is not None:
                public = replace(public, dataset=fit(public.dataset, agreement, "public "))
            self._fitted = agreement, own, public
        return self._fitted[1:]

    def _method(self, agreement: Agreement) -> Method:
        return agreement.build_method(self._means.allow)

    def _task(self, agreement: Agreement) -> Task:
        """The task of this site: it has weights for its own model, and knows of its teachers' models what they say."""
        means = self._means
        return agreement.task({} if means.weights is None else {means.model: means.weights}, self._unseen)

    def _accept(self, agreement: Agreement, k: int) -> None:
        if self._agreed == (agreement, k):
            return
        self._fit(agreement)
        sizes, digest = self._public(agreement) or ((), "")
        if (agreement.public, agreement.public_digest) != (sizes, digest):
            raise AgreementError("the public rows differ from those of the federation: all sites need the same copy.")
        self._agreed, self._host = (agreement, k), None

    def _facts(self, agreement: Agreement, k: int) -> dict[str, Any]:
        """What the site tells the server at the start, before the server knows whether there are public rows.

        Of its own model it tells the width of its features and the shapes of its head, but neither name nor layers.
        """
        card, public, test = self._card(agreement, k), self._public(agreement), self._means.own.get("test")
        self._check_messages(agreement, card, () if public is None else public[0])
        model: dict[str, Any] = {"model": card.model}
        if is_own(card.model):
            model = {"own": {"width": card.width, "head": card.head}}
        pretrained = self._task(agreement).has_weights(card.model)
        counts = {"samples": card.samples, "test": 0 if test is None else len(test.y)}
        facts = {
            "pretrained": pretrained,
            "public": None if public is None else dict(zip(("sizes", "digest"), public, strict=True)),
        }
        return model | (counts if agreement.share_counts else {}) | facts

    def _check_messages(self, agreement: Agreement, card: Card, public: tuple[int, ...]) -> None:
        """Refuse a model whose messages the server cannot know, because it has neither its code nor its weights."""
        if not is_own(card.model) and self._means.weights is None:
            return
        agreement = replace(agreement, public=public)
        task, method = self._task(agreement), self._method(agreement)
        if Need.PUBLIC_DATA in method.needs and not public:
            return  # the server refuses this first
        if method.complete(task, [card.model]) != method:
            return  # its messages depend on the models of others, which the server knows
        seen, unseen = card, {}
        if is_own(card.model):
            seen = replace(card, model=own_name(card.id))
            unseen = {seen.model: Unseen(card.width, card.head)}
        if method.wires(task, card) != method.wires(agreement.task(unseen=unseen), seen):
            raise AgreementError(
                f"{agreement.method} exchanges parts of this site's model that the server does not know: the site adds "
                f"layers to them, or its head is not one linear layer. Use another method, such as fedproto or fd."
            )

    def _public(self, agreement: Agreement) -> tuple[tuple[int, ...], str] | None:
        """Number of public rows of each client, and the digest of all."""
        public = self._means.public
        return None if public is None else (public.sizes(agreement.clients), public.digest(agreement.clients))

    def _card(self, agreement: Agreement, k: int) -> Card:
        return make_card(self._task(agreement), k, self._means.model, len(self._means.own["train"].y))

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
            assert self._agreed is not None
            if self._agreed[0].privacy is not None:
                self._keep_account(request.client)
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
            if isinstance(model, Unseen):
                self._unseen[own_name(j)] = model
            name = own_name(j) if isinstance(model, Unseen) else model
            self._cards[j] = make_card(self._task(agreement), j, name, samples=0)

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
            data = Holdings(*self._fit(agreement), agreement.clients, means.device, means.normalize)
            self._scale, where = data.scale, (agreement.local(), means.device, lambda _: None)
            method, task, local = self._method(agreement), self._task(agreement), where[0]
            check_counts(method, task, [self._cards[k]])
            if local.privacy is not None:
                check_private(method, task, [self._cards[k]], local, "none" if data.scale is None else "client")
            self._host = Host(method, task, self._cards, data, *where)
            self._host.rehearse()
            if saved := self._load_saved():
                self._restore(self._host, k, saved[max(saved)].tensors())
            if self._account_path().exists():
                self._restore_account(self._host, k)
        return self._host

    def _restore(self, host: Host, k: int, kept: Tensors) -> None:
        live = host.client(k).all_tensors()
        if {n: (v.shape, v.dtype) for n, v in live.items()} != {n: (v.shape, v.dtype) for n, v in kept.items()}:
            raise OtherRunError(
                f"{self._folder()} holds the state of another model or method: give the run another name, or move "
                f"that folder away to start again."
            )
        copy_all(live, kept)

    def _account_path(self) -> Path:
        return self._folder() / f"{SPENT}.safetensors"

    def _keep_account(self, k: int) -> None:
        """Write what the client has spent to a file that outlives the states of later rounds."""
        write_tensors(self._account_path(), {SPENT: self._get_host(k).client(k).state.spent.cpu()}, {})

    def _restore_account(self, host: Host, k: int) -> None:
        path, state = self._account_path(), host.client(k).state
        try:
            with safe_open(path, framework="pt") as file:
                known = file.get_tensor(SPENT)
            state.spent = choose_larger(state.spent, known.to(state.spent))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise DamagedFileError(
                f"{path} is damaged ({first_line(error)}), so nobody knows what this site has spent of its privacy "
                f"budget: give the run another name."
            ) from error

    def _save(self, step: Step, digest: str, answer: bytes, k: int) -> None:
        state = _copies(self._get_host(k).client(k).all_tensors())
        state[ANSWER] = torch.frombuffer(bytearray(answer), dtype=torch.uint8)
        saved = self._load_saved()
        before = saved[max(saved)].before + 1 if saved else 0
        facts = {"round": str(step.t), "step": json.dumps(step), "before": str(before), "digest": digest}
        path = self._folder() / f"{step.t + 1:07d}-{step.stage}.safetensors"
        write_tensors(path, state, self._origin(k) | facts)
        for old in sorted(saved)[: 1 - KEPT]:
            saved[old].path.unlink()

    def _origin(self, k: int) -> dict[str, str]:
        """Metadata of a saved file: enough to build the model again, and to normalize rows, without the site's data."""
        assert self._agreed is not None
        means, scale = self._means, self._scale
        facts = {"agreement": json.dumps(self._agreed[0].facts()), "client": str(k), "model": means.model}
        rows = {
            "type": str(means.own["train"].x.dtype).removeprefix("torch."),
            "scale": None if scale is None else {name: one.tolist() for name, one in scale._asdict().items()},
        }
        return facts | {"weights": means.weights or "", "rows": json.dumps(rows)}

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
                facts, answer = file.metadata(), file.get_slice(ANSWER)
            t, stage = map(check_integer, json.loads(facts["step"]))
            if answer.get_dtype() != "U8" or len(answer.get_shape()) != 1:
                raise ValueError("its answer is not one of bytes")
            return cls(path, Step(t, stage), facts["digest"], int(facts["before"]))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedFileError(
                f"{path} is damaged ({error}). Delete it: the site resumes from the state before it."
            ) from error

    def answer(self) -> bytes:
        with safe_open(self.path, framework="pt") as file:
            return bytes(file.get_tensor(ANSWER).numpy())

    def tensors(self) -> Tensors:
        with safe_open(self.path, framework="pt") as file:
            return {n.removeprefix(STATE): file.get_tensor(n) for n in file.keys() if n.startswith(STATE)}  # noqa: SIM118


def _copies(tensors: Tensors) -> Tensors:
    return {f"{STATE}{name}": value.detach().cpu().clone() for name, value in tensors.items()}


def _read_request(envelope: Envelope, agreement: Agreement, method: Method, k: int) -> Request:
    """Read and check a request, before it changes any saved state."""
    head, down = envelope.head, envelope.parts.get("down")
    peers = isinstance(method, PeerMethod)

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
            published = _read_published(envelope, method)
            return Evaluate(k, t(), down, _read_best(head.get("best"), agreement), published)
        case verb:
            raise SchemaError(f"method {agreement.method} has no request '{sanitize(verb)}'.")


def _read_published(envelope: Envelope, method: Method) -> dict[str, Published]:
    """The models of the server by view. Only registered models are built here."""
    views = [view for view in method.views if view in SERVER_VIEWS]
    models = envelope.head.get("models", {})
    if not isinstance(models, dict) or models.keys() != set(views) or not set(views) <= envelope.parts.keys():
        raise SchemaError(f"an evaluation needs the models of the views {', '.join(views) or 'of no server'}.")
    return {view: Published(check_model(models[view]), envelope.parts[view]) for view in views}


def _read_teachers(envelope: Envelope, agreement: Agreement, k: int) -> dict[int, str | Unseen]:
    """Models of the clients whose messages the server sends: names, or what is known of models of their own."""
    models = envelope.head.get("teachers")
    if not envelope.parts or not isinstance(models, dict) or models.keys() != envelope.parts.keys():
        raise SchemaError("the teachers in the request do not match its messages.")
    others = {str(j): j for j in range(agreement.clients) if j != k}
    if unknown := [name for name in models if name not in others]:
        raise SchemaError(f"the request names a teacher '{sanitize(unknown[0])}' that does not exist.")
    return {others[name]: _read_teacher(model) for name, model in models.items()}


def _read_teacher(model: Any) -> str | Unseen:
    if not isinstance(model, dict):
        return check_model(model)
    try:
        return read_unseen(model)
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"the request describes no model of a teacher ({sanitize(error)}).") from error


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
    facts: dict[str, Any] = {
        "loss": loss,
        "compute": reply.compute,
        "communication": reply.communication,
    }
    if reply.steps is not None:
        facts["steps"] = reply.steps
    if reply.left_out:
        facts["left_out"] = {str(j): reason for j, reason in reply.left_out.items()}
    if reply.privacy is not None:
        facts["privacy"] = {"epsilon": reply.privacy.epsilon, "affords_round": reply.privacy.affords_round}
    return seal(facts, {"up": reply.up} if isinstance(reply.up, bytes) else {})
