"""LG-FedAvg (Liang et al., 2020): clients average their heads and keep their feature extractors private."""

from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from pluribus.method import Need, register
from pluribus.methods.fedavg import FedAvg
from pluribus.models import TwoPartModel


@register("lg-fedavg")
@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """Average heads; feature extractors stay private."""

    paper = "Liang et al., arXiv 2020"
    family = "layers"
    up = "the head"
    down = "the global head"
    needs = frozenset({Need.SAME_WIDTH, Need.SAME_HEAD})
    defaults = MappingProxyType({})  # any mix of extractors

    def part(self, model: TwoPartModel) -> nn.Module:
        return model.head
