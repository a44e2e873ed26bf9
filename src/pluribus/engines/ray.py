"""Clients spread over Ray actors, on this machine or on a cluster, with the same bits as one after the other.

An actor owns clients: their weights, their state, their rows of the data. A round asks each actor once, for all of its
clients. What peers teach each other goes from actor to actor; this process hears only what it weighs.

Ray pickles what it carries: it is for simulation, among machines that trust each other.
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
from pluribus.engines.spread import Spread
from pluribus.engines.worker import Outcome, portable
from pluribus.errors import DeviceError, HostLostError, PackageError
from pluribus.experiment import Experiment
from pluribus.host import Limits, Selected, Tensors, make_host
from pluribus.internal.arithmetic import Arithmetic
from pluribus.message import Parcel, tensor_bytes
from pluribus.request import Answer, Learn, Reply, Request, Teach

try:
    import ray
    from ray import ObjectRef, cloudpickle
    from ray.exceptions import RayError
except ImportError as error:
    raise PackageError("--engine ray needs Ray: pip install 'pluribus[ray]'.") from error

Load = Callable[[int], Tensors | None]
SECONDS_TO_ANSWER = 5.0
AUTH = "RAY_AUTH_MODE"


class Ray(Spread):
    """The engine behind `--engine ray`. Its actors start with the first request."""

    def __init__(self, parts: Assembly, load: Load, tell: Callable[[str], None]) -> None:
        super().__init__(parts)
        self._load = load
        self._tell = tell
        self._actors: list[Any] = []
        self._ours = False  # whether Ray itself was started here

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Each client with its answer, in the order of requests."""
        todo = {request.client: request for request in requests}
        if not todo:
            return
        self._start()
        clients, (kind, plan) = list(todo), self._planned(todo, len(self._actors))
        self._settle(plan)
        by_actor: dict[int, list[Request]] = {}
        for k in clients:
            by_actor.setdefault(self._owner[k], []).append(todo.pop(k))
        asked = {number: self._actors[number].answer.remote(own) for number, own in by_actor.items()}
        heard: dict[int, Outcome] = {}
        for k in clients:
            if (number := self._owner[k]) in asked:
                outcomes, told = self._got(asked.pop(number))
                heard |= outcomes
                for sentence in told:
                    self._tell(sentence)
            outcome = heard.pop(k)
            if outcome.error is not None:
                raise outcome.error
            self._costs.note(kind, k, outcome.seconds)
            yield k, outcome.value

    def close(self) -> None:
        """Let the actors go, and Ray itself where it was started here."""
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        if self._ours:
            ray.shutdown()

    # ---- actors ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._actors:
            return
        experiment = self._parts.experiment
        if not ray.is_initialized():
            self._ours = True
            _connect(experiment)
        cores, number = torch.get_num_threads(), min(experiment.workers, experiment.clients)
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        needed = {"CPU": cores * number, "GPU": experiment.gpu_share * number}
        for name, amount in needed.items():
            if (there := resources.get(name, 0)) < amount:
                raise DeviceError(
                    f"{number} workers take {amount:g} {name}s, and the cluster has {there:g}: use fewer --workers"
                    f"{', fewer --threads' if name == 'CPU' else ' or a smaller --gpu-share'}, or more machines."
                )
        device = "cuda" if experiment.gpu_share else "cpu"
        alone = replace(experiment, device=device, workers=1, engine="auto", ray_address=None, gpu_share=0.0)
        described = cloudpickle.dumps((alone, self._parts.method))  # type: ignore[no-untyped-call]
        data = ray.put(_Arrays.of(self._parts.dataset))
        make = ray.remote(Host).options(num_cpus=cores, num_gpus=experiment.gpu_share)
        self._actors = [make.remote() for _ in range(number)]
        here = Arithmetic.here()
        for error in self._all_got([actor.open.remote(described, sys.path, data, here) for actor in self._actors]):
            if error is not None:
                raise error

    def _changed_by_host(self) -> list[dict[int, Tensors]]:
        return self._all_got([actor.changed.remote() for actor in self._actors])

    def _selected_by_host(self) -> list[dict[int, Selected]]:
        return self._all_got([actor.selected.remote() for actor in self._actors])

    def _all_got(self, asked: list[ObjectRef[Any]]) -> list[Any]:
        return [self._got(one) for one in asked]

    def _got(self, asked: ObjectRef[Any]) -> Any:
        try:
            return ray.get(asked)
        except RayError as error:  # an actor tells of its own mistakes; what Ray tells of is lost
            raise HostLostError(f"a Ray actor was lost ({type(error).__name__}).") from error

    # ---- who works where -------------------------------------------------------------------------------------------

    def _settle(self, plan: Mapping[int, int]) -> None:
        """Bring clients to the actors of a plan: with what they hold, or with what was saved of them."""
        moving = self._moving(plan)
        released = [self._actors[self._owner[k]].release.remote(k) for k in moving]
        states = {k: self._got(one) for k, one in zip(moving, released, strict=True)}
        unsaved = {k: state for k, state in states.items() if state is not None}
        saved = [k for k in plan if k not in self._owner or (k in states and k not in unsaved)]
        asked = [self._actors[plan[k]].adopt.remote(k, state) for k, state in unsaved.items()]
        asked += [self._actors[plan[k]].restore.remote(k, self._load(k)) for k in saved]
        self._all_got(asked)
        self._owner.update(plan)


