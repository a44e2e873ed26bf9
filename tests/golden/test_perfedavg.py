"""Per-FedAvg: its variants against softmax regression in double precision, the split of a batch, and adaptation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.functional import hvp
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from conftest import assemble_tiny, run_tiny
from kit import ByHand, differing
from parties import client_of, copies, data_of, equal, flat_split, noise
from pluribus.client import Client
from pluribus.errors import MismatchError, RangeError, UnknownNameError
from pluribus.internal.batches import Batch
from pluribus.message import Message
from pluribus.methods.perfedavg import PerFedAvg, split
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from pluribus.request import Evaluate
from refusals import refused
from toys import RowReader

LABELS = [0, 1, 2, 1, 0, 2, 2, 1, 0]
BETA = 0.5


def client_with(method: PerFedAvg, model: TwoPartModel | None = None, **how) -> Client:
    """A client with nine noisy images of three classes."""
    model = model or flat_split(16, 3)
    client = client_of(model, data_of(noise(9), LABELS), classes=3, rule=Rule(lr=BETA), **how)
    client.equip(method.optimizers(client), {})
    client.begin(0, 0, {})
    return client


def first(client: Client, n: int) -> Batch:
    positions = torch.arange(n)
    return Batch(*client.data["train"].take(positions), positions, n)


def flat(client: Client) -> Tensor:
    head = client.model.head
    return torch.cat([head.weight.detach().flatten(), head.bias.detach()]).double()


def regression(theta: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the linear model with these parameters."""
    logits = batch.x.flatten(1).double() @ theta[:48].view(3, 16).T + theta[48:]
    return F.cross_entropy(logits, batch.y)


def slope(theta: Tensor, batch: Batch) -> Tensor:
    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(regression(theta, batch), theta)[0]


class TestStep:
    def test_first_order(self):
        """theta' = theta - alpha grad(B1), then theta - beta grad(theta'; B2): the outer step starts from theta."""
        method = PerFedAvg(inner_lr=0.8, variant="first-order")
        client = client_with(method)
        theta, (b1, b2) = flat(client), split(first(client, 8), 2)
        expected = theta - BETA * slope(theta - 0.8 * slope(theta, b1), b2)
        loss = method.step(client, first(client, 8))
        torch.testing.assert_close(flat(client), expected, rtol=0, atol=1e-6)
        assert loss.item() == pytest.approx(regression(theta, b1).item(), abs=1e-6)

    def test_exact(self):
        """(I - alpha H(B3)) grad(theta'; B2): the Hessian of softmax regression is x x^T times diag(p) - p p^T."""
        method = PerFedAvg(inner_lr=0.8)
        client = client_with(method)
        theta, (b1, b2, b3) = flat(client), split(first(client, 9), 3)
        outer = slope(theta - 0.8 * slope(theta, b1), b2)
        x = torch.cat([b3.x.flatten(1), torch.ones(3, 1)], 1).double()  # the bias is a pixel that is always 1
        p = (x @ torch.cat([theta[:48].view(3, 16), theta[48:, None]], 1).T).softmax(1)
        inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        direction = torch.cat([outer[:48].view(3, 16), outer[48:, None]], 1)
        product = torch.einsum("sab,bj,sj,si->ai", inner, direction, x, x) / 3
        product = torch.cat([product[:, :16].flatten(), product[:, 16]])
        assert BETA * 0.8 * product.abs().max() > 0.04, "the term would be seen"
        method.step(client, first(client, 9))
        torch.testing.assert_close(flat(client), theta - BETA * (outer - 0.8 * product), rtol=0, atol=1e-6)

    def test_hessian_free(self):
        """(I - alpha H(B3)) grad(theta'; B2), H exactly by double backward; the difference is good to 4 digits."""
        method = PerFedAvg(inner_lr=0.8, variant="hessian-free")
        client = client_with(method)
        theta, (b1, b2, b3) = flat(client), split(first(client, 9), 3)
        outer = slope(theta - 0.8 * slope(theta, b1), b2)
        product = hvp(lambda at: regression(at, b3), theta, outer)[1]
        assert BETA * 0.8 * product.abs().max() > 0.04, "the term would be seen"
        method.step(client, first(client, 9))
        expected = theta - BETA * (outer - 0.8 * product)
        torch.testing.assert_close(flat(client), expected, rtol=0, atol=5e-5)

    def test_the_difference_is_central(self):
        """Its error falls with the square of its step: a large one is still near, a one-sided one would not be."""
        found = []
        for difference in (0.3, 0.1):
            method = PerFedAvg(inner_lr=0.8, variant="hessian-free", difference=difference)
            client = client_with(method)
            theta, (b1, b2, b3) = flat(client), split(first(client, 9), 3)
            outer = slope(theta - 0.8 * slope(theta, b1), b2)
            product = hvp(lambda at, b3=b3: regression(at, b3), theta, outer)[1]
            method.step(client, first(client, 9))
            found.append((flat(client) - theta + BETA * (outer - 0.8 * product)).norm().item())
        assert found[0] / found[1] > 6, "9 for a central difference, 3 for a one-sided one"

    def test_without_adaptation_it_is_a_step_of_fedavg_on_the_second_part(self):
        method = PerFedAvg(inner_lr=0.0, variant="first-order")
        adapted, plain = client_with(method), client_with(method)
        method.step(adapted, first(adapted, 8))
        loss = F.cross_entropy(plain.model(first(plain, 8).x[4:]), first(plain, 8).y[4:])
        plain.descend(loss)
        assert equal(copies(adapted), copies(plain))

    @pytest.mark.parametrize("variant", ["exact", "hessian-free"])
    def test_batch_norm_statistics_follow_the_global_parameters_once_a_step(self, variant):
        method = PerFedAvg(inner_lr=0.8, variant=variant)
        client = client_with(method, flat_split(16, 3, 0, nn.BatchNorm2d(1)))
        method.step(client, first(client, 9))
        norm = client.model.features[0]
        assert norm.num_batches_tracked == 1
        mean = 0.1 * first(client, 3).x.mean()  # momentum 0.1 from 0, on B1
        torch.testing.assert_close(norm.running_mean, mean[None])

    @pytest.mark.parametrize(("variant", "parts"), [("first-order", 2), ("hessian-free", 3), ("exact", 3)])
    def test_a_step_takes_as_many_batches_as_it_has_gradients(self, variant, parts):
        sizes = []

        class Watched(PerFedAvg):
            def step(self, client, batch):
                sizes.append(batch.n)
                return super().step(client, batch)

        method = Watched(variant=variant)
        client = client_with(method, batch=2)
        method.local_update(client)
        assert sizes[0] == parts * 2
        assert sum(sizes) == 9


