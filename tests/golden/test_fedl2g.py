"""FedL2G, by hand from Eq. 4 to 9 and Algorithm 1 of the paper, and the promises of its page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pluribus
from conftest import assemble_tiny, make_host, new_folder, run_tiny, tiny
from kit import ByHand, Memory, StopAfter, StoppedError, check_step, checked_steps, differing, kept, numbers
from parties import CPU, card_of, copies, data_of, noise, server_of, signs, task_of
from pluribus.assembly import assemble
from pluribus.client import Batch, Client, Local
from pluribus.data.augment import Augment
from pluribus.data.federated import Data, Store
from pluribus.data.scaling import Scale
from pluribus.errors import MismatchError, NoModelError, NotFiniteError, PartitionError, RangeError
from pluribus.experiment import experiment
from pluribus.message import Kept, Message, Rows, decode, encode
from pluribus.methods.fedl2g import FedL2G, FedL2GFeatures, FedL2GLogits
from pluribus.models import TwoPartModel
from pluribus.models.dropout import Dropout
from pluribus.ops import jvp_by_double_backward
from pluribus.optim import Rule
from pluribus.request import Work
from pluribus.result import Result
from pluribus.storage.folder import RunFolder
from pluribus.study.budget import equal_rounds
from pluribus.terminal import Progress
from refusals import refused
from toys import RowReader

C, K = 10, 64  # of the small group on digits
BOTH = {"fedl2g-l": FedL2GLogits, "fedl2g-f": FedL2GFeatures}
both_variants = pytest.mark.parametrize("cls", BOTH.values(), ids=BOTH.keys())
both_names = pytest.mark.parametrize("name", BOTH)


# ---- small parties ---------------------------------------------------------------------------------------------------


def plain() -> TwoPartModel:
    return TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh()), nn.Linear(6, 3), 6)


def normalized() -> TwoPartModel:
    """Batch norm over images and over features."""
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 6))
    return TwoPartModel(nn.Sequential(*body, nn.BatchNorm1d(6), nn.Tanh()), nn.Linear(6, 3), 6)


def dropping() -> TwoPartModel:
    """Dropout before and behind the features."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Dropout(0.5), nn.Tanh(), nn.Linear(12, 6))
    return TwoPartModel(body, nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 3)), 6)


def two_layer_head() -> TwoPartModel:
    head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(16, 6)), head, 6)


def transformer() -> TwoPartModel:
    """A vision transformer of timm with fused attention, and dropout inside."""
    from pluribus.internal import torchvision as _torchvision  # noqa: F401

    from timm.models.vision_transformer import VisionTransformer  # isort: skip

    net = VisionTransformer(
        img_size=16, patch_size=8, in_chans=1, embed_dim=32, depth=1, num_heads=2, num_classes=0, proj_drop_rate=0.1
    )
    assert net.blocks[0].attn.fused_attn
    return TwoPartModel(net, nn.Linear(32, 3), 32)


MODELS = {"plain": plain, "batch norm": normalized, "dropout": dropping, "another head": two_layer_head}
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())


class DoubleStore(Store):
    """Images in double precision."""

    def take(self, rows: Tensor, augment: Augment | None = None, scale: Scale | None = None) -> tuple[Tensor, Tensor]:
        x, y = super().take(rows, augment, scale)
        return x.double(), y


def client_for(
    method: FedL2G,
    model: TwoPartModel,
    data: Data,
    guides: Tensor | None = None,
    *,
    classes: int = 3,
    lr: float = 0.5,
    batch: int = 8,
    k: int = 0,
    t: int = 0,
    warmup: int = 0,
) -> Client:
    """A client that a host would bring to life, with these guiding vectors received, in round t."""
    task = replace(task_of(classes, model.width, clients=k + 1), warmup=warmup)
    card = card_of(k, task, len(data))
    client = Client(card, task, model, {"train": data}, Local(Rule(lr=lr), 1, batch), CPU)
    method.prepare(client)
    client.equip(method.optimizers(client), method.schema(task, card).down)
    client.begin(t, 0, {})
    if guides is None:
        shape = (classes, method.guide_width(task, card))
        guides = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    client.take(Message({"guides": guides}))
    return client


def in_double(client: Client) -> Client:
    client.model.double()
    client.state.double()
    client.got = Kept({name: value.double() for name, value in client.got.items()})
    for name, data in client.data.items():
        client.data[name] = Data(DoubleStore(data.store.x, data.store.y, CPU), data.rows)
    return client


def random_client(method: FedL2G, build, samples: int = 24, side: int = 4, **how) -> Client:
    """Random images of three classes, and a random model in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = build()
    images = noise(samples, (1, side, side))
    return in_double(client_for(method, model, data_of(images, [i % 3 for i in range(samples)]), **how))


def guide(method: FedL2G, client: Client) -> tuple[Batch, Tensor]:
    """Lines 10 and 11: the study batch that was drawn, and pi."""
    batches: list[Batch] = []

    def watched(client: Client, batch: Batch) -> Tensor:
        batches.append(batch)
        return method.guide_step(client, batch)

    client.fit(watched, on="study", steps=1)
    (batch,) = batches
    return batch, client.state.gradient.clone()


def quiz_of(client: Client) -> tuple[Tensor, Tensor]:
    quiz = client.data["quiz"]
    return quiz.take(torch.arange(len(quiz)))


def after_a_pseudo_step(
    cls: type[FedL2G], client: Client, batch: Batch, guides: Tensor, differentiable: bool
) -> Tensor:
    """The quiz loss at theta', Eq. 5 and 6, as they are written: one SGD step on Eq. 4, then cross-entropy."""
    theta = {name: p.detach().clone().requires_grad_() for name, p in client.parameters().items()}
    features = client.call(batch.x, theta, "features")
    logits = client.call(features, theta, "head")
    guided = logits if cls is FedL2GLogits else features
    distance = (guided - guides[batch.y]).square().sum() / guided.numel()
    loss = F.cross_entropy(logits, batch.y) + distance
    gradients = torch.autograd.grad(loss, list(theta.values()), create_graph=differentiable)
    moved = {n: p - client.local.rule.lr * g for (n, p), g in zip(theta.items(), gradients, strict=True)}
    x, y = quiz_of(client)
    return F.cross_entropy(client.call(client.call(x, moved, "features"), moved, "head"), y)


