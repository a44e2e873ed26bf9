"""Models: features and head, a zoo of architectures, and groups of architectures for mixed federations."""

from pluribus.models import plain, tiny, vision, vits  # noqa: F401  importing them fills the zoo
from pluribus.models.groups import GROUPS, Group, assign, width_of
from pluribus.models.two_part import TwoPartModel
from pluribus.models.zoo import ModelEntry, build, entries, has_weights, register_model

__all__ = [
    "GROUPS",
    "Group",
    "ModelEntry",
    "TwoPartModel",
    "assign",
    "build",
    "entries",
    "has_weights",
    "register_model",
    "width_of",
]
