"""Run folders: how a run is written and read back."""