class Host:
    """An actor: the client half of a federation, for some of its clients."""

    def open(self, described: bytes, path: list[str], data: _Arrays, arithmetic: Arithmetic) -> BaseException | None:
        """Make ready to host clients; what is wrong is told, not died of."""
        try:
            self._open(described, path, data, arithmetic)
        except BaseException as failure:
            return portable(failure)
        return None

    def _open(self, described: bytes, path: list[str], data: _Arrays, arithmetic: Arithmetic) -> None:
        arithmetic.set()
        sys.path += [folder for folder in path if folder not in sys.path]  # where a script's own modules lie
        experiment, method = cloudpickle.loads(described)
        parts = assemble(experiment, data.dataset(), method)
        # There is no disk here to leave clients on: whoever gives up its place keeps its state in memory.
        limits = Limits.of(parts.device)._replace(away=math.inf)
        self._told: list[str] = []
        self._saved: dict[int, Tensors | None] = {}
        self._host = make_host(parts, self._saved.pop, limits)
        self._engine = local_engine(self._host, experiment, self._told.append)

    def answer(self, requests: list[Request]) -> tuple[dict[int, Outcome], list[str]]:
        """The requests to all of this actor's clients in an exchange, and what there is to tell."""
        requests = [_opened(one) if isinstance(one, Learn) else one for one in requests]
        taught = isinstance(requests[0], Teach)
        outcomes: dict[int, Outcome] = {}
        started = time.perf_counter()
        try:
            for k, answer in self._engine.each(requests):
                seconds, started = time.perf_counter() - started, time.perf_counter()
                outcomes[k] = Outcome(_sealed(answer) if taught else answer, None, seconds)
        except BaseException as failure:
            failed = [one.client for one in requests if one.client not in outcomes]
            outcomes |= {k: Outcome(None, portable(failure), 0.0) for k in failed}
        told, self._told[:] = list(self._told), []
        return outcomes, told

    def process(self) -> int:
        """The number of its process, for whoever wants to look at it."""
        return os.getpid()

    def changed(self) -> dict[int, Tensors]:
        """State of every client that worked since the last call."""
        return self._engine.changed()

    def selected(self) -> dict[int, Selected]:
        """What clients were measured with in the rounds that were selected since the last call."""
        return self._engine.selected()

    def restore(self, k: int, tensors: Tensors | None) -> None:
        """What was saved of a client that will come to life here."""
        self._saved[k] = tensors

    def release(self, k: int) -> Tensors | None:
        """Let go of a client that moves to another actor; None if nothing of it is unsaved."""
        self._saved.pop(k, None)
        return self._host.release(k)

    def adopt(self, k: int, tensors: Tensors) -> None:
        """Host a client that another actor released."""
        self._host.adopt(k, tensors)


# ---- what travels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Arrays:
    """A data set as Ray shares it among the actors of a machine: arrays in its object store, copied once."""

    described: dict[str, Any]
    columns: dict[str, np.ndarray]

    @classmethod
    def of(cls, dataset: Dataset) -> _Arrays:
        columns = {name: value.numpy() for name, value in vars(dataset).items() if isinstance(value, Tensor)}
        return cls({name: value for name, value in vars(dataset).items() if name not in columns}, columns)

    def dataset(self) -> Dataset:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor is it written to
            tensors: dict[str, Any] = {name: torch.from_numpy(value) for name, value in self.columns.items()}
        return Dataset(**self.described, **tensors)


@dataclass(frozen=True)
class _Sealed(Parcel):
    """What a client taught, where its actor put it."""

    layout: dict[str, int]
    place: list[ObjectRef[bytes]]  # in a list, or Ray would fetch it for whoever carries it


def _sealed(answer: Answer) -> Answer:
    if not isinstance(answer, Reply) or not isinstance(answer.up, bytes):
        return answer
    return replace(answer, up=_Sealed(tensor_bytes(answer.up), [ray.put(answer.up)]))


def _opened(asked: Learn) -> Learn:
    places = [sealed.place[0] for sealed in asked.inbox.values() if isinstance(sealed, _Sealed)]
    return replace(asked, inbox=dict(zip(asked.inbox, ray.get(places), strict=True)))


def _connect(experiment: Experiment) -> None:
    """Join a running cluster, or start one on this machine with as many cores as the workers shall have."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where: dict[str, Any] = {"address": experiment.ray_address}
    if experiment.ray_address is None:
        cores = torch.get_num_threads() * experiment.workers
        where = {"address": "local", "num_cpus": cores, "include_dashboard": False}
    else:
        _knock(experiment.ray_address)
    try:
        ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        # Ray does not show its token to an address just because somebody names it
        token = "" if AUTH in os.environ else f" If it asks for a token: {AUTH}=token."
        raise DeviceError(f"no Ray cluster at {experiment.ray_address or 'this machine'}: {first}.{token}") from error


def _knock(address: str) -> None:
    """Whether anyone is there; Ray itself would go on asking for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return  # auto, or another word that Ray knows
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise DeviceError(f"no Ray cluster answers at {address} ({error.strerror or error}).") from error
