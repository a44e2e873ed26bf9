"""Where clients run. The round loop calls an engine, and the engine passes requests to hosts, local or remote.

The server of a simulation on a CUDA GPU runs there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import current_process

from pluribus.assembly import Assembly, Parts
from pluribus.engines.auto import Auto
from pluribus.engines.engine import Engine
from pluribus.engines.local import local_engine
from pluribus.engines.workers import Workers
from pluribus.host import Load, make_host
from pluribus.internal.devices import device_of_server
from pluribus.internal.steps import EagerServer, ServerRunner


def engine_for(parts: Assembly, load: Load, tell: Callable[[str], None]) -> Engine:
    """Make the engine that the experiment configures. The engine reports through `tell` what it cannot speed up."""
    if parts.experiment.engine == "ray":
        from pluribus.engines.ray import Ray

        return Ray(parts, load, tell)
    workers = min(parts.experiment.processes(), parts.experiment.clients)
    if workers > 1 and parts.experiment.workers != "auto":
        return Workers(parts, load, workers)
    if workers > 1 and not current_process().daemon:  # a process of a pool cannot start others
        return Auto(parts, load, workers)
    return local_engine(make_host(parts, load), parts.experiment, tell)


def server_runner_for(parts: Parts, tell: Callable[[str], None]) -> ServerRunner:
    """Make the runner of the server: on the CUDA GPU of a simulation, recorded if so configured, or on the CPU."""
    if not isinstance(parts, Assembly):
        return EagerServer()
    device = device_of_server(parts.device)
    if device.type == "cpu" or not parts.experiment.capture:
        return EagerServer(device)
    from pluribus.engines.server_steps import CapturedServer, Recorder

    return CapturedServer(Recorder(device), tell)