def by_double_backward(cls: type[FedL2G], client: Client, batch: Batch) -> Tensor:
    guides = client.got["guides"].clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.grad(after_a_pseudo_step(cls, client, batch, guides, True), guides)[0]


def by_finite_differences(cls: type[FedL2G], client: Client, batch: Batch, step: float = 1e-4) -> Tensor:
    guides, found = client.got["guides"], torch.zeros_like(client.got["guides"])
    for c in range(guides.shape[0]):
        for m in range(guides.shape[1]):
            up, down = guides.clone(), guides.clone()
            up[c, m] += step
            down[c, m] -= step
            higher, lower = (after_a_pseudo_step(cls, client, batch, g, False) for g in (up, down))
            found[c, m] = (higher - lower) / (2 * step)
    return found


# ---- the gradient of the guiding vectors -----------------------------------------------------------------------------


class TestGradient:
    """Eq. 7, which the code has as two gradients and one Jacobian-vector product."""

    @both_variants
    @every_model
    def test_is_what_autograd_finds_through_the_pseudo_step(self, cls, build):
        method = cls()
        client = random_client(method, build)
        batch, pi = guide(method, client)
        assert pi.abs().max() > 1e-4
        torch.testing.assert_close(pi, by_double_backward(cls, client, batch), rtol=1e-10, atol=1e-15)

    @both_variants
    @every_model
    def test_is_what_finite_differences_find(self, cls, build):
        method = cls()
        client = random_client(method, build)
        batch, pi = guide(method, client)
        torch.testing.assert_close(pi, by_finite_differences(cls, client, batch), rtol=1e-6, atol=1e-10)

    @both_variants
    def test_of_a_vision_transformer(self, cls):
        method = cls()
        client = random_client(method, transformer, side=16)
        batch, pi = guide(method, client)
        assert pi.abs().max() > 1e-4
        torch.testing.assert_close(pi, by_double_backward(cls, client, batch), rtol=1e-9, atol=1e-14)

    @both_variants
    @every_model
    def test_forward_mode_and_a_double_backward_pass_agree(self, cls, build):
        method = cls()
        client = random_client(method, build)
        found = []

        def both(client: Client, batch: Batch) -> Tensor:
            def activations(theta: Mapping[str, Tensor]) -> Tensor:
                return method.guided(*method._forward(client, batch.x, theta))

            theta = {name: p.detach() for name, p in client.parameters().items()}
            direction = {name: torch.cos(torch.arange(p.numel()).double()).view_as(p) for name, p in theta.items()}
            found.append(jvp(activations, (theta,), (direction,))[1])
            found.append(jvp_by_double_backward(client, activations, theta, direction))
            return torch.zeros(())

        client.fit(both, on="study", steps=1)
        assert found[0].abs().max() > 0.1
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)

    @both_variants
    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_of_a_recurrent_model(self, cls, kind):
        """In single precision, where torch runs an LSTM as one kernel that has no forward-mode derivative."""
        method = cls()

        def build() -> TwoPartModel:
            return TwoPartModel(RowReader(kind, 4, 6), nn.Linear(6, 3), 6)

        exact_client = random_client(method, build)
        batch, exact = guide(method, exact_client)
        torch.testing.assert_close(exact, by_double_backward(cls, exact_client, batch), rtol=1e-9, atol=1e-14)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            client = client_for(method, build(), data_of(noise(24), [i % 3 for i in range(24)]))
        pi = guide(method, client)[1]
        assert exact.abs().max() > 1e-5
        torch.testing.assert_close(pi.double(), exact, rtol=1e-3, atol=1e-7)

    @both_variants
    def test_in_the_precision_of_training(self, cls):
        method = cls()
        exact = guide(method, random_client(method, plain))[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            client = client_for(method, plain(), data_of(noise(24), [i % 3 for i in range(24)]))
        pi = guide(method, client)[1]
        assert pi.dtype == torch.float32
        torch.testing.assert_close(pi.double(), exact, rtol=1e-4, atol=1e-7)

    def test_of_logits_by_hand(self):
        """x = 1, y = 0 throughout, W = 0, v^0 = (1, -1), eta_c = 1: p = (1/2, 1/2), M = 2.

        Gradient of Eq. 4: (p - e_0) + (2/M)(o - v^0) = (-1/2, 1/2) + (-1, 1); W' = (3/2, -3/2).
        Quiz: p_0 = sigma(3) = 0.95257413, g_q = (p_0 - 1, 1 - p_0) = (-0.04742587, 0.04742587), J = x = 1.
        pi^0 = (2 eta_c / M) J g_q = g_q, and no sample has class 1.
        """
        model = TwoPartModel(nn.Flatten(), nn.Linear(1, 2, bias=False), 1)
        nn.init.zeros_(model.head.weight)
        method = FedL2GLogits(quiz=2)
        guides = torch.tensor([[1.0, -1.0], [5.0, 7.0]])
        client = client_for(method, model, data_of(signs([[1]] * 6), [0] * 6), guides, classes=2, lr=1.0)
        _, pi = guide(method, client)
        assert pi.tolist() == [pytest.approx([-0.04742587, 0.04742587], abs=1e-7), [0, 0]]
        assert model.head.weight.tolist() == [[0], [0]]

    def test_of_features_by_hand(self):
        """z = w x with w = x = 1, o = (z, -z), y = 0, v^0 = 3, eta_c = 1/10, M = 1.

        p_0 = sigma(2) = 0.88079708. Gradient for W: (p - e_0) z = (-0.11920292, 0.11920292); for w:
        W (p - e_0) + 2 (z - 3) = -0.23840584 - 4. W' = (1.01192029, -1.01192029), w' = 1.42384058.
        Quiz: z = 1.42384058, o_0 - o_1 = 2.88162636, p_0 = 0.94693065, g_w = 2 * 1.01192029 * (p_0 - 1) = -0.10740390.
        J is 1 for w and 0 for W: pi^0 = 2 eta_c g_w = -0.02148078.
        """
        model = TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(1, 1, bias=False)), nn.Linear(1, 2, bias=False), 1)
        nn.init.ones_(model.features[1].weight)
        model.head.load_state_dict({"weight": torch.tensor([[1.0], [-1.0]])})
        method = FedL2GFeatures(quiz=2)
        guides = torch.tensor([[3.0], [8.0]])
        client = client_for(method, model, data_of(signs([[1]] * 6), [0] * 6), guides, classes=2, lr=0.1)
        _, pi = guide(method, client)
        assert pi.tolist() == [pytest.approx([-0.02148078], abs=1e-7), [0]]

    @both_variants
    def test_follows_the_pseudo_step_and_not_the_first_model(self, cls):
        """g_q is taken at theta': at theta it would be another."""
        method = cls()
        client = random_client(method, plain)
        batch, pi = guide(method, client)
        theta = {name: p.detach() for name, p in client.parameters().items()}
        x, y = quiz_of(client)
        at_theta = torch.func.grad(lambda theta: F.cross_entropy(client.call(x, theta), y))(theta)
        part = "" if cls is FedL2GLogits else "features"
        rate = torch.func.jvp(lambda theta: client.call(batch.x, theta, part), (theta,), (at_theta,))[1]
        members = F.one_hot(batch.y, 3).double()
        first_order = 2 * 0.5 / (rate.shape[1] * batch.n) * members.T @ rate
        assert (pi - first_order).norm() > 0.01 * pi.norm()

    @both_variants
    def test_without_a_learning_rate_there_is_none(self, cls):
        method = cls()
        client = random_client(method, plain, lr=0.0)
        _, pi = guide(method, client)
        assert not pi.any()
        assert not method.local_update(client).rows("gradient").held.any()


