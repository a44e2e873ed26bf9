"""Everything that can go wrong in a way that a user can mend. The command line prints the sentence, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PluribusError(Exception):
    """Base of all errors whose message is a full sentence for the user."""


class ConfigError(PluribusError):
    """The experiment as described cannot run; found before anything trains."""


class DataError(PluribusError):
    """A data set is missing, damaged or does not fit the experiment."""


class MessageError(PluribusError):
    """A message is not what its schema declares. Carries who sent what."""


class NotFiniteError(MessageError):
    """A message holds NaN or infinity: training has diverged, or a method divides by zero."""


class CheckpointError(PluribusError):
    """A run folder cannot be read or written."""


class WorkerError(PluribusError):
    """A worker process ended before its work was done."""


class HostLostError(WorkerError):
    """Clients were lost with the machine or process that held them; they can be had again from the last checkpoint."""


def unknown(kind: str, name: str, known: Iterable[str], look: str) -> ConfigError:
    """The error for a mistyped name, with the nearest known one.

    >>> str(unknown("method", "fedg", ["local", "fedgh"], "pluribus list methods"))
    "unknown method 'fedg'. Did you mean 'fedgh'? pluribus list methods shows all."
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return ConfigError(f"unknown {kind} '{name}'.{hint} {look} shows all.")
