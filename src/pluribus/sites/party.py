"""One real site: its client, its data, and a folder in which its state outlives every crash.

A party answers requests, one at a time. State and answer of a request are saved in one file, whose rename is the moment
of truth; only then the answer leaves. So a request that comes twice is done once and answered twice alike, and a server
that fell back to an earlier round finds the party as it was then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pluribus.data import Dataset
from pluribus.data.folders import same_name
from pluribus.errors import AgreementError, DamagedFileError, OtherRunError, SchemaError
from pluribus.evaluate import Selection
from pluribus.host import Host, Reply, Tensors, all_tensors
from pluribus.internal.snapshot import copy_all
from pluribus.method import PeerMethod
from pluribus.sites.agreement import Agreement, known_model, shown, whole
from pluribus.sites.envelope import Envelope, seal, unseal
from pluribus.sites.holdings import OWN, Holdings, Public, relabelled
from pluribus.storage.files import write_tensors
from pluribus.task import Card

STATE, ANSWER = "state/", "answer"
STEPS, EVALUATED = "[0-9]*.safetensors", "evaluated.safetensors"
SELECTED = "selected-*.safetensors"
KEPT = 8  # saved requests, so that the server may fall back by a round of several exchanges
ENROLMENT = -1  # the round in which a client enrols


class Step(NamedTuple):
    """When a request belongs: steps of a run come in this order."""

    t: int
    stage: int


@dataclass(frozen=True)
class Means:
    """What a site brings: its sets of images, its model, where its state lies, and what it computes on."""

    own: Mapping[str, Dataset]
    """`train`, `val` and `test`."""
    public: Public | None
    model: str
    folder: Path
    device: torch.device


class Party:
    """Answers the requests of a server."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._agreed: tuple[Agreement, int] | None = None
        self._host: Host | None = None
        self._cards: dict[int, Card] = {}
        means.folder.mkdir(parents=True, exist_ok=True)

    def answer(self, blob: bytes) -> bytes:
        """What the server gets for a request; what cannot be done is raised, and has left no trace."""
        request = unseal(blob)
        head = request.head
        agreement = Agreement.of(head.get("agreement"))
        k, verb = _number(head, "client", agreement.clients), head.get("verb")
        if verb == "hello":
            self._check(agreement)
            return seal(self._facts(agreement, k), {})
        if verb == "finish":
            return seal({}, {})
        self._agree(agreement, k)
        try:
            if verb == "evaluate":
                t = _number(head, "t", agreement.task().rounds)
                return self._evaluate(t, k, request.parts.get("down"), _best(head.get("best"), agreement))
            return self._once(request, k)
        except BaseException:
            self._host = None  # perhaps half of the work is done: it comes back as its folder knows it
            raise

    # ---- who this is -------------------------------------------------------------------------------------------------

    def _check(self, agreement: Agreement) -> None:
        for name in OWN:
            _check_kind(self._means.own[name], agreement)
        if self._means.public is not None:
            _check_kind(self._means.public.dataset, agreement, "public ")

    def _agree(self, agreement: Agreement, k: int) -> None:
        if self._agreed == (agreement, k):
            return
        self._check(agreement)
        sizes, digest = self._public(agreement) or ((), "")
        if (agreement.public, agreement.public_digest) != (sizes, digest):
            raise AgreementError("the public images of this site are not those of the federation.")
        self._agreed, self._host = (agreement, k), None

    def _facts(self, agreement: Agreement, k: int) -> dict[str, Any]:
        """What the server learns at the hello, before it knows whether there are public images."""
        card, public = self._card(agreement, k), self._public(agreement)
        facts = {"model": card.model, "samples": card.samples, "test": len(self._means.own["test"].y)}
        return facts | {"public": None if public is None else dict(zip(("sizes", "digest"), public, strict=True))}

    def _public(self, agreement: Agreement) -> tuple[tuple[int, ...], str] | None:
        """How many public images each client gave, and which they are."""
        public = self._means.public
        return None if public is None else (public.sizes(agreement.clients), public.digest(agreement.clients))

    def _card(self, agreement: Agreement, k: int) -> Card:
        return _card(agreement, k, self._means.model, len(self._means.own["train"].y))

    def _meet(self, teachers: Any, senders: Collection[str]) -> None:
        """Take note of what models the teachers have, by which their messages are read."""
        assert self._agreed is not None
        agreement, k = self._agreed
        if not senders or not isinstance(teachers, dict) or teachers.keys() != set(senders):
            raise SchemaError("the teachers that the server names are not those whose messages it sends.")
        others = {str(j): j for j in range(agreement.clients) if j != k}
        for name, model in teachers.items():
            if name not in others:
                raise SchemaError(f"the server names a teacher '{shown(name)}' that cannot be.")
            self._cards[others[name]] = _card(agreement, others[name], known_model(model), samples=0)

    # ---- work --------------------------------------------------------------------------------------------------------

    def _once(self, request: Envelope, k: int) -> bytes:
        assert self._agreed is not None
        step, digest = _step(request.head, self._agreed[0]), request.digest()
        saved = self._saved()
        if (done := saved.get(step)) is not None and done.digest == digest:
            return done.answer()
        later = [one for one in saved if one >= step]
        if later:  # the server fell back, and so does this site
            if len(later) == len(saved) and saved[min(saved)].before:
                raise AgreementError(f"this site cannot go back to round {step.t}: what it was then is no longer here.")
            self._host = None
            for one in later:
                saved.pop(one).path.unlink()
        answer = self._do(request, step, k)
        self._save(step, digest, answer, k)
        return answer

    def _do(self, request: Envelope, step: Step, k: int) -> bytes:
        site, verb, parts = self._at_hand(k), request.head["verb"], request.parts
        if verb == "enrol":
            return _sealed(site.enrol(k))
        if verb == "teach":
            return _sealed(site.teach(step.t, k))
        if verb == "learn":
            self._meet(request.head.get("teachers"), parts.keys())
            return _sealed(site.learn(step.t, k, {int(name): part for name, part in parts.items()}))
        return _sealed(site.work(step.t, step.stage, k, parts.get("down")))

    def _evaluate(self, t: int, k: int, down: bytes | None, best: Selection | None) -> bytes:
        site = self._at_hand(k)
        facts = self._origin(k) | {"round": str(t)}
        if (view := site.method.views[0]) != "after":
            # kept, because it takes a download or the site's data, and who predicts later has neither
            with site.viewed(t, k, view, down) as client:
                write_tensors(self._folder() / EVALUATED, _copies(client.measured()), facts)
        figures = site.evaluate(t, k, down, best)
        for _, measured in site.selected().values():
            write_tensors(self._selected_path(t), _copies(measured), facts)
        self._drop_selected({t} if best is None else {t, best.round})
        return seal({"figures": figures}, {})

    def _drop_selected(self, needed: set[int]) -> None:
        """Leave the model of this round, and of the best one that the server knows of, to which it may fall back."""
        paths = {self._selected_path(t) for t in needed}
        for path in self._folder().glob(SELECTED):
            if path not in paths:
                path.unlink()

    def _selected_path(self, t: int) -> Path:
        return self._folder() / SELECTED.replace("*", f"{t:07d}")

    def _at_hand(self, k: int) -> Host:
        if self._host is None:
            assert self._agreed is not None
            agreement, _ = self._agreed
            means, self._cards = self._means, {k: self._card(agreement, k)}
            own = {name: relabelled(dataset, agreement.classes) for name, dataset in means.own.items()}
            data: Any = Holdings(own, means.public, agreement.clients, means.device)
            task = replace(agreement.task(), public=data.public())
            where = agreement.local(), means.device, lambda _: None
            self._host = Host(agreement.build_method(), task, self._cards, data, *where)  # type: ignore[arg-type]
            if saved := self._saved():
                self._put_back(self._host, k, saved[max(saved)].tensors())
        return self._host

    def _put_back(self, site: Host, k: int, kept: Tensors) -> None:
        live = all_tensors(site.client(k))
        if {n: (v.shape, v.dtype) for n, v in live.items()} != {n: (v.shape, v.dtype) for n, v in kept.items()}:
            raise OtherRunError(
                f"what {self._folder()} holds is of another model or method: give the run another name, or move that "
                f"folder away to start afresh."
            )
        copy_all(live, kept)

    # ---- what outlives a crash ---------------------------------------------------------------------------------------

    def _save(self, step: Step, digest: str, answer: bytes, k: int) -> None:
        state = _copies(all_tensors(self._at_hand(k).client(k)))
        state[ANSWER] = torch.frombuffer(bytearray(answer), dtype=torch.uint8)
        saved = self._saved()
        before = saved[max(saved)].before + 1 if saved else 0
        when = {"round": str(step.t), "step": json.dumps(step), "before": str(before), "digest": digest}
        facts = self._origin(k) | when
        write_tensors(self._folder() / f"{step.t + 1:07d}-{step.stage}.safetensors", state, facts)
        for old in sorted(saved)[: 1 - KEPT]:
            saved[old].path.unlink()

    def _origin(self, k: int) -> dict[str, str]:
        """Whose state it is: enough to build the model again without the site's data."""
        assert self._agreed is not None
        return {"agreement": json.dumps(self._agreed[0].facts()), "client": str(k), "model": self._means.model}

    def _folder(self) -> Path:
        assert self._agreed is not None
        folder = self._means.folder / self._agreed[0].run
        folder.mkdir(exist_ok=True)
        return folder

    def _saved(self) -> dict[Step, _Saved]:
        found = (_Saved.at(path) for path in sorted(self._folder().glob(STEPS)))
        return {one.step: one for one in found}


