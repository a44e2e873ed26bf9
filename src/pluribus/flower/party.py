"""One real site: its client, its data, and a folder in which its state outlives every crash.

A party answers requests, one at a time. State and answer of a request are saved in one file, whose rename is the moment
of truth; only then the answer leaves. So a request that comes twice is done once and answered twice alike, and a server
that fell back to an earlier round finds the party as it was then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pluribus.data import Dataset
from pluribus.errors import CheckpointError, MessageError
from pluribus.evaluate import predicting
from pluribus.files import write_tensors
from pluribus.flower.agreement import Agreement
from pluribus.flower.envelope import Envelope, seal, unseal
from pluribus.flower.holdings import Holdings, Public
from pluribus.site import Reply, Site, Tensors, all_tensors
from pluribus.task import Card

STATE, ANSWER = "state/", "answer"
STEPS, EVALUATED = "[0-9]*.safetensors", "evaluated.safetensors"
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
        self._site: Site | None = None
        self._cards: dict[int, Card] = {}
        means.folder.mkdir(parents=True, exist_ok=True)

    def answer(self, blob: bytes) -> bytes:
        """What the server gets for a request. What cannot be done is said in the answer."""
        request = unseal(blob)
        head = request.head
        agreement, k, verb = Agreement.of(head["agreement"]), int(head["client"]), str(head["verb"])
        self._agree(agreement, k)
        if verb == "hello":
            return seal(self._facts(agreement, k), {})
        if verb == "evaluate":
            return self._evaluate(int(head["t"]), k, request.parts.get("down"))
        return self._once(request, verb, k)

    # ---- who this is -------------------------------------------------------------------------------------------------

    def _agree(self, agreement: Agreement, k: int) -> None:
        if self._agreed == (agreement, k):
            return
        mine = self._means.own["train"]
        if mine.classes != agreement.classes:
            raise MessageError(
                f"the label space differs: the federation has {', '.join(agreement.classes)}; this site has "
                f"{', '.join(mine.classes)}."
            )
        if tuple(mine.x.shape[1:]) != agreement.shape:
            there, here = (" x ".join(map(str, shape)) for shape in (agreement.shape, tuple(mine.x.shape[1:])))
            raise MessageError(f"the federation has images of {there}; this site's are {here}.")
        public = self._means.public
        if agreement.public and (public is None or public.digest() != agreement.public_digest):
            raise MessageError("the public images of this site are not those of the federation.")
        self._agreed, self._site = (agreement, k), None

    def _facts(self, agreement: Agreement, k: int) -> dict[str, Any]:
        card = self._card(agreement, k)
        return {"model": card.model, "samples": card.samples, "test": len(self._means.own["test"].y)}

    def _card(self, agreement: Agreement, k: int) -> Card:
        return _card(agreement, k, self._means.model, len(self._means.own["train"].y))

    def _meet(self, teachers: Mapping[str, str]) -> None:
        """Take note of what models the teachers have."""
        assert self._agreed is not None
        for j, model in teachers.items():
            self._cards.setdefault(int(j), _card(self._agreed[0], int(j), str(model), samples=0))

    # ---- work --------------------------------------------------------------------------------------------------------

    def _once(self, request: Envelope, verb: str, k: int) -> bytes:
        step, digest = _step(request.head, verb), request.digest()
        saved = self._saved()
        if (done := saved.get(step)) is not None and done.digest == digest:
            return done.answer()
        later = [one for one in saved if one >= step]
        if later:  # the server fell back, and so does this site
            if len(later) == len(saved) >= KEPT:
                raise MessageError(f"this site cannot go back to round {step.t}: what it was then is no longer here.")
            self._site = None
            for one in later:
                saved.pop(one).path.unlink()
        answer = self._do(request, verb, k)
        self._save(step, digest, answer, k)
        return answer

    def _do(self, request: Envelope, verb: str, k: int) -> bytes:
        site, head, parts = self._at_hand(k), request.head, request.parts
        if verb == "enrol":
            return seal({}, {"up": site.enrol(k)})
        if verb == "work":
            return _sealed(site.work(int(head["t"]), int(head["stage"]), k, parts.get("down")))
        if verb == "teach":
            return _sealed(site.teach(int(head["t"]), k))
        if verb == "learn":
            self._meet(head["teachers"])
            return _sealed(site.learn(int(head["t"]), k, {int(name): part for name, part in parts.items()}))
        raise MessageError(f"a site does not know '{verb}'.")

    def _evaluate(self, t: int, k: int, down: bytes | None) -> bytes:
        site = self._at_hand(k)
        if (view := predicting(site.method)) != "after":
            # kept, because it takes a download or the site's data, and who predicts later has neither
            with site.viewed(t, k, view, down) as client:
                facts = self._origin(k) | {"round": str(t)}
                write_tensors(self._folder() / EVALUATED, _copies(client.tensors()), facts)
        return seal({"figures": site.evaluate(t, k, down)}, {})

    def _at_hand(self, k: int) -> Site:
        if self._site is None:
            assert self._agreed is not None
            agreement, _ = self._agreed
            means, self._cards = self._means, {k: self._card(agreement, k)}
            data: Any = Holdings(means.own, means.public, means.device)
            task = replace(agreement.task(), public=data.public())
            where = agreement.local(), means.device, lambda _: None
            self._site = Site(agreement.build_method(), task, self._cards, data, *where)  # type: ignore[arg-type]
            if saved := self._saved():
                self._site.adopt(k, saved[max(saved)].tensors())
        return self._site

    # ---- what outlives a crash ---------------------------------------------------------------------------------------

    def _save(self, step: Step, digest: str, answer: bytes, k: int) -> None:
        state = _copies(all_tensors(self._at_hand(k).client(k)))
        state[ANSWER] = torch.frombuffer(bytearray(answer), dtype=torch.uint8)
        facts = self._origin(k) | {"round": str(step.t), "step": json.dumps(step), "digest": digest}
        write_tensors(self._folder() / f"{step.t + 1:07d}-{step.stage}.safetensors", state, facts)
        for old in sorted(self._saved())[:-KEPT]:
            self._saved()[old].path.unlink()

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
    """A request that was done: when, which, and where its state and answer lie."""

    path: Path
    step: Step
    digest: str

    @classmethod
    def at(cls, path: Path) -> _Saved:
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata()
            return cls(path, Step(*json.loads(facts["step"])), facts["digest"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
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


def _copies(tensors: Tensors) -> Tensors:
    return {f"{STATE}{name}": value.detach().cpu().clone() for name, value in tensors.items()}


def _step(head: Mapping[str, Any], verb: str) -> Step:
    if verb == "enrol":
        return Step(ENROLMENT, 0)
    return Step(int(head["t"]), {"teach": 0, "learn": 1}.get(verb, int(head.get("stage", 0))))


def _sealed(reply: Reply) -> bytes:
    facts = {"loss": reply.loss, "compute": reply.compute, "communication": reply.communication}
    return seal(facts, {} if reply.up is None else {"up": bytes(reply.up)})  # type: ignore[arg-type]
