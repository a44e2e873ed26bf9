"""FedRolex (Alam et al., NeurIPS 2022): as HeteroFL, but the channels that clients train roll on with the rounds."""

from dataclasses import dataclass

from pluribus.method import register
from pluribus.methods.heterofl import HeteroFL


@register("fedrolex")
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """Clients train a window of channels that moves by one in each round, so that all of the model is trained."""

    paper = "Alam et al., NeurIPS 2022"

    scaler: bool = False
    """Divide activations by the client's share of the width in training, as HeteroFL does."""

    def first(self, t: int) -> int:
        return max(t, 0)  # before round 0 there is no window yet