@dataclass(frozen=True)
class _Saved:
    """A request that was done: when, which, after how many others, and where its state and answer lie."""

    path: Path
    step: Step
    digest: str
    before: int

    @classmethod
    def at(cls, path: Path) -> _Saved:
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata()
            return cls(path, Step(*json.loads(facts["step"])), facts["digest"], int(facts["before"]))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(
                f"{path} is damaged ({error}). Delete it: the site goes on from what it knew before."
            ) from error

    def answer(self) -> bytes:
        with safe_open(self.path, framework="pt") as file:
            return bytes(file.get_tensor(ANSWER).numpy())

    def tensors(self) -> Tensors:
        with safe_open(self.path, framework="pt") as file:
            return {n.removeprefix(STATE): file.get_tensor(n) for n in file.keys() if n.startswith(STATE)}  # noqa: SIM118


def _card(agreement: Agreement, k: int, model: str, samples: int) -> Card:
    built = agreement.task().shape_of(model)
    return Card(k, model, samples, built.width, tuple(tuple(p.shape) for p in built.head.parameters()))


def _check_kind(dataset: Dataset, agreement: Agreement, which: str = "") -> None:
    # a site may lack classes, but know none that others do not; public images have the same labels everywhere
    ours, theirs = (tuple(map(same_name, names)) for names in (dataset.classes, agreement.classes))
    if not (ours == theirs if which else set(ours) <= set(theirs)):
        raise AgreementError(
            f"the label space differs: the federation has {', '.join(agreement.classes)}; this site has "
            f"{', '.join(dataset.classes)}{which and ' in its public images'}."
        )
    if tuple(dataset.x.shape[1:]) != agreement.shape:
        there, here = (" x ".join(map(str, shape)) for shape in (agreement.shape, tuple(dataset.x.shape[1:])))
        raise AgreementError(f"the federation has images of {there}; this site's {which}are {here}.")


