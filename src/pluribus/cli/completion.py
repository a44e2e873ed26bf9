"""pluribus completion: scripts by which shells complete commands, names and flags.

A script holds all words, so that a shell completes without starting Python. The words come from the same places as the
flags themselves.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pluribus.cli.flags import form_of, parse_words
from pluribus.errors import unknown
from pluribus.settings import flag_name

ABOUT = """\
Prints a script by which your shell completes commands, flags, and the names of methods, models and data sets. Save it
where the shell looks for such scripts, and start a new shell. Save it again after an update of Pluribus.

  pluribus completion bash > ~/.local/share/bash-completion/completions/pluribus
  pluribus completion zsh > ~/.pluribus-completion.zsh      and in ~/.zshrc: source ~/.pluribus-completion.zsh
  pluribus completion fish > ~/.config/fish/completions/pluribus.fish
"""

Command = Callable[[list[str]], None]

WITH_METHOD = ("run", "bench")  # commands that have the flags of a method
MANY_WORDS = ("compare", "tune", "report", "audit", "predict")  # commands that take any number of words
WITHOUT_FORM = {  # commands that read their flags by themselves
    "resume": ("--track", "--allow", "--allow-code", "--quiet", "--json"),
    "list": ("--takes", "--json"),
    "completion": (),
}


class Flag(NamedTuple):
    """A flag: what it takes, and what it is for."""

    name: str
    about: str = ""
    takes: bool = True  # whether a value follows
    choices: tuple[str, ...] = ()  # of its value; none: anything, such as a file


class Words(NamedTuple):
    """All words that a shell completes."""

    commands: Mapping[str, str]  # what they do, by name
    arguments: Mapping[str, Sequence[str]]  # of a command, by its name; none: files
    flags: Mapping[str, Sequence[Flag]]  # of a command, by its name
    of_methods: Mapping[str, Sequence[Flag]]  # further flags of `run METHOD`, by method

    def values(self) -> dict[str, list[str]]:
        """The choices of every flag that has some."""
        found: dict[str, dict[str, None]] = {}
        for one in self._all_flags():
            found.setdefault(one.name, {}).update(dict.fromkeys(one.choices))
        return {name: list(choices) for name, choices in sorted(found.items()) if choices}

    def switches(self) -> list[str]:
        """Flags that never have a value."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for one in self._all_flags():
            names[one.takes].add(one.name)
        return sorted(names[False] - names[True])

    def _all_flags(self) -> Iterator[Flag]:
        return (flag for flags in (*self.flags.values(), *self.of_methods.values()) for flag in flags)


def completion(args: list[str], commands: Mapping[str, Command], usage: str) -> None:
    """pluribus completion: print a script for a shell."""
    (shell,), _ = parse_words("completion", "{bash,zsh,fish}", ABOUT, args)
    if shell not in SHELLS:
        raise unknown("shell", shell, SHELLS, "pluribus completion --help")
    print(SHELLS[shell](find_words(commands, usage)), end="")


def find_words(commands: Mapping[str, Command], usage: str) -> Words:
    """Collect the words from the commands, the registries and the settings. `usage` says what the commands do."""
    from pluribus.method import methods

    about = {words[1]: line[35:] for line in usage.splitlines() if (words := line.split())[:1] == ["pluribus"]}
    names = _names()
    flags = {name: list(_flags_of(name, command, names)) for name, command in commands.items()}
    of_methods = {}
    for method in methods():
        here = list(_read_form(form_of(commands["run"], [method]), names))
        of_methods[method] = [flag for flag in here if flag.name not in {one.name for one in flags["run"]}]
    arguments = {name: names[kind] for name, kind in ARGUMENTS.items()}
    return Words({name: about[name] for name in commands}, arguments, flags, of_methods)


def _names() -> dict[str, tuple[str, ...]]:
    """Names to choose from, by kind."""
    from pluribus.data import PARTITIONS
    from pluribus.data import entries as data_sets
    from pluribus.listing import LISTS
    from pluribus.method import methods
    from pluribus.models import GROUPS
    from pluribus.models import entries as models
    from pluribus.study.reproduce.paper import names as tables
    from pluribus.track.tracker import TRACKERS

    return {
        "method": tuple(methods()),
        "model": (*GROUPS, *models()),
        "data": tuple(data_sets()),
        "partition": ("auto", *PARTITIONS),
        "tracker": tuple(TRACKERS),
        "table": tuple(tables()),
        "list": ("methods", *LISTS),
        "target": (*methods(), *models(), *data_sets()),
        "shell": tuple(SHELLS),
        "check": ("check",),
    }


# The kind of names that a command, and that a flag takes.
ARGUMENTS = dict.fromkeys(("run", "bench", "serve", "compare", "tune"), "method") | {
    "list": "list",
    "reproduce": "table",
    "check": "target",
    "completion": "shell",
    "data": "check",
}
VALUES = dict.fromkeys(("--method", "--against"), "method") | {
    "--models": "model",
    "--data": "data",
    "--public-data": "data",
    "--partition": "partition",
    "--track": "tracker",
}


def _flags_of(name: str, command: Command, names: Mapping[str, tuple[str, ...]]) -> Iterator[Flag]:
    if name in WITHOUT_FORM:
        switches = ("--allow-code", "--quiet", "--json")
        found = [Flag(flag, takes=flag not in switches) for flag in WITHOUT_FORM[name]]
        yield from (one._replace(choices=names[VALUES[one.name]] if one.name in VALUES else ()) for one in found)
    else:
        first = {"run": ["local"], "bench": ["local"], "serve": ["local"], "data": ["check"]}.get(name, [])
        yield from _read_form(form_of(command, first), names)
    if name in WITH_METHOD:
        yield Flag("--method", "The method, instead of METHOD.", choices=names["method"])
    yield Flag("--help", "Show every flag.", takes=False)


