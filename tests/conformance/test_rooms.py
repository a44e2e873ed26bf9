"""The rules of the house, over the import graph: which room may import which, and no cycle anywhere.

Imports inside functions count. Imports for the type checker alone count for the rules, but not for cycles: they never
run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pluribus

ROOT = Path(pluribus.__file__).parent
CONTRACT = ("inputs", "targets", "task", "message", "client", "server", "method", "ops", "optim", "settings")
BASE = ("errors", "draws")
# what people and real parties see
OUTSIDE = ("study", "conformance", "cli", "track", "report", "audit", "sites", "terminal")


@cache
def modules() -> dict[str, Path]:
    """Every module by its name below `pluribus`."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> dict[str, bool]:
    """The modules that a module imports, and whether any of these imports runs."""
    found: dict[str, bool] = {}
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    for_types = {id(node) for block in ast.walk(tree) if _for_types(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        for name in _names(node):
            found[name] = found.get(name, False) or id(node) not in for_types
    return found


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    for name in names:
        if name == "pluribus" or name.startswith("pluribus."):
            inside = name.removeprefix("pluribus").removeprefix(".")
            yield inside if inside in modules() else inside.rpartition(".")[0]


def room(module: str) -> str:
    return module.partition(".")[0]


def crossings(inside: tuple[str, ...], outside: tuple[str, ...]) -> list[str]:
    """Imports from some rooms into others."""
    return [
        f"{module} imports {other}"
        for module in modules()
        if room(module) in inside
        for other in imports(module)
        if room(other) in outside
    ]


def test_the_graph_is_seen() -> None:
    assert imports("api")["assembly"]
    assert imports("cli.run")["api"], "an import inside a function counts"
    assert not imports("internal.steps")["client"], "an import for the type checker does not run"


def test_methods_import_the_contract_and_models_alone() -> None:
    known = {*CONTRACT, *BASE, "models", "methods"}
    rooms = tuple({room(module) for module in modules()} - known)
    assert crossings(("methods",), rooms) == []


@pytest.mark.parametrize(
    "inside", [CONTRACT, ("internal",), ("storage",), ("data",), ("models",), ("engines",)], ids="/".join
)
def test_what_is_below_knows_nothing_of_what_is_above(inside: tuple[str, ...]) -> None:
    assert crossings(inside, OUTSIDE) == []


def test_the_two_halves_of_a_round_know_no_loop_around_them() -> None:
    """The round loop, a prediction and a real party use them."""
    assert crossings(("request", "host", "server_half"), ("federation", "result", "prediction", "api", *OUTSIDE)) == []


def test_data_and_models_do_not_know_each_other() -> None:
    assert crossings(("data",), ("models",)) + crossings(("models",), ("data",)) == []


def test_nothing_outside_names_a_method() -> None:
    found = [
        f"{module} imports {other}"
        for module in modules()
        if room(module) != "methods" and not module.startswith("study.reproduce")
        for other in imports(module)
        if other.startswith("methods.")
    ]
    assert found == []


def test_there_is_no_cycle() -> None:
    graph = {module: {other for other, runs in imports(module).items() if runs} for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_hall_has_few_doors() -> None:
    top = [module for module in modules() if "." not in module and modules()[module].name != "__init__.py"]
    assert len(top) <= 26, top
