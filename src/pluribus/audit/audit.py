"""The audit of finished runs, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pluribus import api
from pluribus.audit.attacks import Attacks
from pluribus.audit.disclosure import Group, describe, describe_card, groups_of, merge
from pluribus.audit.findings import CARD, Finding, RunAudit, tables_of
from pluribus.audit.rehearsal import Rehearsal, rehearse
from pluribus.errors import RangeError
from pluribus.internal.frames import make_frame
from pluribus.internal.tables import csv_of, html_of, markdown_of, print_tables, write_to
from pluribus.result import Result
from pluribus.storage.code import Allow
from pluribus.storage.files import write_text

CLIENTS, STEPS = 10, 300  # defaults
ENROLMENT = -1  # the stage of what is sent before the first round

NOTES = (
    "Membership: area under the ROC curve, mean over clients [95% interval]. 0.5: the attack finds nothing.",
    "Inversion: PSNR of the reconstructed images; higher is closer. Guess: PSNR of the mean image of other rows of the "
    "class, which needs no upload. An attack that is not better than the guess has found nothing about single rows.",
    "-: not tried; the page says why.",
    "These are simple attacks on one more round. They show what leaks at least, never that nothing else does.",
)


@dataclass(frozen=True)
class Audit:
    """What attacks found in the uploads of one or several runs.

    >>> found = pluribus.audit("runs/a", "runs/a-private")          # doctest: +SKIP
    >>> found.table(), found.frame(), found.save("audit.html")      # doctest: +SKIP
    """

    runs: Sequence[RunAudit]
    clients: int
    steps: int

    def frame(self) -> Any:
        """One row per run, field and attack: a pandas DataFrame if pandas is installed, otherwise a list of dicts.

        The columns are `run`, `method`, `epsilon`, `field`, `source`, `attack`, `measure`, `value`, `low`, `high`,
        `without` and `says`. A value of None was not tried, for the reason in `says`.
        """
        return make_frame(self._rows())

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows of `frame` as CSV. With `path`, write them to a file, too."""
        return write_to(path, csv_of(self._rows()))

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The table as Markdown. With `path`, write it to a file, too."""
        return write_to(path, markdown_of(tables_of(self.runs), NOTES))

    def to_json(self) -> dict[str, Any]:
        """Everything but the images, as plain values."""
        runs = [{"name": run.name, **run.about, "notes": run.notes} for run in self.runs]
        return {"runs": runs, "findings": [_finite(row) for row in self._rows()], "clients": self.clients}

    def table(self) -> None:
        """Print the table."""
        from rich.console import Console

        console = Console(highlight=False)
        tables = tables_of(self.runs, console.width)
        print_tables(self._heading(), tables, [*self._facts(), *NOTES], console)

    def save(self, path: str | Path = "audit.html") -> Path:
        """Write one self-contained web page, with the images."""
        from pluribus.report import check_packages

        check_packages("jinja2")
        from pluribus.audit.page import page

        write_text(Path(path), page(self))
        return Path(path)

    def __repr__(self) -> str:
        values = [f"  {one.field} ({run.name}, {one.attack}): {one.text()}" for run, one in self._tried()]
        return "\n".join([f"Audit of {self._heading()}", *values])

    def _repr_html_(self) -> str:
        return html_of(tables_of(self.runs), [*self._facts(), *NOTES])

    def _tried(self) -> list[tuple[RunAudit, Finding]]:
        return [(run, one) for run in self.runs for one in run.findings if one.was_tried]

    def _heading(self) -> str:
        return f"audit of {', '.join(run.name for run in self.runs)}"

    def _facts(self) -> list[str]:
        return [_describe_run(run) for run in self.runs]

    def _rows(self) -> list[dict[str, Any]]:
        return [row for run in self.runs for row in run.rows()]


def _describe_run(run: RunAudit) -> str:
    about = run.about
    score = "-" if about["score"] is None else f"{about['score']:.3f}"
    return (
        f"{run.name}: {about['method']} on {about['data']}, seed {about['seed']}, {about['rounds']} rounds, "
        f"{about['metric']} {score}, epsilon {run.epsilon}."
    )


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: an exact reconstruction."""
    return {name: "inf" if isinstance(one, float) and math.isinf(one) else one for name, one in row.items()}