def switching() -> TwoPartModel:
    """A hidden layer of eight units with ReLU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU()), nn.Linear(8, 3), 8)


def reading(kind: type[nn.RNNBase]) -> TwoPartModel:
    """A recurrent network that reads an image row by row."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return TwoPartModel(RowReader(kind, 4, 6), nn.Linear(6, 3), 6)


def by_hessian(client: Client, batch: Batch, direction: Tensor) -> Tensor:
    """The whole matrix of second derivatives in double precision, times the direction."""
    model = copy.deepcopy(client.model).double()
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def loss(theta: Tensor) -> Tensor:
        parts = torch.split(theta, [shape.numel() for shape in shapes.values()])
        named = {n: part.view(shape) for (n, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(model, named, (batch.x.double(),)), batch.y)

    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.func.hessian(loss)(theta) @ direction.double()


def products(client: Client, direction: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """What both variants take for Hessian times direction, as one vector each."""
    theta = {name: p.detach() for name, p in client.parameters().items()}
    found = {v: PerFedAvg(variant=v)._product(client, theta, direction, batch) for v in ("exact", "hessian-free")}
    return {v: torch.cat([product[n].flatten() for n in theta]) for v, product in found.items()}


class TestProduct:
    def test_where_a_unit_switches_only_the_exact_one_is_right(self):
        """The bias of each unit is such that it is 1e-4 below its threshold for the first image: a difference of
        1e-3 sees a slope that the function does not have at theta."""
        client = client_with(PerFedAvg(), switching())
        batch, linear = first(client, 9), client.model.features[1]
        with torch.no_grad():
            linear.bias.copy_(-1e-4 - linear.weight @ batch.x[0].flatten())
        generator = torch.Generator().manual_seed(0)
        direction = {n: torch.randn(p.shape, generator=generator) for n, p in client.parameters().items()}
        right = by_hessian(client, batch, torch.cat([value.flatten() for value in direction.values()]))
        off = {
            v: ((found - right).norm() / right.norm()).item() for v, found in products(client, direction, batch).items()
        }
        assert off["exact"] < 1e-5
        assert off["hessian-free"] > 0.1

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_of_recurrent_models(self, kind):
        client = client_with(PerFedAvg(), reading(kind))
        direction = {n: torch.ones_like(p) for n, p in client.parameters().items()}
        right = by_hessian(client, first(client, 9), torch.cat([d.flatten() for d in direction.values()]))
        found = products(client, direction, first(client, 9))["exact"]
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-6)

    def test_of_fused_attention(self):
        client = client_with(PerFedAvg(), TwoPartModel(Attention(), nn.Linear(4, 3), 4))
        direction = {n: torch.ones_like(p) for n, p in client.parameters().items()}
        with sdpa_kernel(SDPBackend.MATH):
            right = by_hessian(client, first(client, 9), torch.cat([d.flatten() for d in direction.values()]))
        found = products(client, direction, first(client, 9))["exact"]
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-6)

    def test_a_layer_that_has_one_derivative_only_is_refused_by_name(self):
        client = client_with(PerFedAvg(), flat_split(16, 3, 0, Once()))
        with refused(MismatchError, "'toy'", "--variant hessian-free"):
            PerFedAvg().step(client, first(client, 9))
        for variant in ("hessian-free", "first-order"):
            assert PerFedAvg(variant=variant).step(client, first(client, 9)).isfinite()


