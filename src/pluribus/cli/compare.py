"""pluribus compare and tune: commands for several methods."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pluribus.cli.flags import (
    CONFIG,
    JSON,
    ONE_BY_ONE,
    QUIET,
    TRACK,
    explanations,
    flag,
    flags_of,
    given_names,
    is_shown,
    kinds_of,
    parse_groups,
    split_default,
    take_flag,
    value_text,
    word,
)
from pluribus.cli.greeter import print_answer
from pluribus.errors import FormatError, UnfinishedError

if TYPE_CHECKING:
    from pluribus.study.rows import Row
    from pluribus.study.tune import Tuned

ABOUT_COMPARE = """\
Compares methods on the same data, partition, models and initial weights, over several seeds.

  pluribus compare local fedgh fedproto --clients 10 --seeds 3
  pluribus compare local --row slow=fedgh:server_lr=0.01 \\
    --row fast=fedgh:server_lr=0.1

A --row is a method with settings of its own under a label: LABEL=METHOD[:NAME=VALUE,...]. The label names it in tables
and folders. A file (--config) has [rows.LABEL] with method and settings.

Flags and their defaults hold for all methods. If a method has another default for a training setting and you do not
give the flag, a line above the tables says so, and the method gets no verdict. --set fedgh.server_lr=0.02 is for one
method or label: it sets a hyper-parameter or a training setting.

All methods are evaluated in one --view, and only equal views are tested against each other.

--out is a folder with a run folder per row and seed. The same command with the same --out continues: finished runs
are read, stopped runs are resumed. Every run has one process and one CPU thread unless you set --workers and --threads,
so that no metric but seconds depends on --jobs.

Differences from --baseline are per client and seed. 'better' and 'worse' need both a p-value below 0.05 (sign flips
over all pairs, corrected for several methods) and a 95 % interval without 0 (resampled seeds, then clients in them).
"""

ABOUT_TUNE = """\
Searches for good settings. Every method gets the same number of trials and rounds. Validation data decides, never test
data.

  pluribus tune fedgh fedproto --clients 10 --trials 20 \\
    --space lr=1e-3:1e-1:log,server_lr=1e-3:1:log

Names in --space are training settings, which are searched for every method, or hyper-parameters, which are searched for
the methods that have them. Flags are those of compare. The same command with the same --out continues the search, also
with more --trials. The seed and --jobs determine all trials.

