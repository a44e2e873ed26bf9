"""Pluribus: heterogeneous federated learning. Out of many models, one knowledge.

>>> import pluribus
>>> result = pluribus.run("fedgh", data="digits", clients=8, rounds=20, seed=0)     # doctest: +SKIP
>>> result.table()                                                                  # doctest: +SKIP

Names are imported when they are first used, because torch takes seconds to import and `pluribus --help` should not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pluribus.api import load_result, resume, run
    from pluribus.audit.audit import Audit, audit
    from pluribus.client import Batch, Client
    from pluribus.conformance.check import check
    from pluribus.conformance.report import CheckReport
    from pluribus.data import Dataset, register_data, register_partition
    from pluribus.data.check import DataCheck, check_data
    from pluribus.errors import PluribusError
    from pluribus.experiment import Experiment
    from pluribus.federation import Observer
    from pluribus.internal.keywords import Settings
    from pluribus.listing import list_data, list_groups, list_methods, list_models, list_partitions
    from pluribus.message import Dim, Field, Inbox, Message, Rows, Wire, schema_of
    from pluribus.method import Exchange, Method, Need, PeerMethod, register
    from pluribus.models import TwoPartModel, register_model
    from pluribus.optim import Opt, Rule
    from pluribus.prediction import LabelsPrediction, NumbersPrediction, Prediction, predict
    from pluribus.report import write_report
    from pluribus.result import Result
    from pluribus.server import Server
    from pluribus.settings import setting
    from pluribus.storage.reopen import load_model
    from pluribus.study.bench import Bench, bench
    from pluribus.study.compare import compare
    from pluribus.study.definition import Study
    from pluribus.study.merged import StudyResult
    from pluribus.study.standings import Comparison
    from pluribus.study.study import study
    from pluribus.study.tune import Tuned, tune
    from pluribus.task import Card, Task

_HOMES = {
    "api": ("load_result", "resume", "run"),
    "audit.audit": ("Audit", "audit"),
    "client": ("Batch", "Client"),
    "conformance.check": ("check",),
    "conformance.report": ("CheckReport",),
    "data": ("Dataset", "register_data", "register_partition"),
    "data.check": ("DataCheck", "check_data"),
    "errors": ("PluribusError",),
    "experiment": ("Experiment",),
    "federation": ("Observer",),
    "internal.keywords": ("Settings",),
    "listing": ("list_data", "list_groups", "list_methods", "list_models", "list_partitions"),
    "message": ("Dim", "Field", "Inbox", "Message", "Rows", "Wire", "schema_of"),
    "method": ("Exchange", "Method", "Need", "PeerMethod", "register"),
    "models": ("TwoPartModel", "register_model"),
    "optim": ("Opt", "Rule"),
    "prediction": ("LabelsPrediction", "NumbersPrediction", "Prediction", "predict"),
    "report": ("write_report",),
    "result": ("Result",),
    "server": ("Server",),
    "settings": ("setting",),
    "storage.reopen": ("load_model",),
    "study.bench": ("Bench", "bench"),
    "study.compare": ("compare",),
    "study.definition": ("Study",),
    "study.merged": ("StudyResult",),
    "study.standings": ("Comparison",),
    "study.study": ("study",),
    "study.tune": ("Tuned", "tune"),
    "task": ("Card", "Task"),
}

_FORMER = {"Split": "TwoPartModel"}

# fmt: off
__all__ = [
    "Audit", "Batch", "Bench", "Card", "CheckReport", "Client", "Comparison", "DataCheck", "Dataset", "Dim", "Exchange",
    "Experiment", "Field", "Inbox", "LabelsPrediction", "Message", "Method", "Need", "NumbersPrediction", "Observer",
    "Opt", "PeerMethod", "PluribusError", "Prediction", "Result", "Rows", "Rule", "Server", "Settings", "Study",
    "StudyResult", "Task", "Tuned", "TwoPartModel", "Wire", "audit", "bench", "check", "check_data", "compare",
    "list_data", "list_groups", "list_methods", "list_models", "list_partitions", "load_model", "load_result",
    "predict", "register", "register_data", "register_model", "register_partition", "resume", "run", "schema_of",
    "setting", "study", "tune", "write_report",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("pluribus")
        except PackageNotFoundError:  # a source tree that is not installed
            return "0+source"
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"pluribus.{home}"), name)
    if name in _FORMER:
        raise AttributeError(f"pluribus.{name} is called pluribus.{_FORMER[name]} now")
    raise AttributeError(f"module 'pluribus' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
