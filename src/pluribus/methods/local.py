"""Local training: what every method has to beat."""

from dataclasses import dataclass

from pluribus.method import Method, register


@register("local")
@dataclass(frozen=True)
class Local(Method):
    """Each client trains on its own data; nothing travels."""

    paper = "baseline"
