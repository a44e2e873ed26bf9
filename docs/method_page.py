"""The top of a method's page: its source, paper, family and test, and the picture of a run. generate.py writes it."""

from __future__ import annotations

import inspect
import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from pluribus.method import Method, methods

ROOT = Path(__file__).resolve().parent.parent
CURVES = ROOT / "benchmarks" / "results" / "method-curves.json"
SEEDS = "seeds 0 to 2"
MOST_APART = 0.1  # relative difference of gradient steps that a reader must know

# Where a paper is. A paper without a line here has no address that we have checked.
ARXIV = {
    "agg": "2101.11296",
    "ditto": "2012.04221",
    "fd": "1811.11479",
    "fedavg": "1602.05629",
    "fedavg-matched": "2101.11296",
    "fedbabu": "2106.06042",
    "fedbn": "2102.07623",
    "feddf": "2006.07242",
    "fedgen": "2105.10056",
    "fedh2l": "2101.11296",
    "fedhe": "2110.09910",
    "fedhpl": "2405.17267",
    "fedl2g-f": "2410.06490",
    "fedl2g-l": "2410.06490",
    "fedmd": "1910.03581",
    "fedmrl": "2406.00488",
    "fedpac": "2306.11867",
    "fedproto": "2105.00243",
    "fedprox": "1812.06127",
    "fedprox-matched": "2101.11296",
    "fedrep": "2102.07078",
    "fedrolex": "2212.01548",
    "fedtgp": "2401.03230",
    "fjord": "2102.13451",
    "flexlora": "2402.11505",
    "flora": "2409.05976",
    "fml": "2006.16765",
    "heterofl": "2010.01264",
    "hetlora": "2401.06432",
    "ind": "2101.11296",
    "kt-pfl": "2111.02862",
    "lg-fedavg": "2001.01523",
    "per-fedavg": "2002.07948",
    "pfedla": "2205.03993",
    "pfedpg": "2308.15367",
    "pfedpt": "2303.08678",
    "scaffold": "1910.06378",
}
ELSEWHERE = {
    "depthfl": "https://openreview.net/forum?id=pf8RIZTMU58",
    "fccl": "https://openaccess.thecvf.com/content/CVPR2022/html/"
    "Huang_Learn_From_Others_and_Be_Yourself_in_Heterogeneous_Federated_Learning_CVPR_2022_paper.html",
    "fedapen": "https://doi.org/10.1145/3580305.3599344",
    "fedgh": "https://doi.org/10.1145/3581783.3611781",
    "fedkd": "https://doi.org/10.1038/s41467-022-29763-x",
}
# Tests that are not in the file of the method's name.
TESTS = {
    "agg": "fedh2l",
    "fedavg-matched": "matched",
    "fedl2g-f": "fedl2g",
    "fedl2g-l": "fedl2g",
    "fedprox-matched": "matched",
    "fedrolex": "heterofl",
    "ind": "fedh2l",
}


def facts(name: str) -> str:
    """One line with links: the source of a method, its paper, its family and its test by hand."""
    cls = methods()[name]
    source = Path(inspect.getfile(cls)).relative_to(ROOT)
    parts = [f"Source: [{source.name}](../../{source})", f"paper: {_paper(name, cls)}"]
    parts.append(f"family: [{cls.family}](../methods.md)")
    test = ROOT / "tests" / "golden" / f"test_{TESTS.get(name, name.replace('-', ''))}.py"
    parts.append(f"golden test: [{test.name}](../../tests/golden/{test.name})" if test.exists() else "")
    return " · ".join(filter(None, parts))


def _paper(name: str, cls: type[Method]) -> str:
    address = ELSEWHERE.get(name) or (f"https://arxiv.org/abs/{ARXIV[name]}" if name in ARXIV else "")
    return f"[{cls.paper}]({address})" if address else cls.paper


# ---- the picture -----------------------------------------------------------------------------------------------------


@cache
def _written() -> dict[str, Any]:
    written: dict[str, Any] = json.loads(CURVES.read_text(encoding="utf-8"))
    return written


def figure(name: str) -> str:
    """The picture of a method beside its baseline, and what it shows."""
    one = _written()["methods"][name]
    base, lines = one["baseline"], one["lines"]
    last = lines[name][-1][0]
    ends = {label: statistics.fmean(line[-1][1]) for label, line in lines.items()}
    alt = f"Test accuracy over {last} rounds: {name} ends at {ends[name]:.2f}, {base} at {ends[base]:.2f}."
    told = [
        f"`{one['command']}` ({SEEDS}, {last} rounds, {one['clients']} clients, {_written()['hardware']}).",
        f"The lines show the mean test accuracy of clients, {_views(one)}.",
        "The bands are one standard deviation over seeds.",
        f"In the last round {_end(lines, name)} and {_end(lines, base)}.",
        _verdict(name, one),
        f"`{name}` warms up for {one['warmup'][name]} rounds before these." if one["warmup"][name] else "",
        _steps(name, one),
    ]
    return f"![{alt}](../pictures/methods/{name}.svg)\n\n{' '.join(filter(None, told))}"


def _end(lines: dict[str, Any], label: str) -> str:
    values = lines[label][-1][1]
    return f"`{label}` has {statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def _views(one: dict[str, Any]) -> str:
    words = {"after": "after local training", "before": "before local training"}
    views = {label: words.get(view, view) for label, view in one["views"].items()}
    if len(set(views.values())) == 1:
        return next(iter(views.values()))
    return " and ".join(f"`{label}` {view}" for label, view in views.items())


def _verdict(name: str, one: dict[str, Any]) -> str:
    """What the paired test of `compare` says."""
    found = one["tested"]
    if "p" not in found:
        return f"The two are not tested against each other: {found['verdict']}."
    p = "p < 0.001" if found["p"] < 0.001 else f"p = {found['p']:.3f}"
    gap = f"{found['mean']:+.3f}, 95 % interval {found['low']:+.3f} to {found['high']:+.3f}, {p}"
    words = {"better": f"`{name}` is better than `{one['baseline']}`", "worse": f"`{name}` is worse"}
    says = words.get(found["verdict"], "no difference is shown")
    return f"The paired test of the accuracy {one['selection']}: {says} ({gap})."


def _steps(name: str, one: dict[str, Any]) -> str:
    mine, theirs = one["steps"][name], one["steps"][one["baseline"]]
    if not mine or not theirs or abs(mine - theirs) <= MOST_APART * theirs:
        return ""
    return f"`{name}` takes {mine / theirs:.1f} times as many gradient steps."
