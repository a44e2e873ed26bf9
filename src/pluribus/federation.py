"""The only round loop: sample, send, work, collect, aggregate, evaluate, record, save."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol

import torch

from pluribus.assembly import Assembly, Parts
from pluribus.draws import python_rng
from pluribus.engines import engine_for, server_runner_for
from pluribus.engines.engine import MOST_PENDING, Engine
from pluribus.errors import DamagedFileError, FormatError, NotFiniteError, UserCodeError
from pluribus.evaluate import Metrics, exam_sizes, metrics_over_clients
from pluribus.host import make_host
from pluribus.internal.blame import at
from pluribus.internal.clock import Clock
from pluribus.internal.hooks import check_hooks, classes_below, hooks_of
from pluribus.internal.ledger import Ledger
from pluribus.internal.lookup import GIVEN
from pluribus.internal.metrics import ACCURACY, METRICS, asks_for_confusion
from pluribus.internal.views import AFTER, SERVER_VIEWS
from pluribus.message import Message
from pluribus.method import PeerMethod
from pluribus.privacy.budgets import Budgets
from pluribus.privacy.central import NoisedMean
from pluribus.request import Enrol, Evaluate, Learn, Measured, Published, Reply, Request, Teach, Work
from pluribus.result import ClientFacts, Result
from pluribus.server_half import ServerHalf, publish
from pluribus.storage.selection import Selections
from pluribus.storage.store import RunStore

CHECKPOINT_SHARE = 0.05  # most of the run time that automatic checkpoints may take


class Observer(Protocol):
    """Watches a run: a progress bar, a tracker. An observer has any of these functions; derive from this class to get
    the others. An observer that is a context manager is exited after every run."""

    # type checkers take a function without a `return` for one that every subclass must write

    def start(self, federation: Federation) -> None:
        """Before the first round. Called again if the run restarts from a checkpoint."""
        return

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        """After every round, when it is saved."""
        return

    def finish(self, result: Result) -> None:
        """After the last round."""
        return


def check_observers(observers: Iterable[object]) -> None:
    """Refuse an observer that would miss what it should see."""
    if not isinstance(observers, Iterable):
        raise FormatError(f"observers must be a list, not {observers!r}. Write observers=[...].")
    hooks = hooks_of(Observer)
    for one in observers:
        if isinstance(one, type):
            raise UserCodeError(f"observer {one.__name__} is a class. Make an object of it: {one.__name__}().")
        check_hooks(type(one), Observer, hooks)
        owners = [*classes_below(type(one), Observer), one]
        if not any(name in getattr(owner, "__dict__", {}) for owner in owners for name in hooks):
            raise UserCodeError(
                f"observer {one!r} has no function {' or '.join(hooks)}. Derive its class from pluribus.Observer, and "
                f"write at least one of them."
            )


class Federation:
    """One run of one experiment, from its first round or from its last checkpoint."""

    def __init__(
        self, parts: Parts, folder: RunStore, observers: Sequence[Observer] = (), engine: Engine | None = None
    ) -> None:
        """Set up a run. Default engine: the one that the simulated experiment sets."""
        self.parts = parts
        self.method = parts.method
        self.folder = folder
        self.observers = observers
        self.ledger = Ledger()
        self.history: list[dict[str, Any]] = []
        self.warnings = list(parts.warnings)
        self.names: Mapping[int, str] = parts.holders
        self.call: Callable[[int], str] = lambda k: f"client {k}"
        """How sentences call a client."""
        self.report: Callable[[str], None] = self.warn
        """Takes a sentence about a client that is missing in a round."""
        runner, defense = server_runner_for(parts, self.warn), parts.experiment.guard()
        self.half = ServerHalf(parts.method, parts.task, parts.cards, runner, defense, parts.public_at_server)
        terms = parts.experiment.privacy()
        if terms is not None and terms.level == "client-central":
            self.half.noised = NoisedMean(terms, parts.method, parts.task, parts.cards)
        self.server = self.half.server
        if engine is None:
            assert isinstance(parts, Assembly), "only a simulation has the clients' parts"
            engine = engine_for(parts, folder.checkpoint.client, self.warn)
        self.engine = engine
        self.selections = Selections(parts.task, parts.cards, parts.data, self.engine, folder.checkpoint)
        self.budgets = Budgets()
        self.clock = Clock()
        self._steps: Counter[int] | None = Counter()  # gradient steps per client in this round; None: not told
        self._attack = parts.experiment.lies()
        self._left_out: dict[str, str] = {}  # clients whose upload would have spoiled the server in this round
        self._unsaved = 0.0  # seconds of rounds since the last checkpoint, without observers
        self._save_cost = 0.0
        self._restore()

    def warn(self, sentence: str) -> None:
        """Add a warning, unless the run has it already."""
        if sentence not in self.warnings:
            self.warnings.append(sentence)

    def _restore(self) -> None:
        checkpoint = self.folder.checkpoint
        self.history, traffic = self.folder.history(checkpoint.latest)
        self.budgets.restore(self.history)
        for line in traffic:
            self.ledger.replay(line)
        if checkpoint.latest is None:
            return
        self.half.put_back(checkpoint.server(), checkpoint.enrolled())
        if not self.half.can_go_on(checkpoint.latest):
            raise DamagedFileError(
                f"the saved state of the server after round {checkpoint.latest} is not finite. {checkpoint.way_back()}"
            )
        self.selections.restore(self.history, self.method.views[0])
        if self.parts.experiment.dp_secure:
            self.warn("the run is resumed with new noise of the system (--dp-secure): its numbers cannot be repeated.")
        if checkpoint.threads != torch.get_num_threads():
            self.warnings.append(
                f"the run is resumed with {torch.get_num_threads()} threads, but was started with "
                f"{checkpoint.threads}: numbers may differ in the last bits."
            )

    def run(self) -> Result:
        """Run all remaining rounds."""
        with closing(self.engine):
            return self._run()

    def _run(self) -> Result:
        self._rehearse()
        self._tell("start", self)
        rounds = self.parts.task.rounds
        self._expect(len(self.history))
        for t in range(len(self.history), rounds):
            if self._is_over():
                self.report(f"training ends after round {t - 1}: all clients have used up their privacy budget.")
                break
            with at(f"round {t}"):
                record = self._round(t)
            self.history.append(record)
            self.folder.append(record, self.ledger.flush())
            self._unsaved += record["seconds"]
            self._save(t, last=t == rounds - 1 or self._is_over())
            self._tell("round", record, self.ledger)
        result = self.result()
        self.folder.write_result(result.to_json())
        self._tell("finish", result)
        return result

    def _rehearse(self) -> None:
        """Before round 0, refuse what a private simulation could not bound later."""
        if isinstance(self.parts, Assembly) and self.parts.local.privacy is not None and not self.history:
            make_host(self.parts, lambda _: None).rehearse()

    def _is_over(self) -> bool:
        """Whether no client can afford another round."""
        return len(self.budgets.spent) == self.parts.task.clients

    def _tell(self, hook: str, *about: Any) -> None:
        """Call a function of every observer that has it."""
        for observer in self.observers:
            if hasattr(observer, hook):
                getattr(observer, hook)(*about)

    def _round(self, t: int) -> dict[str, Any]:
        self.clock, self._steps, self._left_out = Clock(), Counter(), {}
        before = dict(self.ledger.total)
        self.half.begin(t)
        present, late = self.sample_clients(t)
        present = self._enrol_new([k for k in present if k not in self.budgets.spent])
        exchange = self._peer_exchanges if isinstance(self.method, PeerMethod) else self._exchanges
        losses, answered = exchange(t, present, late)
        self._expect(t + 1)
        with self.clock("evaluation"):
            figures = self._evaluate(t, present)
        headline = self.parts.task.metrics[0]
        return {
            "round": t,
            **({} if headline == ACCURACY else {"metric": headline}),
            "seconds": self.clock.seconds(),
            "spans": self.clock.spans(),
            **({"attackers": sorted(self._attack.clients)} if self._attack is not None else {}),
            "present": len(present),
            "answered": len(answered),
            **({"left_out": self._left_out} if self._left_out else {}),
            "loss": self._mean_loss(t, {k: loss for k, loss in losses.items() if not self._is_attacker(k)}),
            **({} if self._steps is None else {"steps": {str(k): self._steps[k] for k in sorted(self._steps)}}),
            "bytes": {way: total - before[way] for way, total in self.ledger.total.items()},
            **self.budgets.take_record(),
            "mean": self._over_clients(figures),
            "clients": {str(k): views for k, views in figures.items()},
            "notes": self.server.notes,
        }

    def _expect(self, t: int) -> None:
        """Tell the engine who takes part in a round before it begins: that depends on the seed alone."""
        if t < self.parts.task.rounds:
            self.engine.expect(self.sample_clients(t)[0])

    def sample_clients(self, t: int) -> tuple[list[int], set[int]]:
        """Clients of a round, and those of them that will be late. The cost depends on the sample alone."""
        experiment = self.parts.experiment
        rng = python_rng(experiment.seed, "sample", t)
        chosen = self.method.participants(self.parts.task, t)
        sampled = sorted(rng.sample(range(experiment.clients), experiment.sampled()) if chosen is None else chosen)
        present = [k for k in sampled if rng.random() >= experiment.drop_rate]
        return present, {k for k in present if rng.random() < experiment.straggler_rate}

    def _enrol_new(self, present: list[int]) -> list[int]:
        """Ask new clients to enrol, if the method needs that. Returns the clients that can take part."""
        if not self.method.enrols:
            return present
        new = [Enrol(k) for k in present if k not in self.half.enrolled]
        with self.clock("compute"):
            for k, answer in self.engine.each(new):
                assert isinstance(answer, Reply)
                assert isinstance(answer.up, bytes)
                self._count_steps(k, answer.steps)
                self.budgets.note(k, answer.privacy)
                self.ledger.add(self.server.t, 0, k, "up", answer.up)
                self.half.enrol(k, answer.up)
        return [k for k in present if k in self.half.enrolled]

    def _exchanges(self, t: int, present: list[int], late: set[int]) -> tuple[dict[int, float | None], list[int]]:
        losses: dict[int, float | None] = {}
        for stage in range(len(self.method.exchanges)):
            uploads: dict[int, Message] = {}
            answered: list[int] = []
            sent: dict[int, bytes | None] = {}
            requests = (Work(k, t, stage, self._download(stage, k, sent)) for k in present)
            for k, reply in self._replies(requests):
                self._book(t, stage, k, "down", sent.pop(k))  # not when it is sent: an engine may read requests ahead
                losses[k] = reply.loss if reply.loss is not None else losses.get(k)
                self._leave_out(t, reply.left_out)
                if k not in late:
                    answered.append(k)
                if isinstance(reply.up, bytes):
                    upload = self._read(stage, k, reply.up)
                    self._book(t, stage, k, "up", reply.up)
                    if k not in late and upload is not None:
                        uploads[k] = upload
            if uploads:
                with self.clock("server"):
                    left_out = self.half.aggregate(stage, uploads)
                self._leave_out(t, left_out)
            present = [k for k in answered if str(k) not in self._left_out]
        return losses, present

    def _read(self, stage: int, k: int, up: bytes) -> Message | None:
        """The upload of a client. None: it is the invalid message of a simulated attacker, which is left out."""
        with self.clock("communication"):
            try:
                return self.half.read(stage, k, up)
            except NotFiniteError as error:
                if not self._is_attacker(k):
                    raise
                self._left_out[str(k)] = error.sentence
                return None

    def _is_attacker(self, k: int) -> bool:
        return self._attack is not None and k in self._attack.clients

    def _leave_out(self, t: int, clients: Mapping[int, str]) -> None:
        """Report clients that are missing in a round because of what they sent, with the reasons."""
        for k, reason in clients.items():
            self._left_out[str(k)] = reason
            if not self._is_attacker(k):
                self.report(f"{self.call(k)} is missing in round {t}: {reason}")

    def _peer_exchanges(self, t: int, present: list[int], late: set[int]) -> tuple[dict[int, float | None], list[int]]:
        assert isinstance(self.method, PeerMethod)
        replies = dict(self._replies(Teach(k, t) for k in present))
        for reply in replies.values():
            self._leave_out(t, reply.left_out)
        losses = {k: reply.loss for k, reply in replies.items()}
        sent = {k: reply.up for k, reply in replies.items() if reply.up is not None}
        for k, data in sent.items():
            self.ledger.add(t, 0, k, "up", data)
        answered = tuple(k for k in present if k in replies and k not in late)
        topology = self.method.topology(self.parts.task, t, answered)
        inboxes = {k: {j: sent[j] for j in topology[k] if j in sent} for k in sorted(topology)}
        for student, inbox in inboxes.items():
            for data in inbox.values():
                self.ledger.add(t, 1, student, "down", data)
        for student, reply in self._replies(Learn(k, t, inbox) for k, inbox in inboxes.items() if inbox):
            found = {j: why for j, why in reply.left_out.items() if str(j) not in self._left_out}
            self._leave_out(t, {j: f"{self.call(student)} cannot learn from it: {why}" for j, why in found.items()})
        return losses, [k for k in answered if str(k) not in self._left_out]

    def _replies(self, requests: Iterable[Request]) -> Iterator[tuple[int, Reply]]:
        """Let clients work. The elapsed time is divided by the times that they report."""
        shares = {"compute": 0.0, "communication": 0.0}
        with self.clock.apportion(shares):
            for k, reply in self.engine.each(requests):
                assert isinstance(reply, Reply)
                self._count_steps(k, reply.steps)
                self.budgets.note(k, reply.privacy)
                shares["compute"] += reply.compute
                shares["communication"] += reply.communication
                yield k, reply

    def _count_steps(self, k: int, steps: int | None) -> None:
        if steps is None:
            self._steps = None  # the sum of a part would mislead
        elif self._steps is not None:
            self._steps[k] += steps

    def _download(self, stage: int, k: int, sent: dict[int, bytes | None]) -> bytes | None:
        with self.clock("communication"):
            sent[k] = self.half.download(stage, k)
            return sent[k]

    def _publish(self, k: int, known: dict[tuple[str, str], Published]) -> dict[str, Published]:
        with self.clock("communication"):
            return publish(self.method, self.server, k, known)

    def _book(self, t: int, stage: int, k: int, way: str, data: bytes | None) -> None:
        if data is not None:
            with self.clock("communication"):
                self.ledger.add(t, stage, k, way, data)

    def _evaluate(self, t: int, present: list[int]) -> dict[int, dict[str, Metrics]]:
        experiment, task = self.parts.experiment, self.parts.task
        trained = t + 1 - task.warmup  # number of rounds in which models trained
        if trained < 1 or (trained % experiment.evaluate_every and t != task.rounds - 1 and not self._is_over()):
            return {}
        everyone = experiment.evaluates_everyone()
        receives = any(view != AFTER and view not in SERVER_VIEWS for view in self.method.views)  # the newest download
        known: dict[tuple[str, str], Published] = {}
        found: dict[int, dict[str, Metrics]] = {}
        sent: dict[int, bytes | None] = {}
        chosen = [k for k in (range(experiment.clients) if everyone else present) if not self._is_attacker(k)]
        for some in self.selections.groups(chosen):
            downs = (self._download(0, k, sent) if receives else None for k in some)
            requests = (
                Evaluate(k, t, down, self.selections.best(k), self._publish(k, known))
                for k, down in zip(some, downs, strict=True)
            )
            for k, answer in self.engine.each(requests):
                assert isinstance(answer, Measured)
                self._book(t, 0, k, "evaluation", sent.pop(k, None))
                for model in self._publish(k, known).values():
                    self._book(t, 0, k, "evaluation", model.tensors)
                self.selections.note(t, k, answer.figures[self.method.views[0]])
                found[k] = answer.figures
        return found

    def _over_clients(self, figures: Mapping[int, Mapping[str, Metrics]]) -> dict[str, dict[str, Metrics]]:
        if not figures:
            return {}
        samples = {k: self.parts.cards.told.test_samples(k) for k in figures}
        exams = {k: exam_sizes(self.parts.task, k) for k in figures}
        views, headline = next(iter(figures.values())), METRICS[self.parts.task.metrics[0]]
        return {
            view: metrics_over_clients({k: f[view] for k, f in figures.items()}, samples, exams, headline)
            for view in views
        }

    def _mean_loss(self, t: int, losses: Mapping[int, float | None]) -> float | None:
        finite = [loss for loss in losses.values() if loss is not None and math.isfinite(loss)]
        if broken := [k for k, loss in losses.items() if loss is not None and not math.isfinite(loss)]:
            self.warnings.append(f"round {t}: the training loss of client {broken[0]} is not finite. Lower --lr.")
        return sum(finite) / len(finite) if finite else None

    def _save(self, t: int, last: bool) -> None:
        """Write a checkpoint if one is due."""
        if not (last or self._is_save_due(t) or self.engine.is_full()):
            return
        started = time.perf_counter()
        self.folder.sync_lines()
        self.selections.keep()
        self.folder.checkpoint.commit(t, self.half.state(), self.engine.take_changed(), self.half.enrolled)
        self.selections.drop_superseded()
        self._unsaved, self._save_cost = 0.0, time.perf_counter() - started

    def _is_save_due(self, t: int) -> bool:
        """Whether it is time to save. A run in memory would lose its checkpoints with everything else, so it has none
        unless parts of it can be lost alone."""
        lasting = self.folder.path is not None or self.engine.can_lose
        if lasting and self.engine.pending() > MOST_PENDING:
            return True
        if every := self.parts.experiment.checkpoint_every:
            return (t + 1) % every == 0
        return lasting and self._unsaved >= self._save_cost * (1 / CHECKPOINT_SHARE - 1)

    def result(self) -> Result:
        """The result of the rounds so far."""
        evaluated = {int(k) for record in self.history for k in record["clients"]}
        experiment = self.parts.experiment
        return Result(
            method=experiment.method,
            data=experiment.data_name,
            seed=experiment.seed,
            rounds=experiment.rounds,
            warmup=self.parts.task.warmup,
            views=self.method.views,
            history=self.history,
            ledger=self.ledger,
            clients={k: self._facts(k) for k in sorted(evaluated)},
            folder=self.folder.path,
            warnings=self.warnings,
            _live=(experiment, self.folder) if isinstance(self.parts, Assembly) else None,
            classes=self.parts.task.names,
            with_confusion=asks_for_confusion(experiment.metrics),
        )

    def _facts(self, k: int) -> ClientFacts:
        data, card = self.parts.cards.told, self.parts.cards[k]
        counts = data.counts(k) if self.parts.task.target.kind == "classes" else None
        classes = zip(self.parts.task.names, counts or (), strict=counts is not None)
        names = tuple(name for name, count in classes if count)
        model, exams = card.model.removeprefix(GIVEN), exam_sizes(self.parts.task, k)
        return ClientFacts(k, model, names, data.samples(k), data.test_samples(k), self.names.get(k, ""), exams)
