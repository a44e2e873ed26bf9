"""Local training: the baseline of every method."""

from dataclasses import dataclass

from pluribus.method import Method, register
from pluribus.targets import TARGETS


@register("local")
@dataclass(frozen=True)
class Local(Method):
    """Each client trains on its own data; nothing is sent."""

    paper = "baseline"
    family = "baseline"
    targets = TARGETS
