"""The command line. An experiment's fields and its method's settings are the flags of its command.

torch takes seconds to import, so commands import what they need when they run, and `pluribus --help` answers at once.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from pluribus.errors import (
    CheckpointError,
    FormatError,
    MissingSettingError,
    PluribusError,
    UnfinishedError,
    UnknownNameError,
    same_thing,
    unknown,
)

if TYPE_CHECKING:
    from rich.console import Console

    from pluribus.experiment import Experiment
    from pluribus.federation import Federation
    from pluribus.internal.views import View
    from pluribus.result import Result
    from pluribus.storage.folder import RunFolder

USAGE = """\
Pluribus: heterogeneous federated learning.

  pluribus run METHOD [flags]      run a federation         pluribus run fedgh --clients 10 --rounds 50
  pluribus resume FOLDER           go on with a stopped run
  pluribus compare METHOD... [..]  methods over several seeds, and which differences are more than noise
  pluribus tune METHOD... [flags]  a fair search for settings, on validation data
  pluribus reproduce [NAME] [..]   a paper's table: ours beside its figures
  pluribus predict PLACE IMAGES    classes of images, by a trained model
  pluribus report RUN... [flags]   plots and tables of runs, as one web page
  pluribus watch RUN               the same page, live, while a run goes on
  pluribus bench METHOD [flags]    how fast it runs here, and where its time goes
  pluribus list WHAT               methods, models, groups, data or partitions
  pluribus data check PATH         what a data set holds, and what happens to it when it is read

  pluribus keys FOLDER [flags]     certificates and keys for a federation of real sites
  pluribus serve METHOD [flags]    the server of a federation of real sites
  pluribus join [flags]            one site of a federation

  pluribus run METHOD --help       every flag, with the paper's symbols and the defaults
"""

# The groups of `--help`. Every field of Experiment stands in exactly one; a test holds this to that.
FLAG_GROUPS = {
    "data": "data partition clients classes_per_client unequal mass alpha min_samples min_share "
    "val_fraction test_fraction public_fraction test image_size",
    "models": "models width projector same_init weights",
    "training": "rounds epochs batch_size optimizer lr momentum weight_decay lr_decay optimizer_life augment",
    "participation": "participation drop_rate straggler_rate",
    "evaluation": "evaluate evaluate_every",
    "this run": "seed device threads workers engine ray_address gpu_share precision channels_last "
    "capture stack checkpoint_every out",
}

# What the size of messages depends on.
TASK = (
    "data partition clients classes_per_client mass alpha min_share public_fraction image_size "
    "models width projector rounds batch_size"
)

# Flags of a command that decide nothing about the run: name, type, default, help.
JSON = ("json", bool, False, "Print the result as one JSON object, and nothing else.")
CONFIG = ("config", str | None, None, "A TOML file with these settings; flags override it.")
AGAINST = ("against", str | None, None, "Run this method first, and show both side by side.")
TRACK = ("track", str, "", "Trackers that are told, with commas between: tensorboard, mlflow, wandb.")
BARE = ("bare", bool, True, "Time the bare loop too. It takes as long as the run.")

ABOUT_BENCH = """
Measures --rounds rounds after one that warms up, and gives the median. Its run folder is deleted unless --out is given.

After each round a bare loop does the same in plain PyTorch: batches of the same sizes through the same models, forward,
cross-entropy, backward, step, and the same forward passes of evaluation. How many times as long a round takes is what
the framework costs, and whatever the method does besides a step of cross-entropy.
"""

ABOUT_COMPARE = """\
Methods side by side on the same data, partition, models and initial weights, over several seeds.

  pluribus compare local fedgh fedproto --clients 10 --seeds 3

Flags and their defaults hold for all methods. Where a method's own default of training is another and nobody gave the
flag, a line above the tables says so, and there is no verdict on that method. --set fedgh.server_lr=0.02 is for one
method: a hyper-parameter of its own, or a training setting.

All methods are asked in one --view, and only equal views are tested against each other.

--out is a folder with a run folder per method and seed. The same command with the same --out goes on: runs that are
finished are read, those that were stopped are resumed. Every run has one CPU thread unless --threads says otherwise, so
that no figure but seconds depends on --jobs.

Differences to --baseline are per client and seed. 'better' and 'worse' need both a p-value below 0.05 (sign flips over
all pairs, corrected for several methods) and a 95 % interval without 0 (seeds drawn anew, then clients within them).
"""

ABOUT_TUNE = """\
A fair search: every method gets as many trials of as many rounds, and only validation data decides, never test data.

  pluribus tune fedgh fedproto --clients 10 --trials 20 --space lr=1e-3:1e-1:log,server_lr=1e-3:1:log

Names of --space are training settings, which are searched for every method, or hyper-parameters, which are searched for
the methods that have them. Flags are those of compare. The same command with the same --out goes on, and with more
--trials goes further. It needs Optuna: pip install 'pluribus[tune]'.
"""

ABOUT_REPRODUCE = """\
A paper's table: runs its rows over several seeds, and puts ours beside the paper's figures.

Tables named claim-... show a paper's claim on embedded data. They have no figures of the paper, and take seconds to
minutes on a laptop.

  pluribus reproduce                                            all tables, and what they need
  pluribus reproduce fedh2l-table2 --rounds 500 --seeds 1       less than the paper, which the heading says
  pluribus reproduce fedh2l-table2 --summary benchmarks/results what was measured, without running anything

