"""Pluribus: heterogeneous federated learning. Out of many models, one knowledge.

>>> import pluribus
>>> result = pluribus.run("fedgh", data="digits", clients=8, rounds=20, seed=0)     # doctest: +SKIP
>>> result.table()                                                                  # doctest: +SKIP
"""

from importlib.metadata import PackageNotFoundError, version

from pluribus.api import load_model, resume, run
from pluribus.client import Batch, Client
from pluribus.data import Dataset, register_data
from pluribus.errors import PluribusError
from pluribus.experiment import Experiment
from pluribus.message import Dim, Field, Message, Rows, Wire, schema_of
from pluribus.method import Exchange, Inbox, Method, Need, PeerMethod, methods, register
from pluribus.models import Split, register_model
from pluribus.optim import Opt, Rule
from pluribus.result import Result
from pluribus.server import Server
from pluribus.task import Card, Task

try:
    __version__ = version("pluribus")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

__all__ = [
    "Batch",
    "Card",
    "Client",
    "Dataset",
    "Dim",
    "Exchange",
    "Experiment",
    "Field",
    "Inbox",
    "Message",
    "Method",
    "Need",
    "Opt",
    "PeerMethod",
    "PluribusError",
    "Result",
    "Rows",
    "Rule",
    "Server",
    "Split",
    "Task",
    "Wire",
    "load_model",
    "methods",
    "register",
    "register_data",
    "register_model",
    "resume",
    "run",
    "schema_of",
]
