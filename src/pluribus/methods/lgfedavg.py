"""LG-FedAvg (Liang et al., 2020): clients average their heads and keep their feature extractors to themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import nn

from pluribus.message import Message
from pluribus.method import Need, register
from pluribus.methods.fedavg import FedAvg
from pluribus.models import Split
from pluribus.ops import averaged
from pluribus.server import Server


@register("lg-fedavg")
@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """The mean of heads, over feature extractors that never leave their clients."""

    paper = "Liang et al., arXiv 2020"
    up = "the head"
    down = "the global head"
    needs = frozenset({Need.SAME_WIDTH, Need.SAME_HEAD})
    defaults = MappingProxyType({})  # any mix of extractors

    weighting: Literal["samples", "uniform"] = "samples"
    """Whether a client counts by its training samples, or each client once."""

    def part(self, model: Split) -> nn.Module:
        return model.head

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.state.shared.load_state_dict(averaged(server, uploads, uniform=self.weighting == "uniform"))
