"""The engine for a host in this process."""

from __future__ import annotations

from collections.abc import Callable

from pluribus.engines.engine import Engine
from pluribus.engines.serial import Serial
from pluribus.experiment import Experiment
from pluribus.host import Host


def local_engine(host: Host, experiment: Experiment, tell: Callable[[str], None]) -> Engine:
    """Make the engine for a host in this process: Cuda on a CUDA GPU, Serial on a CPU or an Apple GPU."""
    if host.device.type == "cuda":
        from pluribus.engines.cuda import Cuda

        return Cuda(host, tell, experiment.capture, experiment.stack)
    return Serial(host)
