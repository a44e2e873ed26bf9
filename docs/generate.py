"""Writes the tables in the documentation that only the code can know, and the types of keyword arguments.

    python docs/generate.py

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. The tests compare every one with the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import method_page
import scoreboard
import torch

from pluribus.cli.flags import explanations
from pluribus.data import PARTITIONS, load, partition
from pluribus.data import entries as data_entries
from pluribus.data.datasets import cache_file
from pluribus.draws import numpy_rng
from pluribus.experiment import SETTINGS, Experiment
from pluribus.listing import list_methods, name_sources
from pluribus.method import FAMILIES, Method, Need, PeerMethod, methods
from pluribus.models import GROUPS
from pluribus.models import entries as model_entries
from pluribus.models.sizes import size_of, typical_input
from pluribus.privacy.check import BOUNDED
from pluribus.settings import flag_name
from pluribus.sites.config import FederationFile, SiteFile
from pluribus.study.reproduce import paper

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("*.md")])
KEYWORDS = ROOT / "src" / "pluribus" / "internal" / "keywords.py"
MASKED = "its masked loss tells which classes a client holds; --no-masked can run."
# settings that a private run needs
NEEDED_SETTINGS = {
    "fedbabu": "it trains on private rows before every evaluation; --finetune-epochs 0 can run.",
    "heterofl": MASKED,
    "fedrolex": MASKED,
}
SECTION = re.compile(r"(<!-- generated: (?P<name>[\w .-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Where a data set is looked for, if not in the file of its own name.
PLACES = {
    **dict.fromkeys(("digits", "rotated-digits", "breast-cancer", "wine", "iris", "diabetes"), "inside scikit-learn"),
    **dict.fromkeys(("speeches", "watch"), "inside Pluribus"),
    "rotated-mnist": "`mnist.npz`",
    "rotated-mnist-independent": "`mnist.npz`",
    "pacs": "the folder `pacs/`",
    "office-home": "the folder `office-home/`",
}


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[str] = ()) -> str:
    """A Markdown table; columns in `numbers` are right-aligned."""
    rule = ["---:" if column in numbers else "---" for column in columns]
    lines = [columns, rule, *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: object) -> str:
    """As code, or nothing where there is nothing."""
    return f"`{text}`" if str(text) else ""


# ---- models and methods ----------------------------------------------------------------------------------------------


def _models() -> str:
    rows = []
    for name, entry in model_entries().items():
        size = size_of(name)
        assert size is not None
        shown = " x ".join(map(str, typical_input(name).shape))
        counted = (size.width, f"{size.parameters:,}", f"{size.parameters * 4 / 2**20:.2f}")
        rows.append((code(name), entry.about, ", ".join(entry.takes), shown, *counted))
    columns = ("model", "what it is", "takes", "counted on", "features", "parameters", "MiB")
    return table(columns, rows, columns[4:])


def _groups() -> str:
    rows = [
        (code(name), group.about, ", ".join(map(code, group.models)), group.width or "own")
        for name, group in GROUPS.items()
    ]
    return table(("group", "from", "models", "K"), rows, ("K",))


def _methods() -> str:
    rows = []
    for name, cls in methods().items():
        needs = ", ".join(sorted(need.value for need in cls.needs)) or "nothing"
        sources = name_sources(_sources()[name])
        rows.append((_linked(name), cls.family, cls.paper, cls.up, sources, cls.down, needs))
    return table(("method", "family", "paper", "up", "from", "down", "needs"), rows)


def _linked(name: str, folder: str = "methods") -> str:
    """A method and its page."""
    return f"[`{name}`]({folder}/{name}.md)"


def _families(folder: str = "methods") -> str:
    """The families that have a method, and what their methods have in common."""
    rows = []
    for family, about in FAMILIES.items():
        if found := [_linked(name, folder) for name, cls in methods().items() if cls.family == family]:
            rows.append((family, about, ", ".join(found)))
    return table(("family", "what its methods have in common", "methods"), rows)


@cache
def _sources() -> dict[str, dict[str, list[str]]]:
    """By method, the fields that a client sends on the default task, by their source."""
    return {row["name"]: row["sources"] for row in list_methods()}


def _source(name: str) -> str:
    """What a client of this method sends, and where it comes from."""
    rows = []
    for source, fields in _sources()[name].items():
        most = 3  # a model has many fields of one source
        more = f" and {len(fields) - most} more" if len(fields) > most else ""
        rows.append((", ".join(map(code, fields[:most])) + more, source))
    return table(("sent by a client", "source"), rows) if rows else "A client sends nothing."


def _privacy() -> str:
    """How the messages of every method are bounded by differential privacy of rows, or why they are not."""
    rows = []
    for name, cls in methods().items():
        sources = list(_sources()[name])
        bounds = "; ".join(f"{source}: {BOUNDED[source]}" for source in sources if source in BOUNDED)
        refused = cls.unbounded or NEEDED_SETTINGS.get(name, "")
        rows.append((code(name), ", ".join(sources) or "nothing", f"refused: {refused}" if refused else bounds))
    return table(("method", "sources", "what bounds them"), rows)


def _hyper(name: str) -> str:
    return _flag_table(methods()[name], [field.name for field in dataclasses.fields(methods()[name])])  # type: ignore[arg-type]


def _hooks() -> str:
    rows = []
    for owner in (Method, PeerMethod):
        for name, function in vars(owner).items():
            shown = inspect.isfunction(function) and name not in ("wires", "functions") and not name.startswith("_")
            if shown and not (owner is PeerMethod and hasattr(Method, name)):
                arguments = ", ".join(list(inspect.signature(function).parameters)[1:])
                rows.append((code(f"{name}({arguments})"), " ".join((inspect.getdoc(function) or "").split())))
    return table(("hook", "what it is for"), rows)


def _needs() -> str:
    return table(("need", "what is checked"), [(code(f"Need.{need.name}"), need.value) for need in Need])


# ---- data ------------------------------------------------------------------------------------------------------------


def _data() -> str:
    rows = [
        (code(name), entry.about, PLACES.get(name, code(cache_file(name).name)))
        for name, entry in data_entries().items()
    ]
    return table(("data set", "what it is", "where it is looked for"), rows)


def _partitions() -> str:
    rows = [
        (
            code(name),
            kind.about,
            ", ".join(code(flag_name(read)) for read in kind.reads),
            "yes" if kind.disjoint else "no",
        )
        for name, kind in PARTITIONS.items()
    ]
    return table(("partition", "what it does", "reads", "disjoint"), rows)


def _counts(kind: str) -> str:
    """Rows per client and class: four clients, seed 0, defaults; domains and holders need data that have them."""
    dataset = load({"domain": "rotated-digits", "natural": "watch"}.get(kind, "digits"))
    own = {"domain": dataset.domain, "holder": dataset.client}
    named = {name: None if column is None else column.numpy() for name, column in own.items()}
    parts = partition(kind, dataset.y.numpy(), 4, numpy_rng(0, "partition"), **named, min_samples=10)
    rows = []
    for client, held in enumerate(parts):
        counts = torch.bincount(dataset.y[torch.from_numpy(held)], minlength=len(dataset.classes)).tolist()
        rows.append((client, *counts, sum(counts)))
    columns = ("client", *dataset.classes, "rows")
    return table(columns, rows, columns)


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def _reproduced(name: str) -> str:
    return scoreboard.read_table(name).to_markdown().strip()


def _scoreboard() -> str:
    return table(scoreboard.COLUMNS, scoreboard.reproduced_rows(), scoreboard.NUMBERS)


def _claims() -> str:
    return table(scoreboard.CLAIM_COLUMNS, scoreboard.claim_rows(), scoreboard.NUMBERS)


def _result(benchmark: str, part: str = "rows") -> str:
    written = json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))
    rows = written[part] if isinstance(written, dict) else written
    columns = [name.replace("_", " ") for name in rows[0]]
    numbers = [name for name, value in zip(columns, rows[0].values(), strict=True) if not isinstance(value, str)]
    return table(columns, [row.values() for row in rows], numbers)


# ---- flags -----------------------------------------------------------------------------------------------------------


def _flags() -> str:
    parts = []
    for group, names in SETTINGS.items():
        parts.append(f"### {group.capitalize()}\n\n{_flag_table(Experiment, names)}")
    return "\n\n".join(parts)


def _flag_table(cls: type, names: Sequence[str]) -> str:
    helps = explanations(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    rows = [
        (code(flag_name(name)), "" if defaults[name] is None else code(_spelled(defaults[name])), helps[name].strip())
        for name in names
    ]
    return table(("flag", "default", "meaning"), rows) if rows else "None."


def _settings(cls: type) -> str:
    """Of a file, a row per setting; those that follow without words of their own share the row before."""
    helps, rows = explanations(cls), list[list[str]]()
    for field in dataclasses.fields(cls):
        if field.name not in helps:
            rows[-1][0] += f", {code(field.name)}"
            continue
        needed, unset = field.default is dataclasses.MISSING, field.default in (None, "", ())
        default = "needed" if needed else "" if unset else code(field.default)
        rows.append([code(field.name), default, helps[field.name].strip()])
    return table(("setting", "default", "meaning"), rows)


def _spelled(default: object) -> str:
    return "off" if default is False else str(default)


# ---- keyword arguments -----------------------------------------------------------------------------------------------

# Settings that take more than their fields hold: an experiment converts it.
WIDER = {
    "data": "DataLike",
    "models": "ModelsLike",
    "partition": "PartitionLike",
    "device": "DeviceLike",
    "lr_steps": "str | Sequence[int]",
    "augment": "str | Sequence[str]",
    "metrics": "str | Sequence[str]",
    "weights": "str | Path | None",
    "out": "str | Path | None",
}


def keywords(text: str) -> str:
    """The module of keyword arguments with all that is generated as the code has it now."""
    written = text[: text.index("\n", text.index("# ---- generated")) + 1]
    hints = _hints_by_name()
    # compare and tune have arguments named seed and out, bench one named rounds; no keyword may be both
    rest = [name for name in hints if name not in ("rounds", "seed", "out")]
    classes = [
        ("CommonSettings(TypedDict, total=False)", "Settings that run, compare, tune and bench take.", rest),
        (
            "StudySettings(CommonSettings, total=False)",
            "Settings of compare and tune, which name seed and out.",
            ["rounds"],
        ),
        ("BenchSettings(CommonSettings, total=False)", "Settings of bench.", ["seed", "out"]),
        ("Settings(StudySettings, total=False)", "All settings of one run.", ["seed", "out"]),
    ]
    for head, about, names in classes:
        fields = "".join(f"    {name}: {WIDER.get(name) or _annotation(hints[name])}\n" for name in names)
        written += f'\n\nclass {head}:\n    """{about}"""\n\n{fields}'
    return written


def _hints_by_name() -> dict[str, list[Any]]:
    """By setting or hyper-parameter, all types that it has. Methods may share a name, but not its type."""
    found: dict[str, list[Any]] = {}
    for cls in (Experiment, *methods().values()):
        hints = get_type_hints(cls)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            hint = hints[field.name]
            found.setdefault(field.name, []).extend(
                get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
            )
    del found["method"]
    return found


def _annotation(hints: list[Any]) -> str:
    """A union of types as code: first the types, then all choices, then None."""
    choices = dict.fromkeys(word for hint in hints if get_origin(hint) is Literal for word in get_args(hint))
    types = [hint for hint in hints if get_origin(hint) is not Literal and hint is not NoneType]
    words = [hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint) for hint in types]
    if choices:
        words.append(f"Literal[{', '.join(json.dumps(word) for word in choices)}]")
    if NoneType in hints:
        words.append("None")
    return " | ".join(dict.fromkeys(words)).replace("typing.", "")


# ---- pages -----------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], str]] = {
    "models": _models,
    "groups": _groups,
    "methods": _methods,
    "families": _families,
    "families in the readme": lambda: _families("docs/methods"),
    "hooks": _hooks,
    "needs": _needs,
    "privacy": _privacy,
    "data": _data,
    "partitions": _partitions,
    "flags": _flags,
    "federation.toml": lambda: _settings(FederationFile),
    "site.toml": lambda: _settings(SiteFile),
    "scoreboard": _scoreboard,
    "scoreboard of claims": _claims,
    "result overhead": lambda: _result("overhead"),
    "result scale": lambda: _result("scale"),
    "result gpu": lambda: _result("gpu"),
    "result families": lambda: _result("families"),
    "result families models": lambda: _result("families", "models"),
    "result kinds": lambda: _result("kinds"),
    "result stores": lambda: _result("stores"),
    "result privacy": lambda: _result("privacy"),
    "result noise": lambda: _result("noise"),
    "result workers": lambda: _result("workers"),
    "result ray": lambda: _result("ray"),
    **{
        f"reproduced {name}": lambda name=name: _reproduced(name)  # type: ignore[misc]
        for name in paper.names()
        if (RESULTS / f"{name}.json").exists()
    },
    **{f"counts {kind}": lambda kind=kind: _counts(kind) for kind in PARTITIONS},  # type: ignore[misc]
    **{f"sources {name}": lambda name=name: _source(name) for name in methods()},  # type: ignore[misc]
    **{f"facts {name}": lambda name=name: method_page.facts(name) for name in methods()},  # type: ignore[misc]
    **{f"figure {name}": lambda name=name: method_page.figure(name) for name in methods()},  # type: ignore[misc]
    **{f"hyper {name}": lambda name=name: _hyper(name) for name in methods()},  # type: ignore[misc]
}


def refreshed(text: str) -> str:
    """A page with all its generated tables as the code has them now."""
    return SECTION.sub(lambda found: f"{found[1]}{SECTIONS[found['name']]()}\n{found[3]}", text)


def main() -> None:
    """Refresh every page."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = refreshed(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"refreshed {page.relative_to(ROOT)}")
    KEYWORDS.write_text(keywords(KEYWORDS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