class TestGuideStep:
    @pytest.mark.parametrize("model", ["resnet18", "cnn4"])  # one layer of cnn4 is three quarters of it
    @both_variants
    def test_takes_little_more_memory_than_a_training_step(self, cls, model):
        method = assemble_tiny(cls, models=model, image_size=32, clients=2, batch_size=10, warmup=0)
        client = make_host(method).client(0)
        client.begin(0, 0, {})
        batch = Batch(*client.data["study"].take(torch.arange(10)), torch.arange(10), 10)
        weights = sum(value.nbytes for value in client.tensors().values())
        peaks = []
        for step in (method.method.step, method.method.guide_step):
            with client._training(10), Memory(client.tensors().values()) as memory:
                step(client, batch)
            peaks.append(weights + memory.peak)
        assert peaks[0] > 2 * weights  # there are gradients
        assert peaks[1] <= 1.2 * peaks[0]

    @both_variants
    def test_moves_no_weight_and_no_statistic(self, cls):
        method = cls()
        client = random_client(method, normalized)
        before = copies(client)
        guide(method, client)
        after = copies(client)
        assert sorted(differing(before, after)) == ["state.gradient"]
        assert any(name.endswith("running_mean") for name in after)
        assert any(name.endswith("num_batches_tracked") for name in after)

    @both_variants
    def test_normalizes_by_the_batch(self, cls):
        """In train mode: the running statistics have no part in it."""
        found = []
        for shift in (0.0, 5.0):
            method = cls()
            client = random_client(method, normalized)
            client.model.features[1].running_mean.add_(shift)
            found.append(guide(method, client)[1])
        assert torch.equal(*found)

    @both_variants
    def test_drops_the_same_units_in_every_pass_over_the_study_batch(self, cls):
        masks: list[Tensor] = []

        class Watched(Dropout):
            def forward(self, x: Tensor) -> Tensor:
                mask = super().forward(torch.ones(x.shape, dtype=torch.float64))
                masks.append(mask)
                return x * mask

        def build() -> TwoPartModel:
            return TwoPartModel(
                nn.Sequential(nn.Flatten(), nn.Linear(16, 6), Watched(0.5), nn.Tanh()), nn.Linear(6, 3), 6
            )

        method = cls(quiz=5)  # another size than the study batch, so that its mask can be told apart
        client = random_client(method, build)
        guide(method, client)
        study = [mask for mask in masks if len(mask) == 8]
        assert len(study) == 2
        assert torch.equal(*study)
        assert 0 < (study[0] == 0).sum() < study[0].numel()
        masks.clear()
        client.begin(1, 0, {})
        guide(method, client)
        assert not torch.equal(masks[0], study[0])

    @both_variants
    def test_is_a_pure_tensor_program(self, cls):
        method = cls()
        client = client_for(method, normalized(), data_of(noise(24), [i % 3 for i in range(24)]))
        check_step(method, client, method.guide_step, client.data["study"], 8)
        check_step(method, client, method.step, client.data["study"], 8)

    @both_names
    def test_is_checked_by_the_kit_beside_the_training_step(self, name):
        settings = {"clients": 2, "partition": "iid", "models": "mlp-64,cnn-16-32"}
        with checked_steps(assemble_tiny(name, **settings).method) as checked:
            run_tiny(name, **settings)
        assert {step.split(".")[-1] for step in checked} == {"step", "guide_step"}

    @both_variants
    def test_takes_another_study_batch_every_round(self, cls):
        method, seen = cls(), []
        for t in range(3):
            client = random_client(method, plain, t=t)
            seen.append(frozenset(client.data["study"].rows[guide(method, client)[0].i].tolist()))
        assert len(set(seen)) == 3
        assert all(len(rows) == 8 for rows in seen)


