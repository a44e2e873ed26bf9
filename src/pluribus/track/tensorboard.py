"""TensorBoard: event files in RUN/tensorboard. It shows all runs below the folder that it is given, by their paths.

tensorboard --logdir runs
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pluribus.track.tracker import Tracker


class TensorBoard(Tracker):
    """Writes curves, hyper-parameters and results for TensorBoard."""

    name = "tensorboard"

    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        """Open an event file. Points of later rounds in earlier files are hidden: those rounds run again."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        _wait_for_a_new_name(folder / "tensorboard")
        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=done + 1)
        # not add_hparams: it marks the run as finished, and writes to a separate folder
        experiment, session, self._ended = hparams(dict(settings), {self.metric: 0.0})  # type: ignore[no-untyped-call]
        self._add(experiment)
        self._add(session)
        self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a watched curve is up to date, and a full disk raises here

    def end(self, step: int, metrics: Mapping[str, float] | None) -> None:
        if metrics is not None:
            self.log(step, metrics)
            self._add(self._ended, step)
        self._writer.close()

    def _add(self, summary: Any, step: int | None = None) -> None:
        self._writer.file_writer.add_summary(summary, step)


def _wait_for_a_new_name(folder: Path) -> None:
    """Files are read in the order of their names, which begin with the second: two of one second may be swapped."""
    while list(folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
        time.sleep(0.05)
