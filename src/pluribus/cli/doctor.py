"""pluribus doctor: what this machine has, and what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from pluribus.cli.flags import flag, parse_groups
from pluribus.cli.greeter import print_answer
from pluribus.internal.system import total_memory

ABOUT_DOCTOR = """\
Shows versions, devices, threads and memory, which extras are installed and how to install the others, where data sets
are cached, and which browser shows reports. The exit status is 0.
"""
FOR_DEVELOPERS = ("docs", "test")  # extras


def doctor(args: list[str]) -> None:
    """pluribus doctor: show what this machine has."""
    json = ("json", bool, False, "Print what was found as one JSON object, and nothing else.")
    given = parse_groups({"output": [flag(*json)]}, "pluribus doctor", ABOUT_DOCTOR, args)
    found = examine()
    print_answer(given.output.json, lambda: found, lambda: _print(found))


def examine() -> dict[str, Any]:
    """What this machine has, as values of JSON."""
    import torch

    import pluribus
    from pluribus.data.datasets import data_folder

    cuda = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    folder = data_folder()
    return {
        "pluribus": pluribus.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "gpus": [{"name": one.name, "memory": one.total_memory} for one in cuda],
        "mps": torch.backends.mps.is_available(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": total_memory(),
        "extras": {name: missing_packages(needed) for name, needed in find_extras().items()},
        "data": {"folder": str(folder), "writable": is_writable(folder)},
        "browser": _find_browser(),
    }


def find_extras() -> dict[str, list[str]]:
    """The packages of each extra, as the installed package declares them."""
    extras: dict[str, list[str]] = {}
    for text in importlib.metadata.requires("pluribus") or ():
        found = re.match(r"([\w.-]+).*; *extra *== *['\"]([\w-]+)['\"]", text)
        if found is not None and found[2] not in FOR_DEVELOPERS:
            extras.setdefault(found[2], []).append(found[1])
    return extras


def missing_packages(names: list[str]) -> list[str]:
    """Those of some packages that are not installed."""
    missing = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return missing


def is_writable(folder: Path) -> bool:
    """Whether a file can be written to a folder, or to the nearest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _find_browser() -> str | None:
    try:
        return getattr(webbrowser.get(), "name", "default")
    except webbrowser.Error:
        return None


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(Column(no_wrap=True, style="cyan"), Column(overflow="fold"), box=None, show_header=False)
    for name, text in _rows(found):
        table.add_row(name, escape(text))
    Console(highlight=False).print(table)


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    from pluribus.terminal import format_bytes

    gpus = [f"{one['name']}, {format_bytes(one['memory'])}" for one in found["gpus"]]
    mps = ["Apple GPU (--device mps)"] if found["mps"] else []
    data = found["data"]
    fix = "" if data["writable"] else ", not writable: set PLURIBUS_DATA to another folder"
    missing = {name: needed for name, needed in found["extras"].items() if needed}
    return [
        *((name, found[name]) for name in ("pluribus", "python", "torch", "platform")),
        ("gpu", "; ".join(gpus + mps) or "none"),
        ("cpu", f"cores: {found['cores']}, threads of torch: {found['threads']}"),
        ("memory", "unknown" if found["memory"] is None else format_bytes(found["memory"])),
        ("data", f"{data['folder']}{fix}"),
        ("browser", found["browser"] or "none: copy report.html to a machine that has one"),
        ("extras", ", ".join(name for name in found["extras"] if name not in missing) or "none"),
        *(("missing", f"{name}: pip install 'pluribus[{name}]'") for name in missing),
    ]
