"""What every data set promises, one line each, and the check of one data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pluribus.conformance.bits import same_bits
from pluribus.conformance.promise import BrokenError, Promise, SkippedError
from pluribus.conformance.report import Line
from pluribus.data import Dataset, load
from pluribus.data.check import DataCheck, check_data, check_dataset
from pluribus.data.given import take_data

Data = Any  # what the setting `data` takes


@dataclass(frozen=True)
class DataCase:
    """One data set."""

    data: Data

    def but(self, **settings: Any) -> Self:
        return replace(self, **settings)

    def call(self) -> str:
        return f'pluribus.check_data("{self.data}")' if isinstance(self.data, str | Path) else ""

    @cached_property
    def found(self) -> DataCheck:
        """What `pluribus data check` finds."""
        return check_data(self.data) if isinstance(self.data, str | Path) else check_dataset("data", self.dataset)

    @cached_property
    def dataset(self) -> Dataset:
        return self.load()

    def load(self) -> Dataset:
        """Load it again, as a run does."""
        return load(take_data(self.data))


def can_be_read(case: DataCase) -> None:
    """Every row can be read."""
    if case.found.problem is not None:
        first = next(iter(case.found.unreadable.values()))
        raise BrokenError(f"{case.found.problem} The first one: {first}")
    _ = case.dataset


def same_twice(case: DataCase) -> None:
    """Loaded twice, it has the same rows and labels."""
    if isinstance(case.data, Dataset):
        raise SkippedError("it is in memory.")
    again = case.load()
    for name in ("x", "y"):
        if not same_bits(getattr(case.dataset, name), getattr(again, name)):
            raise BrokenError(f"loaded twice, {name} differs")


def every_class_has_rows(case: DataCase) -> None:
    """There are two classes or more, and each has a row. Of labels, each has a row, and a row without it."""
    dataset = case.dataset
    names = dataset.classes
    if dataset.target == "numbers":
        raise SkippedError("numbers are predicted, not classes.")
    if dataset.target == "labels":
        shares = dataset.y.float().mean(0).tolist()
        if alike := [name for name, share in zip(names, shares, strict=True) if share in (0, 1)]:
            raise BrokenError(f"all rows are alike in {len(alike)} of {len(names)} labels: {', '.join(alike[:3])}")
        return
    held = Counter(dataset.y.tolist())
    if len(names) < 2:
        raise BrokenError(f"it has {len(names)} class, but a simulation needs two")
    if empty := [name for label, name in enumerate(names) if not held[label]]:
        raise BrokenError(f"{len(empty)} of {len(names)} classes have no row: {', '.join(empty[:3])}")


def pixels_are_bytes(case: DataCase) -> None:
    """Pixels range over bytes: those of 0 to 1 that were cast are all black."""
    if case.dataset.kind != "image":
        raise SkippedError(f"its rows are {case.dataset.input}, not images.")
    if case.dataset.x.is_floating_point():
        raise SkippedError("its images are numbers, not bytes.")
    low, high = int(case.dataset.x.min()), int(case.dataset.x.max())
    if high - low < 2:
        raise BrokenError(f"all pixels are between {low} and {high}")


def no_test_row_is_trained_on(case: DataCase) -> None:
    """No row has a copy in another split."""
    _skip_chance(case)
    copies = case.found.duplicates
    if copies.across_splits:
        raise BrokenError(f"{copies.across_splits} {case.dataset.rows} have a copy in another split{_example(case)}")


def copies_have_one_label(case: DataCase) -> None:
    """No two copies of a row have different classes."""
    _skip_chance(case)
    copies = case.found.duplicates
    if copies.across_classes:
        raise BrokenError(f"{copies.across_classes} {case.dataset.rows} have a copy with another class{_example(case)}")


def _skip_chance(case: DataCase) -> None:
    if case.dataset.kind in ("table", "tokens"):
        raise SkippedError("two rows of a table, or two short texts, may be equal by chance.")


def _example(case: DataCase) -> str:
    example = case.found.duplicates.example
    return f", for example {' and '.join(example)}" if example else ""


PROMISES: tuple[Promise[DataCase], ...] = (
    Promise("every row can be read", can_be_read, "Repair or delete what cannot be read."),
    Promise("loaded twice, it is the same", same_twice, "Draw with a seeded generator, such as default_rng(0)."),
    Promise("every class has rows", every_class_has_rows, "Name in classes only what has rows."),
    Promise("pixels are bytes from 0 to 255", pixels_are_bytes, "Multiply pixels of 0 to 1 by 255 before the cast."),
    Promise(
        "no test row is a training row",
        no_test_row_is_trained_on,
        "Remove the copies from one of the splits, or give copies the same identity.",
    ),
    Promise("copies of a row have one class", copies_have_one_label, "Correct the labels, or remove the copies."),
)


def check_data_set(data: Data) -> Iterator[Line]:
    """Check all promises of a data set. If it cannot be read, the others are skipped."""
    case = DataCase(data)
    first = PROMISES[0].check(case)
    yield first
    for promise in PROMISES[1:]:
        failed = first.status == "failed"
        yield Line(promise.name, "skipped", "it cannot be read yet.") if failed else promise.check(case)