# ---- the loss --------------------------------------------------------------------------------------------------------


class TestLoss:
    """Eq. 4: cross-entropy plus the mean, over batch and dimensions, of (a - v^y)^2."""

    def test_of_logits_by_hand(self):
        """x = (1, -1), y = (0, 1), W = 0, v^0 = (1, -1), v^1 = (0, 2), eta_c = 1.

        Cross-entropy: the mean of (p - e_y) x is (-1/2, 1/2). Distance, four numbers in all: (2/4) sum of (0 - v) x
        is ((-1 + 0) / 2, (1 + 2) / 2) = (-1/2, 3/2). W' = (1, -2), and the loss that is logged is ln 2.
        """
        model = TwoPartModel(nn.Flatten(), nn.Linear(1, 2, bias=False), 1)
        nn.init.zeros_(model.head.weight)
        method = FedL2GLogits()
        data = data_of(signs([[1], [-1]]), [0, 1])
        client = client_for(method, model, data, torch.tensor([[1.0, -1.0], [0.0, 2.0]]), classes=2, lr=1.0)
        loss = method.step(client, Batch(*data.take(torch.arange(2)), torch.arange(2), 2))
        assert model.head.weight.tolist() == [[1], [-2]]
        assert loss.item() == pytest.approx(0.6931472)

    def test_of_features_by_hand(self):
        """z = w x with w = (1, 2), x = (1, -1), y = (0, 1), head 0, v^0 = (3, 0), v^1 = (-1, 2), eta_c = 1.

        The head is 0, so cross-entropy moves w by nothing. Distance: (2/4) sum of (z - v) x over both samples;
        first (1 - 3) + (-1 + 1)(-1) = -2, second (2 - 0) + (-2 - 2)(-1) = 6: w' = (1 + 1, 2 - 3) = (2, -1).
        The mean of (p - e_y) z^T for class 0 is -1/2 ((1, 2) - (-1, -2)) / 2 = -1/2 (1, 2).
        """
        features = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
        model = TwoPartModel(features, nn.Linear(2, 2, bias=False), 2)
        features[1].load_state_dict({"weight": torch.tensor([[1.0], [2.0]])})
        nn.init.zeros_(model.head.weight)
        method = FedL2GFeatures()
        data = data_of(signs([[1], [-1]]), [0, 1])
        client = client_for(method, model, data, torch.tensor([[3.0, 0.0], [-1.0, 2.0]]), classes=2, lr=1.0)
        loss = method.step(client, Batch(*data.take(torch.arange(2)), torch.arange(2), 2))
        assert features[1].weight.tolist() == [[2], [-1]]
        assert model.head.weight.tolist() == [[0.5, 1], [-0.5, -1]]
        assert loss.item() == pytest.approx(0.6931472)

    @both_names
    def test_what_is_logged_is_the_cross_entropy_of_the_study_over_its_samples(self, name, monkeypatch):
        """Of each batch as it is met; not that of the report's batch, and none in the warm-up."""
        hand = ByHand(assemble_tiny(name, models="mlp-64", warmup=1, epochs=2))
        with torch.no_grad():
            hand.server.state.guides.mul_(100)  # the distance would show
        step, met = FedL2G.step, list[tuple[float, int]]()

        def watched(method, client, batch):
            with torch.no_grad():
                met.append((F.cross_entropy(client.model(batch.x), batch.y).item(), batch.n))
            return step(method, client, batch)

        monkeypatch.setattr(FedL2G, "step", watched)
        assert hand.host.answer(Work(0, 0, 0, hand.download(0, 0))).loss is None
        assert met == []
        reply = hand.host.answer(Work(0, 1, 0, hand.download(0, 0)))
        assert len({n for _, n in met}) == 2  # the last batch of an epoch is smaller, and counts less
        assert reply.loss == pytest.approx(sum(loss * n for loss, n in met) / sum(n for _, n in met), rel=1e-5)


# ---- who reports what ------------------------------------------------------------------------------------------------


