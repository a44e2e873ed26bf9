"""Turns dataclasses into flags, and flags into settings.

torch takes seconds to import, so this module does not import it before the flags are read.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pluribus.cli.failures import error_json
from pluribus.errors import FormatError, MissingSettingError, UnknownNameError, same_thing, unknown
from pluribus.internal.digits import is_whole
from pluribus.settings import FORMER, flag_name, settings_of

if TYPE_CHECKING:
    from pluribus.experiment import Experiment

JSON = ("json", bool, False, "Print the result as one JSON object, and nothing else.")
DRY_RUN = ("dry_run", bool, False, "Check everything, print what would run and how long, and stop before round 0.")
QUIET = ("quiet", bool, False, "Print the result alone: no heading, no progress.")
CONFIG = ("config", str | None, None, "A TOML file with these settings; flags override it.")
AGAINST = ("against", str | None, None, "Run this method first, and show both side by side.")
TRACK = ("track", str, "", "Trackers, comma-separated: tensorboard, mlflow, wandb.")
BARE = ("bare", bool, True, "Also time the bare loop. It takes as long as the run.")

ALLOW_CODE = "Import the code that a folder names by dotted paths. Only for folders that you trust."
ALLOW = "Import these dotted paths, comma-separated, if a folder names them."
BELOW = 6  # spaces before an explanation that stands below its example
ONE_BY_ONE = "(one by one)"  # shown by --help if a config file sets a model per client
# Flags are text, where files also take lists and tables, and Python also takes objects.
AS_TEXT: dict[str, Any] = dict.fromkeys(
    ("data", "partition", "models", "capacity", "lr_steps", "augment", "columns", "metrics"), str
)
AS_TEXT["public_data"] = str | None
AS_TEXT["workers"] = int | str  # the experiment refuses other words in a sentence
DECIDING = ("data", "models", "partition", "clients", "columns", "window")  # settings that decide defaults of others


def given_names(args: list[str]) -> set[str]:
    """The names of the settings that the user gave, as flags or in a config file."""
    from pluribus.experiment import from_toml

    config, args = take_flag(args, "--config")
    flags = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in args if word.startswith("--")}
    return flags | (from_toml(Path(config)).keys() if config else set())


def begin(args: list[str]) -> tuple[Experiment, list[str]]:
    """Make an experiment from the method and the config file. Returns the remaining flags too."""
    from pluribus.experiment import experiment

    config, args = take_flag(args, "--config")
    method, args = take_flag(args, "--method")
    if method is None and args and not args[0].startswith("-"):
        method, args = args[0], args[1:]
    named = {name: take_flag(args, flag_name(name))[0] for name in DECIDING}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    given |= {name: int(given[name]) for name in ("clients", "window") if is_whole(given.get(name))}
    return experiment(method, config, **given), args


def take_flag(args: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Remove a flag from the arguments and return its value: it decides which other flags exist."""
    for i, arg in enumerate(args):
        if arg == flag and i + 1 < len(args):
            return args[i + 1], args[:i] + args[i + 2 :]
        if arg.startswith(flag + "="):
            return arg.removeprefix(flag + "="), args[:i] + args[i + 1 :]
    return None, args


def parse_experiment(
    command: str, described: Experiment, args: list[str], output: list[Any], about: str = ""
) -> tuple[Experiment, dict[str, Any]]:
    """Parse flags that override an experiment, and the flags of the command itself."""
    from pluribus.experiment import SETTINGS
    from pluribus.method import find, hyperparameters

    cls = find(described.method)
    hyper = hyperparameters(described.build_method())
    values = vars(described) | {"models": described.models if isinstance(described.models, str) else ONE_BY_ONE}
    groups = {group: flags_of(type(described), names, values) for group, names in SETTINGS.items()}
    if hyper:
        groups[described.method] = flags_of(cls, hyper, hyper)
    groups["output"] = [flag(*one) for one in output]
    description = f"{(cls.__doc__ or '').strip()}\n{cls.paper}\n{about}"
    parsed = parse_groups(groups, f"pluribus {command} {described.method}", description, args)
    flat = {k: v for group in vars(parsed).values() for k, v in vars(group).items()}
    chosen = {k: v for k, v in flat.items() if k in values and v != ONE_BY_ONE}
    hyper = {k: flat[k] for k in hyper}
    return dataclasses.replace(described, **chosen, hyper=hyper), {name: flat[name] for name, *_ in output}


