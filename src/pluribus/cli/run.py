"""pluribus run, resume and bench: run one experiment."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pluribus.cli.flags import (
    AGAINST,
    BARE,
    CONFIG,
    JSON,
    TRACK,
    begin,
    given_names,
    parse_experiment,
    parse_one_word,
    take_flag,
)
from pluribus.cli.greeter import Greeter, print_results
from pluribus.cli.interrupts import resumable

if TYPE_CHECKING:
    from pluribus.experiment import Experiment
    from pluribus.internal.views import View


ABOUT_BENCH = """
Measures --rounds rounds after one warm-up round, and reports the median. The run folder is deleted unless --out is set.

After each round, a bare loop in plain PyTorch does the same work: batches of the same sizes through the same models,
with forward, cross-entropy, backward and step, and the same forward passes of evaluation. The ratio of the two times is
the cost of the framework, and of all that the method does beyond steps of cross-entropy.
"""


def run(args: list[str]) -> None:
    """pluribus run: run one federation, or two with --against."""
    from pluribus.internal.views import ABOUT, AFTER, View

    view = ("view", View, AFTER, f"For --against. {ABOUT}")
    described, output = parse_experiment("run", *begin(args), [AGAINST, view, TRACK, JSON, CONFIG])
    _run_and_report(described, output["against"], output["view"], output["track"], output["json"], given_names(args))


def _run_and_report(
    described: Experiment, against: str | None, view: View, track: str, as_json: bool, given: set[str]
) -> None:
    from rich.console import Console

    from pluribus import api
    from pluribus.data.datasets import loaded_once

    console = Console(stderr=as_json)
    results = []
    with contextlib.nullcontext() if against is None else loaded_once():  # a single run does not keep its data
        chain, cautions = ([described], []) if against is None else _add_other(described, against, given)
        for number, one in enumerate(chain):
            greeter = Greeter(console, chain, first=number == 0)
            with resumable(greeter):
                results.append(api.run(one, progress=not as_json, observers=[greeter], track=track))
    print_results(results, as_json, console, view=view if against else None, cautions=cautions)


def _add_other(described: Experiment, against: str, given: set[str]) -> tuple[list[Experiment], list[str]]:
    """The experiments of the other method and of this one, and cautions about the comparison."""
    import dataclasses

    from pluribus.assembly import assemble
    from pluribus.experiment import embedded_hyper
    from pluribus.method import find
    from pluribus.storage.folder import RunFolder
    from pluribus.study.standings import about_defaults, overruled

    assemble(described)  # find its mistakes before the other method runs
    RunFolder.check_free(described.out)
    out = f"{described.out}-{against}" if described.out else None
    other = dataclasses.replace(described, method=against, hyper=embedded_hyper(find(against), given), out=out)
    return [other, described], about_defaults({against: overruled(other, given)}, {against: other})


def resume(args: list[str]) -> None:
    """pluribus resume: continue a stopped run from its last checkpoint."""
    from rich.console import Console

    from pluribus import api

    about = "Continue a stopped run from its last checkpoint. A finished run shows its table again."
    track, args = take_flag(args, "--track")
    path, as_json = parse_one_word("resume", "FOLDER [--track NAMES]", about, args)
    console = Console(stderr=as_json)
    greeter = Greeter(console, [], first=False)
    with resumable(greeter):
        result = api.resume(path, progress=not as_json, observers=[greeter], track=track or ())
    print_results([result], as_json, console)


def bench(args: list[str]) -> None:
    """pluribus bench: measure how fast a method runs."""
    import dataclasses

    from pluribus.storage.files import to_json
    from pluribus.study import bench

    begun, args = begin(args)
    begun = dataclasses.replace(begun, rounds=bench.ROUNDS)  # not those of a config file, which describes a whole run
    described, output = parse_experiment("bench", begun, args, [BARE, JSON, CONFIG], ABOUT_BENCH)
    report = bench.bench(described, rounds=described.rounds, bare=output["bare"], progress=not output["json"])
    if output["json"]:
        print(to_json(report.to_json()))
    else:
        report.table()
