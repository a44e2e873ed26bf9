"""The liar table: what becomes of a client that sends one number everywhere in a field, for every method and field.

It calls the functions of tests/conformance/test_liars.py, which assert the same. The table is in docs/robustness.md.

    python benchmarks/liars.py
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "conformance")]

from test_liars import HUGE, NAMES, TINY, lies_of, merged, rounds_of  # noqa: E402


def outcomes(method: str) -> tuple[set[str], dict[str, set[str]]]:
    """The fields of a method's uploads, and what became of the liar for each number."""
    fields: set[str] = set()
    found: dict[str, set[str]] = {number: set() for number in (*HUGE, *TINY)}
    for now in rounds_of(method):
        liar = max(now.uploads)
        for what, lie in lies_of(now.uploads[liar], {**HUGE, **TINY}):
            number, _, names = what.partition(" in ")
            fields |= set(names.split(", ")) - {""}
            left_out = merged(now, liar, lie)
            assert left_out.keys() <= {liar}, "an honest client is blamed"
            if names:
                found[number].add("left out" if left_out else "merged")
    return fields, found


def main() -> None:
    """Print one row per method."""
    numbers = (*HUGE, *TINY)
    print("| method | fields | " + " | ".join(numbers) + " |\n" + "|---|---|" + "---|" * len(numbers))
    for method in NAMES:
        fields, found = outcomes(method)
        if fields:
            shown = (
                ", ".join(f"`{name}`" for name in sorted(fields)) if len(fields) < 4 else f"{len(fields)} of weights"
            )
            cells = [" and ".join(sorted(found[number])) for number in numbers]
            print(f"| {method} | {shown} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