class TestReports:
    @both_variants
    def test_only_classes_of_the_study_batch_are_sent(self, cls):
        """Five classes, of which the client holds three and the batch may miss one."""
        seen = set()
        for t in range(8):
            method = cls()
            labels = [(0, 2, 3)[i % 3] for i in range(24)]
            model = TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh()), nn.Linear(6, 5), 6)
            client = client_for(method, model, data_of(noise(24), labels), classes=5, batch=3, t=t, warmup=8)
            batch, pi = guide(method, client)
            here = set(batch.y.tolist())
            for c in range(5):
                assert bool(pi[c].any()) == (c in here)
            client.begin(t, 0, {})
            rows = method.local_update(client).rows("gradient")
            assert set(rows.held.nonzero().flatten().tolist()) == here
            assert not rows.value[~rows.held].any()
            seen.add(len(here))
        assert min(seen) < 3

    @both_variants
    def test_a_model_that_diverged_is_refused_by_name(self, cls):
        method = cls()
        client = random_client(method, plain)
        with torch.no_grad():
            client.model.head.weight.fill_(float("nan"))
        up = method.schema(client.task, client.card).up
        message = method.local_update(client)
        single = {n: Rows(r.value.float(), r.held) for n, r in message.items()}
        with refused(NotFiniteError, "client 0", "'gradient'"):
            encode(Message(single), up, "client 0")

    @both_names
    @pytest.mark.parametrize("batch", [4, 10])
    def test_bytes(self, name, batch):
        """Up: at most min(B, c_i) rows with their class numbers. Down: C x M floats."""
        settings = {"rounds": 2, "partition": "pathological", "classes_per_client": 5, "batch_size": batch}
        result, parts = run_tiny(name, **settings), assemble_tiny(name, **settings)
        width = C if name == "fedl2g-l" else K
        entries = list(result.ledger.entries())
        down = [(e.tensor, e.bytes) for e in entries if e.direction == "down" and e.tensor != "(header)"]
        assert down == [("guides", 4 * C * width)] * 12
        for t in range(3):
            for k in range(4):
                sent = {e.tensor: e.bytes for e in entries if (e.round, e.client, e.direction) == (t, k, "up")}
                assert sent.pop("(header)") > 0
                rows = sent["gradient.ids"] // 4
                assert sent == {"gradient": 4 * rows * width, "gradient.ids": 4 * rows}
                assert 1 <= rows <= min(batch, sum(count > 0 for count in parts.data.counts(k)))
        assert result.bytes["evaluation"] == 0

    def test_a_message_to_the_byte(self):
        """The numbers of the page: digits, K = 64, a study batch of seven classes."""
        for cls, down, up in ((FedL2GLogits, 480, 452), (FedL2GFeatures, 2640, 1972)):
            task = task_of(C, K)
            wire = cls().schema(task, card_of(0, task))
            width = cls().guide_width(task, card_of(0, task))
            held = torch.arange(C) < 7
            assert len(encode(Message({"guides": torch.ones(C, width)}), wire.down, "server")) == down
            rows = Rows(torch.ones(C, width) * held[:, None], held)
            assert len(encode(Message({"gradient": rows}), wire.up, "client")) == up


# ---- warm-up ---------------------------------------------------------------------------------------------------------


