"""What rounds cost: bytes by tensor, and seconds by what they were spent on."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from pluribus.internal.clock import SPANS
from pluribus.report.groups import Group, seeds_text
from pluribus.report.numbers import Run
from pluribus.report.plots.series import Plot, Point, Section, Series, make_series
from pluribus.terminal import format_bytes

MOST_BARS = 36  # of tensors, for all groups together
MOST_LAYERS = 6  # of a stack, per direction
WAYS = ("up", "down")
OTHERS = "others"

Bytes = dict[tuple[str, str], dict[int, float]]  # (direction, tensor) -> round -> bytes


def traffic(groups: Sequence[Group]) -> Section:
    """Bytes by tensor, in total and per round."""
    sent = {group.name: _mean_traffic(group) for group in groups}
    sending = {name: found for name, found in sent.items() if any(way in WAYS for way, _ in found)}
    plots = [_in_total(sending), *(_per_round(name, found) for name, found in sending.items())] if sending else []
    what = "Serialized bytes of all clients by tensor; (header) is the header of a message."
    says = f"{what} Downloads for evaluation only are left out.{_about_means(groups)}"
    return Section("traffic", "Communication", says, plots, "Nothing has been sent.")


def _about_means(groups: Sequence[Group]) -> str:
    seeds = seeds_text(groups)
    return f" Numbers are means over {seeds}." if seeds else ""


def _mean_traffic(group: Group) -> Bytes:
    sums: dict[tuple[str, str], Counter[int]] = {}
    for run in group.runs:
        for key, rounds in run.traffic.items():
            sums.setdefault(key, Counter()).update(rounds)
    return {key: {t: size / len(group.runs) for t, size in rounds.items()} for key, rounds in sums.items()}


def _shares(sent: Bytes, way: str, named: Sequence[str]) -> dict[str, dict[int, float]]:
    """Bytes per round by tensor. Tensors that are not in `named` are added up."""
    shares: dict[str, dict[int, float]] = {}
    for (one, tensor), rounds in sent.items():
        if one == way:
            share = shares.setdefault(tensor if tensor in named else OTHERS, {})
            for t, size in rounds.items():
                share[t] = share.get(t, 0) + size
    return shares


def _largest(sent: Bytes, ways: Sequence[str], most: int) -> list[str]:
    sums: dict[str, float] = {}
    for (way, tensor), rounds in sent.items():
        if way in ways:
            sums[tensor] = sums.get(tensor, 0) + sum(rounds.values())
    return sorted(sums, key=lambda tensor: -sums[tensor])[:most]


def _in_total(sending: dict[str, Bytes]) -> Plot:
    rows: list[str] = []
    bars: dict[str, list[Point]] = {way: [] for way in WAYS}
    for name, sent in sending.items():
        named = _largest(sent, WAYS, max(2, MOST_BARS // len(sending)))
        shares = {way: _shares(sent, way, named) for way in WAYS}
        for tensor in [*named, OTHERS]:
            sizes = {way: sum(share[tensor].values()) for way, share in shares.items() if tensor in share}
            for way, size in sizes.items():
                bars[way].append((size, len(rows), f"{name}, {way}: {format_bytes(size)} of {tensor}"))
            rows += [f"{name}: {tensor}" if len(sending) > 1 else tensor] if sizes else []
    known = [(number, way) for number, way in enumerate(WAYS) if bars[way]]
    series = [make_series(way, bars[way], number, "bars", way == "down") for number, way in known]
    return Plot("in all", "bytes", "", series, y_names=rows, bytes="x")


def _per_round(name: str, sent: Bytes) -> Plot:
    series: list[Series] = []
    for way in WAYS:
        shares = _shares(sent, way, _largest(sent, [way], MOST_LAYERS))
        for tensor, rounds in sorted(shares.items(), key=lambda pair: -sum(pair[1].values())):
            what = f"{way}: {tensor}"
            points = [(t + 1, rounds[t], f"{what}, {format_bytes(rounds[t])} in round {t + 1}") for t in sorted(rounds)]
            series.append(make_series(what, points, len(series), "stack", way == "down"))
    return Plot(f"{name}, per round", "round", "bytes", series, bytes="y")


# ---- time ------------------------------------------------------------------------------------------------------------

REST = "rest"
SPENT_ON = {
    "compute": "training at clients",
    "communication": "packing, copying and counting messages",
    "server": "work of the server",
    "evaluation": "measuring models",
    REST: "all else",
}


def time(groups: Sequence[Group]) -> Section:
    """Seconds by span, a bar per group."""
    known = [group for group in groups if any(record["spans"] for run in group.runs for record in run.history)]
    spent = [
        {name: statistics.fmean(_seconds(run, name) for run in group.runs) for name in SPENT_ON} for group in known
    ]
    series = [
        make_series(
            name,
            [(one[name], row, f"{known[row].name}: {one[name]:.3g} s of {name}") for row, one in enumerate(spent)],
            color,
            "bars",
        )
        for color, name in enumerate(SPENT_ON)
    ]
    meaning = ", ".join(f"{name} is {text}" for name, text in SPENT_ON.items())
    says = (
        f"Seconds in rounds, by what they were spent on: {meaning}. They depend on the machine and on what else it "
        f"did.{_about_means(groups)}"
    )
    names = [group.name for group in known]
    plots = [Plot("seconds", "seconds in all rounds", "", series, y_names=names, stacked=True)] if known else []
    return Section("time", "Time", says, plots, "")


def _seconds(run: Run, span: str) -> float:
    if span == REST:
        total = math.fsum(record["seconds"] for record in run.history)
        return max(0.0, total - math.fsum(_seconds(run, name) for name in SPANS))
    return math.fsum(record["spans"].get(span, 0.0) for record in run.history)
