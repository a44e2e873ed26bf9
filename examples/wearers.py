"""People who wear a sensor are clients: each trains a model of its own on its own signals.

    python examples/wearers.py

The 30 wearers of UCI-HAR, if `uci-har` is in the data folder (`$PLURIBUS_DATA`); otherwise the 10 wearers of `watch`,
which is part of Pluribus. Five architectures take turns. Training alone is compared with two methods that exchange class
means: FedProto and FedGH. Of each recording the first part trains and the last part tests, so that no window of a test
overlaps one of training.
"""

import sys

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


def compare_methods(data: str, rounds: int = 10, progress: bool = True) -> pluribus.Comparison:
    """Test accuracy over wearers, each on the last part of its own recordings."""
    return pluribus.compare(
        METHODS,
        data=data,
        partition="natural",
        split_by="time",
        models="sensor5",
        rounds=rounds,
        lr=0.05,
        device="cpu",
        progress=progress,
    )


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    compare_methods(choose_data(), rounds).table()