class TestWarmUp:
    @both_names
    def test_only_the_guides_learn(self, name):
        hand = ByHand(assemble_tiny(name, rounds=3, warmup=2))
        born = {n: v for n, v in hand.tensors().items() if " model." in n}
        guides = [hand.server.state.guides.clone()]
        for t in range(3):
            answers = hand.round(t, range(4))
            guides.append(hand.server.state.guides.clone())
            assert not torch.equal(guides[t], guides[t + 1])
            for (_, k), data in answers.items():
                assert decode(data, hand.host.wires(k)[0].up, "client").rows("gradient").held.any()
            now = {n: v for n, v in hand.tensors().items() if " model." in n}
            changed = differing(born, now)
            heads = [f"client {k} model.head.weight" for k in range(4)]
            assert changed == [] if t < 2 else set(heads) <= set(changed)

    @both_names
    def test_comes_before_the_rounds_of_training(self, name):
        """T' = 3 and T = 4: seven rounds in the records, of which the last four train."""
        result = run_tiny(name, rounds=4, warmup=3, evaluate_every=3)
        assert (result.warmup, result.rounds) == (3, 4)
        assert [record["round"] for record in result.history] == list(range(7))
        assert [record["loss"] is None for record in result.history] == [True] * 3 + [False] * 4
        evaluated = [record["round"] for record in result.history if record["clients"]]
        assert evaluated == [5, 6]  # the third round of training, and the last
        told = result.to_json()
        assert (told["rounds"], told["warmup"]) == (4, 3)
        again = Result.read(result.folder)
        assert (again.rounds, again.warmup, again.accuracy) == (4, 3, result.accuracy)

    @both_variants
    def test_has_fifty_rounds_however_short_the_run_is(self, cls):
        assert cls().warmup_rounds() == 50
        one = experiment(cls, rounds=1)
        assert (one.rounds, one.all_rounds()) == (1, 51)
        task = assemble(one).task
        assert (task.rounds, task.warmup) == (51, 50)

    @both_names
    def test_none_is_an_ablation_that_the_run_tells_of(self, name):
        assert any("--warmup" in warning for warning in assemble_tiny(name, warmup=0).warnings)
        assert not any("--warmup" in warning for warning in assemble_tiny(name, warmup=1).warnings)
        with refused(RangeError, "--warmup", 0, -1):
            assemble_tiny(name, warmup=-1)

    def test_the_learning_rate_decays_from_the_first_round_of_training_on(self):
        host = make_host(assemble_tiny("fedl2g-l", lr=0.5, lr_decay=0.1, warmup=3))
        rates = []
        for t in range(5):
            client = host.client(0)
            client.begin(t, 0, {})
            rates.append((client.now["lr"].item(), client.optimizers["model"]._torch.param_groups[0]["lr"]))
        assert rates == [pytest.approx((rate, rate)) for rate in (0.5, 0.5, 0.5, 0.5, 0.05)]

    @both_names
    @pytest.mark.parametrize("last", [1, 2, 3])
    def test_a_run_stopped_in_it_resumes_to_the_same_bits(self, name, last):
        """In the midst, at its end, and after a round of training."""
        settings = {"rounds": 2, "warmup": 3, "checkpoint_every": 1}
        whole, folder = run_tiny(name, **settings), new_folder()
        with pytest.raises(StoppedError):
            run_tiny(name, folder, observers=[StopAfter(last)], **settings)
        resumed = pluribus.resume(folder, progress=False)
        assert numbers(resumed) == numbers(whole)
        assert differing(kept(resumed), kept(whole)) == []

    def test_a_run_stopped_in_it_has_no_selected_model_yet(self):
        folder = new_folder()
        with pytest.raises(StoppedError):
            run_tiny("fedl2g-l", folder, warmup=2, checkpoint_every=1, observers=[StopAfter(0)])
        with refused(NoModelError, "client 0", "last"):
            pluribus.load_model(folder, 0)
        assert pluribus.load_model(folder, 0, "last") is not None

    def test_the_table_and_the_bar_tell_of_it(self, capsys):
        shown = io.StringIO()
        bar = Progress(Console(file=shown, width=80, force_terminal=True))
        seen = []

        class Look(StopAfter):
            def round(self, record, ledger):
                seen.append(bar.bar.tasks[0].fields["score"].strip())

        result = run_tiny("fedl2g-l", warmup=2, rounds=3, evaluate_every=2, observers=[bar, Look(99)])
        assert seen[0] == "warm-up"
        assert seen[1:3] == ["", ""]
        assert float(seen[3]) > 0
        result.table()
        assert re.search(r"\b2 rounds\D*warm-up\D*3\b", capsys.readouterr().out)

    def test_equal_steps_count_its_reports(self):
        """A report is one step; twenty of them in the warm-up, and one in each round of training."""
        one = experiment("fedl2g-l", **tiny(clients=2, models="mlp-64", warmup=20, rounds=3, partition="iid"))
        other = experiment("local", **tiny(clients=2, models="mlp-64", rounds=3, partition="iid"))
        rounds = equal_rounds({"fedl2g-l": one, "local": other})
        assert rounds["fedl2g-l"] == 3
        taken = run_tiny("fedl2g-l", clients=2, models="mlp-64", warmup=20, rounds=3, partition="iid").steps_per_client
        each = run_tiny("local", clients=2, models="mlp-64", rounds=1, partition="iid").steps_per_client
        assert rounds["local"] == round(taken / each)

    def test_bench_times_rounds_of_training_alone(self):
        report = pluribus.bench("fedl2g-l", progress=False, **tiny(rounds=2, warmup=3, clients=2))
        assert len(report.each) == 2
        assert report.bare_seconds is not None


# ---- study and quiz --------------------------------------------------------------------------------------------------


trained_on: list[tuple[int, int, str, list[int], list[int]]] = []  # round, client, step, rows of the batch and quiz


@dataclass(frozen=True)
class Watched(FedL2GLogits):
    """FedL2G-l that writes down which rows its steps see."""

    def step(self, client, batch):
        self._write("step", client, batch)
        return super().step(client, batch)

    def guide_step(self, client, batch):
        self._write("guide_step", client, batch)
        return super().guide_step(client, batch)

    def _write(self, step, client, batch):
        rows = client.data["study"].rows[batch.i].tolist()
        trained_on.append((client._round, client.card.id, step, rows, client.data["quiz"].rows.tolist()))


