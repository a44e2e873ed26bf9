"""Data sets, their partition among clients, and the split of each client's rows."""

from pluribus.data import domains as domains  # registers the data sets with domains
from pluribus.data import sets as sets  # registers those of the other kinds, and those with natural clients
from pluribus.data.dataset import Dataset
from pluribus.data.datasets import entries, load, register_data
from pluribus.data.partition import Manifest, by_domain
from pluribus.data.partitions import PARTITIONS, partition, register_partition
from pluribus.data.split import split

__all__ = [
    "PARTITIONS",
    "Dataset",
    "Manifest",
    "by_domain",
    "entries",
    "load",
    "partition",
    "register_data",
    "register_partition",
    "split",
]
