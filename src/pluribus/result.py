"""The result of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pluribus.errors import DamagedFileError
from pluribus.evaluate import Chosen, Exams, Metrics, choose, selection_text, summarize
from pluribus.internal.ledger import Ledger
from pluribus.internal.views import View, view_text
from pluribus.storage.files import read_json, read_lines
from pluribus.storage.folder import RESULT

if TYPE_CHECKING:
    from pluribus.assembly import Assembly
    from pluribus.experiment import Experiment
    from pluribus.storage.store import RunStore


@dataclass(frozen=True)
class ClientFacts:
    """Facts about a client: a row of the table."""

    id: int
    model: str
    classes: tuple[str, ...]
    train: int
    test: int
    name: str = ""  # empty if the client has only a number
    exams: Exams | None = None  # None in a run without domains

    @property
    def label(self) -> str:
        return self.name or str(self.id)


@dataclass(frozen=True)
class Result:
    """Metrics, history and traffic of a run.

    >>> import pluribus                                             # doctest: +SKIP
    >>> result = pluribus.run("fedgh", clients=8, rounds=20)        # doctest: +SKIP
    >>> result.accuracy, result.bytes["up"], result.folder          # doctest: +SKIP
    """

    method: str
    data: str
    seed: int
    rounds: int
    views: tuple[str, ...]
    history: list[dict[str, Any]]
    ledger: Ledger
    clients: Mapping[int, ClientFacts]
    folder: Path | None
    """The run folder; None if the run was kept in memory."""
    warnings: list[str] = field(default_factory=list)
    warmup: int = 0
    """Rounds at the start in which no model trains. `history` includes them; `rounds` does not count them."""
    _live: tuple[Experiment, RunStore] | None = field(default=None, repr=False, compare=False)
    """The experiment and the state of a simulation in this process."""

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Read the result of a finished run. This needs only the files in its folder."""
        saved, ledger = read_json(folder / RESULT), Ledger()
        try:
            for line in read_lines(folder / "traffic.jsonl"):
                ledger.replay(line)
            facts = {int(k): _facts(int(k), one) for k, one in saved["clients"].items()}
            about = {name: saved[name] for name in ("method", "data", "seed", "rounds", "warnings")}
            history = read_lines(folder / "metrics.jsonl")
            about |= {"warmup": saved.get("warmup", 0), "views": tuple(saved["summary"])}
            return cls(**about, history=history, ledger=ledger, clients=facts, folder=folder)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{folder / RESULT} or a file beside it is damaged ({error}).") from error

    @property
    def accuracy(self) -> float | None:
        """The headline: test accuracy, mean over clients, selected on validation, in the method's own view."""
        return self.summary[self.views[0]]["selected"].get("test", {}).get("mean")

    @property
    def summary(self) -> dict[str, dict[str, dict[str, Metrics]]]:
        """view -> `last` or `selected` -> metric -> `mean`, `weighted`, `worst` and `best` over clients."""
        samples = {k: c.test for k, c in self.clients.items()}
        return summarize(self.history, self.views, samples, {k: c.exams for k, c in self.clients.items()})

    @property
    def selection(self) -> str:
        """How the round of the reported metrics was selected, in words."""
        return selection_text(one.selected["val"] for one in self.per_client().values())

    @property
    def bytes(self) -> dict[str, int]:
        """Transferred bytes: `up`, `down`, and `evaluation` (downloads for evaluation only)."""
        return dict(self.ledger.total)

    @property
    def seconds(self) -> float:
        """Total time of all rounds."""
        return float(sum(record["seconds"] for record in self.history))

    @property
    def steps(self) -> dict[int, int] | None:
        """Gradient steps of every client; None if a round of the run did not count them."""
        if not all("steps" in record for record in self.history):
            return None
        total = Counter(dict.fromkeys(self.clients, 0))
        for record in self.history:
            total.update({int(k): steps for k, steps in record["steps"].items()})
        return dict(sorted(total.items()))

    @property
    def steps_per_client(self) -> float | None:
        """Gradient steps, mean over the clients that took part or were evaluated."""
        return sum(self.steps.values()) / len(self.steps) if self.steps else None

    def per_client(self, view: str | None = None) -> dict[int, Chosen]:
        return choose(self.history, view or self.views[0])

    def model(self, client: int, round: Literal["selected", "last"] = "selected") -> nn.Module:
        """Load a client's model: that of the reported accuracy, or that of the last round."""
        from pluribus.storage.reopen import copy_model

        with self._open() as (parts, store):
            return copy_model(parts, store, client, round)

    def _open(self) -> AbstractContextManager[tuple[Assembly, RunStore]]:
        """The parts and the state of the run, from this process or from its folder."""
        from pluribus.storage.reopen import assemble_again, open_run

        if self._live is not None:
            return assemble_again(*self._live)
        assert self.folder is not None, "a result that was read has a folder"
        return open_run(self.folder)

    def table(self, *others: Result, view: View | None = None) -> None:
        """Print accuracy per client, beside that of other runs on the same data.

        `view` says which model is evaluated: `after` local training or `before` it, if a method has that view, or its
        `own` headline. Default: `own` for one run, `after` for several.
        """
        from pluribus.terminal import print_table

        print_table([*others, self], view=view)

    def _rows(self) -> dict[int, dict[str, Any]]:
        by_view = {view: self.per_client(view) for view in self.views}
        steps = self.steps or {}
        return {
            k: _row({v: of[k] for v, of in by_view.items()}, self.clients[k]) | {"steps": steps.get(k)}
            for k in self.per_client()
        }

    def to_json(self) -> dict[str, Any]:
        """Everything but the history, as plain values."""
        return {
            "method": self.method,
            "data": self.data,
            "seed": self.seed,
            "rounds": max(0, len(self.history) - self.warmup),
            "warmup": self.warmup,
            "accuracy": self.accuracy,
            "accuracy_is": f"test accuracy, mean over clients, {self.selection}, {view_text(self.views[0])}",
            "summary": self.summary,
            "clients": self._rows(),
            "bytes": self.bytes,
            "steps": {"total": sum((self.steps or {}).values()), "per_client": self.steps_per_client},
            "seconds": round(self.seconds, 3),
            "folder": None if self.folder is None else str(self.folder),
            "warnings": self.warnings,
            "torch": torch.__version__,
        }


def _facts(k: int, row: Mapping[str, Any]) -> ClientFacts:
    own, everything = row.get("exams", (0, 0))
    held = row["model"], tuple(row["classes"]), row["train"], row["test"], row.get("name", "")
    return ClientFacts(k, *held, (own, everything) if everything else None)


def _row(chosen: Mapping[str, Chosen], facts: ClientFacts) -> dict[str, Any]:
    headline = next(iter(chosen.values()))
    return ({"name": facts.name} if facts.name else {}) | {
        "model": facts.model,
        "classes": list(facts.classes),
        "train": facts.train,
        "test": facts.test,
        **({"exams": list(facts.exams)} if facts.exams else {}),
        **vars(headline),
        "views": {view: vars(one) for view, one in chosen.items()},
    }
