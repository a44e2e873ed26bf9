"""Any model of timm by its name there: `timm:resnet10t`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pluribus.errors import unknown
from pluribus.internal.late import import_late
from pluribus.models.pretrained import Origin
from pluribus.models.probe import Shape

TIMM = "timm:"


@dataclass(frozen=True, eq=False)
class TimmBackbone:
    """Builds a model of timm without its head, for any number of channels and, where it asks for one, any size."""

    name: str
    origin: Origin | None  # of its pretrained weights
    fixed_size: bool  # whether it is built for images of one size

    def __call__(self, shape: Shape) -> nn.Module:
        channels, height, width = shape
        sized = {"img_size": (height, width)} if self.fixed_size else {}
        made: nn.Module = import_late("timm").create_model(self.name, num_classes=0, in_chans=channels, **sized)
        return made


def timm_backbone(name: str) -> TimmBackbone:
    """The builder of a model of timm. An unknown name is refused."""
    timm = import_late("timm")
    if not timm.is_model(name):
        raise unknown("model of timm", name, timm.list_models(), "timm.list_models()")
    config = timm.get_pretrained_cfg(name)
    if config is None:  # timm has no weights for it
        return TimmBackbone(name, None, fixed_size=False)
    return TimmBackbone(name, Origin("timm", name, config.mean, config.std), bool(config.fixed_input_size))
