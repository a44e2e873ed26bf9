"""pluribus run, resume and bench: run one experiment."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from pluribus.cli import flags
from pluribus.cli.dry_run import show_plans
from pluribus.cli.greeter import Greeter, print_answer, print_notes, print_results
from pluribus.cli.interrupts import resumable
from pluribus.internal.views import ABOUT, AFTER, View

if TYPE_CHECKING:
    from pluribus.experiment import Experiment

ABOUT_BENCH = """
Measures --rounds rounds after one warm-up round, and reports the median. The run folder is deleted unless --out is set.

After each round, a bare loop in plain PyTorch does the same work: batches of the same sizes through the same models,
with forward, cross-entropy, backward and step, and the same forward passes of evaluation. The ratio of the two times is
the cost of the framework, and of all that the method does beyond steps of cross-entropy.
"""


def run(args: list[str]) -> None:
    """pluribus run: run one federation, or two with --against."""
    from rich.console import Console

    from pluribus import api
    from pluribus.data.datasets import load_once

    view = ("view", View, AFTER, f"For --against. {ABOUT}")
    asked = [flags.AGAINST, view, flags.TRACK, flags.DRY_RUN, flags.QUIET, flags.JSON, flags.CONFIG]
    described, output = flags.parse_experiment("run", *flags.begin(args), asked)
    against, as_json, given = output["against"], output["json"], flags.given_names(args)
    shown = flags.is_shown(output)
    console = Console(stderr=as_json)
    results = []
    with contextlib.nullcontext() if against is None else load_once():  # a single run does not keep its data
        chain, cautions = ([described], []) if against is None else _add_other(described, against, given)
        if output["dry_run"]:
            return show_plans(chain, as_json, console)
        for number, one in enumerate(map(_with_folder, chain)):
            greeter = Greeter(console, chain if number == 0 and not output["quiet"] else ())
            with resumable(greeter):
                results.append(api.run(one, progress=shown, observers=[greeter], track=output["track"]))
    if output["quiet"] and not as_json:
        print_notes(results)
    print_results(results, as_json, console, view=output["view"] if against else None, cautions=cautions)


def _with_folder(described: Experiment) -> Experiment:
    """A run of the command line always has a folder."""
    from pluribus.storage.folder import new_folder

    return described if described.out else dataclasses.replace(described, out=str(new_folder(described.label())))


def _add_other(described: Experiment, against: str, given: set[str]) -> tuple[list[Experiment], list[str]]:
    """The experiments of the other method and of this one, and cautions about the comparison."""
    from pluribus.assembly import assemble
    from pluribus.experiment import embedded_hyper
    from pluribus.method import find
    from pluribus.storage.folder import RunFolder
    from pluribus.study.standings import find_overridden, note_defaults

    assemble(described)  # find its mistakes before the other method runs
    RunFolder.check_free(described.out)
    out = f"{described.out}-{against}" if described.out else None
    other = dataclasses.replace(described, method=against, hyper=embedded_hyper(find(against), given), out=out)
    return [other, described], note_defaults({against: find_overridden(other, given)}, {against: other})


def resume(args: list[str]) -> None:
    """pluribus resume: continue a stopped run from its last checkpoint."""
    from rich.console import Console

    from pluribus import api

    about = "Continue a stopped run from its last checkpoint. A finished run shows its table again."
    about += f"\n\n  --allow-code   {flags.ALLOW_CODE}\n  --allow PATHS  {flags.ALLOW}"
    about += f"\n  --quiet        {flags.QUIET[-1]}"
    track, args = flags.take_flag(args, "--track")
    paths, args = flags.take_flag(args, "--allow")
    allow = "--allow-code" in args or (paths or "")
    quiet = "--quiet" in args
    args = [word for word in args if word not in ("--allow-code", "--quiet")]
    usage = "FOLDER [--track NAMES] [--allow-code] [--allow PATHS] [--quiet]"
    (path,), as_json = flags.parse_words("resume", usage, about, args)
    console = Console(stderr=as_json)
    greeter = Greeter(console)
    with resumable(greeter):
        shown = not (as_json or quiet)
        result = api.resume(path, allow_code=allow, progress=shown, observers=[greeter], track=track or ())
    if quiet and not as_json:
        print_notes([result])
    print_results([result], as_json, console)


def bench(args: list[str]) -> None:
    """pluribus bench: measure how fast a method runs."""
    from pluribus.study import bench

    begun, args = flags.begin(args)
    begun = dataclasses.replace(begun, rounds=bench.ROUNDS)  # not those of a config file, which describes a whole run
    asked = [flags.BARE, flags.JSON, flags.CONFIG]
    described, output = flags.parse_experiment("bench", begun, args, asked, ABOUT_BENCH)
    report = bench.bench(described, rounds=described.rounds, bare=output["bare"], progress=not output["json"])
    print_answer(output["json"], report.to_json, report.table)
