"""Models: features and head, a zoo of architectures, and groups of architectures for mixed federations."""

from pluribus.models import plain, tiny, vision, vits  # noqa: F401, I001  importing them fills the zoo, in this order
from pluribus.models import signals, texts, tables  # noqa: F401  models for other rows than images
from pluribus.models import group_norm  # noqa: F401  twins of models above
from pluribus.models.groups import GROUPS, Group, assign, width_of
from pluribus.models.own import OwnModel, own_models, take_models
from pluribus.models.two_part import TwoPartModel
from pluribus.models.zoo import (
    GROUP_OF,
    ModelEntry,
    build,
    comes_with_library,
    entries,
    find_own_builders,
    has_weights,
    note_on,
    register_model,
)

__all__ = [
    "GROUPS",
    "GROUP_OF",
    "Group",
    "ModelEntry",
    "OwnModel",
    "TwoPartModel",
    "assign",
    "build",
    "comes_with_library",
    "entries",
    "find_own_builders",
    "has_weights",
    "note_on",
    "own_models",
    "register_model",
    "take_models",
    "width_of",
]
