"""TensorBoard: event files in RUN/tensorboard.

tensorboard --logdir runs

Written here and now, not by the thread of TensorBoard's own writer: what goes wrong there is printed, and not raised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pluribus.track.tracker import Tracker


class TensorBoard(Tracker):
    """Writes curves, hyper-parameters and final figures for TensorBoard."""

    name = "tensorboard"

    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        """Open a file; what earlier ones hold of later rounds is no longer shown, because it happens again."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams

        place = folder / "tensorboard"
        place.mkdir(exist_ok=True)
        file = place / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"  # TensorBoard reads them by name
        self._records: Any = RecordWriter(file.open("xb"))
        self._write(file_version="brain.Event:2")
        self._write(step=done + 1, session_log=SessionLog(status=SessionLog.START))
        experiment, session, self._ended = hparams(dict(settings), {"accuracy": 0.0})  # type: ignore[no-untyped-call]
        self._write(summary=experiment)
        self._write(summary=session)
        self._records.flush()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """A point on each curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(step=step, summary=Summary(value=values))
        self._records.flush()  # whoever watches wants to see it now

    def end(self, step: int, figures: Mapping[str, float] | None) -> None:
        """Close the file."""
        if figures is not None:
            self.log(step, figures)
            self._write(step=step, summary=self._ended)
        self._records.close()

    def _write(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **event).SerializeToString())
