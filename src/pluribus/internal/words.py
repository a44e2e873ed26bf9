"""Sentences in Python's words. Errors are written once, with the flags and commands of the command line.

`--test common needs test data.` becomes `test="common" needs test data.`, and `pluribus list models` becomes
`pluribus.list_models()`.
"""

from __future__ import annotations

import re

# With these words a sentence continues after a flag that has no value. Any other word is the flag's value.
NO_VALUE = (
    *("a", "and", "are", "as", "at", "by", "cannot", "for", "from", "gives", "has", "have", "if", "in", "is"),
    *(
        "keeps",
        "leave",
        "maps",
        "must",
        "names",
        "need",
        "needs",
        "of",
        "on",
        "or",
        "replaces",
        "resizes",
        "sets",
        "shows",
        "takes",
        "that",
    ),
    *("to", "was", "when", "with"),
)

_END = r"(?=[.,:;)]*(?:\s|$))"  # the punctuation of the sentence is no part of a value
_VALUE = rf"(?!(?:{'|'.join(NO_VALUE)}){_END})(?:\[[^]]*\]|\{{[^}}]*\}}|-?[\w./~]\S*?){_END}"
_NAME = r"[a-z][a-z0-9-]*"
_FLAG = re.compile(
    rf"(?<![^\s(])--(?:no-(?P<off>{_NAME})|(?P<name>{_NAME})(?: (?P<value>{_VALUE})(?P<more> (?=--))?)?)"
)
_OF_ROW = re.compile(r"(?P<row>\S+)\.(?P<name>\w+)=(?P<value>\S+)")  # of --set
_LITERAL = re.compile(r"-?[\d.]+(e[-+]?\d+)?|inf|nan|True|False|None|[\[{].*")

_COMMAND = re.compile(
    rf"pluribus (?:list (?P<kind>\w+)(?: --takes (?P<takes>\w+))?"
    rf"|run \S+ (?P<settings>--help)"
    rf"|(?P<help>[a-z]+) --help"
    rf"|run --config (?P<file>\S+?){_END}"
    rf"|resume (?P<allowing>\S+) --allow-code"
    rf"|resume (?P<again>\S+) --allow (?P<paths>\S+?){_END}"
    rf"|resume (?P<folder>\S*[/\\]\S*?{_END}|\S+?(?=\)|$))"
    rf"|(?P<function>resume|predict|report|data check)\b"
    rf"|(?:keys|serve|join)(?: [^\s-]\S*)?(?: --{_NAME} \S+?{_END})*)"  # for real sites: commands only
)
_FUNCTIONS = {"report": "write_report", "data check": "check_data"}


def in_python(sentence: str) -> str:
    """A sentence in the words of Python. One that is in them already stays as it is.

    >>> in_python("Set it for one row with --set fml.lr=0.05.")
    'Set it for one row with own={"fml": {"lr": 0.05}}.'

    >>> in_python("scaffold is for plain SGD: use --optimizer sgd --momentum 0.")
    'scaffold is for plain SGD: use optimizer="sgd", momentum=0.'
    >>> in_python("runs/a already holds a run. Resume it (pluribus resume runs/a) or choose another --out.")
    'runs/a already holds a run. Resume it (pluribus.resume("runs/a")) or choose another out=.'
    >>> in_python("Use one of pluribus list models --takes tokens.")
    'Use one of pluribus.list_models(takes="tokens").'
    """
    parts, end = [], 0
    for command in _COMMAND.finditer(sentence):
        parts += [_FLAG.sub(_argument, sentence[end : command.start()]), _call(command)]
        end = command.end()
    parts.append(_FLAG.sub(_argument, sentence[end:]))
    return "".join(parts).replace("the same command", "the same call")


def _call(command: re.Match[str]) -> str:
    match command.lastgroup, command[command.lastgroup or 0]:
        case "kind", kind:
            return f"pluribus.list_{kind}()"
        case "takes", kind:
            return f'pluribus.list_{command["kind"]}(takes="{kind}")'
        case "settings", _:
            return "help(pluribus.Experiment)"
        case "help", name:
            return f"help(pluribus.{name})"
        case "file", file:
            return f'pluribus.run(config="{file}")'
        case "folder", folder:
            return f'pluribus.resume("{folder}")'
        case "allowing", folder:
            return f'pluribus.resume("{folder}", allow_code=True)'
        case "paths", paths:
            return f'pluribus.resume("{command["again"]}", allow_code={paths.split(",")})'
        case "function", name:
            return f"pluribus.{_FUNCTIONS.get(name, name)}()"
    return command[0]


def _argument(flag: re.Match[str]) -> str:
    if flag["off"]:
        return f"{flag['off'].replace('-', '_')}=False"
    name, value = flag["name"].replace("-", "_"), flag["value"]
    if name == "set" and (row := _OF_ROW.fullmatch(value or "")):
        return f'own={{"{row["row"]}": {{"{row["name"]}": {row["value"]}}}}}'
    if name == "allow_code":
        return "allow_code=True"
    if name == "allow" and value:
        return f'allow_code=["{value}"]'
    if value is None:
        return name if flag.string[flag.end() :].startswith(":") else f"{name}="
    value = "None" if value == "unset" else value if _LITERAL.fullmatch(value) else f'"{value}"'
    return f"{name}={value}" + (", " if flag["more"] else "")
