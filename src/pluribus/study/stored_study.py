"""The Optuna study of a row in a storage, for optuna-dashboard and optuna.load_study.

The study is a copy of trials.jsonl, which decides. A trial is added when it has ended, in one transaction, so that a
killed search leaves no trial that seems to run. Storages hold JSON. Those that unpickle are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pluribus import errors
from pluribus.internal.metrics import Metric
from pluribus.internal.paths import check_path
from pluribus.study.proposal import direction, to_optuna

FILE = "study.db"
UNUSABLE = "?{}"  # in a path, they have a meaning in the URL of a storage
SEARCH = "pluribus"  # the user attribute of a study with the settings of its search


def own_storage(folder: Path) -> str:
    """The URL of the storage in the folder of a search."""
    if found := [sign for sign in UNUSABLE if sign in str(folder)]:
        raise errors.FormatError(
            f"{folder} cannot be part of the URL of an Optuna storage because of '{found[0]}'. Choose another --out."
        )
    return f"sqlite:///{folder / FILE}"


def open_storage(storage: str) -> Any:
    """Open a storage: a URL such as sqlite:///FILE or postgresql://..., or the path of a journal file."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if not isinstance(storage, str):
        raise errors.FormatError(f"--storage takes a URL or the path of a journal file, not {storage!r:.80}.")
    if storage.partition("://")[0] in ("redis", "rediss"):
        raise errors.FormatError("--storage cannot be Redis, from which Optuna unpickles: use a database or a file.")
    with _refusing(storage):
        if "://" in storage:
            return optuna.storages.get_storage(storage)
        return optuna.storages.JournalStorage(JournalFileBackend(str(check_path(storage))))


def hide_password(storage: str) -> str:
    """The name of a storage for people and files."""
    if "://" not in storage:
        return storage
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(storage).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return storage.partition("://")[0] + "://..."


def load_study(storage: str, name: str) -> Any:
    """The study of this name."""
    import optuna

    with _refusing(storage):
        return optuna.load_study(study_name=name, storage=open_storage(storage))


class StoredStudy:
    """Adds the trials of a search to its study. Trials that the study has must be those of the search."""

    def __init__(self, storage: Any, where: str | None, name: str, search: Mapping[str, Any], metric: Metric) -> None:
        """`where` names the storage. None: the study is in memory."""
        import optuna

        self.where = where
        self.name = name
        with _refusing(where):
            self.study = optuna.create_study(
                storage=storage, study_name=name, direction=direction(metric), load_if_exists=True
            )
            if not self.study.user_attrs and not self.study.trials:
                self.study.set_user_attr("metric", metric.name)
                self.study.set_user_attr(SEARCH, dict(search))
            found, directions = self.study.user_attrs.get(SEARCH), self.study.directions
            self._known = self.study.get_trials(deepcopy=False)
        if found != search or [one.name.lower() for one in directions] != [direction(metric)]:
            raise self._refusal("is of a search with other settings")

    def add(self, one: Mapping[str, Any], distributions: Mapping[str, Any], started: datetime, **about: Any) -> None:
        """Add a trial that has ended, unless the study has it. `about` are its user attributes."""
        if one["trial"] < len(self._known):
            if not _is_same(self._known[one["trial"]], one):
                raise self._refusal(f"has another trial {one['trial']} than this search")
            return
        made = to_optuna(one, distributions, **about)
        made.datetime_start = started
        with _refusing(self.where):
            self.study.add_trial(made)

    def _refusal(self, what: str) -> errors.OtherRunError:
        where = hide_password(self.where or "memory")
        return errors.OtherRunError(f"study '{self.name}' in {where} {what}. Choose another --out or --storage.")


def _is_same(stored: Any, one: Mapping[str, Any]) -> bool:
    """Whether a trial in a storage is this one. A database may round."""
    return (
        stored.state.name == one["state"]
        and stored.params == one["settings"]
        and stored.value is not None
        and math.isclose(stored.value, one["score"], rel_tol=1e-9)
    )


@contextmanager
def _refusing(storage: str | None) -> Iterator[None]:
    """Say in one sentence why a storage cannot be used. It is foreign: reading it may raise anything."""
    try:
        yield
    except errors.PluribusError:
        raise
    except ImportError as error:
        driver = getattr(error.__cause__ or error, "name", None) or "its driver"
        raise errors.PackageError(f"{_name(storage)} needs a package: pip install {driver}.") from error
    except Exception as error:
        raise errors.FileAccessError(f"cannot use {_name(storage)}: {_innermost(error)}.") from error


def _name(storage: str | None) -> str:
    return f"the Optuna storage {hide_password(storage or 'in memory')}"


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