def parse_groups(groups: dict[str, list[Any]], command: str, about: str, args: list[str]) -> Any:
    """Parse the flags of a command, by group."""
    return parse(_tree(groups), command, about, args)


def parse(form: type, command: str, about: str, args: list[str]) -> Any:
    """Parse the arguments of a command into a dataclass."""
    import tyro

    if _only_form.get():
        raise _FormFound(form)
    _check_flags(form, command, args)
    # comments in the source are never help texts, and searching for them takes longer than all the rest
    plain = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff)
    try:
        return tyro.cli(form, prog=command, description=_wrap(about), args=args, config=plain)
    except SystemExit as end:
        if end.code and "--json" in args:  # tyro wrote to standard error; programs read standard output
            print(error_json("the flags are wrong: standard error says which.", "flags"))
        raise


class _FormFound(SystemExit):
    """Ends a command that was called for its form."""

    def __init__(self, form: type) -> None:
        self.form = form


_only_form = ContextVar("_only_form", default=False)


def form_of(command: Callable[[list[str]], None], args: list[str]) -> type:
    """The dataclass into which a command parses its arguments. The command ends before it does anything else."""
    asked = _only_form.set(True)
    try:
        command(args)
    except _FormFound as found:
        return found.form
    finally:
        _only_form.reset(asked)
    raise AssertionError(f"{command.__name__} does not parse its arguments into a form")


def _check_flags(form: type, command: str, args: list[str]) -> None:
    """Refuse a synonym of a flag, and the former name of a choice. For a mistyped flag, tyro suggests the nearest."""
    known = {"--help", *_flag_names(form)}
    for (name, former), now in FORMER.items():
        if flag_name(name) in known and take_flag(args, flag_name(name))[0] == former:
            raise UnknownNameError(f"{flag_name(name)} {former} was renamed to {flag_name(name)} {now}.")
    for word in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
        if word.replace("_", "-") not in known and same_thing(word, known):
            raise unknown("flag", word, known, f"{command} --help")


def _flag_names(form: type) -> Iterator[str]:
    """The flags of a dataclass and of the dataclasses in its fields."""
    for field in dataclasses.fields(form):
        if dataclasses.is_dataclass(field.type):
            yield from _flag_names(field.type)  # type: ignore[arg-type]
        else:
            yield flag_name(field.name)
            yield flag_name(f"no_{field.name}")


def _wrap(about: str) -> str:
    """Wrap paragraphs to the width of the terminal. The margin keeps tyro from joining their lines."""
    width = _width()
    margin = textwrap.TextWrapper(width, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)
    parts = about.strip("\n").rstrip().split("\n\n")
    return "\n\n".join(_wrap_examples(p, width) if p.startswith(" ") else margin.fill(p) for p in parts)


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)