The same command goes on: what is finished, in --out or in a summary beside --save, is not run again. Rows that several
tables share are run once.
"""

ABOUT_PREDICT = """\
The classes of images, by a model that a run has trained.

  pluribus predict runs/a scans/ one.png --client 0      the model of a client of a simulation
  pluribus predict state scans/                          the model of a real site: site.toml says where its state lies

Images are brought to the shape that the model takes. The model is the one whose accuracy the run reports: of the round
that validation selects; --round last takes that of the last round. The score is the class's share in the softmax of
what the method gives to each class: a probability where that is logits, just a number where it is a distance.
"""

ABOUT_DATA = """\
What a data set holds: images per class, domain and split, their shapes and depths, which files are not read and which
cannot be, which images are scaled or turned, and which are there twice.

  pluribus data check photos/           a folder of images
  pluribus data check mine.npz          a file
  pluribus data check cifar10           a name of pluribus list data

The status is 0 if it can be read, and 2 if not.
"""

ABOUT_REPORT = """\
Plots and tables of runs, as one web page that holds all it needs: it can be sent by mail and read without a network.

  pluribus report runs/a                              report.html
  pluribus report runs/a runs/b --out both.html       several runs in the same plots
  pluribus report runs --figures figures              all runs below a folder; figures for a paper, as PNG and PDF

A run may be going on, or have been stopped. Features of models are shown from its last checkpoint.
"""

ABOUT_WATCH = """\
The page of pluribus report, live, while a run goes on. It is served to this machine alone; Ctrl-C ends it, not the run.

  pluribus watch runs/a
"""

ABOUT_KEYS = """\
Certificates and keys for a federation of real sites: a CA of your own, a certificate for the server, a key per site.

  pluribus keys keys --server fl.example.org,10.0.0.5 --sites berlin,paris

  keys/ca.crt, ca.key   the CA. ca.key signs the server's certificate: keep it offline, it is needed for nothing else
  keys/server/          server.pem and server.key, for the server
  keys/sites/berlin/    berlin.key, berlin.pub and ca.crt: hand this folder to the site, by a way that you trust
  keys/sites.toml       the public key of each site, for the server: who may join

What is there stays as it is. To add a site, run it again with --sites rome. To renew the server's certificate, or to
change its names, remove keys/server first: the CA stays, and sites notice nothing. To give a site a new key, remove its
folder and its line in keys/sites.toml first.
"""

ABOUT_SERVE = """\
The server of a federation of real sites: it waits for all of them, runs the rounds, and shows their accuracies.

  pluribus serve fedgh --config federation.toml

federation.toml says who the sites are, which classes there are and how training goes; docs/deployment.md shows one.
The same command goes on with a run that was stopped. Sites reach the address that federation.toml names under 'listen',
over TLS, and only those with a key in keys/sites.toml.
"""

ABOUT_JOIN = """\
One site of a federation: it trains its own model on its own images, and leaves when the federation has ended.

  pluribus join --config site.toml

site.toml says who this site is, where its images and its keys lie and how to reach the server; docs/deployment.md shows
one. The same command goes on after a crash: all that the site has learned lies in its state folder.
"""

ONE_BY_ONE = "(one by one)"  # what --help shows where a config file gives each client its model


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.path.insert(0, "")  # a user's own method, model or data set lies beside where they work
    commands: dict[str, Callable[[list[str]], None]] = {
        "run": _run,
        "resume": _resume,
        "compare": _compare,
        "tune": _tune,
        "reproduce": _reproduce,
        "predict": _predict,
        "report": _report_page,
        "watch": _watch,
        "bench": _bench,
        "list": _list,
        "data": _data,
        "keys": _keys,
        "serve": _serve,
        "join": _join,
    }
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("pluribus"))
        return 0
    try:
        if args[0] not in commands:
            raise unknown("command", args[0], commands, "pluribus --help")
        with _ctrl_c_ends_imports():
            commands[args[0]](args[1:])
        return 0
    except PluribusError as error:
        _fail(str(error), error.kind, "--json" in args)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nstopped. {stop}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # of a user's own method, model or data function, or a mistake of ours
        _fail_with_lines(error, "--json" in args)
        return 1


@contextlib.contextmanager
def _ctrl_c_ends_imports() -> Iterator[None]:
    """Ctrl-C while a module is imported ends the program at once, unless there is something to clean up.

    As an exception it would come up inside that module: torch and numpy make another error of it, or swallow it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    _at_work.clear()
    try:
        signal.signal(signal.SIGINT, _stopped)
    except ValueError:  # not in the main thread, which alone hears of signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_at_work = threading.Event()  # set once something runs that Ctrl-C has to end in order


def _stopped(number: int, frame: FrameType | None) -> None:
    if _importing(frame) and not (_at_work.is_set() or multiprocessing.active_children()):
        print("\nstopped.", file=sys.stderr, flush=True)
        os._exit(130)
    signal.default_int_handler(number, frame)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _fail(sentence: str, kind: str, as_json: bool) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    if as_json:
        print(_as_json(sentence, kind))


def _as_json(sentence: str, kind: str) -> str:
    return json.dumps({"error": sentence, "kind": kind})


def _fail_with_lines(error: Exception, as_json: bool) -> None:
    """What came up where; then the user's own lines, or all, where none of those had a part in it."""
    import traceback

    from pluribus.internal.blame import blame_of, sentence_of

    _fail(sentence_of(error), "exception", as_json)
    known = blame_of(error)
    if known is not None and known.frames:
        print(known.frames, end="", file=sys.stderr)
    else:
        traceback.print_exception(error)


# ---- run -----------------------------------------------------------------------------------------------------------


def _run(args: list[str]) -> None:
    from pluribus.internal.views import ABOUT, AFTER, View

    view = ("view", View, AFTER, f"For --against. {ABOUT}")
    described, output = _parse("run", *_begun(args), [AGAINST, view, TRACK, JSON, CONFIG])
    _run_and_report(described, output["against"], output["view"], output["track"], output["json"], _given(args))


def _given(args: list[str]) -> set[str]:
    """The settings that someone has given, as flags or in a config file."""
    from pathlib import Path

    from pluribus.experiment import from_toml

    config, args = _take(args, "--config")
    flags = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in args if word.startswith("--")}
    return flags | (from_toml(Path(config)).keys() if config else set())


def _begun(args: list[str]) -> tuple[Experiment, list[str]]:
    """What a method and a config file say of an experiment, and the flags that are left."""
    from pluribus.experiment import experiment

    config, args = _take(args, "--config")
    method, args = _take(args, "--method")
    if method is None and args and not args[0].startswith("-"):
        method, args = args[0], args[1:]
    named = {name: _take(args, f"--{name}")[0] for name in ("data", "models")}  # a method's defaults depend on them
    return experiment(method, config, **{name: value for name, value in named.items() if value is not None}), args


def _take(args: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Take a flag that decides which other flags there are out of the arguments."""
    for i, arg in enumerate(args):
        if arg == flag and i + 1 < len(args):
            return args[i + 1], args[:i] + args[i + 2 :]
        if arg.startswith(flag + "="):
            return arg.removeprefix(flag + "="), args[:i] + args[i + 1 :]
    return None, args


def _parse(
    command: str, described: Experiment, args: list[str], output: list[Any], about: str = ""
) -> tuple[Experiment, dict[str, Any]]:
    """Flags over an experiment's own values, and those of the command itself."""
    import dataclasses

    from pluribus.method import find, hyperparameters

    cls = find(described.method)
    hyper = hyperparameters(described.build_method())
    values = vars(described) | {"models": described.models if isinstance(described.models, str) else ONE_BY_ONE}
    groups = {name: _flags(type(described), fields.split(), values) for name, fields in FLAG_GROUPS.items()}
    if hyper:
        groups[described.method] = _flags(cls, list(hyper), hyper)
    groups["output"] = [_flag(*one) for one in output]
    description = f"{(cls.__doc__ or '').strip()}\n{cls.paper}\n{about}"
    parsed = _understood(groups, f"pluribus {command} {described.method}", description, args)
    flat = {k: v for name in groups for k, v in vars(getattr(parsed, _identifier(name))).items()}
    chosen = {k: v for k, v in flat.items() if k in values and v != ONE_BY_ONE}
    hyper = {k: flat[k] for k in hyper}
    return dataclasses.replace(described, **chosen, hyper=hyper), {name: flat[name] for name, *_ in output}


def _understood(groups: dict[str, list[Any]], command: str, about: str, args: list[str]) -> Any:
    """The flags of a command, by group."""
    return _typed(_tree(groups), command, about, args)


def _typed(form: type, command: str, about: str, args: list[str]) -> Any:
    """The arguments of a command in the form of a dataclass."""
    import tyro

    _check_flags(form, command, args)
    # no comment in any source is the help of a flag, and to look for some takes longer than all the rest
    plain = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff)
    try:
        return tyro.cli(form, prog=command, description=_wrapped(about), args=args, config=plain)
    except SystemExit as end:
        if end.code and "--json" in args:  # tyro has told the person; a machine reads standard output
            print(_as_json("the flags are not understood; standard error says which.", "flags"))
        raise


def _check_flags(form: type, command: str, args: list[str]) -> None:
    """Refuse a flag that is another name of one of ours, and a choice by its former name.

    Of those that are merely mistyped tyro knows the nearest.
    """
    from pluribus.settings import FORMER, flag

    known = {"--help", *_flag_names(form)}
    for (name, former), now in FORMER.items():
        if flag(name) in known and _take(args, flag(name))[0] == former:
            raise UnknownNameError(f"{flag(name)} {former} is called {flag(name)} {now} now.")
    for word in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
        if word.replace("_", "-") not in known and same_thing(word, known):
            raise unknown("flag", word, known, f"{command} --help")


def _flag_names(form: type) -> Iterator[str]:
    """The flags of a dataclass, and of those within."""
    import dataclasses

    from pluribus.settings import flag

    for field in dataclasses.fields(form):
        if dataclasses.is_dataclass(field.type):
            yield from _flag_names(field.type)  # type: ignore[arg-type]
        else:
            yield flag(field.name)
            yield flag(f"no_{field.name}")