class TestQuiz:
    def test_no_batch_has_a_quiz_row_and_the_quiz_stays(self, monkeypatch):
        monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 1)  # clients leave memory and come back
        trained_on.clear()
        run_tiny(Watched, rounds=4, epochs=2)
        parts = assemble_tiny(Watched, rounds=4)
        for k in range(4):
            mine = [record for record in trained_on if record[1] == k]
            assert {record[0] for record in mine} == {0, 1, 2, 3, 4}
            (quiz,) = {tuple(record[4]) for record in mine}
            assert len(quiz) == 10
            studied = {row for record in mine for row in record[3]}
            assert studied & set(quiz) == set()
            train = set(parts.data.rows(k)["train"].tolist())
            assert {row for record in mine if record[2] == "step" for row in record[3]} | set(quiz) == train

    def test_after_a_stop_it_is_the_same(self):
        folder = new_folder()
        trained_on.clear()
        with pytest.raises(StoppedError):
            run_tiny(Watched, folder, rounds=2, checkpoint_every=1, observers=[StopAfter(0)])
        pluribus.resume(folder, progress=False)
        assert {record[0] for record in trained_on} == {0, 1, 2}
        assert len({(record[1], tuple(record[4])) for record in trained_on}) == 4

    @both_variants
    def test_every_client_draws_its_own(self, cls):
        clients = [client_for(cls(), plain(), data_of(noise(40), [0] * 40), k=k) for k in (0, 1)]
        assert not torch.equal(*(client.data["quiz"].rows for client in clients))

    @both_variants
    @pytest.mark.parametrize(
        ("samples", "batch", "asked", "quiz"),
        [
            (40, 10, None, 10),
            (19, 10, None, 9),
            (4, 10, None, 2),
            (3, 10, None, 0),
            (1, 10, None, 0),
            (40, 4, None, 4),
            (40, 1, None, 2),
            (40, 10, 25, 25),
            (3, 10, 2, 2),
        ],
    )
    def test_size(self, cls, samples, batch, asked, quiz):
        client = client_for(cls(quiz=asked), plain(), data_of(noise(samples), [0] * samples), batch=batch)
        assert (len(client.data["quiz"]), len(client.data["study"])) == (quiz, samples - quiz)

    @both_variants
    @pytest.mark.parametrize("samples", [1, 2, 3])
    def test_who_has_too_few_samples_for_a_quiz_trains_and_reports_nothing(self, cls, samples):
        method = cls()
        client = client_for(method, normalized(), data_of(noise(samples), [0] * samples))
        before = copies(client)
        message = method.local_update(client)
        assert not message.rows("gradient").held.any()
        assert client.loss() is not None
        assert "model.head.weight" in differing(before, copies(client))

    @both_variants
    @pytest.mark.parametrize("samples", [4, 5, 11])
    def test_few_samples_and_batch_norm(self, cls, samples):
        method = cls()
        client = client_for(method, normalized(), data_of(noise(samples), [i % 3 for i in range(samples)]), batch=10)
        rows = method.local_update(client).rows("gradient")
        assert rows.held.any()
        assert rows.value.isfinite().all()

    @both_names
    def test_one_that_leaves_nothing_to_study_is_refused_before_round_0(self, name):
        settings = {"partition": "iid", "clients": 16}  # 20 images each, 14 of them to train on
        with refused(PartitionError, "client 0", "14 training samples", "quiz of 14", "--quiz"):
            assemble_tiny(name, quiz=14, **settings)
        assemble_tiny(name, quiz=13, **settings)

    @both_names
    def test_of_one_sample_is_refused(self, name):
        with refused(RangeError, "--quiz", 2, 1):
            assemble_tiny(name, quiz=1)


# ---- the server ------------------------------------------------------------------------------------------------------


def upload(classes: int, width: int, rows: Mapping[int, list[float]]) -> Message:
    value, held = torch.zeros(classes, width), torch.zeros(classes, dtype=torch.bool)
    for c, row in rows.items():
        value[c], held[c] = torch.tensor(row), True
    return Message({"gradient": Rows(value, held)})


