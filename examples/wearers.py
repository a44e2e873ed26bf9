"""People who wear a sensor are clients: each trains a model of its own on its own signals.

    python examples/wearers.py

The 30 wearers of UCI-HAR, if `uci-har` is in the data folder (`$PLURIBUS_DATA`); otherwise the 10 wearers of `watch`,
which is part of Pluribus. Five architectures take turns. Training alone is compared with FedProto and FedGH, whose
clients exchange class means. Of each recording the first part trains and the last part tests, and windows that reach
into a later part are left out, so that no window of a test overlaps one of training. On two CPU cores the wearers of
`watch` take three minutes.
"""

from typing import Any

import pluribus
from pluribus.data.datasets import cache_file, data_folder

METHODS = ("local", "fedproto", "fedgh")


def choose_data() -> str:
    """The larger data set, if it is on this machine."""
    original = data_folder() / "UCI HAR Dataset.zip"
    if cache_file("uci-har").exists() or original.exists():
        print(f"data: uci-har, from {data_folder()}")
        return "uci-har"
    print(f"data: watch. For 30 wearers, put '{original.name}' into {data_folder()}.")
    return "watch"


def compare_methods(data: Any, rounds: int = 10, **settings: Any) -> pluribus.Comparison:
    """Test accuracy over wearers, each on the last part of its own recordings."""
    who = {"data": data, "partition": "natural", "split_by": "time"}
    return pluribus.compare(METHODS, **who, models="sensor5", rounds=rounds, lr=0.05, **settings)


if __name__ == "__main__":
    compare_methods(choose_data()).table()
