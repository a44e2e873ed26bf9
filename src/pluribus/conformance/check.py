"""`pluribus.check`: hold a method, a model or a data set to what it promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pluribus.conformance.data import check_data_set
from pluribus.conformance.methods import check_method
from pluribus.conformance.models import check_model
from pluribus.conformance.report import CheckReport, Line, paragraphs
from pluribus.conformance.targets import Kind, Target, find_target
from pluribus.errors import FormatError
from pluribus.internal.arithmetic import reproducible
from pluribus.models.probe import Shape
from pluribus.processes import check_guarded
from pluribus.terminal import print_check


def check(
    target: Any,
    *,
    kind: Kind | None = None,
    device: Literal["auto", "cpu"] = "auto",
    shape: str | Shape | None = None,
    classes: int = 10,
    progress: bool = True,
) -> CheckReport:
    """Check what a method, a model or a data set promises, one line per promise.

    `target` is a Method class or instance, a module or a builder of models, a `Dataset` or a function that returns one,
    a path, a name, or a dotted path. `kind` decides if a name is ambiguous: `method`, `model` or `data`. The checks run
    on the CPU; one promise of methods needs a GPU, and `device="cpu"` leaves it out. Models are built for `classes`
    and for rows of `shape`, such as `"3x32x32"` for images or `"9x128"` for signals. Default: small rows that it takes.

    >>> report = check("mlp-64", progress=False)
    >>> report.passed, len(report.lines)
    (True, 10)
    """
    check_guarded()
    if device not in ("auto", "cpu"):
        raise FormatError(f"device must be auto or cpu, not {device!r}: the checks run on the CPU, one also on a GPU.")
    found, size = find_target(target, kind), _shape(shape)
    with TemporaryDirectory(prefix="pluribus-check-") as scratch, reproducible(1, "tf32"):
        lines = _lines(found, Path(scratch), device, size, classes)
        seen: list[Line] = []
        if progress:
            print_check(f"{found.kind} {found.name}", paragraphs(_noted(lines, seen)))
        report = CheckReport(found.kind, found.name, (*seen, *lines))
    if progress:
        print(f" {report.summary()}")
    return report


def _noted(lines: Iterator[Line], seen: list[Line]) -> Iterator[Line]:
    for line in lines:
        seen.append(line)
        yield line


def _lines(target: Target, scratch: Path, device: str, shape: Shape | None, classes: int) -> Iterator[Line]:
    if target.kind == "method":
        return check_method(target.value, scratch, device)
    if target.kind == "model":
        return check_model(target.value, shape, classes)
    return check_data_set(target.value)


def _shape(shape: str | Shape | None) -> Shape | None:
    if shape is None:
        return None
    numbers = shape.split("x") if isinstance(shape, str) else list(shape)
    try:
        found = tuple(int(number) for number in numbers)
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise FormatError(f"shape must be the sizes of one row, such as 3x32x32 for an image, not {shape!r}.")
    return found
