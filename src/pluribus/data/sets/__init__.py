"""Data sets by name that are tables, texts or signals, or whose rows have natural clients."""

from pluribus.data.sets import tables as tables
from pluribus.data.sets import texts as texts
from pluribus.data.sets import wearers as wearers
from pluribus.data.sets import writers as writers
