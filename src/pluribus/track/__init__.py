"""Trackers: observers that log a run to TensorBoard, MLflow or W&B."""
