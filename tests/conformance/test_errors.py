"""Every kind of error, and one whole sentence of each: here, and only here, tests read the words."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import pluribus
from conftest import assemble_tiny, few_digits, run_tiny, tiny
from pluribus.data import Dataset, load
from pluribus.engines.worker import Start, Worker
from pluribus.errors import (
    AgreementError,
    BudgetError,
    CertificateError,
    CheckpointError,
    ConfigError,
    ConflictError,
    DamagedDataError,
    DamagedFileError,
    DataError,
    DeviceError,
    FileAccessError,
    ForeignCodeError,
    FormatError,
    HostLostError,
    MessageError,
    MismatchError,
    MissingDataError,
    MissingSettingError,
    NoModelError,
    NotFiniteError,
    OtherRunError,
    PackageError,
    PartitionError,
    PluribusError,
    RangeError,
    SchemaError,
    UnfinishedError,
    UnknownNameError,
    UnreadableMessageError,
    UserCodeError,
    WeightsError,
    WorkerError,
)
from pluribus.internal.arithmetic import Arithmetic
from pluribus.message import Field, Message, decode, encode
from pluribus.method import Method, find
from pluribus.report import check_packages
from pluribus.report.watch import make_server
from pluribus.sites.agreement import Agreement
from pluribus.storage.code import check_code
from pluribus.storage.folder import RunFolder
from pluribus.storage.toml import read_toml
from pluribus.study.reproduce import summary
from pluribus.study.space import parse_space
from refusals import Kind, refused

BASES = {PluribusError, ConfigError, MessageError, CheckpointError}
"""Kinds that say little: for what none of the others fits."""


# ---- ways to go wrong ------------------------------------------------------------------------------------------------


def take_the_port_twice(folder: Path) -> None:
    run = run_tiny("local", rounds=1, models="mlp-64", out=folder / "run").folder
    with make_server(run) as server:
        make_server(run, server.server_port)


def use_a_file_as_a_key(folder: Path) -> None:
    pytest.importorskip("cryptography")
    from pluribus.sites.keys import check_node_key

    (folder / "site.key").write_text("no key")
    check_node_key(folder / "site.key")


def cut_a_data_set_short(folder: Path) -> None:
    (folder / "mine.npz").write_bytes(Path(few_digits()).read_bytes()[:5000])
    load(str(folder / "mine.npz"))


def summarize_nothing(folder: Path) -> None:
    (folder / "mine.json").write_text("[]")
    summary.read(folder / "mine.json")


def run_where_a_run_is(folder: Path) -> None:
    (folder / "config.toml").touch()
    RunFolder.check_free(str(folder))


def delete_what_was_trained(folder: Path) -> None:
    run = run_tiny("local", rounds=1, models="mlp-64", out=folder / "run").folder
    shutil.rmtree(run / "state")
    pluribus.load_model(run, client=0)


def kill_a_worker(folder: Path) -> None:
    how = Start(multiprocessing.get_context("spawn"), b"", [], Arithmetic.here())
    worker = Worker(3, how)  # which need not have imported anything to die
    os.kill(worker._process.pid or 0, signal.SIGKILL)
    worker.receive()


@dataclass(frozen=True)
class Losing(Method):
    """A host is lost in every attempt."""

    def local_update(self, client: Any) -> Any:
        raise HostLostError("a host was lost.")


def compare_what_diverges(folder: Path) -> None:
    settings = tiny(lr=1e30, models="mlp-64", out=str(folder / "all"))
    pluribus.compare(["fedgh"], seeds=1, jobs=1, progress=False, **settings)


def send(means: float | None) -> None:
    message = Message({} if means is None else {"means": torch.tensor([means])})
    encode(message, {"means": Field((1,))}, "client 2")


# ---- one sentence of each kind ---------------------------------------------------------------------------------------

Provoke = Callable[[Path], Any]
WRONG_LABELS = {"x": torch.zeros(2, 1, 4, 4, dtype=torch.uint8), "y": torch.tensor([0, 5]), "classes": ("a", "b")}

SENTENCES: dict[Kind, tuple[Provoke, str]] = {
    UnknownNameError: (
        lambda folder: pluribus.run("fedg"),
        "unknown method 'fedg'. Did you mean 'fedgh'? pluribus list methods shows all.",
    ),
    RangeError: (
        lambda folder: run_tiny("local", rounds=0),
        "--rounds must be at least 1, not 0.",
    ),
    FormatError: (
        lambda folder: parse_space("lr"),
        "--space takes NAME=LOW:HIGH, with commas between several, not 'lr'.",
    ),
    MissingSettingError: (
        lambda folder: pluribus.compare([]),
        "name at least one method. pluribus list methods shows all.",
    ),
    ConflictError: (
        lambda folder: pluribus.compare(["local"], own={"local": {"clients": 3}}, **tiny()),
        "clients is the same for all methods: use --clients.",
    ),
    MismatchError: (
        lambda folder: assemble_tiny("fedavg", models="small"),
        "fedavg averages whole models, but clients 0 (mlp-64) and 1 (cnn-16) differ. Use one model (--models mlp-64) "
        "or a method for mixed models, such as fedgh, fedproto or local: pluribus list methods shows all.",
    ),
    PartitionError: (
        lambda folder: assemble_tiny("local", clients=400, partition="iid"),
        "client 320 got no data from partition 'iid': use fewer clients (--clients) or more data.",
    ),
    WeightsError: (
        lambda folder: assemble_tiny("local", models="mlp-64", weights=str(folder)),
        "--weights FOLDER has no file mlp-64.safetensors. Add the file, or use other --models.",
    ),
    UserCodeError: (
        lambda folder: find("no.such.Method"),
        "method 'no.such.Method' cannot be imported: No module named 'no'.",
    ),
    ForeignCodeError: (
        lambda folder: check_code(folder / "config.toml", {"data": "http.server.test"}, allow=False),
        "FOLDER/config.toml names code, data 'http.server.test', which is imported only if you allow it: if you trust "
        "it, add --allow-code.",
    ),
    PackageError: (
        lambda folder: check_packages("no_such_package"),
        "reports need no_such_package: pip install 'pluribus[report]'.",
    ),
    DeviceError: (
        take_the_port_twice,
        "cannot listen on 127.0.0.1:PORT: Address already in use. Leave out --port for a free one.",
    ),
    CertificateError: (
        use_a_file_as_a_key,
        "FOLDER/site.key is not an OpenSSH private key without a passphrase.",
    ),
    DataError: (
        lambda folder: Dataset("mine", **WRONG_LABELS),
        "data set mine: y must be in 0..1, but ranges from 0 to 5 (row 1).",
    ),
    MissingDataError: (
        lambda folder: load(str(folder / "mine.npz")),
        "file FOLDER/mine.npz does not exist.",
    ),
    DamagedDataError: (
        cut_a_data_set_short,
        "FOLDER/mine.npz is not a complete npz file: write it again or delete it.",
    ),
    SchemaError: (
        lambda folder: send(None),
        "client 2: the message lacks 'means'.",
    ),
    NotFiniteError: (
        lambda folder: send(float("nan")),
        "client 2: 'means' holds NaN or infinity.",
    ),
    UnreadableMessageError: (
        lambda folder: decode(b"", {}, "client 2"),
        "client 2: the message cannot be read (Error while deserializing: header too small).",
    ),
    AgreementError: (
        lambda folder: Agreement.of({"version": "0.0"}),
        f"the server runs Pluribus 0.0, this site {pluribus.__version__}: install the same version.",
    ),
    FileAccessError: (
        lambda folder: read_toml(folder / "no.toml"),
        "cannot read FOLDER/no.toml: No such file or directory.",
    ),
    DamagedFileError: (
        summarize_nothing,
        "FOLDER/mine.json is not a summary of runs. pluribus reproduce writes one.",
    ),
    OtherRunError: (
        run_where_a_run_is,
        "FOLDER already holds a run. Resume it (pluribus resume FOLDER) or choose another --out.",
    ),
    NoModelError: (
        delete_what_was_trained,
        "FOLDER/run holds no trained model: no round was saved, or its state was deleted.",
    ),
    WorkerError: (
        kill_a_worker,
        "worker 3 (process NUMBER) was killed, perhaps because memory ran out: use fewer --workers.",
    ),
    HostLostError: (
        lambda folder: run_tiny(Losing, rounds=1, models="mlp-64", out=folder),
        "a host was lost. Resume with: pluribus resume FOLDER --allow test_errors.Losing",
    ),
    BudgetError: (
        lambda folder: run_tiny("local", models="mlp-64", dp_epsilon=1, dp_noise=1, batch_size=1000, rounds=1),
        "client 0 would spend epsilon 4.73 in one round, and 1 is allowed (--dp-epsilon): use a larger --dp-noise, or "
        "leave it out.",
    ),
    UnfinishedError: (
        compare_what_diverges,
        "fedgh-0 failed: round 0, client 0: 'means' holds NaN or infinity. Lower --lr. The other runs "
        "are kept. Use the same command with --out FOLDER/all to resume.",
    ),
}


@pytest.mark.parametrize("kind", SENTENCES, ids=lambda kind: kind.kind)
def test_the_sentence_of_a_kind(kind: Kind, tmp_path: Path) -> None:
    provoke, sentence = SENTENCES[kind]
    with refused(kind) as caught:
        provoke(tmp_path)
    assert plain(caught.value.sentence, tmp_path) == sentence


def plain(sentence: str, folder: Path) -> str:
    """Without what differs from run to run."""
    sentence = sentence.replace(str(folder), "FOLDER")
    sentence = re.sub(r"(?<=process )\d+", "NUMBER", sentence)
    return re.sub(r"(?<=127\.0\.0\.1:)\d+", "PORT", sentence)


def test_every_kind_has_a_sentence_and_a_code() -> None:
    kinds = set(below(PluribusError))
    assert kinds == {*SENTENCES, *BASES}
    assert len({kind.kind for kind in kinds}) == len(kinds)
    assert (UnknownNameError.kind, NotFiniteError.kind, PluribusError.kind) == ("unknown-name", "not-finite", "error")


def below(kind: Kind) -> Iterator[Kind]:
    """A kind and all that derive from it in the package."""
    yield kind
    for derived in kind.__subclasses__():
        if derived.__module__.startswith("pluribus."):
            yield from below(derived)
