"""MLflow: a file store in RUN/mlruns, unless MLFLOW_TRACKING_URI names another store.

MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlruns
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pluribus.track.tracker import Tracker, identity

LONGEST = 6000  # characters that MLflow accepts for a parameter


class MLflow(Tracker):
    """Logs settings, metrics and results to an MLflow store."""

    name = "mlflow"

    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when MLflow is imported
        from mlflow import MlflowClient
        from mlflow.entities import Param

        store = os.environ.get("MLFLOW_TRACKING_URI")
        if store is None:  # files do not depend on MLflow's database version, but need this variable
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            store = (folder.resolve() / "mlruns").as_uri()
        self._client: Any = MlflowClient(tracking_uri=store)
        self._run = identity(folder, self.name, lambda: self._new_run(folder.name))
        self._client.update_run(self._run, status="RUNNING")
        self._logged = max((point.step for point in self._client.get_metric_history(self._run, "seconds")), default=0)
        self._client.log_batch(self._run, params=[Param(k, str(value)[:LONGEST]) for k, value in settings.items()])

    def _new_run(self, label: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pluribus")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run: str = self._client.create_run(experiment, run_name=label).info.run_id
        return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log each metric. A resumed run may repeat a round; its metrics are already in the store."""
        if step > self._logged:
            self._log_metrics(step, metrics)

    def _log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])

    def end(self, step: int, metrics: Mapping[str, float] | None) -> None:
        if metrics is not None:
            self._log_metrics(step, metrics)
        self._client.set_terminated(self._run, "KILLED" if metrics is None else "FINISHED")
