"""Weights & Biases: files in RUN/wandb. Nothing is sent unless WANDB_MODE=online is set.

Runs that belong together are a group, unless WANDB_RUN_GROUP names another one.

wandb sync RUN/wandb/offline-run-*
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from pluribus.track.tracker import Tracker, identity


class WandB(Tracker):
    """Writes configuration, history and summary for W&B."""

    name = "wandb"

    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when W&B is imported
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        tags = self.tags(folder, settings)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pluribus"),
            name=self.run_name(folder),
            group=os.environ.get("WANDB_RUN_GROUP", tags.pop("study", None)),
            tags=[f"{name}:{value}" for name, value in tags.items()],
            id=identity(folder, self.name, lambda: uuid4().hex[:12]),
            resume="allow",
            dir=str(folder),  # W&B adds its name
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(  # log nothing about this machine and its console
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"round": step, **metrics}, step=step)

    def end(self, step: int, metrics: Mapping[str, float] | None) -> None:
        self._run.summary.update(dict(metrics or {}))
        self._run.finish(exit_code=1 if metrics is None else 0)