def _wrapped(about: str) -> str:
    """Paragraphs as wide as the terminal; tyro would make one long line of each, were it not for the margin."""
    import shutil
    import textwrap

    width = min(100, shutil.get_terminal_size().columns)
    margin = textwrap.TextWrapper(width, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)
    parts = (part if part.startswith(" ") else margin.fill(part) for part in about.strip().split("\n\n"))
    return "\n\n".join(parts)


def _flags(cls: type, names: list[str], values: dict[str, Any]) -> list[Any]:
    """Fields for tyro, with the attribute docstrings as help."""
    from typing import get_type_hints

    helps = explanations(cls)
    hints = get_type_hints(cls)
    hints |= {"models": str, "augment": str}  # lists and tables are for config files and Python
    return [_flag(name, hints[name], values[name], helps.get(name, "")) for name in names]


@cache  # a command asks for each of its groups of flags, and the source has to be parsed
def explanations(cls: type) -> Mapping[str, str]:
    """The attribute docstrings of a dataclass by field, those that it inherits too."""
    import dataclasses

    import docstring_parser

    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    said = [param for base in bases for param in docstring_parser.parse_from_object(base).params]
    return {param.arg_name: param.description for param in said if param.description}


def _flag(name: str, kind: Any, value: Any, about: str) -> tuple[str, Any, Any]:
    import tyro

    return name, Annotated[kind, tyro.conf.arg(help=about)], value


