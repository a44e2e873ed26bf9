"""MLflow: a file store in RUN/mlruns, unless MLFLOW_TRACKING_URI names another store.

Runs that belong together share the store OUT/mlruns of their folder, and have tags.

MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri OUT/mlruns
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pluribus.errors import OtherRunError
from pluribus.internal.system import lock_file
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
            store = ((self.group or folder).resolve() / "mlruns").as_uri()
        name, tags = self.run_name(folder), self.tags(folder, settings)
        with _alone(self.group or folder):
            self._client: Any = MlflowClient(tracking_uri=store)
            self._run = identity(folder, self.name, lambda: self._new_run(name, tags))
        self._continue_run(store)
        self._logged = max((point.step for point in self._client.get_metric_history(self._run, "seconds")), default=0)
        self._client.log_batch(self._run, params=[Param(k, str(value)[:LONGEST]) for k, value in settings.items()])

    def _new_run(self, label: str, tags: Mapping[str, str]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pluribus")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run: str = self._client.create_run(experiment, run_name=label, tags=dict(tags)).info.run_id
        return run

    def _continue_run(self, store: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(self._run, status="RUNNING")
        except MlflowException as error:  # a run of a comparison, resumed alone
            remedy = "Set MLFLOW_TRACKING_URI to its store, or resume with the command that started it"
            raise OtherRunError(f"{store} does not have the run {self._run}. {remedy}") from error

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


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep the other processes out: two that create a store or an experiment at a time would create two."""
    with (folder / ".mlflow.lock").open("w") as lock:
        while True:
            try:
                lock_file(lock)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield
