"""Parts of recorded steps that need no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import assemble_tiny, make_host
from pluribus.client import Client
from pluribus.engines.capture import _count_batches
from pluribus.models.depthwise import keep_planar


def client_with(model: nn.Module) -> Client:
    client = make_host(assemble_tiny("local")).client(0)
    client.model = model
    return client


def counters(model: nn.Module) -> list[int]:
    return [int(layer.num_batches_tracked) for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)]


class Twice(nn.Module):
    """The first layer is used twice, the second once, the third not at all, the last is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.never = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.frozen = nn.BatchNorm1d(3).eval()
        self.averaging = nn.BatchNorm1d(3, momentum=None)  # reads its counter: it keeps its own
        self.bare = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bare(self.averaging(self.frozen(self.once(self.twice(self.twice(x))))))


class TestBatchCounters:
    def test_they_advance_as_in_a_step_as_written(self):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        written, together = Twice(), Twice()
        outputs = [written(x), written(x)]
        client = client_with(together)
        before = [id(layer.num_batches_tracked) for layer in (together.twice, together.once)]
        for _ in range(2):
            with _count_batches(client):
                found = together(x)
        assert torch.equal(found, outputs[-1])
        expected, state = written.state_dict(), together.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert state["twice.num_batches_tracked"] == 4
        assert [id(layer.num_batches_tracked) for layer in (together.twice, together.once)] == before

    def test_a_step_that_fails_leaves_them(self):
        client = client_with(Twice())
        with pytest.raises(RuntimeError), _count_batches(client):
            client.model(client.model(torch.ones(2, 3)) @ torch.ones(4, 4))
        assert int(client.model.twice.num_batches_tracked) == 0
        assert int(client.model.averaging.num_batches_tracked) == 1


class TestPlanarImages:
    @pytest.mark.parametrize("size", [8, 1])
    def test_only_depthwise_layers_get_them(self, size):
        net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4))
        net = net.to(memory_format=torch.channels_last)
        expected = net(torch.ones(2, 4, size, size))
        keep_planar(net)
        seen: dict[int, tuple[int, ...]] = {}
        for number, layer in enumerate(net):
            layer.register_forward_pre_hook(lambda _, args, number=number: seen.update({number: args[0].stride()}))
        x = torch.ones(2, 4, size, size).to(memory_format=torch.channels_last)
        assert torch.allclose(net(x), expected, atol=1e-6)
        assert seen[0] == x.stride()
        assert seen[1] == torch.empty(2, 4, size, size).stride()
        assert net[1].weight.stride() == torch.empty(4, 1, 3, 3).stride()
        assert net[0].weight.stride() == net[0].weight.contiguous(memory_format=torch.channels_last).stride()