class Attention(nn.Module):
    """Rows of an image look at each other, by torch's fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.mix(x)
        return F.scaled_dot_product_attention(rows, rows, rows).mean((1, 2))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum()


class Once(nn.Module):
    """Images times a learned number, with a derivative that torch cannot differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.scale)


class TestSplit:
    def test_parts_are_disjoint_and_none_is_lost(self):
        whole = first(client_with(PerFedAvg()), 7)
        parts = split(whole, 3)
        assert [part.n for part in parts] == [len(part.x) for part in parts] == [2, 2, 3]
        for at in range(3):
            assert torch.equal(torch.cat([part[at] for part in parts]), whole[at])

    @pytest.mark.parametrize(("n", "parts", "whole"), [(1, 2, True), (3, 2, True), (4, 2, False), (5, 3, True)])
    def test_too_few_samples_serve_every_part(self, n, parts, whole):
        batch = first(client_with(PerFedAvg()), n)
        assert (split(batch, parts) == [batch] * parts) is whole if whole else len(split(batch, parts)[0].x) == 2


class TestAdapted:
    def test_one_step_at_the_inner_rate_on_one_batch_of_training_data(self):
        method = PerFedAvg(inner_lr=0.8)
        client = client_with(method)
        theta = flat(client)
        method.adapt(client, "before")
        assert torch.equal(flat(client), theta)
        method.adapt(client, "adapted")
        torch.testing.assert_close(
            flat(client), theta - 0.8 * slope(theta, first(client, 9)), rtol=0, atol=1e-6
        )  # batch 10: all nine

    def test_it_takes_no_more_than_a_batch(self):
        method = PerFedAvg(inner_lr=0.8)
        client = client_with(method, batch=3)
        theta = flat(client)
        order = torch.randperm(9, generator=client_with(method).draw("shuffle", 1, 0))[:3]
        x, y = client.data["train"].take(order)
        method.adapt(client, "adapted")
        expected = theta - 0.8 * slope(theta, Batch(x, y, order, 3))
        torch.testing.assert_close(flat(client), expected, rtol=0, atol=1e-6)

    def test_evaluation_measures_it_and_leaves_the_global_model_alone(self):
        hand = ByHand(assemble_tiny("per-fedavg", inner_lr=0.5))
        before = {n: v.clone() for n, v in hand.server.state.state_dict().items()}
        measured = hand.host.answer(Evaluate(0, 0, hand.download(0, 0))).figures
        assert measured["adapted"]["test_loss"] < measured["before"]["test_loss"]
        assert differing(before, hand.server.state.state_dict()) == []
        still = ByHand(assemble_tiny("per-fedavg", inner_lr=0.0))
        measured = still.host.answer(Evaluate(0, 0, still.download(0, 0))).figures
        assert measured["adapted"] == measured["before"]


def test_all_variants_learn():
    for variant in ("first-order", "hessian-free", "exact"):
        result = run_tiny("per-fedavg", variant=variant, rounds=4, models="mlp-64")
        losses = [record["loss"] for record in result.history]
        assert losses[-1] < losses[0]


def test_recurrent_models_learn():
    losses = [record["loss"] for record in run_tiny("per-fedavg", rounds=4, models="toys.lstm").history]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("wrong", "kind", "facts"),
    [
        ({"inner_lr": -0.1}, RangeError, ("--inner-lr", 0, -0.1)),
        ({"difference": 0.0}, RangeError, ("--difference", 0.0)),
        ({"variant": "newton"}, UnknownNameError, ("--variant", "exact", "hessian-free", "first-order", "newton")),
    ],
)
def test_refusals(wrong, kind, facts):
    with refused(kind, *facts):
        assemble_tiny("per-fedavg", **wrong)


def test_traffic_is_what_the_sheet_says():
    """The model each way, as FedAvg."""
    assert run_tiny("per-fedavg").ledger.by("tensor") == run_tiny("fedavg").ledger.by("tensor")


def test_the_upload_is_the_model():
    method = PerFedAvg()
    client = client_with(method)
    assert equal(dict(method.local_update(client)), Message.of(client.model).part())
