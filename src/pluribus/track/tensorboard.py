"""TensorBoard: event files in RUN/tensorboard.

tensorboard --logdir runs
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pluribus.track.tracker import Tracker


class TensorBoard(Tracker):
    """Writes curves, hyper-parameters and final figures for TensorBoard."""

    name = "tensorboard"

    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        """Open a file; what earlier ones hold of later rounds is no longer shown, because it happens again."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer: Any = SummaryWriter(folder / "tensorboard", purge_step=done + 1)
        # by hand, because add_hparams says that a run is finished, in a folder of its own
        experiment, session, self._ended = hparams(dict(settings), {"accuracy": 0.0})  # type: ignore[no-untyped-call]
        self._add(experiment)
        self._add(session)
        self._writer.flush()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """A point on each curve."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # whoever watches wants to see it now, and a full disk shows here

    def end(self, step: int, figures: Mapping[str, float] | None) -> None:
        """Close the file."""
        if figures is not None:
            self.log(step, figures)
            self._add(self._ended, step)
        self._writer.close()

    def _add(self, summary: Any, step: int | None = None) -> None:
        self._writer.file_writer.add_summary(summary, step)