def _read_form(form: type, names: Mapping[str, tuple[str, ...]]) -> Iterator[Flag]:
    """The flags of a dataclass and of the dataclasses in its fields. Arguments without a flag are left out."""
    import tyro

    for field in dataclasses.fields(form):
        if dataclasses.is_dataclass(field.type):
            yield from _read_form(field.type, names)  # type: ignore[arg-type]
            continue
        kind, *notes = get_args(field.type)
        if tyro.conf.Positional in notes:
            continue
        config = next(note for note in notes if hasattr(note, "help"))
        on = kind is bool and _default(field) is True
        name = flag_name(config.name or f"no_{field.name}" if on else config.name or field.name)
        choices = names[VALUES[name]] if name in VALUES else _choices(kind)
        yield Flag(name, " ".join((config.help or "").split()), kind is not bool, choices)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _choices(kind: Any) -> tuple[str, ...]:
    """The words that a type allows: those of a Literal, alone or beside other types."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        return tuple(word for one in get_args(kind) for word in _choices(one))
    return ()


# ---- scripts ---------------------------------------------------------------------------------------------------------

BASH = """\
_pluribus_flags() {
  case $1 in
{flags}
  esac
}

_pluribus_flags_of_method() {
  case $1 in
{of_methods}
  esac
}

_pluribus_arguments() {
  case $1 in
{arguments}
  esac
}

_pluribus_values() {
  case $1 in
{values}
  esac
}

_pluribus() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=""
  COMPREPLY=()
  if [ "$word" = "=" ]; then  # --data=digits is three words
    word=""
  elif [ "$before" = "=" ]; then
    before=${COMP_WORDS[COMP_CWORD-2]}
  fi
  case $before in
    {switches}) before="" ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  else
    case $before in
      --*) words=$(_pluribus_values "$before") ;;
      *)
        case $word in
          -*) words="$(_pluribus_flags "$command")"
            case $command in
              {with_method}) words="$words $(_pluribus_flags_of_method "${COMP_WORDS[2]}")" ;;
            esac ;;
          *)
            case $command in
              {many_words}) words=$(_pluribus_arguments "$command") ;;
              *) if [ "$COMP_CWORD" -eq 2 ]; then words=$(_pluribus_arguments "$command"); fi ;;
            esac ;;
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))  # without any, the shell completes files
}

complete -o bashdefault -o default -F _pluribus pluribus
"""


def write_bash(words: Words, shell: str = "bash") -> str:
    """The script for bash, of functions that bash 3 and zsh understand too."""
    parts = {
        "flags": _cases({name: [one.name for one in some] for name, some in words.flags.items()}),
        "of_methods": _cases({name: [one.name for one in some] for name, some in words.of_methods.items() if some}),
        "arguments": _cases(words.arguments),
        "values": _cases(words.values()),
        "switches": "|".join(words.switches()),
        "commands": " ".join(words.commands),
        "with_method": "|".join(WITH_METHOD),
        "many_words": "|".join(MANY_WORDS),
    }
    script = BASH
    for name, text in parts.items():
        script = script.replace(f"{{{name}}}", text)
    return _heading(shell) + script


def _cases(words: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f"    {name}) echo {shlex.join(some)} ;;" for name, some in words.items())


def write_zsh(words: Words) -> str:
    """The script for zsh, which reads that for bash."""
    body = write_bash(words, "zsh").replace("complete -o bashdefault -o default -F", "complete -o default -F")
    heading, _, rest = body.partition("\n")
    return f"{heading}\nautoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n\n{rest}"


def write_fish(words: Words) -> str:
    """The script for fish, with an explanation of every command and flag."""
    lines = ["complete -c pluribus -n __fish_use_subcommand -l version -f"]
    for name, about in words.commands.items():
        lines.append(f"complete -c pluribus -n __fish_use_subcommand -f -a {name} -d {_quote(about)}")
        seen = f"__fish_seen_subcommand_from {name}"
        if name in words.arguments:
            few = "" if name in MANY_WORDS else "; and test (count (commandline -opc)) -eq 2"
            values = _quote(" ".join(words.arguments[name]))
            lines.append(f"complete -c pluribus -n {_quote(seen + few)} -f -a {values}")
        lines += [_fish_flag(one, seen) for one in words.flags[name]]
    for method, flags in words.of_methods.items():
        some = " ".join(WITH_METHOD)
        both = f"__fish_seen_subcommand_from {some}; and __fish_seen_subcommand_from {method}"
        lines += [_fish_flag(one, both) for one in flags]
    return _heading("fish") + "\n".join(lines) + "\n"


def _fish_flag(one: Flag, seen: str) -> str:
    how = ["-r"] if one.takes else ["-f"]
    how += ["-f", "-a", _quote(" ".join(one.choices))] if one.choices else []
    about = ["-d", _quote(_first_sentence(one.about))] if one.about else []
    return " ".join(["complete -c pluribus -n", _quote(seen), "-l", one.name.removeprefix("--"), *how, *about])


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def _quote(text: str) -> str:
    """A word of fish: quotes and backslashes are escaped within single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _heading(shell: str) -> str:
    from pluribus import __version__

    return f"# Completion for pluribus {__version__}, written by: pluribus completion {shell}\n"


SHELLS: dict[str, Callable[[Words], str]] = {"bash": write_bash, "zsh": write_zsh, "fish": write_fish}