def audit(
    run: str | Path | Result,
    *others: str | Path | Result,
    clients: int = CLIENTS,
    steps: int = STEPS,
    allow_code: Allow = False,
) -> Audit:
    """Attack what the clients of finished runs upload: disclosure, membership inference and inversion, per field.

    A run is a folder or a result. Several runs, such as one with and one without privacy, stand side by side. A run
    keeps no uploads: its clients work for one more round from the last checkpoint, and nothing is written. At most
    `clients` clients are attacked, with `steps` steps of descent for images. `allow_code` lets folders name your own
    code: all of it, or a list of dotted paths.

    >>> audit("runs/a").save("audit.html")     # doctest: +SKIP
    """
    for name, value in (("clients", clients), ("steps", steps)):
        if value < 1:
            raise RangeError(f"the number of {name} must be at least 1, not {value}.")
    results = [
        one if isinstance(one, Result) else api.load_result(one, allow_code=allow_code) for one in (run, *others)
    ]
    names = _names(results)
    return Audit([_audit(*pair, clients, steps) for pair in zip(names, results, strict=True)], clients, steps)


def _names(results: Sequence[Result]) -> list[str]:
    """A short and distinct name for each run."""
    short = [one.method if one.folder is None else one.folder.name or str(one.folder) for one in results]
    if len(set(short)) < len(short):
        short = [str(one.folder or one.method) for one in results]
    return short if len(set(short)) == len(short) else [f"{name} ({at + 1})" for at, name in enumerate(short)]


def _audit(name: str, result: Result, clients: int, steps: int) -> RunAudit:
    with result._open() as (parts, store):
        rehearsal = rehearse(parts, store, clients)
        attacks = Attacks(rehearsal, steps)
        findings = [Finding(CARD, "-", "disclosure", describe_card(rehearsal)), attacks.on_model()]
        for group in _groups(rehearsal):
            findings.append(_disclosure(rehearsal, group))
            if group.stage != ENROLMENT:
                findings += attacks.on(group)
    about = _about(result)
    return RunAudit(name, about, findings, _notes(rehearsal, about["epsilon"] is not None))


def _groups(rehearsal: Rehearsal) -> list[Group]:
    """All that a client may send, at enrolment and in the exchanges of a round."""
    found = []
    for k in rehearsal.clients:
        wires = rehearsal.host.wires(k)
        found += groups_of(ENROLMENT, wires[0].once)
        found += [group for stage, wire in enumerate(wires) for group in groups_of(stage, wire.up)]
    return merge(found)


def _disclosure(rehearsal: Rehearsal, group: Group) -> Finding:
    if group.stage == ENROLMENT:
        messages, when = dict(rehearsal.enrolled), " (at enrolment)"
    else:
        messages, when = {one.client: one.message for one in rehearsal.of(group.stage)}, ""
    return Finding(group.name + when, group.source, "disclosure", describe(rehearsal, group, messages))


def _about(result: Result) -> dict[str, Any]:
    return {
        "method": result.method,
        "data": result.data,
        "seed": result.seed,
        "rounds": result.rounds,
        "metric": result.metric,
        "score": result.score,
        "epsilon": result.epsilon,
    }


def _notes(rehearsal: Rehearsal, private: bool) -> list[str]:
    every = rehearsal.parts.task.clients
    told = [
        f"{len(rehearsal.clients)} of {every} clients worked once more from the last checkpoint, as in round "
        f"{rehearsal.t + 1} of {rehearsal.latest + 1}, to see what they upload."
    ]
    if private:
        told.append("The epsilon is that of the run. One more round is beyond it, with the noise of the run.")
    return told if rehearsal.uploads else [*told, "They sent nothing."]