The trials are also studies of Optuna in a file of the folder, study.db, or in --storage, for optuna-dashboard and
optuna.load_study. It needs Optuna: pip install 'pluribus[tune]'.
"""


def compare(args: list[str]) -> None:
    """pluribus compare: compare methods over several seeds."""
    from pluribus.internal.views import ABOUT, AFTER, View
    from pluribus.storage.files import check_writable
    from pluribus.study.compare import compare

    baseline = "Method or label that the others are compared with."
    target = "Report rounds and bytes until the mean of the test metric reaches this."
    asked = [
        flag("seeds", int, 3, "Number of seeds."),
        flag("seed", int, 0, "First seed."),
        ("baseline", word(str | None, "METHOD", baseline, "(default: the first)"), None),
        ("target", word(float | None, "VALUE", target, "(default: the first method's own)"), None),
        flag("view", View, AFTER, ABOUT),
        flag("equal_steps", bool, False, "Run more rounds of some methods, for equal gradient steps per client."),
        ("jobs", word(int | None, "INT", "Runs at a time.", "(default: 1 on a GPU, otherwise one per core)"), None),
        flag(*TRACK),
    ]
    formats = {"markdown": "Markdown", "csv": "CSV, unrounded", "latex": "LaTeX (booktabs)"}
    files = [flag(kind, str | None, None, f"Write the tables to a file as {name}.") for kind, name in formats.items()]
    methods, settings, flat = _parse_for_all("compare", ABOUT_COMPARE, args, asked, files)
    paths = {Path(flat[kind]): kind for kind in formats if flat[kind] is not None}
    for path in paths:
        check_writable(path)
    try:
        found = compare(methods, progress=is_shown(flat), **settings, **{name: flat[name] for name, *_ in asked})
    except UnfinishedError as error:
        if error.partial is not None and not flat["json"]:
            error.partial.table()
        raise
    for path, kind in paths.items():
        getattr(found, f"to_{kind}")(path)
    print_answer(flat["json"], found.to_json, found.table)


def tune(args: list[str]) -> None:
    """pluribus tune: search for settings."""
    from pluribus.internal.views import ABOUT, AFTER, View
    from pluribus.study.proposal import Pruner, Sampler
    from pluribus.study.space import SPACE
    from pluribus.study.tune import tune

    storage = "Optuna storage: a URL such as sqlite:///FILE, or the path of a journal file."
    asked = [
        flag("trials", int, 20, "Trials per method."),
        flag("space", str, SPACE, "Search space, comma-separated: NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=ONE|OTHER."),
        flag("view", View, AFTER, ABOUT),
        flag("seed", int, 0, "First seed of the runs, and seed of the search."),
        flag("seeds", int, 1, "Seeds per trial: its score is the mean over them."),
        flag("jobs", int, 1, "Trials at a time."),
        flag("sampler", Sampler, "tpe", "How Optuna chooses settings; grid tries every combination."),
        flag("pruner", Pruner, "none", "How Optuna stops trials early, by the validation metric of their rounds."),
        ("storage", word(str | None, "STORAGE", storage, "(default: study.db in the folder --out)"), None),
        flag(*TRACK),
    ]
    methods, settings, flat = _parse_for_all("tune", ABOUT_TUNE, args, asked, [])
    found = tune(methods, progress=is_shown(flat), **settings, **{name: flat[name] for name, *_ in asked})
    print_answer(flat["json"], lambda: {"tuned": [one.to_json() for one in found]}, lambda: _print_tuned(found))


def _print_tuned(found: Sequence[Tuned]) -> None:
    from pluribus.internal.metrics import METRICS
    from pluribus.internal.views import view_text

    for one in found:
        for caution in one.cautions:
            print(caution)
        where = f"{METRICS[one.metric].text} on validation data, {view_text(one.view)}"
        seeds = len(one.trials[one.best_trial]["scores"])
        mean = f", mean of {seeds} seeds" if seeds > 1 else ""
        pruned = sum(trial["state"] == "PRUNED" for trial in one.trials)
        what = f"{where}{mean}, the best of {len(one.trials)} trials" + (f", {pruned} pruned" if pruned else "")
        print(f"{one.label}  {one.score:.3f} {what}\n  {one.command}\n  pluribus run --config {one.file}")
    names, storage = ", ".join(one.study_name for one in found), found[0].to_json()["storage"]
    print(f"Optuna storage {storage}, with the {'study' if len(found) == 1 else 'studies'} {names}")


def _parse_for_all(
    command: str, about: str, args: list[str], asked: list[Any], output: list[Any]
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Parse the rows, the settings for all or for one of them, and all flags of a command by name."""
    import tyro

    from pluribus.experiment import TRAINING
    from pluribus.study.grid import data_label, new_folder
    from pluribus.study.plan import common_settings

    config, args = take_flag(args, "--config")
    methods = list(itertools.takewhile(lambda word: not word.startswith("-"), args))
    common = common_settings(config)
    many = tyro.conf.UseAppendAction[tuple[str, ...]]
    row = "A method with settings of its own, under a label. May be repeated."
    one = "Set a value for one method or label. May be repeated."
    asked = [
        *asked,
        ("row", word(many, "LABEL=METHOD[:NAME=VALUE,...]", row, "(default: none)"), ()),
        ("set", word(many, "METHOD.NAME=VALUE", one, "(default: none)"), ()),
        ("out", word(str | None, "FOLDER", "Folder of the runs.", "(default: a new folder under runs/)"), None),
    ]
    groups = _common_flags(common) | {command: asked}
    groups["output"] = [*output, flag(*QUIET), flag(*JSON), flag(*CONFIG)]
    given = parse_groups(groups, f"pluribus {command} METHOD...", about, args[len(methods) :])
    flat = {k: v for group in vars(given).values() for k, v in vars(group).items()}
    settings = {k: flat[k] for k in TRAINING if flat[k] is not None}
    # not named: the hyper-parameters for the embedded ones hold, and the data decide the others
    usual = {"data", "models", "clients"} - given_names(args)
    settings |= {k: flat[k] for k in common if k in flat and flat[k] != ONE_BY_ONE and k not in usual}
    out = flat["out"] or new_folder(command, data_label(flat["data"]))
    rows = [*methods, *map(_parse_row, flat["row"])]
    return rows, settings | {"config": config, "own": _parse_set(flat["set"]), "out": out}, flat


def _common_flags(common: dict[str, Any]) -> dict[str, list[Any]]:
    """The flags of an experiment except method, seed and folder."""
    from pluribus.experiment import SETTINGS, TRAINING, Experiment

    helps, kinds = explanations(Experiment), kinds_of(Experiment)
    values = common | {"models": common["models"] if isinstance(common["models"], str) else ONE_BY_ONE}
    groups = {
        group: flags_of(Experiment, [name for name in names if name in common], values)
        for group, names in SETTINGS.items()
    }
    groups["training"] = []
    for name in TRAINING:  # None if not given
        value = common.get(name, getattr(Experiment, name))
        about, usual = split_default(kinds[name], value, helps[name])
        usual = f"(default: {value})" if usual is None else usual
        kind = kinds[name] | None
        groups["training"].append((name, word(kind, value_text(kind), about, usual), common.get(name)))
    return groups


def _parse_set(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse `--set fedgh.server_lr=0.02` into settings by method."""
    own: dict[str, dict[str, Any]] = {}
    for text in settings:
        where, equals, value = text.partition("=")
        method, dot, name = where.rpartition(".")
        if not (equals and dot):
            raise FormatError(f"--set takes METHOD.NAME=VALUE, such as fedgh.server_lr=0.02, not '{text}'.")
        own.setdefault(method, {})[name.replace("-", "_")] = _parse_value(value)
    return own


def _parse_row(text: str) -> Row:
    """Parse `--row client=fedgh:server_step=client,server_lr=0.1`."""
    from pluribus.study.rows import Row

    label, equals, rest = text.partition("=")
    method, colon, settings = rest.partition(":")
    pairs = [part.partition("=") for part in settings.split(",")] if colon else []
    if not (equals and method) or not all(name and between for name, between, _ in pairs):
        wanted = "LABEL=METHOD or LABEL=METHOD:NAME=VALUE,NAME=VALUE, such as fast=fedgh:server_lr=0.1"
        raise FormatError(f"--row takes {wanted}, not '{text}'.")
    return Row(label, method, {name.strip().replace("-", "_"): _parse_value(value) for name, _, value in pairs})


def _parse_value(text: str) -> Any:
    """A value as in TOML, or a word, which TOML would need in quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
