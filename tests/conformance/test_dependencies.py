"""Every package that the library imports is declared in pyproject.toml, and those of the core without an extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pluribus

SOURCE = Path(pluribus.__file__).parent
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "mlflow": "mlflow-skinny"}  # whose modules have another name
OF_THE_HOST = {"IPython"}  # which a notebook runs in
CORE = ("docstring_parser", "numpy", "rich", "safetensors", "scipy", "timm", "tomli_w", "torch", "torchvision", "tyro")


def imported(text: str) -> Iterator[str]:
    """The top-level modules that a file imports, those inside functions and by `import_module` counted."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (str(one.value).partition(".")[0] for one in node.args if isinstance(one, ast.Constant))


def foreign() -> set[str]:
    """The modules of other packages that the library imports."""
    every = {name for path in SOURCE.rglob("*.py") for name in imported(path.read_text(encoding="utf-8"))}
    return every - sys.stdlib_module_names - OF_THE_HOST - {"pluribus"}


def package(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found, requirement
    return found[0].lower().replace("_", "-")


def declared(*extras: str) -> set[str]:
    """The packages of the core and of some extras."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    optional = [one for extra in extras for one in project["optional-dependencies"][extra]]
    return {package(one) for one in [*project["dependencies"], *optional]}


def extras_of_users() -> list[str]:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    return [extra for extra in project["optional-dependencies"] if extra not in ("test", "docs")]


def named(module: str) -> str:
    return package(PACKAGES.get(module, module))


def test_imports_are_seen() -> None:
    text = "import a.b\nfrom c.d import e\ndef f():\n    import g\n    import_module('h.i')\n"
    assert set(imported(text)) == {"a", "c", "g", "h"}
    assert {"torch", "flwr"} <= foreign()


def test_every_import_is_declared() -> None:
    known = declared(*extras_of_users())
    assert [module for module in sorted(foreign()) if named(module) not in known] == []


@pytest.mark.parametrize("module", CORE)
def test_the_core_needs_no_extra(module: str) -> None:
    assert named(module) in declared()


def test_a_bound_is_given() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras_of_users())]
    assert [one for requirements in lists for one in requirements if ">=" not in one] == []
