"""Load the trained model of a site from its state folder, without its data or its server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pluribus import __version__
from pluribus.client import MOMENTA, OPTIMIZERS, Client
from pluribus.data.federated import Data, ExamSets, Store
from pluribus.data.scaling import Scale
from pluribus.errors import DamagedFileError, NoModelError, PluribusError
from pluribus.host import Host, Tensors
from pluribus.internal.blame import first_line
from pluribus.method import Method, Need
from pluribus.sites.agreement import Agreement, is_own, make_card
from pluribus.sites.holdings import OWN
from pluribus.sites.responder import ENROLMENT, EVALUATED, SELECTED, STATE, STEPS
from pluribus.storage.checkpoint import put_back
from pluribus.storage.code import Allow, check_code
from pluribus.storage.reopen import Round
from pluribus.task import Task

MODEST = 2**26  # numbers of a model that may be built although a file holds fewer
# what reading a damaged file raises; RuntimeError: torch, of numbers that it cannot hold
DAMAGE = (
    *(SafetensorError, OSError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RuntimeError),
    PluribusError,
)


@contextmanager
def recall_client(folder: Path, round: Round = "selected", allow: Allow = False) -> Iterator[tuple[Method, Client]]:
    """Load the method of a site, and its client with the model of the headline metric. Of several runs, the newest."""
    saved = _load(_newest_run(folder), round)
    check_code(folder, {"models": saved.model, "hyper": saved.agreement.hyper}, allow)
    host = saved.host()
    # a file of the last training has optimizers too
    measured = {name: value for name, value in saved.tensors.items() if not name.startswith((OPTIMIZERS, MOMENTA))}
    put_back(host.client(saved.client).prediction_tensors(), measured, "the site")
    with host.open_view(saved.t, saved.client, "after", None) as client:  # "after" changes nothing
        yield saved.method, client


def _load(run: Path, round: Round) -> _SavedModel:
    """Load the model of the selected round, of the last evaluation, or of the last training."""
    trained = _SavedModel.at(max(run.glob(STEPS)))
    if trained.t == ENROLMENT:
        raise NoModelError(f"{run} holds no trained model: the site has enrolled, but not trained.")
    if round == "selected":
        return _SavedModel.at(max(run.glob(SELECTED), default=run / SELECTED))
    return trained if trained.method.views[0] == "after" else _SavedModel.at(run / EVALUATED)


def _newest_run(folder: Path) -> Path:
    files = [*folder.glob(STEPS), *folder.glob(f"*/{STEPS}")]
    if not files:
        raise NoModelError(
            f"{folder} holds no trained model: it is neither the folder of a run nor the state folder of a site that "
            f"has trained."
        )
    return max(files, key=lambda file: file.stat().st_mtime_ns).parent


@dataclass(frozen=True)
class _SavedModel:
    """A saved model, and all that is needed to create its client."""

    path: Path
    agreement: Agreement
    method: Method
    client: int
    model: str
    t: int
    tensors: Tensors
    weights: str  # source of pretrained weights; empty: there is none
    rows: _Rows

    @classmethod
    def at(cls, path: Path) -> _SavedModel:
        if not path.exists():  # only files of an evaluation can be missing
            raise NoModelError(f"{path.parent} holds no measured model: the site was not evaluated yet.")
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata()
                names = [name for name in file.keys() if name.startswith(STATE)]  # noqa: SIM118
                tensors = {name.removeprefix(STATE): file.get_tensor(name) for name in names}
            # a later version may predict, as it may resume: tensors that do not fit are refused when they are restored
            agreement = Agreement.of(json.loads(facts["agreement"]) | {"version": __version__})
            k, t = int(facts["client"]), int(facts["round"])
            if not 0 <= k < agreement.clients:
                raise ValueError(f"there is no client {k}")
            method, shape = agreement.build_method(None), agreement.input.shape
            rows = _Rows.of(json.loads(facts.get("rows", "{}")), shape)
            return cls(path, agreement, method, k, facts["model"], t, tensors, facts.get("weights", ""), rows)
        except DAMAGE as error:
            raise DamagedFileError(f"{path} cannot be read as the state of a site ({error}).") from error

    def host(self) -> Host:
        task = self.agreement.task({self.model: self.weights} if self.weights else {})
        if not is_own(self.model):
            self._check_size(task)
        cards = {self.client: make_card(task, self.client, self.model, samples=0)}
        where = self.agreement.local(), torch.device("cpu"), lambda _: None
        return Host(self.method, task, cards, _NoData(self.agreement, self.rows), *where)

    def _check_size(self, task: Task) -> None:
        """Refuse facts of a model that is far larger than the file, before it takes memory."""
        try:
            claimed = sum(one.numel() for one in task.shape_of(self.model).state_dict().values())
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise DamagedFileError(
                f"{self.path} describes a model that cannot be built ({first_line(error)})."
            ) from error
        held = sum(one.numel() for one in self.tensors.values())
        if claimed > max(held, MODEST) and Need.PRETRAINED not in self.method.needs:  # they do not save the backbone
            raise DamagedFileError(
                f"{self.path} describes a model '{self.model}' of {claimed:,} numbers, but holds {held:,}."
            )


class _Rows(NamedTuple):
    """What the rows of the site were: the type of their numbers, and how they were normalized."""

    dtype: torch.dtype
    scale: Scale | None

    @classmethod
    def of(cls, facts: Mapping[str, Any], shape: tuple[int, ...]) -> _Rows:
        """Read the facts of a file about rows of this shape. An older file is of images in bytes, not normalized."""
        scale, dtype = facts.get("scale"), getattr(torch, facts.get("type", "uint8"))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype} is no type of numbers")
        if scale is None:
            return cls(dtype, None)
        mean, factor = (torch.tensor(scale[name], dtype=torch.float32) for name in Scale._fields)
        for one in (mean, factor):
            one.expand(shape)  # torch refuses numbers that do not fit such rows
        return cls(dtype, Scale(mean, factor))


class _NoData:
    """Sets without rows, but normalized as the site's rows were.

    Public sets have the agreed lengths, because the state of a method may depend on them.
    """

    def __init__(self, agreement: Agreement, rows: _Rows) -> None:
        x = torch.empty(0, *agreement.input.shape, dtype=rows.dtype)
        outputs = len(agreement.classes)
        y = {
            "classes": torch.empty(0, dtype=torch.int64),
            "labels": torch.empty(0, outputs, dtype=torch.uint8),
            "numbers": torch.empty(0, outputs),
        }[agreement.target.kind]
        self._store, self._scale = Store(x, y, torch.device("cpu")), rows.scale
        self.public = {k: self._blank(rows) for k, rows in enumerate(agreement.public)}

    def sets(self, client: int) -> dict[str, Data]:
        return {name: self._blank(0) for name in OWN} | {"public": self.public.get(client, self._blank(0))}

    def public_for(self, client: int) -> dict[int, Data]:
        return self.public

    def exams_for(self, client: int) -> ExamSets:
        return MappingProxyType({})

    def _blank(self, rows: int) -> Data:
        return Data(self._store, torch.zeros(1, dtype=torch.int64).expand(rows), self._scale)  # takes no memory
