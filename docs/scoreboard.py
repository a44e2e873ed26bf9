"""The scoreboards of the pages of results: what agrees with the papers, what does not, and how long it ran.

A scoreboard has a row per table on its page, in the order of the page. generate.py writes it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pluribus.study.reproduce.beside import Beside
from pluribus.study.reproduce.paper import PaperRow
from pluribus.study.reproduce.run import load_table
from pluribus.study.significance import BETTER, NOT_SHOWN, WORSE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = (
    "table",
    "rows x seeds",
    "rounds",
    "figures that agree",
    "differ",
    "the paper's claim",
    "is it shown by our test?",
    "run time in sum (one run)",
)
CLAIM_COLUMNS = ("table", "rows x seeds", "rounds", "claim", "is it shown by our test?", "run time in sum (one run)")
OPPOSITE = {BETTER: WORSE, WORSE: BETTER}


def reproduced_rows() -> list[tuple[str, ...]]:
    """A row per table of a paper, and what our counts of FedHPL say."""
    rows = []
    for link, beside in _tables(ROOT / "docs" / "reproduction.md"):
        rows.append(
            (link, _size(beside), _rounds(beside), *_agreement(beside), _claim(beside), _shown(beside), _time(beside))
        )
    return [*rows, _counted_row(), _tuned_row()]


def claim_rows() -> list[tuple[str, ...]]:
    """A row per table that tests a claim on embedded data, where the paper has no figures."""
    tables = _tables(ROOT / "docs" / "claims.md")
    return [(link, _size(one), f"{one.rounds:,}", _claim(one), _shown(one), _time(one)) for link, one in tables]


def _tables(page: Path) -> Iterator[tuple[str, Beside]]:
    """The tables of a page, each with a link to the section that holds it."""
    heading = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if found := re.fullmatch(r"<!-- generated: reproduced ([\w-]+) -->", line):
            beside = load_table(found[1], RESULTS)
            title = beside.table.title.removeprefix("Claim: ").replace(", mean over nodes", "")
            yield f"[{title}](#{anchor(heading)})", beside


def anchor(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# ---- what ran --------------------------------------------------------------------------------------------------------


def _size(beside: Beside) -> str:
    seeds = sorted({len(runs) for runs in beside.runs.values()})
    return f"{len(beside.runs)} x {' to '.join(map(str, seeds))}"


def _rounds(beside: Beside) -> str:
    whole = beside.rounds == beside.table.rounds
    return f"all {beside.rounds:,}" if whole else f"{beside.rounds:,} of {beside.table.rounds:,}"


def _time(beside: Beside) -> str:
    runs = [one for of_row in beside.runs.values() for one in of_row]
    seconds = [one.run.result["seconds"] for one in runs]
    where = ", ".join(sorted({one.device for one in runs}))
    return f"{sum(seconds) / 60:,.0f} min ({min(seconds):,.0f} to {max(seconds):,.0f} s), {where}"


# ---- what agrees -----------------------------------------------------------------------------------------------------


def _agreement(beside: Beside) -> tuple[str, str]:
    """How many figures of the paper are inside the prediction interval of our runs, and how many are not."""
    pairs = [pair for row in beside.pairs.values() for pair in row.values() if pair.difference is not None]
    tested = [pair for pair in pairs if pair.ours.std is not None]
    differ = sum(pair.beyond_noise for pair in tested)
    if not tested:
        return f"not testable: {len(pairs)} figures, one seed", "-"
    return f"{len(tested) - differ} of {len(tested)}", str(differ)


# ---- what is claimed -------------------------------------------------------------------------------------------------


def _claim(beside: Beside) -> str:
    """Where the paper has its own method, by its first figure. Rows without a figure count as below it."""
    others = _others(beside)
    below = [row.label for row in others if _claimed(beside, row) == WORSE]
    against = "all other rows" if len(others) > 1 else others[0].label
    return f"{_own(beside)} above {against}" + (f" but {', '.join(below)}" if below else "")


def _shown(beside: Beside) -> str:
    """Which part of the claim the paired test of our runs shows."""
    verdicts = _verdicts(beside)
    groups: dict[str, list[str]] = {"shown": [], "not shown": [], "the opposite is shown": [], "not tested": []}
    for row in _others(beside):
        verdict, claimed = verdicts.get(row.label), _claimed(beside, row)
        if verdict == NOT_SHOWN:
            groups["not shown"].append(row.label)
        elif verdict in OPPOSITE:
            groups["shown" if verdict == claimed else "the opposite is shown"].append(row.label)
        else:
            groups["not tested"].append(row.label)
    told = [f"{kind}: {', '.join(labels)}" for kind, labels in groups.items() if labels]
    answer = _answer([kind for kind, labels in groups.items() if labels])
    return f"{answer}; {'; '.join(told)}" if len(_others(beside)) > 1 and answer else answer or "not tested"


def _answer(kinds: list[str]) -> str:
    """The short answer, from the kinds of verdicts that there are."""
    tested = [kind for kind in kinds if kind != "not tested"]
    if tested == ["shown"]:
        return "**yes**" if tested == kinds else "**yes**, as far as tested"
    return "**in part**" if "shown" in tested else "**no**" if tested else ""


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
    return (link, "-", "no training", f"{figures - differ} of {figures}", str(differ), "-", "-", "seconds, CPU")


def _tuned_row() -> tuple[str, ...]:
    """FedHPL on the backbones that we have. The paper has no figures for them."""
    written = json.loads((RESULTS / "fedhpl_efficientnet_gpu.json").read_text(encoding="utf-8"))
    verdict = written["fedhpl less local"]["last"]["verdict"]
    rows = {name.partition(",")[0] for name in written["runs"]}
    answer = {BETTER: "**yes**", WORSE: "**no**; the opposite is shown"}.get(verdict, "**no**")
    link = "[FedHPL, CIFAR-10 with other backbones](#fedhpl-against-local-tuning)"
    size = f"{len(rows)} x {len(written['runs']) // len(rows)}"
    time = f"not recorded, {written['device']}"
    return (
        link,
        size,
        str(written["settings"]["rounds"]),
        "not in the paper",
        "-",
        "FedHPL above local tuning",
        answer,
        time,
    )