def _copies(tensors: Tensors) -> Tensors:
    return {f"{STATE}{name}": value.detach().cpu().clone() for name, value in tensors.items()}


def _step(head: Mapping[str, Any], agreement: Agreement) -> Step:
    """Checked against what the method does, before anything saved makes way for it."""
    verb, method = head.get("verb"), agreement.build_method()
    if verb == "enrol" and method.enrols:
        return Step(ENROLMENT, 0)
    stages = ("teach", "learn") if isinstance(method, PeerMethod) else ("work",)
    if verb not in stages:
        raise SchemaError(f"{agreement.method} knows no '{shown(verb)}'.")
    t = _number(head, "t", agreement.task().rounds)
    return Step(t, _number(head, "stage", len(method.exchanges)) if verb == "work" else stages.index(verb))


def _best(said: Any, agreement: Agreement) -> Selection | None:
    """The best round of this site so far, as the server knows it."""
    if said is None:
        return None
    val = said.get("val") if isinstance(said, dict) else math.nan
    if val is not None and not (isinstance(val, int | float) and 0 <= val <= 1):
        raise SchemaError("the request has a 'best' that cannot be.")
    return Selection(_number(said, "round", agreement.task().rounds), val)


def _number(head: Mapping[str, Any], name: str, end: int) -> int:
    try:
        return whole(head.get(name), 0, end - 1)
    except ValueError as error:
        raise SchemaError(f"the request has a '{name}' that cannot be: {error}.") from error


def _sealed(reply: Reply) -> bytes:
    loss = reply.loss if reply.loss is not None and math.isfinite(reply.loss) else None  # JSON knows no NaN
    facts = {"loss": loss, "compute": reply.compute, "communication": reply.communication, "steps": reply.steps}
    return seal(facts, {} if reply.up is None else {"up": bytes(reply.up)})  # type: ignore[arg-type]
