"""Errors that a user can fix. The command line prints their sentence without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pluribus.internal.words import in_python


class PluribusError(Exception):
    """Base of all errors whose message is a full sentence for the user. The class is the kind of the error.

    Sentences are written with the flags of the command line. `str` has them in Python's words, but on the command line.
    """

    kind: ClassVar[str] = "error"
    """The class name as a short code, which `--json` prints beside the sentence."""

    def __init_subclass__(cls) -> None:
        words = re.findall("[A-Z][a-z]+", cls.__name__.removesuffix("Error"))
        cls.kind = "-".join(words).lower()

    @property
    def sentence(self) -> str:
        """The sentence as it was written, with flags: for files, and for sentences that are made of it."""
        return super().__str__()

    def __str__(self) -> str:
        return to_words(self.sentence)


_speaks_flags = False


def to_words(sentence: str) -> str:
    """A sentence in the words of the interface in use: flags on the command line, arguments in Python."""
    return sentence if _speaks_flags else in_python(sentence)


@contextmanager
def speaking_flags() -> Iterator[None]:
    """Show errors with the flags of the command line."""
    global _speaks_flags
    before, _speaks_flags = _speaks_flags, True
    try:
        yield
    finally:
        _speaks_flags = before


# ---- settings ------------------------------------------------------------------------------------------------------


class ConfigError(PluribusError):
    """The experiment cannot run with these settings. Raised before anything trains."""


class UnknownNameError(ConfigError):
    """There is no command, flag, method or choice of this name."""


class RangeError(ConfigError):
    """A number is outside the range of its setting."""


class FormatError(ConfigError):
    """A value has the wrong type, or its text cannot be parsed."""


class MissingSettingError(ConfigError):
    """A required setting or argument is missing."""


class ConflictError(ConfigError):
    """Two settings exclude each other, or one needs another."""


class MismatchError(ConfigError):
    """The method, the models and the data do not fit each other."""


class PartitionError(ConfigError):
    """The data cannot be divided among the clients in this way."""


class WeightsError(ConfigError):
    """Pretrained weights are missing, or belong to another model."""


class UserCodeError(ConfigError):
    """A method, model, data function or observer of the user cannot be imported, or breaks its contract."""


class ForeignCodeError(ConfigError):
    """A file names code by a dotted path, which the user has not allowed."""


class PackageError(ConfigError):
    """A required package is not installed."""


class DeviceError(ConfigError):
    """A GPU, a cluster, memory or a network port is not available."""


class CertificateError(ConfigError):
    """A key or certificate cannot be used: it is missing, damaged, expired, or does not belong to the other files."""


# ---- data ----------------------------------------------------------------------------------------------------------


class DataError(PluribusError):
    """The content of a data set does not fit the experiment."""


class MissingDataError(DataError):
    """A data set or a file of it does not exist, or cannot be downloaded."""


class DamagedDataError(DataError):
    """A file of a data set cannot be read."""


# ---- messages ------------------------------------------------------------------------------------------------------


class MessageError(PluribusError):
    """A message cannot be accepted. The sentence names the sender and the field."""


class SchemaError(MessageError):
    """A message does not match its schema."""


class NotFiniteError(MessageError):
    """A message holds NaN or infinity: training has diverged, or a method divides by zero."""


class UnreadableMessageError(MessageError):
    """The bytes are not a message."""


class AgreementError(MessageError):
    """The server and a site disagree: on the version, the classes, the images or the state of the run."""


# ---- folders and processes -----------------------------------------------------------------------------------------


class CheckpointError(PluribusError):
    """A run folder cannot be used."""


class FileAccessError(CheckpointError):
    """A file or folder cannot be read or written: it does not exist, or the system refuses."""


class DamagedFileError(CheckpointError):
    """A file exists, but its content cannot be used."""


class OtherRunError(CheckpointError):
    """A folder holds another run than the requested one, or a run that is in use."""


class NoModelError(CheckpointError):
    """A folder holds no trained model of this client and round."""


class WorkerError(PluribusError):
    """A process ended before its work was done, or does not answer."""


class HostLostError(WorkerError):
    """Clients were lost with the machine or process that held them; the last checkpoint still has them."""


class BudgetError(PluribusError):
    """A client has used up its privacy budget."""


class UnfinishedError(PluribusError):
    """Some runs of a comparison, search or table did not finish."""

    def __init__(self, sentence: str, failed: Mapping[str, str]) -> None:
        super().__init__(sentence)
        self.failed = failed  # the reason of each failure, by run folder
        self.partial: Any = None  # the results of the finished runs of a comparison; None if there are none


# Names of our settings in other tools and papers.
_NAMES_ELSEWHERE = {
    "method": "algorithm algo alg strategy",
    "data": "dataset data_set",
    "models": "model arch architecture",
    "clients": "num_clients n_clients num_parties",
    "rounds": "num_rounds n_rounds global_rounds comm_rounds communication_rounds",
    "epochs": "local_epochs num_epochs n_epochs",
    "batch_size": "batch bs local_batch_size",
    "lr": "learning_rate local_learning_rate local_lr eta",
    "lr_decay": "learning_rate_decay",
    "lr_schedule": "lr_scheduler scheduler learning_rate_schedule",
    "lr_steps": "milestones lr_milestones",
    "clip_norm": "max_grad_norm grad_clip clip_grad gradient_clip gradient_clipping",
    "server_lr": "server_learning_rate",
    "optimizer": "opt",
    "weight_decay": "wd",
    "alpha": "dirichlet_alpha",
    "classes_per_client": "num_classes_per_client",
    "participation": "client_fraction sample_fraction join_ratio",
    "width": "feature_dim",
    "evaluate_every": "eval_every",
    "seed": "random_seed random_state",
    "seeds": "num_seeds",
    "device": "gpu",
    "threads": "num_threads",
    "workers": "num_workers n_workers",
    "jobs": "n_jobs",
    "trials": "num_trials",
    "out": "output output_dir outdir save_dir folder",
}
OTHER_NAMES = {other: ours for ours, others in _NAMES_ELSEWHERE.items() for other in others.split()}


def unknown(kind: str, name: str, known: Iterable[str], look: str) -> UnknownNameError:
    """The error for an unknown name. It suggests the most similar known name.

    >>> str(unknown("method", "FedG", ["local", "fedgh"], "pluribus list methods"))
    "unknown method 'FedG'. Did you mean 'fedgh'? pluribus.list_methods() shows all."
    """
    known = list(known)
    by_lower = {one.lower(): one for one in known}
    similar = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    near = same_thing(name, known) or (by_lower[similar[0]] if similar else None)
    hint = f" Did you mean '{near}'?" if near else ""
    return UnknownNameError(f"unknown {kind} '{name}'.{hint} {look} shows all.")


def same_thing(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs only in case, dashes and underscores, or that has this name in other tools.

    >>> same_thing("Fashion_MNIST", ["mnist", "fashion-mnist"]), same_thing("learning_rate", ["lr"])
    ('fashion-mnist', 'lr')
    """
    ours = {_letters(one): one for one in known}
    others = {_letters(other): _letters(one) for other, one in OTHER_NAMES.items()}
    letters = _letters(name)
    return ours.get(letters) or ours.get(others.get(letters, ""))


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
