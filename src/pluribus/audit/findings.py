"""What an audit found: one Finding per field and attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pluribus.audit.inversion import Guess, Span
from pluribus.audit.measures import Interval
from pluribus.internal.tables import Cell, Table

Attack = Literal["disclosure", "membership", "inversion"]
ATTACKS = ("membership", "inversion")  # that give numbers
MODEL = "the model"
CARD = "the card"


@dataclass(frozen=True)
class Picture:
    """Images side by side: what is behind an upload, and what an attack made of it."""

    client: int
    label: str
    guess: Guess
    span: Span


@dataclass(frozen=True)
class Finding:
    """What one attack found in one field, or why it was not tried.

    The value of `membership` is an area under the ROC curve, that of `inversion` a PSNR in dB. `without` is the PSNR of
    a guess that needs no upload.
    """

    field: str
    source: str
    attack: Attack
    says: str
    value: Interval | None = None
    without: float | None = None
    pictures: Sequence[Picture] = ()

    @property
    def was_tried(self) -> bool:
        return self.value is not None

    def text(self) -> str:
        """The number for a table."""
        if self.value is None:
            return "-"
        if self.attack == "membership":
            return f"{self.value.value:.3f} [{self.value.low:.2f}, {self.value.high:.2f}]"
        return f"{self.value.value:.1f} dB" + ("" if self.without is None else f" (guess {self.without:.1f})")


@dataclass(frozen=True)
class RunAudit:
    """The findings of one run."""

    name: str
    about: dict[str, Any]
    """Facts about the run: method, data, seed, rounds, epsilon, metric and score."""
    findings: list[Finding]
    notes: list[str] = field(default_factory=list)

    @property
    def epsilon(self) -> str:
        """The privacy that the run spent, in words."""
        spent = self.about["epsilon"]
        return "none" if spent is None else f"{spent:.3g}"

    def fields(self) -> dict[tuple[str, str], dict[str, Finding]]:
        """(field, source) -> attack -> finding."""
        found: dict[tuple[str, str], dict[str, Finding]] = {}
        for one in self.findings:
            found.setdefault((one.field, one.source), {})[one.attack] = one
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The findings as plain values."""
        return [
            {
                "run": self.name,
                "method": self.about["method"],
                "epsilon": self.about["epsilon"],
                "field": one.field,
                "source": one.source,
                "attack": one.attack,
                "measure": {"membership": "auc", "inversion": "psnr"}.get(one.attack),
                "value": None if one.value is None else one.value.value,
                "low": None if one.value is None else one.value.low,
                "high": None if one.value is None else one.value.high,
                "without": one.without,
                "says": one.says,
            }
            for one in self.findings
        ]


def tables_of(runs: Sequence[RunAudit], width: int | None = None) -> list[Table]:
    """Fields and attacks of one run; of several runs with a column each, in tables that fit a width."""
    if len(runs) == 1:
        found = [(key, attacks) for key, attacks in runs[0].fields().items() if key[0] != CARD]
        rows = [[*key, *(_text(attacks, one) for one in ATTACKS)] for key, attacks in found]
        return [_table(("field", "source", *ATTACKS), rows)]
    keys = dict.fromkeys(key for run in runs for key in run.fields() if key[0] != CARD)
    rows = [
        [f"{key[0]}: {attack}", *(_text(run.fields().get(key, {}), attack) for run in runs)]
        for key in keys
        for attack in ATTACKS
        if any(attack in run.fields().get(key, {}) for run in runs)
    ]
    table = _table(("field: attack", *(run.name for run in runs)), rows)
    return [table] if width is None else table.split(width)


def _text(attacks: Mapping[str, Finding], attack: str) -> str:
    return attacks[attack].text() if attack in attacks else "-"


def _table(columns: tuple[str, ...], rows: Sequence[Sequence[str]]) -> Table:
    return Table(columns, [[Cell(text) for text in row] for row in rows])
