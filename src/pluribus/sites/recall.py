"""A site's trained model from its state folder alone: neither the site's data nor its server is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from pluribus import __version__
from pluribus.client import OPTIMISERS, Client
from pluribus.data.federated import Data, ExamSets, Store
from pluribus.errors import DamagedFileError, NoModelError, PluribusError
from pluribus.host import MOMENTA, Host, Tensors
from pluribus.method import Method
from pluribus.sites.agreement import Agreement
from pluribus.sites.holdings import OWN
from pluribus.sites.responder import ENROLMENT, EVALUATED, SELECTED, STATE, STEPS
from pluribus.storage.checkpoint import put_back
from pluribus.storage.reopen import Round


@contextmanager
def recalled(folder: Path, round: Round = "selected") -> Iterator[tuple[Method, Client]]:
    """The site's method, and its client with the model that the headline measured. Of several runs, the newest."""
    memory = _memory(_newest_run(folder), round)
    host = memory.host()
    put_back(host.client(memory.client).measured(), memory.measured, "the site")
    with host.viewed(memory.t, memory.client, "after", None) as client:  # as it was saved
        yield memory.method, client


def _memory(run: Path, round: Round) -> _Memory:
    """The model of the round that validation selects, of the last evaluation, or of the last training."""
    trained = _Memory.at(max(run.glob(STEPS)))
    if trained.t == ENROLMENT:
        raise NoModelError(f"{run} holds no trained model: the site has enrolled, but not trained.")
    if round == "selected":
        return _Memory.at(max(run.glob(SELECTED), default=run / SELECTED))
    return trained if trained.method.views[0] == "after" else _Memory.at(run / EVALUATED)


def _newest_run(folder: Path) -> Path:
    files = [*folder.glob(STEPS), *folder.glob(f"*/{STEPS}")]
    if not files:
        raise NoModelError(
            f"{folder} holds no trained model: it is neither the folder of a run nor the state folder of a site that "
            f"has trained."
        )
    return max(files, key=lambda file: file.stat().st_mtime_ns).parent


@dataclass(frozen=True)
class _Memory:
    """What a party saved, and all that is needed to bring it to life."""

    agreement: Agreement
    method: Method
    client: int
    model: str
    t: int
    tensors: Tensors

    @classmethod
    def at(cls, path: Path) -> _Memory:
        if not path.exists():  # only what evaluation keeps can be missing
            raise NoModelError(f"{path.parent} holds no measured model: the site was not evaluated yet.")
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata()
                names = [name for name in file.keys() if name.startswith(STATE)]  # noqa: SIM118
                tensors = {name.removeprefix(STATE): file.get_tensor(name) for name in names}
            # a later version may predict, as it may resume: what no longer fits is noticed when it is put back
            agreement = Agreement.of(json.loads(facts["agreement"]) | {"version": __version__})
            k, t = int(facts["client"]), int(facts["round"])
            if not 0 <= k < agreement.clients:
                raise ValueError(f"there is no client {k}")
            return cls(agreement, agreement.build_method(), k, facts["model"], t, tensors)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, PluribusError) as error:
            raise DamagedFileError(f"{path} cannot be read as the state of a site ({error}).") from error

    @property
    def measured(self) -> Tensors:
        """Without the optimisers, which a file of the last training has too."""
        optimisers = OPTIMISERS, MOMENTA
        return {name: value for name, value in self.tensors.items() if not name.startswith(optimisers)}

    def host(self) -> Host:
        """A host of the client, on the CPU."""
        cards = {self.client: self.agreement.card(self.client, self.model, samples=0)}
        where = self.agreement.local(), torch.device("cpu"), lambda _: None
        return Host(self.method, self.agreement.task(), cards, _NoData(self.agreement), *where)


class _NoData:
    """Sets without images, and public sets that are as long as agreed: what a method keeps may be as long as these."""

    exams: ExamSets = MappingProxyType({})

    def __init__(self, agreement: Agreement) -> None:
        nothing = torch.empty(0, *agreement.shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
        self._store = Store(*nothing, torch.device("cpu"))
        self.public = {k: self._blank(rows) for k, rows in enumerate(agreement.public)}

    def sets(self, client: int) -> dict[str, Data]:
        """The client's sets."""
        return {name: self._blank(0) for name in OWN} | {"public": self.public.get(client, self._blank(0))}

    def _blank(self, rows: int) -> Data:
        return Data(self._store, torch.zeros(rows, dtype=torch.int64))
