"""Clients run in Ray actors, on this machine or on a cluster, with the same bits as the serial engine.

An actor owns clients: their weights, their state, their rows of the data. In a round, each actor gets one call for all
of its clients. Messages between peers travel from actor to actor; this process gets only their sizes.

Ray pickles what it sends, so this engine is for simulation among machines that trust each other.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pluribus.assembly import Assembly, assemble
from pluribus.data import Dataset
from pluribus.engines.local import local_engine
from pluribus.engines.spread import Order, Spread
from pluribus.engines.worker import HostCommand, Outcome, Release, carry_out, make_portable
from pluribus.errors import DeviceError, HostLostError, PackageError
from pluribus.experiment import Experiment
from pluribus.host import Limits, Load, Tensors, make_host
from pluribus.internal.arithmetic import Arithmetic
from pluribus.internal.digits import is_whole
from pluribus.message import Parcel, tensor_bytes
from pluribus.request import Answer, Learn, Reply, Request, Teach

try:
    import ray
    from ray import ObjectRef, cloudpickle
    from ray.exceptions import RayError
except ImportError as error:
    raise PackageError("--engine ray needs Ray: pip install 'pluribus[ray]'.") from error

SECONDS_TO_ANSWER = 5.0
AUTH = "RAY_AUTH_MODE"


class Ray(Spread):
    """The engine of `--engine ray`."""

    can_lose = True

    def __init__(self, parts: Assembly, load: Load, tell: Callable[[str], None]) -> None:
        super().__init__(parts, load, min(parts.experiment.processes(), parts.experiment.clients))
        self._tell = tell
        self._started_ray = False  # whether this process started Ray

    def _answers(self, todo: dict[int, Request]) -> Iterator[tuple[int, Outcome]]:
        clients, by_actor = list(todo), dict[int, list[Request]]()
        for k in clients:
            by_actor.setdefault(self._owner[k], []).append(todo.pop(k))
        asked = {number: self._hosts[number].answer.remote(own) for number, own in by_actor.items()}
        outcomes_by_client: dict[int, Outcome] = {}
        for k in clients:
            if (number := self._owner[k]) in asked:
                outcomes, notes = self._get(asked.pop(number))
                outcomes_by_client |= outcomes
                for sentence in notes:
                    self._tell(sentence)
            outcome = outcomes_by_client.pop(k)
            if outcome.error is not None:
                raise outcome.error
            yield k, outcome

    def close(self) -> None:
        actors, self._hosts = self._hosts, []
        for actor in actors:
            ray.kill(actor)
        if self._started_ray:
            ray.shutdown()

    def _start(self) -> None:
        experiment = self._parts.experiment
        if not ray.is_initialized():
            self._started_ray = True
            _connect(experiment)
        cores, number = torch.get_num_threads(), self._number
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        needed = {"CPU": cores * number, "GPU": experiment.gpu_share * number}
        for name, amount in needed.items():
            if (there := resources.get(name, 0)) < amount:
                raise DeviceError(
                    f"{number} workers need {amount:g} {name}s, but the cluster has {there:g}: use fewer --workers"
                    f"{', fewer --threads' if name == 'CPU' else ' or a smaller --gpu-share'}, or more machines."
                )
        device = "cuda" if experiment.gpu_share else "cpu"
        alone = replace(experiment, device=device, workers=1, engine="auto", ray_address=None, gpu_share=0.0)
        pickled = cloudpickle.dumps((alone, self._parts.method))  # type: ignore[no-untyped-call]
        data = ray.put(_Arrays.of(self._parts.dataset))
        make = ray.remote(Actor).options(num_cpus=cores, num_gpus=experiment.gpu_share)
        self._hosts = [make.remote() for _ in range(number)]
        here = Arithmetic.here()
        for error in self._get_all([actor.open.remote(pickled, sys.path, data, here) for actor in self._hosts]):
            if error is not None:
                raise error

    def _command(self, orders: Iterable[Order]) -> list[Any]:
        return self._get_all([self._hosts[number].do.remote(command) for number, command in orders])

    def _send_saved(self, plan: Mapping[int, int]) -> None:
        self._get_all([self._hosts[number].restore.remote(k, self._load(k)) for k, number in plan.items()])

    def _get_all(self, refs: list[ObjectRef[Any]]) -> list[Any]:
        return [self._get(one) for one in refs]

    def _get(self, ref: ObjectRef[Any]) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:  # an actor returns its own errors; an error of Ray means that the actor is lost
            raise HostLostError(f"a Ray actor was lost ({type(error).__name__}).") from error


class Actor:
    """The Ray actor: a process with a Host for some of the clients."""

    def open(self, pickled: bytes, path: list[str], data: _Arrays, arithmetic: Arithmetic) -> BaseException | None:
        """Make the host. An error is returned: a raised one would look like a lost actor."""
        try:
            self._open(pickled, path, data, arithmetic)
        except BaseException as failure:
            return make_portable(failure)
        return None

    def _open(self, pickled: bytes, path: list[str], data: _Arrays, arithmetic: Arithmetic) -> None:
        arithmetic.set()
        sys.path += [folder for folder in path if folder not in sys.path]  # folders of a script's own modules
        experiment, method = cloudpickle.loads(pickled)
        parts = assemble(experiment, data.dataset(), method)
        # An actor has no run folder: clients that are put away keep their state in memory.
        limits = Limits.of(parts.device)._replace(away=math.inf)
        self._notes: list[str] = []
        self._saved: dict[int, Tensors | None] = {}
        self._host = make_host(parts, self._saved.pop, limits)
        self._engine = local_engine(self._host, experiment, self._notes.append)

    def answer(self, requests: list[Request]) -> tuple[dict[int, Outcome], list[str]]:
        """Answer the requests to all clients of this actor in an exchange. Also returns new notes of the engine."""
        requests = [_open_inbox(one) if isinstance(one, Learn) else one for one in requests]
        taught = isinstance(requests[0], Teach)
        outcomes: dict[int, Outcome] = {}
        started = time.perf_counter()
        try:
            for k, answer in self._engine.each(requests):
                seconds, started = time.perf_counter() - started, time.perf_counter()
                outcomes[k] = Outcome(_seal(answer) if taught else answer, None, seconds)
        except BaseException as failure:
            failed = [one.client for one in requests if one.client not in outcomes]
            outcomes |= {k: Outcome(None, make_portable(failure), 0.0) for k in failed}
        notes, self._notes[:] = list(self._notes), []
        return outcomes, notes

    def process(self) -> int:
        """Id of the process, for tests and monitoring."""
        return os.getpid()

    def do(self, command: HostCommand) -> Any:
        if isinstance(command, Release):
            self._saved.pop(command.client, None)
        return carry_out(self._host, command)

    def restore(self, k: int, tensors: Tensors | None) -> None:
        """Store the saved state of a client until the host creates the client."""
        self._saved[k] = tensors


@dataclass(frozen=True)
class _Arrays:
    """A data set for the object store of Ray: arrays that all actors of a machine share."""

    fields: dict[str, Any]
    columns: dict[str, np.ndarray]

    @classmethod
    def of(cls, dataset: Dataset) -> _Arrays:
        columns = {name: value.numpy() for name, value in vars(dataset).items() if isinstance(value, Tensor)}
        return cls({name: value for name, value in vars(dataset).items() if name not in columns}, columns)

    def dataset(self) -> Dataset:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to it
            tensors: dict[str, Any] = {name: torch.from_numpy(value) for name, value in self.columns.items()}
        return Dataset(**self.fields, **tensors)


@dataclass(frozen=True)
class _Sealed(Parcel):
    """The message of a teacher in the object store of its actor."""

    layout: dict[str, int]
    ref: list[ObjectRef[bytes]]  # in a list: Ray would resolve a bare reference where it is passed on


def _seal(answer: Answer) -> Answer:
    if not isinstance(answer, Reply) or not isinstance(answer.up, bytes):
        return answer
    return replace(answer, up=_Sealed(tensor_bytes(answer.up), [ray.put(answer.up)]))


def _open_inbox(request: Learn) -> Learn:
    refs = [sealed.ref[0] for sealed in request.inbox.values() if isinstance(sealed, _Sealed)]
    return replace(request, inbox=dict(zip(request.inbox, ray.get(refs), strict=True)))


def _connect(experiment: Experiment) -> None:
    """Join a running cluster, or start one on this machine with the cores that the workers need."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where: dict[str, Any] = {"address": experiment.ray_address}
    if experiment.ray_address is None:
        cores = torch.get_num_threads() * experiment.processes()
        where = {"address": "local", "num_cpus": cores, "include_dashboard": False}
    else:
        _check_reachable(experiment.ray_address)
    try:
        ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        # Ray sends its token only if the mode is set
        token = "" if AUTH in os.environ else f" If it requires a token, set {AUTH}=token."
        raise DeviceError(
            f"cannot connect to Ray at {experiment.ray_address or 'this machine'}: {first}.{token}"
        ) from error


def _check_reachable(address: str) -> None:
    """Check that the address accepts connections. Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and is_whole(port)):
        return  # auto, or another keyword of Ray
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise DeviceError(f"no Ray cluster answers at {address} ({error.strerror or error}).") from error
