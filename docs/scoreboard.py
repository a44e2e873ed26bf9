"""The scoreboards of the pages of results: what agrees with the papers, what does not, and how long it ran.

A scoreboard has a row per table on its page, in the order of the page. generate.py writes it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pluribus.internal.views import AFTER
from pluribus.study.reproduce import paper, summary
from pluribus.study.reproduce.beside import Beside
from pluribus.study.reproduce.paper import PaperRow
from pluribus.study.significance import BETTER, NOT_SHOWN, WORSE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = "is its method better, by our test?"
COLUMNS = ("table", "rows x seeds", "rounds", "figures agree", "differ", SHOWN, "run time")
CLAIM_COLUMNS = ("table", "rows x seeds", "rounds", SHOWN, "run time")
NUMBERS = ("rows x seeds", "rounds", "figures agree", "differ", "run time")  # they stay on one line
OPPOSITE = {BETTER: WORSE, WORSE: BETTER}


def reproduced_rows() -> list[tuple[str, ...]]:
    """A row per table of a paper, and what our counts of FedHPL say."""
    tables = _tables(ROOT / "docs" / "reproduction.md")
    rows = [(link, _size(one), _rounds(one), *_agreement(one), _shown(one), _time(one)) for link, one in tables]
    return [*rows, _counted_row(), _tuned_row()]


def claim_rows() -> list[tuple[str, ...]]:
    """A row per table that tests a claim on embedded data, where the paper has no figures."""
    tables = _tables(ROOT / "docs" / "claims.md")
    return [(link, _size(one), f"{one.rounds:,}", _shown(one), _time(one)) for link, one in tables]


def _tables(page: Path) -> Iterator[tuple[str, Beside]]:
    """The tables of a page, each with a link to the section that holds it."""
    heading = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if found := re.fullmatch(r"<!-- generated: reproduced ([\w-]+) -->", line):
            beside = read_table(found[1])
            title = beside.table.title.removeprefix("Claim: ")
            if beside.table.printed:
                title = f"{title.partition(',')[0]}, {heading}"
            yield f"[{title}](#{anchor(heading)})", beside


def read_table(name: str) -> Beside:
    """A table of a paper beside our results, as `load_table` reads it. The results are read once for all tables."""
    table = paper.find(name)
    return Beside.of(table, table.chosen(()), _results(), None, AFTER)


@cache
def _results() -> tuple[summary.Finished, ...]:
    return tuple(summary.read(RESULTS).values())


def anchor(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# ---- what ran --------------------------------------------------------------------------------------------------------


def _size(beside: Beside) -> str:
    seeds = sorted({len(runs) for runs in beside.runs.values()})
    return f"{len(beside.runs)} x {' to '.join(map(str, seeds))}"


def _rounds(beside: Beside) -> str:
    return (
        f"{beside.rounds:,}"
        if beside.rounds == beside.table.rounds
        else f"{beside.rounds:,} of {beside.table.rounds:,}"
    )


def _time(beside: Beside) -> str:
    seconds = sum(one.run.result["seconds"] for runs in beside.runs.values() for one in runs)
    return f"{seconds / 60:,.0f} min"


# ---- what agrees -----------------------------------------------------------------------------------------------------


def _agreement(beside: Beside) -> tuple[str, str]:
    """How many figures of the paper are inside the prediction interval of our runs, and how many are not."""
    pairs = [pair for row in beside.pairs.values() for pair in row.values() if pair.difference is not None]
    tested = [pair for pair in pairs if pair.ours.std is not None]
    differ = sum(pair.beyond_noise for pair in tested)
    if not tested:
        return "one seed", "-"
    return f"{len(tested) - differ} of {len(tested)}", str(differ)


# ---- what is claimed -------------------------------------------------------------------------------------------------


def _shown(beside: Beside) -> str:
    """Against how many of the other rows the paired test of our runs shows what the paper claims."""
    verdicts, others = _verdicts(beside), _others(beside)
    tested = [row for row in others if verdicts.get(row.label) in (BETTER, WORSE, NOT_SHOWN)]
    shown = [row for row in tested if verdicts[row.label] == _claimed(beside, row)]
    opposite = [row.label for row in tested if verdicts[row.label] == OPPOSITE[_claimed(beside, row)]]
    if not tested:
        return f"{_own(beside)}: not tested"
    answer = "yes" if len(shown) == len(tested) else "in part" if shown else "no"
    told = [f"{_own(beside)}: **{answer}**, shown against {len(shown)} of {len(tested)}"]
    told += [f"the opposite against {', '.join(opposite)}"] if opposite else []
    told += [f"{len(others) - len(tested)} not tested"] if len(tested) < len(others) else []
    return ", ".join(told)


def _own(beside: Beside) -> str:
    return beside.table.own or beside.table.baseline


def _others(beside: Beside) -> list[PaperRow]:
    """The rows that the paper's own method is tested against."""
    own, baseline = _own(beside), beside.table.baseline
    return [row for row in beside.table.rows if row.label != own and (own == baseline or row.label == baseline)]


def _claimed(beside: Beside, other: PaperRow) -> str:
    """Whether the paper has its own method above or below another row."""
    column = next(iter(beside.table.figures))
    (own,) = [row for row in beside.table.rows if row.label == _own(beside)]
    values = [row.figures[column].value for row in (own, other) if column in row.figures]
    mine, theirs = values if len(values) == 2 else (None, None)
    return WORSE if mine is not None and theirs is not None and mine < theirs else BETTER


def _verdicts(beside: Beside) -> dict[str, str]:
    """What the test says of the paper's own method against each other row."""
    found = {one.label: one.verdict for one in beside.differences}
    own, baseline = _own(beside), beside.table.baseline
    if own == baseline:
        return {label: OPPOSITE.get(verdict, verdict) for label, verdict in found.items()}
    return {baseline: found[own]} if own in found else {}


# ---- FedHPL ----------------------------------------------------------------------------------------------------------


def _counted_row() -> tuple[str, ...]:
    """Figures that need no training."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from fedhpl_counts import COUNTS, counted

    tables = [counted(name) for name in COUNTS]
    figures = sum(len(row) for one in tables for row in one.paper.values())
    differ = sum(len(one.differing) for one in tables)
    link = "[FedHPL, Tables 5, 6, 8, 9, 10: parameters and traffic](#fedhpl-parameters-and-traffic)"
    return (link, "-", "no training", f"{figures - differ} of {figures}", str(differ), "-", "seconds")


def _tuned_row() -> tuple[str, ...]:
    """FedHPL on the backbones that we have. The paper has no figures for them."""
    written = json.loads((RESULTS / "fedhpl_efficientnet_gpu.json").read_text(encoding="utf-8"))
    verdict = written["fedhpl less local"]["last"]["verdict"]
    rows = {name.partition(",")[0] for name in written["runs"]}
    told = {BETTER: "**yes**, shown against 1 of 1", WORSE: "**no**, the opposite against local tuning"}
    link = "[FedHPL, other backbones on CIFAR-10](#fedhpl-against-local-tuning)"
    size = f"{len(rows)} x {len(written['runs']) // len(rows)}"
    rounds, answer = str(written["settings"]["rounds"]), f"FedHPL: {told.get(verdict, '**no**, shown against 0 of 1')}"
    return (link, size, rounds, "not printed", "-", answer, "not recorded")
