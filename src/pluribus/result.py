"""The result of a run."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pluribus.errors import DamagedFileError, MismatchError, NoModelError, RangeError, UnknownNameError
from pluribus.evaluate import (
    Chosen,
    Exams,
    Metrics,
    choose,
    class_rows,
    confusion,
    confusion_rows,
    evaluated_clients,
    headline_in,
    selection_text,
    summarize,
    tidy_rows,
)
from pluribus.internal.axes import new_axes
from pluribus.internal.frames import make_frame
from pluribus.internal.ledger import Ledger
from pluribus.internal.metrics import ACCURACY, Metric
from pluribus.internal.tables import Cell, Table, csv_of, latex_of, markdown_of, write_to
from pluribus.internal.views import View, view_text
from pluribus.privacy.budgets import epsilon_of_run
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.folder import RESULT
from pluribus.storage.history import read_metrics, read_summary, read_traffic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pluribus.assembly import Assembly
    from pluribus.client import Client
    from pluribus.experiment import Experiment
    from pluribus.storage.code import Allow
    from pluribus.storage.store import RunStore, StateStore

MOST_ROWS = 20  # clients that a notebook or a sentence shows


@dataclass(frozen=True)
class ClientFacts:
    """Facts about a client: a row of the table."""

    id: int
    model: str
    classes: tuple[str, ...]
    train: int | None  # None: clients do not tell
    test: int | None
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
    classes: tuple[str, ...] = ()
    """The names of all classes, by number. Empty: the version that wrote the folder did not record them."""
    with_confusion: bool = False
    """Whether result.json has the confusion matrix, as the experiment asked."""
    _live: tuple[Experiment, RunStore] | None = field(default=None, repr=False, compare=False)
    """The experiment and the state of a simulation in this process."""
    _allow: Allow = field(default=False, repr=False, compare=False)
    """Code that the folder may name for its models."""

    @classmethod
    def read(cls, folder: Path, allow: Allow = False) -> Result:
        """Read the result of a finished run. This needs only the files in its folder."""
        saved, ledger = read_summary(folder / RESULT), Ledger()
        try:
            for line in read_traffic(folder / "traffic.jsonl"):
                ledger.replay(line)
            facts = {int(k): _facts(int(k), one) for k, one in saved["clients"].items()}
            about = {name: saved[name] for name in ("method", "data", "seed", "rounds", "warnings")}
            history = read_metrics(folder / "metrics.jsonl")
            about |= {"warmup": saved.get("warmup", 0), "views": tuple(saved["summary"])}
            about |= {"classes": tuple(saved.get("classes", ())), "with_confusion": "confusion" in saved}
            return cls(**about, history=history, ledger=ledger, clients=facts, folder=folder, _allow=allow)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{folder / RESULT} or a file beside it is damaged ({error}).") from error

    @property
    def score(self) -> float | None:
        """The headline: the test metric, mean over clients, selected on validation, in the method's own view."""
        return self._selected_mean("test")

    @property
    def metric(self) -> str:
        """The name of the headline metric, such as `accuracy` or `rmse`."""
        return self._headline.name

    @property
    def accuracy(self) -> float | None:
        """The test accuracy: `score`, if it is the accuracy. None if the accuracy was not measured."""
        return self.score if self.metric == ACCURACY else self._selected_mean(f"test_{ACCURACY}")

    @property
    def _headline(self) -> Metric:
        return headline_in(self.history)

    def _selected_mean(self, metric: str) -> float | None:
        return self.summary[self.views[0]]["selected"].get(metric, {}).get("mean")

    @property
    def summary(self) -> dict[str, dict[str, dict[str, Metrics]]]:
        """view -> `last` or `selected` -> metric -> its values over clients.

        These are `mean`, `weighted`, `worst`, `best`, `deviation` and `worst_decile`.
        """
        samples = {k: c.test for k, c in self.clients.items()}
        return summarize(self.history, self.views, samples, {k: c.exams for k, c in self.clients.items()})

    @property
    def selection(self) -> str:
        """How the round of the reported metrics was selected, in words."""
        return selection_text(one.selected["val"] for one in self.per_client().values())

    @property
    def _score_is(self) -> str:
        return self._describe(self._headline.text)

    def _describe(self, metric: str) -> str:
        return f"test {metric}, mean over {self._whose}, {self.selection}, {view_text(self.views[0])}"

    @property
    def _whose(self) -> str:
        return evaluated_clients([self.history])

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
    def epsilon(self) -> float | None:
        """The largest privacy budget that a client has spent. None: the run has no differential privacy."""
        return epsilon_of_run(self.history)

    @property
    def steps_per_client(self) -> float | None:
        """Gradient steps, mean over the clients that took part or were evaluated."""
        return sum(self.steps.values()) / len(self.steps) if self.steps else None

    def _steps_in_all(self) -> dict[str, float | None] | None:
        known = self.steps
        return None if known is None else {"total": sum(known.values()), "per_client": self.steps_per_client}

    def per_client(self, view: str | None = None) -> dict[int, Chosen]:
        return choose(self.history, view or self.views[0])

    # ---- models ------------------------------------------------------------------------------------------------------

    def model(self, client: int, round: Literal["selected", "last"] = "selected") -> nn.Module:
        """Load a client's model: that of the reported metrics, or that of the last round."""
        from pluribus.storage.reopen import copy_model

        with self._trained(client, round) as (_, trained):
            return copy_model(trained)

    def server_model(self, client: int | None = None) -> nn.Module:
        """Load the server's model of the last round, for methods that have one. With one model per architecture, the
        client chooses it."""
        from pluribus.storage.reopen import copy_model, server_model

        with self._open() as (parts, folder), server_model(parts, folder, client) as found:
            return copy_model(found)

    def save_model(self, client: int, path: str | Path, round: Literal["selected", "last"] = "selected") -> None:
        """Write a client's model to a safetensors file, which `pluribus.load_model` reads without this run."""
        from pluribus import __version__
        from pluribus.storage.model_file import ModelFacts, write_model

        with self._trained(client, round) as (parts, trained):
            task, name = parts.task, trained.card.model
            made_of = name, task.input, task.classes, task.names, task.width, task.projector
            facts = ModelFacts(
                *made_of, self.method, self.views[0], client, trained.round, __version__, split=task.split
            )
            write_model(Path(path), trained.model, facts, task.shape_of(name))

    def evaluate(self, x: Any, y: Any, client: int | None = None) -> Metrics | dict[int, Metrics]:
        """The run's metrics and the loss of a client's selected model on other rows, by the method's own rule.

        `x` and `y` are arrays or tensors in the form of the run's data. Without a client, evaluate all of them:
        client -> metrics.
        """
        from pluribus.prediction import measure_on
        from pluribus.storage.reopen import check_client, trained_client

        found: dict[int, Metrics] = {}
        with self._open() as (parts, folder):
            for k in self.clients if client is None else [client]:
                check_client(self.folder or "the run", parts, k)
                with trained_client(parts, folder, k, "selected") as trained:
                    found[k] = measure_on(parts.method, trained, x, y)
        return found if client is None else found[client]

    @contextmanager
    def _trained(self, client: int, round: Literal["selected", "last"]) -> Iterator[tuple[Assembly, Client]]:
        from pluribus.storage.reopen import check_client, trained_client

        with self._open() as (parts, folder):
            check_client(self.folder or "the run", parts, client)
            with trained_client(parts, folder, client, round) as trained:
                yield parts, trained

    def _open(self) -> AbstractContextManager[tuple[Assembly, RunStore]]:
        """The parts and the state of the run, from this process or from its folder."""
        from pluribus.storage.reopen import assemble_again, open_run

        if self._live is not None:
            return assemble_again(*self._live)
        assert self.folder is not None, "a result that was read has a folder"
        again = f"load it with pluribus.load_result({str(self.folder)!r}, allow_code=True)"
        return open_run(self.folder, self._allow, again)

    # ---- predictions -------------------------------------------------------------------------------------------------

    def predictions(self, client: int) -> Any:
        """What the client's selected model predicts for each of its test rows, as it was measured.

        A frame with the columns `row` (number in the data set), `label`, `predicted` and `correct`. Several labels of a
        row are joined by commas. If numbers are predicted, there is no `correct`, and several numbers have two columns
        each, such as `label height` and `predicted height`. With domains, the rows are the test rows of the client's
        own domain. This needs neither the data nor the code of the method.
        """
        tested = self._test_rows(client)
        names = self._class_names([tested])
        rows = zip(tested.row.tolist(), tested.label.tolist(), tested.predicted.tolist(), strict=True)
        if tested.are_numbers:
            return make_frame([{"row": row} | _pairs(names, y, p) for row, y, p in rows])
        named = [(row, _name(names, y), _name(names, p), y == p) for row, y, p in rows]
        return make_frame([{"row": row, "label": y, "predicted": p, "correct": same} for row, y, p, same in named])

    def confusion(self, client: int | None = None) -> Any:
        """The confusion matrix of the test predictions of a client, or of all clients together.

        A frame: each row is a true class, each column a predicted class.
        """
        labels, predicted, names = self._pooled(client)
        if labels.dim() > 1:
            raise MismatchError("a confusion matrix needs one class per row, but rows have several labels here.")
        frame = make_frame(list(confusion_rows(labels, predicted, names)))
        return frame if isinstance(frame, list) else frame.set_index("label")

    def per_class(self, client: int | None = None) -> Any:
        """Precision, recall, F1 and number of test rows per class or label, of a client or of all clients together.

        A frame with the columns `class`, `precision`, `recall`, `f1` and `support`.
        """
        return make_frame(list(class_rows(*self._pooled(client))))

    def _pooled(self, client: int | None) -> tuple[Tensor, Tensor, Sequence[str]]:
        """True labels, predicted classes and names of the classes. Refused if numbers are predicted."""
        tested = [self._test_rows(k) for k in (self.clients if client is None else [client])]
        if any(one.are_numbers for one in tested):
            raise MismatchError(f"{self.method} predicts numbers here, which have no classes: use predictions().")
        labels, predicted = (torch.cat([one[column] for one in tested]) for column in (0, 1))
        return labels, predicted, self._class_names(tested)

    def _confusion_to_json(self) -> dict[str, Any]:
        """The confusion matrix of all clients, and the recall of each class; None if no test row has the class."""
        labels, predicted, names = self._pooled(None)
        counts = confusion(labels, predicted, len(names))
        recall = {one["class"]: one["recall"] for one in class_rows(labels, predicted, names)}
        return {"counts": counts.tolist(), "recall": recall}

    def _class_names(self, tested: Sequence[_TestRows]) -> Sequence[str]:
        """The names of the classes, or their numbers if the folder does not have the names."""
        known = [int(values.max()) for one in tested for values in one[:2] if len(values)]
        most = max(known, default=-1)
        return self.classes or [str(number) for number in range(most + 1)]

    def _test_rows(self, client: int) -> _TestRows:
        if client not in self.clients:
            more = ", ..." if len(self.clients) > MOST_ROWS else ""
            known = ", ".join(map(str, list(self.clients)[:MOST_ROWS])) + more
            raise RangeError(f"the run has no evaluated client {client}: its evaluated clients are {known}.")
        kept = self._kept(client)
        if not kept:
            raise NoModelError(
                f"{self.folder or 'the run'} has no test predictions of client {client}: real sites and old versions "
                f"keep none, or the files in state/selected were deleted."
            )
        return _TestRows(*(kept[name] for name in _TestRows._fields))

    def _kept(self, client: int) -> dict[str, Tensor]:
        """The tensors of a client's predictions; empty if they were not kept."""
        return self._state.tested(client, self._selected_rounds[client])

    @cached_property
    def _selected_rounds(self) -> dict[int, int]:
        return {k: one.selected_round for k, one in self.per_client().items()}

    @cached_property
    def _state(self) -> StateStore:
        if self.folder is not None:
            return Checkpoint(self.folder / "state", read_only=True)
        assert self._live is not None, "a run without a folder is of this process"
        return self._live[1].checkpoint

    # ---- tables ------------------------------------------------------------------------------------------------------

    def frame(self) -> Any:
        """All metrics, with the columns `round`, `client`, `model`, `view`, `split`, `metric` and `value`.

        A pandas DataFrame if pandas is installed, otherwise a list of dicts.
        """
        return make_frame(self._tidy())

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows of `frame` as CSV. With `path`, write them to a file, too."""
        return write_to(path, csv_of(self._tidy()))

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The headline metric per client as a Markdown table. With `path`, write it to a file, too."""
        return write_to(path, markdown_of([self._table()], [self._score_is]))

    def to_latex(self, path: str | Path | None = None) -> str:
        """The headline metric per client as a LaTeX table (package booktabs). With `path`, write it to a file, too."""
        return write_to(path, latex_of([self._table()], [self._score_is]))

    def curve(self, view: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the test and validation metric over rounds, mean over clients. Default: headline view, on new axes."""
        view = view or self.views[0]
        if view not in self.views:
            raise UnknownNameError(f"{self.method} has no view '{view}': it has {' and '.join(self.views)}.")
        axes = new_axes() if ax is None else ax
        for split, style in (("test", "-"), ("val", ":")):
            values = {one["round"] + 1: _mean(one, view, split) for one in self.history}
            known = {rounds: value for rounds, value in values.items() if value is not None}
            if known:
                axes.plot(list(known), list(known.values()), style, label=f"{self.method}, {split}")
        if ax is None:
            axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("rounds")
        axes.set_ylabel(f"{self._headline.text}, mean over {self._whose}, {view_text(view)}")
        axes.legend()
        return axes

    def __repr__(self) -> str:
        return f"Result of {self.method} on {self.data}\n" + "\n".join(
            f"  {name:9} {text}" for name, text in self._about().items()
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the facts, and the table per client."""
        facts = "<br>\n".join(f"{name}: {html.escape(text)}" for name, text in self._about().items())
        title = html.escape(f"{self.method} on {self.data}")
        return f"<p><b>{title}</b><br>\n{facts}</p>\n{self._table(MOST_ROWS).to_html()}"

    def _about(self) -> dict[str, str]:
        from pluribus.terminal import format_bytes

        moved = (f"{format_bytes(self.bytes[way])} {way}" for way in ("up", "down"))
        return {
            "clients": f"{len(self.clients)} evaluated",
            "rounds": str(self.rounds),
            "seed": str(self.seed),
            self._headline.text: f"{_number(self.score)} ({self._score_is})",
            "bytes": ", ".join(moved),
            "seconds": f"{self.seconds:.1f}",
            **({} if self.epsilon is None else {"epsilon": f"{self.epsilon:.2f}, the most that a client spent"}),
            "folder": str(self.folder or "none: the run is in memory"),
        }

    def _tidy(self) -> list[dict[str, Any]]:
        return list(tidy_rows(self.history, {k: one.model for k, one in self.clients.items()}))

    def _table(self, most: int | None = None) -> Table:
        """The headline metric per client, of `most` clients, and over clients."""
        from pluribus.terminal import join_classes, statistics_for, write_count

        chosen, has_classes = self.per_client(), any(one.classes for one in self.clients.values())
        columns = ("client", "model", *(["classes"] if has_classes else []), "train", self.method)
        rows = []
        for k, one in list(self.clients.items())[:most]:
            classes = [join_classes(one.classes)] if has_classes else []
            score = _number(chosen[k].selected.get("test"))
            rows.append([one.label, one.model, *classes, write_count(one.train), score])
        empty = [""] * (len(columns) - 2)
        if most is not None and len(self.clients) > most:
            rows.append([f"and {len(self.clients) - most} more", *empty, ""])
        over = self.summary[self.views[0]]["selected"].get("test", {})
        rows += [[text, *empty, _number(over.get(name))] for name, text in statistics_for(len(self.clients)).items()]
        return Table(columns, [[Cell(text) for text in row] for row in rows])

    def table(self, *others: Result, view: View | None = None) -> None:
        """Print the headline metric per client, beside that of other runs on the same data.

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
            "metric": self.metric,
            "score": self.score,
            "score_is": self._score_is,
            "accuracy": self.accuracy,
            "accuracy_is": self._describe(ACCURACY),
            "summary": self.summary,
            "classes": list(self.classes),
            **({"confusion": self._confusion_to_json()} if self.with_confusion else {}),
            "clients": self._rows(),
            "bytes": self.bytes,
            **({} if self.epsilon is None else {"epsilon": self.epsilon}),
            "steps": self._steps_in_all(),
            "seconds": round(self.seconds, 3),
            "folder": None if self.folder is None else str(self.folder),
            "warnings": self.warnings,
            "torch": torch.__version__,
        }


class _TestRows(NamedTuple):
    """A client's test rows: what is true, what is predicted, and the numbers of the rows in the data set."""

    label: Tensor
    predicted: Tensor
    row: Tensor

    @property
    def are_numbers(self) -> bool:
        return self.label.is_floating_point()


def _name(names: Sequence[str], value: int | list[int]) -> str:
    """The name of a class, or those of several labels."""
    return names[value] if isinstance(value, int) else ", ".join(n for n, has in zip(names, value, strict=True) if has)


def _pairs(names: Sequence[str], label: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """True and predicted numbers by column. A single number needs no name."""
    if len(names) == 1:
        return {"label": label[0], "predicted": predicted[0]}
    told = {f"label {name}": value for name, value in zip(names, label, strict=True)}
    return told | {f"predicted {name}": value for name, value in zip(names, predicted, strict=True)}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _mean(record: Mapping[str, Any], view: str, metric: str) -> float | None:
    found: float | None = record["mean"].get(view, {}).get(metric, {}).get("mean")
    return found


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