class TestServer:
    """Lines 13 and 14: G - eta_s times the mean of the non-zero vectors of each class."""

    def server(self, classes: int, width: int, guides: list[list[float]]):
        server = server_of(task_of(classes, width), dict.fromkeys(range(5), 30))
        server.state.guides = torch.tensor(guides)
        return server

    def test_two_reporters_of_five(self):
        """Class 0: (1 + 3) / 2 = 2 and (-4 + 2) / 2 = -1. Class 1: (1 + 2 + 3 + 4 + 5) / 5 = 3. eta_s = 1/2."""
        server = self.server(3, 2, [[1.0, 2.0], [3.0, 4.0], [0.1, 0.7]])
        uploads = {k: {1: [k + 1.0, 0.0]} for k in range(5)}
        uploads[1][0] = [1.0, -4.0]
        uploads[4][0] = [3.0, 2.0]
        FedL2GFeatures(server_lr=0.5).aggregate(server, {k: upload(3, 2, rows) for k, rows in uploads.items()})
        assert server.state.guides[:2].tolist() == [[0.0, 2.5], [1.5, 4.0]]
        assert torch.equal(server.state.guides[2], torch.tensor([0.1, 0.7]))

    def test_reports_without_any_class_move_nothing(self):
        server = self.server(2, 2, [[0.1, 0.2], [0.3, 0.4]])
        FedL2GLogits().aggregate(server, {0: upload(2, 2, {}), 3: upload(2, 2, {})})
        assert torch.equal(server.state.guides, torch.tensor([[0.1, 0.2], [0.3, 0.4]]))

    @both_names
    def test_starts_standard_normal_from_the_key_of_the_task(self, name):
        parts = assemble_tiny(name)
        guides = ByHand(parts).server.state.guides
        width = C if name == "fedl2g-l" else K
        assert torch.equal(guides, torch.randn((C, width), generator=parts.task.draw("guides")))
        assert abs(guides.mean()) < 3 / guides.numel() ** 0.5
        assert guides.std() == pytest.approx(1, abs=0.25)
        assert not torch.equal(guides, ByHand(assemble_tiny(name, seed=1)).server.state.guides)

    @both_names
    def test_who_does_not_take_part_has_no_say(self, name):
        """Two of four clients: the mean is over the reporters of each class, and classes without one stay."""
        parts = assemble_tiny(name, partition="pathological", classes_per_client=2)
        hand = ByHand(parts)
        before = hand.server.state.guides.double()
        answers = hand.round(0, [1, 3])
        reports = [decode(answers[0, k], hand.host.wires(k)[0].up, "client").rows("gradient") for k in (1, 3)]
        silent = 0
        for c in range(C):
            given = [r.value[c].double() for r in reports if r.held[c]]
            silent += not given
            step = parts.method.server_lr * sum(given) / len(given) if given else torch.zeros(())
            torch.testing.assert_close(hand.server.state.guides[c].double(), before[c] - step, rtol=0, atol=1e-6)
        assert silent >= C - 4
        result = run_tiny(name, rounds=3, participation=0.5)
        for t in range(3):
            for way in ("up", "down"):
                assert len({e.client for e in result.ledger.entries() if (e.round, e.direction) == (t, way)}) == 2

    @both_names
    def test_sends_the_newest_guides_to_everyone(self, name):
        hand = ByHand(assemble_tiny(name))
        for t in range(2):
            old = hand.server.state.guides.clone()
            hand.round(t, range(4))
            for k in range(4):
                assert torch.equal(hand.host.client(k).got["guides"], old)  # the same old ones throughout the round

    @both_names
    def test_tells_how_far_the_guides_moved(self, name):
        result = run_tiny(name, rounds=3)
        start = torch.randn((C, C if name == "fedl2g-l" else K), generator=assemble_tiny(name).task.draw("guides"))
        end = RunFolder.open(result.folder).checkpoint.server()["guides"]
        told = [record["notes"]["guides_moved"] for record in result.history]
        assert told[-1] == pytest.approx(((end - start).norm() / start.norm()).item(), rel=1e-4)
        assert all(moved > 0 for moved in told)

    @both_names
    def test_tells_how_large_the_reports_are(self, name):
        """By client, of those who answered: the norm of what was uploaded."""
        parts = assemble_tiny(name)
        hand = ByHand(parts)
        answers = hand.round(0, [1, 3])
        sent = {k: decode(answers[0, k], hand.host.wires(k)[0].up, "client").rows("gradient") for k in (1, 3)}
        norms = {str(k): rows.value.double().square().sum().sqrt().item() for k, rows in sent.items()}
        assert min(norms.values()) > 0
        assert hand.server.notes["reports"] == {k: pytest.approx(norm, rel=1e-5) for k, norm in norms.items()}

    @both_names
    def test_frozen_guides(self, name):
        result = run_tiny(name, rounds=2, server_lr=0.0)
        start = torch.randn((C, C if name == "fedl2g-l" else K), generator=assemble_tiny(name).task.draw("guides"))
        assert [record["notes"]["guides_moved"] for record in result.history] == [0.0] * 3
        assert torch.equal(RunFolder.open(result.folder).checkpoint.server()["guides"], start)

    @both_names
    def test_a_step_lowers_the_loss_that_the_guides_are_to_lower(self, name):
        """Eq. 6 is gradient descent on the quiz loss after a pseudo-step."""
        cls = BOTH[name]
        method = cls()
        client = random_client(method, plain)
        batch, pi = guide(method, client)
        guides = client.got["guides"]
        before, after = (after_a_pseudo_step(cls, client, batch, guides - eta * pi, False) for eta in (0.0, 1.0))
        assert after < before


# ---- who may take part -----------------------------------------------------------------------------------------------


def deep_head(shape) -> TwoPartModel:
    features = nn.Sequential(nn.Flatten(), nn.Linear(64, K))
    return TwoPartModel(features, nn.Sequential(nn.Linear(K, 8), nn.ReLU(), nn.Linear(8, C)), K)


def narrow(shape) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32))


def small_vit(shape) -> nn.Module:
    from pluribus.internal import torchvision as _torchvision  # noqa: F401

    from timm.models.vision_transformer import VisionTransformer  # isort: skip

    return VisionTransformer(
        img_size=shape[1], patch_size=4, in_chans=1, embed_dim=K, depth=1, num_heads=2, num_classes=0
    )


class TestModels:
    @both_names
    def test_heads_may_differ(self, name):
        result = run_tiny(name, models="mlp-64,test_fedl2g.deep_head,cnn-16-32,test_fedl2g.small_vit")
        assert all(record["answered"] == 4 for record in result.history)
        assert all(record["loss"] is not None for record in result.history[result.warmup :])

    def test_logits_need_no_common_width(self):
        result = run_tiny("fedl2g-l", models="mlp-64,test_fedl2g.narrow", projector="none")
        assert {e.bytes for e in result.ledger.entries() if e.tensor == "guides"} == {4 * C * C}

    def test_features_do(self):
        with refused(MismatchError, "fedl2g-f", "widths 64 and 32"):
            assemble_tiny("fedl2g-f", models="mlp-64,test_fedl2g.narrow", projector="none")
        assert run_tiny("fedl2g-f", models="mlp-64,test_fedl2g.narrow", width=16, rounds=1).accuracy is not None

    @both_names
    def test_settings_survive_their_file(self, name):
        """Hyper-parameters that are not set are left out of the file, and come back so."""
        result = run_tiny(name, rounds=1)
        assert "quiz" not in (result.folder / "config.toml").read_text()
        assert pluribus.resume(result.folder, progress=False).accuracy == result.accuracy


@both_names
def test_recurrent_models_run_and_the_run_says_how(name):
    result = run_tiny(name, models="toys.lstm,mlp-64", rounds=3, evaluate_every=3)
    assert all(record["notes"]["guides_moved"] > 0 for record in result.history)
    (said,) = [warning for warning in result.warnings if "recurrent" in warning]
    assert "toys.lstm" in said
    assert "double backward" in said
    plain = run_tiny(name, models="mlp-64", rounds=1)
    assert not any("recurrent" in warning for warning in plain.warnings)
