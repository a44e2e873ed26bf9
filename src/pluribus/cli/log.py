"""Log lines on standard error, where it is no terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def lines_on_stderr() -> Iterator[None]:
    """Print what Pluribus logs to standard error, with the time, unless a terminal shows a bar there."""
    if sys.stderr.isatty():
        yield
        return
    logger, handler = logging.getLogger("pluribus"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a package that configures the root would print each line twice
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