def _tree(groups: dict[str, list[Any]]) -> type:
    """A dataclass of dataclasses, one per group of flags."""
    import dataclasses

    def default(value: Any) -> Any:
        return dataclasses.field(default_factory=lambda: value)

    fields: list[Any] = []
    for name, flags in groups.items():
        group = dataclasses.make_dataclass(name, [(n, kind, default(v)) for n, kind, v in flags])
        group.__doc__ = " "
        fields.append((_identifier(name), group, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass("Run", fields)


def _identifier(name: str) -> str:
    return name.replace(" ", "_").replace("-", "_").replace(".", "_")


def _run_and_report(
    described: Experiment, against: str | None, view: View, track: str, as_json: bool, given: set[str]
) -> None:
    import dataclasses

    from rich.console import Console

    from pluribus.api import run
    from pluribus.assembly import assemble
    from pluribus.experiment import embedded_hyper
    from pluribus.method import find
    from pluribus.storage.folder import RunFolder
    from pluribus.study.standings import about_defaults, overruled

    console = Console(stderr=as_json)
    chain, cautions = [described], list[str]()
    if against is not None:
        assemble(described)  # what is wrong with it should not show after the other has run
        RunFolder.check_free(described.out)
        out = f"{described.out}-{against}" if described.out else None
        other = dataclasses.replace(described, method=against, hyper=embedded_hyper(find(against), given), out=out)
        cautions = about_defaults({against: overruled(other, given)}, {against: other})
        chain.insert(0, other)
    results = []
    for number, one in enumerate(chain):
        greeter = _Greeter(console, chain, first=number == 0)
        with _resumable(greeter):
            results.append(run(one, progress=not as_json, observers=[greeter], track=track))
    _report(results, as_json, console, view=view if against else None, cautions=cautions)


def _report(
    results: list[Result],
    as_json: bool,
    console: Console,
    again: str | None = None,
    view: View | None = None,
    cautions: Sequence[str] = (),
) -> None:
    from pluribus.storage.files import to_json
    from pluribus.study.tables import show_cautions
    from pluribus.terminal import print_table

    if as_json:
        told = {"against": [r.to_json() for r in results[:-1]]} | ({"cautions": cautions} if cautions else {})
        print(to_json(results[-1].to_json() | told))
        return
    console.print()
    show_cautions(cautions, console)
    print_table(results, console, view)
    folder = results[-1].folder
    again = again or f"pluribus run --config {folder}/config.toml"
    saved = f"\n Saved {folder}   again: {again}"
    console.print(saved, highlight=False, markup=False, soft_wrap=True)


class _Greeter:
    """Prints what is about to run, and remembers its folder for whoever interrupts it."""

    def __init__(self, console: Console, chain: Sequence[Experiment], first: bool) -> None:
        self._console = console
        self._chain = chain
        self._first = first
        self._run: RunFolder | None = None

    @property
    def folder(self) -> str | None:
        """Where the run is, once there is one."""
        return None if self._run is None else str(self._run.path)

    def saved(self) -> int | None:
        """The last round that a resumed run would not have to do again."""
        return None if self._run is None else self._run.checkpoint.latest

    def start(self, federation: Federation) -> None:
        """Print the heading, once."""
        from rich.markup import escape

        from pluribus import __version__
        from pluribus.terminal import print_partition

        self._run = federation.folder
        _at_work.set()
        if not self._first:
            return
        one, names = federation.parts.experiment, " against ".join(e.method for e in reversed(self._chain))
        kinds = len(federation.parts.cards.architectures())
        what = f"{one.data}   {one.clients} clients, {kinds} architecture{'s' if kinds > 1 else ''}   seed {one.seed}"
        self._console.print(f"[bold]Pluribus {__version__}[/]   {names}   {escape(what)}\n", highlight=False)
        print_partition(federation.parts, self._console)
        self._console.print()

    def round(self, record: Any, ledger: Any) -> None:
        """Nothing to say."""

    def finish(self, result: Result) -> None:
        """Nothing to say."""


@contextlib.contextmanager
def _resumable(greeter: _Greeter) -> Any:
    """However a run is cut short, say how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if greeter.folder is None:
            raise
        raise KeyboardInterrupt(f"Go on with: pluribus resume {greeter.folder}") from stop
    except CheckpointError as error:
        if greeter.folder is None:
            raise
        raise type(error)(f"{error} {_kept(greeter.saved())} pluribus resume {greeter.folder}") from error


def _kept(latest: int | None) -> str:
    """What of a run is saved; the command that takes it from there follows."""
    if latest is None:
        return "No round is saved yet. Once this is fixed, start again:"
    rounds = "Round 0 is" if latest == 0 else f"Rounds 0 to {latest} are"
    return f"{rounds} saved. Once this is fixed, continue:"


def _resume(args: list[str]) -> None:
    from rich.console import Console

    from pluribus.api import resume

    about = "Go on with a run that was stopped, from its last checkpoint; a finished run shows its table again."
    track, args = _take(args, "--track")
    path, as_json = _one_word("resume", "FOLDER [--track NAMES]", about, args)
    console = Console(stderr=as_json)
    greeter = _Greeter(console, [], first=False)
    with _resumable(greeter):
        result = resume(path, progress=not as_json, observers=[greeter], track=track or ())
    _report([result], as_json, console)


# ---- compare -------------------------------------------------------------------------------------------------------


def _compare(args: list[str]) -> None:
    from pathlib import Path

    from pluribus.internal.views import ABOUT, AFTER, View
    from pluribus.storage.files import check_place, to_json, write_text
    from pluribus.study.compare import compare

    target = "Rounds and bytes until the mean test accuracy is there."
    asked = [
        _flag("seeds", int, 3, "Number of seeds."),
        _flag("seed", int, 0, "The first of them."),
        ("baseline", _word(str | None, "METHOD", "Whom the others are compared with.", "(default: the first)"), None),
        ("target", _word(float | None, "ACCURACY", target, "(default: what the first method has)"), None),
        _flag("view", View, AFTER, ABOUT),
        _flag("equal_steps", bool, False, "More rounds for some, until all have as many gradient steps per client."),
        ("jobs", _word(int | None, "INT", "Runs at a time.", "(default: 1 on a GPU, otherwise one per core)"), None),
    ]
    formats = {"markdown": "Markdown", "csv": "CSV, unrounded", "latex": "LaTeX (booktabs)"}
    files = [_flag(kind, str | None, None, f"Write the tables to a file, as {name}.") for kind, name in formats.items()]
    methods, settings, flat = _for_all("compare", ABOUT_COMPARE, args, asked, files)
    paths = {Path(flat[kind]): kind for kind in formats if flat[kind] is not None}
    for path in paths:
        check_place(path)
    try:
        found = compare(methods, progress=not flat["json"], **settings, **{name: flat[name] for name, *_ in asked})
    except UnfinishedError as error:
        if error.partial is not None and not flat["json"]:
            error.partial.table()
        raise
    for path, kind in paths.items():
        write_text(path, getattr(found, f"to_{kind}")())
    if flat["json"]:
        print(to_json(found.to_json()))
    else:
        found.table()


def _for_all(
    command: str, about: str, args: list[str], asked: list[Any], output: list[Any]
) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Methods, the settings that hold for all or for one of them, and every flag of a command by name."""
    import itertools

    from pluribus.study.compare import common_settings

    config, args = _take(args, "--config")
    methods = list(itertools.takewhile(lambda word: not word.startswith("-"), args))
    common = common_settings(config)
    groups = _common_flags(common) | {command: [*asked, *_set_and_out()]}
    groups["output"] = [*output, _flag(*JSON), _flag(*CONFIG)]
    given = _understood(groups, f"pluribus {command} METHOD...", about, args[len(methods) :])
    flat = {k: v for name in groups for k, v in vars(getattr(given, _identifier(name))).items()}
    settings = {k: v for k, v in flat.items() if k in FLAG_GROUPS["training"].split() and v is not None}
    usual = {"data", "models"} - _given(args)  # not named: hyper-parameters for the embedded ones hold
    settings |= {k: flat[k] for k in common if k in flat and flat[k] != ONE_BY_ONE and k not in usual}
    return methods, settings | {"config": config, "own": _own(flat["set"]), "out": flat["out"]}, flat


def _common_flags(common: dict[str, Any]) -> dict[str, list[Any]]:
    """Those of an experiment but for method, seed and folder."""
    from typing import get_type_hints

    from pluribus.experiment import Experiment
    from pluribus.study.standings import OWN

    helps, hints = explanations(Experiment), get_type_hints(Experiment) | {"augment": str}
    values = common | {"models": common["models"] if isinstance(common["models"], str) else ONE_BY_ONE}
    groups: dict[str, list[Any]] = {
        name: _flags(Experiment, [field for field in fields.split() if field in common and field not in OWN], values)
        for name, fields in FLAG_GROUPS.items()
    }
    for name in OWN:  # None where nobody says anything
        usual = f"(default: {common.get(name, getattr(Experiment, name))})"
        groups["training"].append((name, _word(hints[name] | None, name.upper(), helps[name], usual), common.get(name)))
    return groups


def _set_and_out() -> list[Any]:
    import tyro

    many, one = tyro.conf.UseAppendAction[tuple[str, ...]], "A setting of one method; may be repeated."
    return [
        ("set", _word(many, "METHOD.NAME=VALUE", one, "(default: none)"), ()),
        ("out", _word(str | None, "FOLDER", "Where the runs are.", "(default: a name of its own under runs/)"), None),
    ]


def _own(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `--set fedgh.server_lr=0.02` says, by method."""
    import tomllib

    own: dict[str, dict[str, Any]] = {}
    for text in settings:
        where, equals, value = text.partition("=")
        method, dot, name = where.rpartition(".")
        if not (equals and dot):
            raise FormatError(f"--set takes METHOD.NAME=VALUE, such as fedgh.server_lr=0.02, not '{text}'.")
        try:
            read = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            read = value  # a word, which TOML would have in quotes
        own.setdefault(method, {})[name.replace("-", "_")] = read
    return own


# ---- tune ----------------------------------------------------------------------------------------------------------


def _tune(args: list[str]) -> None:
    from pluribus.internal.views import ABOUT, AFTER, View, view_text
    from pluribus.storage.files import to_json
    from pluribus.study.tune import SPACE, tune

    asked = [
        _flag("trials", int, 20, "Trials of each method."),
        _flag("space", str, SPACE, "What is searched: NAME=LOW:HIGH, LOW:HIGH:log or ONE|OTHER, with commas between."),
        _flag("view", View, AFTER, ABOUT),
        _flag("seed", int, 0, "Of all runs, and of the search."),
    ]
    methods, settings, flat = _for_all("tune", ABOUT_TUNE, args, asked, [])
    found = tune(methods, progress=not flat["json"], **settings, **{name: flat[name] for name, *_ in asked})
    if flat["json"]:
        print(to_json({"tuned": [one.to_json() for one in found]}))
        return
    for one in found:
        for caution in one.cautions:
            print(caution)
        what = f"on validation data, {view_text(one.view)}, the best of {len(one.trials)} trials"
        print(f"{one.method}  {one.accuracy:.3f} {what}")
        print(f"  {one.command}")
        print(f"  pluribus run --config {one.file}")


# ---- reproduce -----------------------------------------------------------------------------------------------------


def _reproduce(args: list[str]) -> None:
    import dataclasses

    import tyro

    from pluribus.internal.views import ABOUT, AFTER, View

    runs = "Where the runs are, of all tables."
    flags: list[Any] = [
        ("name", _word(tyro.conf.Positional[str], "NAME", "The table.", "(default: list all)"), ""),
        ("seeds", _word(int | None, "INT", "Number of seeds.", "(default: as the table has it)"), None),
        ("rounds", _word(int | None, "INT", "Rounds of every run.", "(default: as the table has it)"), None),
        ("only", _word(str, "ROW[,ROW...]", "Rows by name.", "(default: all)"), ""),
        _flag("view", View, AFTER, f"For differences between rows. {ABOUT}"),
        ("jobs", _word(int | None, "INT", "Runs at a time.", "(default: 1 on a GPU, otherwise one per core)"), None),
        _flag("device", str, "auto", "cpu, cuda, or auto."),
        ("out", _word(str, "FOLDER", runs, "(default: runs/reproduce)"), "runs/reproduce"),
        ("save", _word(str | None, "FILE", "Write what stays of the runs here.", "(default: OUT/NAME.json)"), None),
        ("summary", _word(str | None, "PLACE", "Run nothing: read this file or folder.", "(default: none)"), None),
        _flag("markdown", str | None, None, "Write the tables to a file, as Markdown."),
        _flag(*JSON),
    ]
    given = _typed(dataclasses.make_dataclass("Reproduce", flags), "pluribus reproduce", ABOUT_REPRODUCE, args)
    if not given.name:
        return _list_tables(given.json)
    from pathlib import Path

    from pluribus.storage.files import check_place, to_json, write_text
    from pluribus.study.reproduce.run import reproduce, shown

    if given.markdown is not None:
        check_place(Path(given.markdown))
    asked = {"seeds": given.seeds, "rounds": given.rounds, "view": given.view}
    asked["only"] = [word.strip() for word in given.only.split(",") if word.strip()]
    if given.summary is not None:
        found = shown(given.name, given.summary, **asked)
    else:
        how = {name: getattr(given, name) for name in ("out", "save", "jobs", "device")}
        found = reproduce(given.name, **asked, **how, progress=not given.json)
    if given.markdown is not None:
        write_text(Path(given.markdown), found.to_markdown())
    if given.json:
        print(to_json(found.to_json()))
    else:
        found.show()


def _list_tables(as_json: bool) -> None:
    from pluribus.listing import print_list
    from pluribus.study.reproduce.paper import find, names

    tables = [find(name) for name in names()]
    rows = [
        {"name": one.name, "about": one.title, "data": one.data, "needs": one.needs}
        | {"rows": ", ".join(row.name for row in one.rows)}
        for one in tables
    ]
    if as_json:
        print(json.dumps({"tables": rows}))
    else:
        print_list(rows)


# ---- predict -------------------------------------------------------------------------------------------------------


def _predict(args: list[str]) -> None:
    import dataclasses
    from pathlib import Path
    from typing import Literal

    import tyro

    words, place = tyro.conf.Positional[tuple[str, ...]], "The folder of a run, or the state folder of a site."
    flags: list[Any] = [
        ("place", _word(tyro.conf.Positional[str], "PLACE", place, "(required)")),
        ("images", _word(words, "IMAGES...", "Files, and folders of images.", "(required)")),
        ("client", _word(int | None, "K", "Whose model, of the clients of a run.", "(needed for a run)"), None),
        _flag("round", Literal["selected", "last"], "selected", "The round whose model predicts."),
        _flag("json", bool, False, "Print the predictions as one JSON list, and nothing else."),
        ("out", _word(str | None, "FILE", "Write the predictions to a CSV file, too.", "(default: none)"), None),
    ]
    given = _typed(dataclasses.make_dataclass("Predict", flags), "pluribus predict", ABOUT_PREDICT, args)
    from pluribus.prediction import predict, to_csv
    from pluribus.storage.files import to_json
    from pluribus.terminal import print_predictions

    predictions = predict(given.place, given.images, given.client, given.round)
    if given.out:
        to_csv(predictions, Path(given.out))
    if given.json:
        print(to_json([dataclasses.asdict(one) for one in predictions]))
    else:
        print_predictions(predictions)


def _word(kind: Any, metavar: str, about: str, hint: str) -> Any:
    """A flag or argument whose help is written by hand."""
    import tyro

    return Annotated[kind, tyro.conf.arg(metavar=metavar, help=about, help_behavior_hint=hint)]


# ---- report and watch ------------------------------------------------------------------------------------------------


def _report_page(args: list[str]) -> None:
    import dataclasses
    from typing import Literal

    import tyro

    words, places = tyro.conf.Positional[tuple[str, ...]], "Folders of runs, or folders that hold some."
    folder, features = "Write every plot to this folder, too, as PNG and PDF.", "How features of models are shown."
    flags: list[Any] = [
        ("runs", _word(words, "RUN...", places, "(required)")),
        ("out", _word(str, "FILE", "The page.", "(default: report.html)"), "report.html"),
        ("figures", _word(str | None, "FOLDER", folder, "(default: none)"), None),
        _flag("embeddings", Literal["tsne", "pca", "none"], "pca", features),
    ]
    given = _typed(dataclasses.make_dataclass("Report", flags), "pluribus report", ABOUT_REPORT, args)
    from pluribus.report import write_report

    for path in write_report(given.runs, given.out, given.figures, given.embeddings):
        print(f"wrote {path}")


def _watch(args: list[str]) -> None:
    import dataclasses

    import tyro

    flags: list[Any] = [
        ("run", _word(tyro.conf.Positional[str], "RUN", "The folder of a run.", "(required)")),
        ("port", _word(int, "INT", "Where the page is served.", "(default: 0, any that is free)"), 0),
    ]
    given = _typed(dataclasses.make_dataclass("Watch", flags), "pluribus watch", ABOUT_WATCH, args)
    from pluribus.report.watch import watch

    watch(given.run, given.port, tell=lambda text: print(text, flush=True))


# ---- bench ---------------------------------------------------------------------------------------------------------


def _bench(args: list[str]) -> None:
    import dataclasses

    from pluribus.storage.files import to_json
    from pluribus.study.bench import ROUNDS, bench

    begun, args = _begun(args)
    begun = dataclasses.replace(begun, rounds=ROUNDS)  # a config file is of a whole run
    described, output = _parse("bench", begun, args, [BARE, JSON, CONFIG], ABOUT_BENCH)
    report = bench(described, rounds=described.rounds, bare=output["bare"], progress=not output["json"])
    if output["json"]:
        print(to_json(report.to_json()))
    else:
        report.table()


# ---- list ----------------------------------------------------------------------------------------------------------


def _list(args: list[str]) -> None:
    from pluribus.listing import LISTS, print_list

    if args[:1] == ["methods"]:
        return _list_methods(args[1:])
    lists = ["methods", *LISTS]
    what, as_json = _one_word("list", f"{{{','.join(lists)}}}", "What there is to choose from.", args)
    if what not in LISTS:
        raise unknown("list", what, lists, "pluribus list --help")
    rows = LISTS[what]()
    if as_json:
        print(json.dumps({what: rows}))
    else:
        print_list(rows)


def _data(args: list[str]) -> None:
    import dataclasses

    import tyro

    if args and args[0] != "check" and not args[0].startswith("-"):
        raise unknown("command", f"data {args[0]}", ["data check"], "pluribus --help")
    path = "A folder of images, an .npz file, or the name of a data set."
    flags: list[Any] = [
        ("path", _word(tyro.conf.Positional[str], "PATH", path, "(required)")),
        _flag("json", bool, False, "Print what was found as one JSON object, and nothing else."),
    ]
    form = dataclasses.make_dataclass("DataCheck", flags)
    given = _typed(form, "pluribus data check", ABOUT_DATA, args[1:] if args[:1] == ["check"] else args)
    from pluribus.data.check import check_data
    from pluribus.storage.files import to_json
    from pluribus.terminal import print_data_check

    found = check_data(given.path)
    if given.json:
        print(to_json(found.to_json()))
    else:
        print_data_check(found)
    if found.problem is not None:
        print(f"error: {found.problem}", file=sys.stderr)
        sys.exit(2)


def _list_methods(args: list[str]) -> None:
    from typing import get_type_hints

    from pluribus.experiment import Experiment
    from pluribus.listing import method_rows, print_methods
    from pluribus.settings import flag

    helps, hints = explanations(Experiment), get_type_hints(Experiment) | {"models": str}
    groups = {
        "task": [_flag(name, hints[name] | None, None, helps[name]) for name in TASK.split()],
        "output": [_flag(*JSON)],
    }
    about = "Every method, what travels, and how much of it: on its own default task, or on the one given."
    parsed = _understood(groups, "pluribus list methods", about, args)
    settings = {name: value for name, value in vars(parsed.task).items() if value is not None}
    rows = method_rows(settings)
    if parsed.output.json:
        print(json.dumps({"methods": rows}))
    else:
        given = " ".join(f"{flag(name)} {value}" for name, value in settings.items())
        print_methods(rows, f"with {given}" if given else "each on its default task")


def _one_word(command: str, word: str, about: str, args: list[str]) -> tuple[str, bool]:
    """The argument of a command that takes just one, and whether it shall answer in JSON."""
    usage = f"pluribus {command} {word} [--json]"
    if "-h" in args or "--help" in args:
        print(f"usage: {usage}\n\n{about}")
        sys.exit(0)
    flags, words = ([a for a in args if a.startswith("-") == is_flag] for is_flag in (True, False))
    for flag in flags:
        if flag != "--json":
            raise unknown("flag", flag, ["--json", "--help"], f"pluribus {command} --help")
    if len(words) != 1:
        kind = FormatError if words else MissingSettingError
        raise kind(f"{len(words)} arguments where one is needed: {usage}.")
    return words[0], bool(flags)


# ---- keys ----------------------------------------------------------------------------------------------------------


def _keys(args: list[str]) -> None:
    import dataclasses
    from datetime import UTC, datetime
    from pathlib import Path

    import tyro

    reached = "Host names and IP addresses by which sites reach the server."
    flags: list[Any] = [
        ("folder", _word(tyro.conf.Positional[str], "FOLDER", "Where the keys are, or shall be.", "(required)")),
        ("server", _word(str, "NAME[,NAME...]", reached, "(needed once)"), ""),
        ("sites", _word(str, "NAME[,NAME...]", "Sites that shall have a key.", "(default: none)"), ""),
        ("days", _word(int, "INT", "How long a new certificate of the server is valid.", "(default: 825)"), 825),
    ]
    given = _typed(dataclasses.make_dataclass("Keys", flags), "pluribus keys", ABOUT_KEYS, args)
    from pluribus.sites.keys import make_keys  # after the flags: --help needs no further packages

    server, sites = ([word.strip() for word in text.split(",") if text] for text in (given.server, given.sites))
    for item in make_keys(Path(given.folder), server, sites, given.days, datetime.now(UTC)):
        print(f"{'made' if item.made else 'kept'}  {item.path}  {item.about}".rstrip())


# ---- serve and join ------------------------------------------------------------------------------------------------


def _serve(args: list[str]) -> None:
    from rich.console import Console

    method, args = (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)
    config = ("config", str, "federation.toml", "What server and sites agree on.")
    out = ("out", str | None, None, "Run folder. Unset: as the config says, or 'federation' beside it.")
    given = _understood(
        {"server": [_flag(*one) for one in (config, out, JSON)]}, "pluribus serve METHOD", ABOUT_SERVE, args
    )
    if method is None:
        raise MissingSettingError(
            "which method? pluribus serve fedgh --config federation.toml; pluribus list methods shows all."
        )
    from pluribus.sites.serve import serve
    from pluribus.terminal import Progress

    flags = given.server
    console, again = Console(stderr=flags.json), f"pluribus serve {method} --config {flags.config}"
    again += f" --out {flags.out}" if flags.out else ""
    with _told_how_to_go_on(again), Progress() as bar:
        observers = [] if flags.json else [bar]
        result = serve(method, flags.config, out=flags.out, tell=_teller(console), observers=observers)
    _report([result], flags.json, console, f"pluribus serve {method} --config {flags.config} --out NEW-FOLDER")


def _join(args: list[str]) -> None:
    from rich.console import Console

    config = ("config", str, "site.toml", "Who this site is.")
    given = _understood({"site": [_flag(*config)]}, "pluribus join", ABOUT_JOIN, args)
    from pluribus.sites.join import join

    with _told_how_to_go_on(f"pluribus join --config {given.site.config}"):
        join(given.site.config, tell=_teller(Console()))


def _teller(console: Console) -> Callable[[str], None]:
    """Says what happens, and when."""
    import time

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)

    return tell


@contextlib.contextmanager
def _told_how_to_go_on(command: str) -> Any:
    """However it is stopped, what it started is ended, and a person learns how to go on."""

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    _at_work.set()
    before = signal.signal(signal.SIGTERM, stopped)  # by which services are stopped
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"Go on with: {command}") from stop
    finally:
        signal.signal(signal.SIGTERM, before)
