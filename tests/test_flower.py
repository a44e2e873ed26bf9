"""Real Flower on loopback: SuperLink, SuperNodes, warm workers. The same bits as a simulation."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import pluribus
from kit import differing, timeless
from pluribus.assembly import Assembly, assemble
from pluribus.checkpoint import Checkpoint
from pluribus.data.datasets import write_npz
from pluribus.experiment import experiment
from pluribus.files import read_lines
from test_parties import NAMES, SETTINGS

pytest.importorskip("flwr")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

BIN = Path(sys.executable).parent
PATIENCE = 240  # seconds until a test gives up; only one that fails waits so long


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Any]:
    """Starts programs whose words end up in files; ends all of them, and what they started."""
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    }
    quiet |= {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_HOME": str(folder / "home")}
    here = {"PYTHONPATH": str(Path(pluribus.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    running: list[subprocess.Popen[bytes]] = []

    def start(log: str, *command: str) -> subprocess.Popen[bytes]:
        with (folder / f"{log}.log").open("wb") as words:
            env = os.environ | quiet | here
            running.append(subprocess.Popen(command, stdout=words, stderr=words, env=env, start_new_session=True))
        return running[-1]

    try:
        yield start
    finally:
        for process in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def until(done: Any, folder: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            words = "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))
            raise AssertionError(f"it did not happen\n{words}")
        time.sleep(0.2)


def answers_at(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def write_files(parts: Assembly, method: str, folder: Path) -> None:
    """What the server and each site of this simulation would have on their disks."""
    task, experiment = parts.task, parts.experiment
    said = {"method": method, "run": "trial", "rounds": task.rounds, "seed": task.seed, "evaluate_every": task.rounds}
    said |= {"width": task.width, "deadline": float(PATIENCE), "lr": experiment.lr}
    lists = {"sites": list(NAMES.values()), "classes": list(task.names), "image": list(task.shape)}
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in {**said, **lists}.items()]
    (folder / "federation.toml").write_text("\n".join(lines) + "\n")
    for k, name in NAMES.items():
        for part, rows in parts.data.rows(k).items():
            x, y = parts.dataset.x[rows, 0].numpy(), parts.dataset.y[rows].numpy()  # grey
            columns = {"x_train": x, "y_train": y, "x_test": x[:0], "y_test": y[:0]}
            write_npz(folder / f"{name}-{part}.npz", columns | {"classes": np.array(task.names)})
        sets = "".join(f'{part} = "{folder}/{name}-{part}.npz"\n' for part in ("train", "val", "test"))
        facts = f'name = "{name}"\nmodel = "{parts.cards[k].model}"\nstate = "{folder}/{name}"\n'
        (folder / f"{name}.toml").write_text(facts + sets)
    (folder / "home").mkdir()


def test_the_same_bits_as_a_simulation(tmp_path: Path) -> None:
    parts = assemble(experiment("fedgh", **SETTINGS | {"rounds": 2, "evaluate_every": 2}))
    simulated = pluribus.run(parts.experiment, progress=False)
    write_files(parts, "fedgh", tmp_path)
    shutil.copytree(Path(pluribus.__file__).parent / "flower" / "app", tmp_path / "app")
    link, out = free_port(), tmp_path / "out"
    address = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    (tmp_path / "home" / "config.toml").write_text(address)
    with processes(tmp_path) as start:
        flags = ["--insecure", "--host", "127.0.0.1"]
        place = ["--port", str(link), "--database", str(tmp_path / "link.db")]
        start("link", str(BIN / "flower-superlink"), *flags, *place)
        for name in NAMES.values():
            files = f"{tmp_path}/{name}.toml", f"{tmp_path}/{name}.sock"
            start(f"worker-{name}", sys.executable, "-m", "pluribus.flower.worker", *files)
        until(lambda: answers_at(link), tmp_path)
        for name in NAMES.values():
            node = f'site="{name}" socket="{tmp_path}/{name}.sock"'
            place = ["--superlink", f"127.0.0.1:{link}", "--port", str(free_port()), "--node-config", node]
            start(f"node-{name}", str(BIN / "flower-supernode"), *flags, *place)
        settings = f'config="{tmp_path}/federation.toml" out="{out}"'
        start("run", str(BIN / "flwr"), "run", str(tmp_path / "app"), "here", "--run-config", settings)
        until(lambda: (out / "result.json").exists(), tmp_path)
    assert [timeless(r) for r in read_lines(out / "metrics.jsonl")] == [timeless(r) for r in simulated.history]
    assert differing(Checkpoint(out / "state").server(), Checkpoint(simulated.folder / "state").server()) == []
    saved = Checkpoint(simulated.folder / "state")
    for k, name in NAMES.items():
        newest = max((tmp_path / name / "trial").glob("*.safetensors"))
        with safe_open(newest, framework="pt") as file:
            expected = saved.client(k) or {}
            assert differing(expected, {n: file.get_tensor(f"state/{n}") for n in expected}) == []
