"""MLflow: a store of files in RUN/mlruns, unless MLFLOW_TRACKING_URI names another one.

MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlruns
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pluribus.track.tracker import Tracker, identity

LONGEST = 6000  # characters of a parameter that MLflow takes


class MLflow(Tracker):
    """Tells a store of MLflow parameters, metrics and final figures."""

    name = "mlflow"

    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        """Make a run in the store, or open the one that this run has there."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when MLflow is imported
        from mlflow import MlflowClient
        from mlflow.entities import Param

        store = os.environ.get("MLFLOW_TRACKING_URI")
        if store is None:  # files need no database of MLflow's version, but it wants to be asked twice for them
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            store = (folder.resolve() / "mlruns").as_uri()
        self._client: Any = MlflowClient(tracking_uri=store)
        self._run = identity(folder, self.name, lambda: self._new_run(folder.name))
        self._client.update_run(self._run, status="RUNNING")
        self._logged = max((point.step for point in self._client.get_metric_history(self._run, "seconds")), default=0)
        params = [Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        self._client.log_batch(self._run, params=params)

    def _new_run(self, label: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pluribus")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run: str = self._client.create_run(experiment, run_name=label).info.run_id
        return run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """A value of each metric; those of a round that a stop has undone are there already."""
        if step > self._logged:
            self._tell(step, figures)

    def _tell(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in figures.items()])

    def end(self, step: int, figures: Mapping[str, float] | None) -> None:
        """Say how the run came out."""
        if figures is not None:
            self._tell(step, figures)
        self._client.set_terminated(self._run, "KILLED" if figures is None else "FINISHED")