def _wrap_examples(lines: str, width: int) -> str:
    """Wrap lines with a left side and an explanation: under itself, or below if the left side is long."""
    wrapped: list[str] = []
    for line in lines.split("\n"):
        found = re.fullmatch(r"( +\S.*?  +)(\S.*)", line)
        if len(line) <= width or found is None:
            wrapped.append(line)
            continue
        left, explanation = found.groups()
        indent = " " * (len(left) if len(left) <= width // 2 else BELOW)
        texts = textwrap.wrap(explanation, width - len(indent), break_on_hyphens=False)
        if len(left) <= width // 2:
            wrapped += [left + texts[0], *(indent + text for text in texts[1:])]
        else:
            wrapped += [left.rstrip(), *(indent + text for text in texts)]
    return "\n".join(wrapped)


def flags_of(cls: type, names: Iterable[str], values: dict[str, Any]) -> list[Any]:
    """The fields of a dataclass as flags for tyro, with the attribute docstrings as help."""
    helps, kinds = explanations(cls), kinds_of(cls)
    return [flag(name, kinds[name], values[name], helps.get(name, "")) for name in names]


@cache  # a command asks for each group of flags
def kinds_of(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, as a command line takes them."""
    return get_type_hints(cls) | AS_TEXT


@cache  # parses the source, and a command calls it for each group of flags
def explanations(cls: type) -> Mapping[str, str]:
    """The attribute docstrings of a dataclass by field, inherited ones included, with symbols and ranges."""
    import docstring_parser

    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    said = [param for base in bases for param in docstring_parser.parse_from_object(base).params]
    texts = {param.arg_name: param.description.strip() for param in said if param.description}
    return {name: one.explain(texts[name]) for name, one in settings_of(cls).items() if name in texts}


def flag(name: str, kind: Any, value: Any, about: str) -> tuple[str, Any, Any]:
    """A flag for tyro: its name, its annotated type and its default."""
    import tyro

    about, usual = split_default(kind, value, about)
    return name, Annotated[kind, tyro.conf.arg(help=about, metavar=value_text(kind), help_behavior_hint=usual)], value


def value_text(kind: Any) -> str | None:
    """What the help shows as the value of a flag that may be left out: tyro would add {None}. None: as tyro does."""
    kinds = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else ()
    if NoneType not in kinds:
        return None
    return "|".join(map(_text_of_kind, (one for one in kinds if one is not NoneType)))


def _text_of_kind(kind: Any) -> str:
    if get_origin(kind) is Literal or kind is bool:
        return f"{{{','.join(map(str, get_args(kind) or (True, False)))}}}"
    return getattr(kind, "__name__", "value").upper()


def split_default(kind: Any, value: Any, about: str) -> tuple[str, str | None]:
    """What the help says of a flag, and of its default. None: as tyro does. A flag that is on has the name --no-...

    >>> split_default(str | None, None, "Run folder. Default: a new folder. It is created.")
    ('Run folder. It is created.', '(default: a new folder)')
    """
    if kind is bool:
        return about, "(default: on; this flag turns it off)" if value else "(default: off)"
    found = re.search(r" ?Default: (.+?)\.(?= |$)", about)
    rest = about.replace(found[0], "").strip() if found else about
    if value is not None and value != "":  # another default, such as that of a config file
        return rest, None
    return rest, f"(default: {found[1] if found else 'none'})"


def is_shown(given: Mapping[str, Any]) -> bool:
    """Whether the progress is shown."""
    return not (given["json"] or given["quiet"])


def allow_flags() -> list[Any]:
    """The flags by which a folder may name code."""
    return [flag("allow_code", bool, False, ALLOW_CODE), ("allow", word(str, "PATHS", ALLOW, "(default: none)"), "")]


def allowed(given: Any) -> bool | list[str]:
    """The code that the user allows: all, or dotted paths."""
    return given.allow_code or [path.strip() for path in given.allow.split(",")]


def word(kind: Any, metavar: str | None, about: str, hint: str) -> Any:
    """The type of a flag or argument with a hand-written help."""
    import tyro

    return Annotated[kind, tyro.conf.arg(metavar=metavar, help=about, help_behavior_hint=hint)]


def _tree(groups: dict[str, list[Any]]) -> type:
    """A dataclass of dataclasses, one per group of flags."""

    def default(value: Any) -> Any:
        return dataclasses.field(default_factory=lambda: value)

    fields: list[Any] = []
    for name, flags in groups.items():
        group = dataclasses.make_dataclass(name, [(n, kind, default(v)) for n, kind, v in flags])
        group.__doc__ = " "
        fields.append((re.sub("[ .-]", "_", name), group, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass("Run", fields)


def parse_words(command: str, usage: str, about: str, args: list[str], most: int = 1) -> tuple[list[str], bool]:
    """Parse the arguments of a command without other flags, and whether it answers in JSON."""
    usage = f"pluribus {command} {usage} [--json]"
    if "-h" in args or "--help" in args:
        usages = textwrap.wrap(f"usage: {usage}", _width(), subsequent_indent=" " * BELOW, break_on_hyphens=False)
        print("\n".join([*usages, "", _wrap(about)]))
        sys.exit(0)
    flags, words = ([a for a in args if a.startswith("-") == is_flag] for is_flag in (True, False))
    for flag in flags:
        if flag != "--json":
            raise unknown("flag", flag, ["--json", "--help"], f"pluribus {command} --help")
    if not 1 <= len(words) <= most:
        kind = FormatError if words else MissingSettingError
        takes = "1 argument" if most == 1 else f"1 to {most} arguments"
        raise kind(f"the command takes {takes}, not {len(words)}: {usage}.")
    return words, bool(flags)
