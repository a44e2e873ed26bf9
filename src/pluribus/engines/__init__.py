"""Where clients run. The round loop speaks to an engine; an engine hands its requests to hosts, here or elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from pluribus.assembly import Assembly
from pluribus.engines.engine import Engine
from pluribus.engines.local import local_engine
from pluribus.engines.workers import Workers
from pluribus.host import Tensors, make_host


def engine_for(parts: Assembly, load: Callable[[int], Tensors | None], tell: Callable[[str], None]) -> Engine:
    """The engine that an experiment asks for. It says through `tell` what it could not do as fast as it would."""
    if parts.experiment.engine == "ray":
        from pluribus.engines.ray import Ray

        return Ray(parts, load, tell)
    workers = min(parts.experiment.workers, parts.experiment.clients)
    if workers > 1:
        return Workers(parts, load, workers)
    return local_engine(make_host(parts, load), parts.experiment, tell)
