"""Print why a command failed: a sentence for people, and with `--json` an object for programs."""

from __future__ import annotations

import json
import sys
import traceback


def fail(sentence: str, kind: str, as_json: bool) -> None:
    """Print why a command failed."""
    print(f"error: {sentence}", file=sys.stderr)
    if as_json:
        print(error_json(sentence, kind))


def error_json(sentence: str, kind: str) -> str:
    """An error as one JSON object."""
    return json.dumps({"error": sentence, "kind": kind})


def fail_with_lines(error: Exception, as_json: bool) -> None:
    """Print the error and where it was raised, then the frames of user code, or the whole traceback without them."""
    from pluribus.internal.blame import blame_of, sentence_of

    fail(sentence_of(error), "exception", as_json)
    known = blame_of(error)
    if known is not None and known.frames:
        print(known.frames, end="", file=sys.stderr)
    else:
        traceback.print_exception(error)
