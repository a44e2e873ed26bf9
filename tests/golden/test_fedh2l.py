"""FedH2L, by hand from Eq. 2 to 8 of the paper, its variants, and its baselines IND and AGG."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F

import pluribus
from conftest import assemble_tiny, make_host, new_folder, run_tiny
from kit import ByHand, StopAfter, StoppedError, assert_same, checked_steps, differing, kept
from parties import CPU, card_of, copies, equal, flat_split, signs
from pluribus.assembly import assemble
from pluribus.client import Client, Local
from pluribus.data.federated import Data, Store
from pluribus.errors import ConflictError, MismatchError, RangeError, UnknownNameError
from pluribus.experiment import experiment
from pluribus.inputs import Input
from pluribus.message import Inbox, Message, decode
from pluribus.methods.fedh2l import FedH2L, public_batch
from pluribus.ops import flatten, project, unflatten
from pluribus.optim import Rule
from pluribus.request import Learn, Teach
from pluribus.task import Task
from refusals import refused

SGD = Rule("sgd", lr=1.0)
TINY = {"partition": "iid", "evaluate_every": 1}  # with the embedded digits that other tests use
M = 10


def run(method="fedh2l", **settings_):
    return run_tiny(method, **{**TINY, **settings_})


def parts_of(method="fedh2l", **settings_):
    return assemble_tiny(method, **{**TINY, **settings_})


# ---- Eq. 7 and 8: the projection -----------------------------------------------------------------------------------

entry = st.floats(-1000, 1000, width=32)
pairs_of_vectors = st.integers(1, 8).flatmap(
    lambda n: st.tuples(*(st.lists(entry, min_size=n, max_size=n).map(torch.tensor) for _ in range(2)))
)


def inner(a: Tensor, b: Tensor) -> float:
    return float(a.double() @ b.double())


def norm(a: Tensor) -> float:
    return math.sqrt(inner(a, a))


class TestProject:
    # What comes back is rounded to float32, so each entry may be wrong by half a unit in its last place.
    ROUNDING = 2.0**-23

    @settings(deadline=None)
    @given(pairs_of_vectors)
    def test_never_a_conflict(self, vectors):
        g, r = vectors
        assert inner(project(g, r), r) >= -self.ROUNDING * norm(g) * norm(r) - 1e-40

    @settings(deadline=None)
    @given(pairs_of_vectors)
    def test_bitwise_itself_without_conflict_and_orthogonal_and_no_longer_with_one(self, vectors):
        g, r = vectors
        projected = project(g, r)
        if inner(g, r) >= 0:
            assert projected.numpy().tobytes() == g.numpy().tobytes()
        else:
            assert abs(inner(projected, r)) <= self.ROUNDING * norm(g) * norm(r) + 1e-40
            assert norm(projected) <= norm(g) * (1 + self.ROUNDING)

    @settings(deadline=None, max_examples=50)
    @given(st.integers(0, 10**6), st.integers(2, 6))
    def test_is_the_solution_of_the_quadratic_program(self, seed, n):
        g, r = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        solved = minimize(
            lambda z: 0.5 * ((z - g.numpy()) ** 2).sum(),
            np.zeros(n),
            jac=lambda z: z - g.numpy(),
            constraints={"type": "ineq", "fun": lambda z: z @ r.numpy(), "jac": lambda z: r.numpy()},
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        np.testing.assert_allclose(project(g, r).numpy(), solved.x, rtol=0, atol=1e-6)

    @settings(deadline=None)
    @given(pairs_of_vectors)
    def test_is_one_sided_pcgrad(self, vectors):
        g, r = (v.double() for v in vectors)
        dot = float(g @ r)
        expected = g - (dot / float(r @ r)) * r if dot < 0 else g
        torch.testing.assert_close(project(g, r), expected, rtol=1e-12, atol=1e-9)

    def test_by_hand(self):
        """<g, r> = -4, <r, r> = 8, v = 1/2: g + r / 2 = (2, -2)."""
        g, r = torch.tensor([1.0, -3.0]), torch.tensor([2.0, 2.0])
        assert project(g, r).tolist() == [2, -2]

    def test_a_zero_reference_forbids_nothing(self):
        g = torch.tensor([1.0, -3.0])
        assert project(g, torch.zeros(2)).tolist() == [1, -3]

    def test_margin_and_eps_of_gem(self):
        """v >= margin: g + 3/4 r. eps: v = 4 / (8 + 8) = 1/4. Neither counts without conflict."""
        g, r = torch.tensor([1.0, -3.0]), torch.tensor([2.0, 2.0])
        assert project(g, r, margin=0.75).tolist() == [2.5, -1.5]
        assert project(g, r, margin=0.25).tolist() == [2, -2]
        assert project(g, r, eps=8.0).tolist() == [1.5, -2.5]
        assert project(-g, r, margin=0.75, eps=8.0).tolist() == [-1, 3]
        assert project(g, torch.zeros(2), margin=0.75, eps=8.0).tolist() == [1, -3]

    def test_sums_are_in_double_precision(self):
        """2^24 + 1 + 1 - (2^24 + 2) is 0; in float32, where 2^24 + 1 is 2^24, it is -2, which would be a conflict."""
        g, r = torch.tensor([4096.0, 1.0, 1.0, -8388609.0]), torch.tensor([4096.0, 1.0, 1.0, 2.0])
        assert inner(g, r) == 0
        assert torch.equal(project(g, r), g)


class TestFlatten:
    def test_in_the_order_of_the_parameters_and_back(self):
        parameters = {"a": torch.zeros(2, 2), "b": torch.zeros(3), "c": torch.zeros(())}
        grads = {"c": torch.tensor(8.0), "a": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        vector = flatten(grads, parameters)
        assert vector.tolist() == [1, 2, 3, 4, 0, 0, 0, 8]
        back = unflatten(vector, parameters)
        assert {name: value.tolist() for name, value in back.items()} == {
            "a": [[1, 2], [3, 4]],
            "b": [0, 0, 0],
            "c": 8,
        }


# ---- Eq. 2 to 6: small enough to follow ----------------------------------------------------------------------------

Samples = Sequence[tuple[tuple[int, int], int]]  # pixels and label


def node(
    method: FedH2L,
    private: Samples,
    public: Mapping[int, Samples],
    *,
    k: int = 0,
    rule: Rule = SGD,
    batch: int = 10,
    classes: int = 2,
) -> Client:
    """A node with a linear model of zeros, so that every posterior is uniform; at the start of round 0."""
    samples = [*private, *(one for mine in public.values() for one in mine)]
    store = Store(signs([pixels for pixels, _ in samples]), torch.tensor([label for _, label in samples]), CPU)
    starts = np.cumsum([len(private), *(len(mine) for mine in public.values())])
    sets = {
        j: Data(store, torch.arange(start, start + len(public[j]))) for j, start in zip(public, starts, strict=False)
    }
    sizes = {j: len(data) for j, data in sets.items()}
    task = Task(classes, Input("image", (1, 1, 2)), 2, "pool", clients=len(public), rounds=3, seed=0, public=sizes)
    model = flat_split(2, classes)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    train = {"train": Data(store, torch.arange(len(private)))}
    client = Client(card_of(k, task, len(private)), task, model, train, Local(rule, 1, batch), CPU, public=sets)
    method.prepare(client)
    client.equip(method.optimizers(client), {})
    client.begin(0, 0, {})
    return client


def taught(client: Client, signals: Mapping[int, tuple[Mapping[tuple[int, int], list[float]], float]]) -> Inbox:
    """What teachers send: to each the posteriors of its samples, by their pixels, and its accuracy."""
    most = min(client.local.batch, max(client.task.public.values()))
    messages = {}
    for j, (posteriors, accuracy) in signals.items():
        data = public_batch(client, j)
        x, _ = data.take(torch.arange(len(data)))
        rows = [posteriors[tuple(int(v) for v in image.flatten())] for image in x]
        padding = [[0.0] * client.task.classes] * (most - len(rows))
        messages[j] = Message({"posterior": torch.tensor(rows + padding), "accuracy": torch.tensor(accuracy)})
    return Inbox.of(messages, CPU)


def learn(method: FedH2L, client: Client, inbox: Inbox) -> None:
    client.begin(client.t, 1, {})
    client.inbox = inbox
    method.learn(client, inbox)


def weights(client: Client) -> list[list[float]]:
    return client.model.head.weight.tolist()


class TestLocalStep:
    """Eq. 2 at theta = 0, where p = (1/2, 1/2): the mean of (p - e_y) x^T."""

    PUBLIC = {0: [((1, 1), 1)], 1: [((-1, 1), 0), ((-1, -1), 0)]}  # noqa: RUF012

    def test_with_own_public_data(self):
        """Row 0: (-1/2 (1, -1) + 1/2 (1, 1)) / 2 = (0, 1/2), and row 1 the opposite; the biases' gradients cancel."""
        client = node(FedH2L(labels="own"), [((1, -1), 0)], self.PUBLIC)
        FedH2L(labels="own").teach(client)
        assert client.state.local_gradient.tolist() == [0, 0.5, 0, -0.5, 0, 0]
        assert weights(client) == [[0, -0.5], [0, 0.5]]
        assert client.model.head.bias.tolist() == [0, 0]

    def test_with_everyones_public_data(self):
        """Row 0: (-1/2 (1, -1) + 1/2 (1, 1) - 1/2 (-1, 1) - 1/2 (-1, -1)) / 4 = (1/4, 1/4), bias -1/4."""
        client = node(FedH2L(), [((1, -1), 0)], self.PUBLIC)
        FedH2L().teach(client)
        assert client.state.local_gradient.tolist() == [0.25, 0.25, -0.25, -0.25, -0.25, 0.25]
        assert weights(client) == [[-0.25, -0.25], [0.25, 0.25]]

    @pytest.mark.parametrize(("labels", "sizes"), [("all", (1, 1, 2)), ("own", (1, 1)), ("none", (1, 1))])
    def test_which_rows_it_is_drawn_from(self, labels, sizes):
        client = node(FedH2L(labels=labels), [((1, -1), 0)], self.PUBLIC)
        own, *public = client.data["local"].rows.split(sizes)
        assert torch.equal(own, client.data["train"].rows)
        for j, rows in enumerate(public):
            assert torch.equal(rows, client.public[j].rows)

    def test_a_batch_is_of_the_batch_size(self):
        seen = []

        class Watched(FedH2L):
            def local_step(self, client, batch):
                seen.append(batch.n)
                return super().local_step(client, batch)

        client = node(Watched(), [((1, -1), 0)] * 5, self.PUBLIC, batch=3)
        Watched().teach(client)
        assert seen == [3]


class TestTeachingSignal:
    def test_posteriors_of_the_updated_model_and_their_accuracy(self):
        """W = ((0, -1/2), (0, 1/2)) after the step: logits (-1/2, 1/2) x_2, and sigma(1) = 0.7310586.

        The own public set is (1, 1) of class 1, said to be 1, and (-1, -1) of class 1, said to be 0: Acc = 1/2.
        """
        public = {0: [((1, 1), 1), ((-1, -1), 1)], 1: [((1, 1), 0)] * 2}
        # the local gradient of row 0: -1/2 (1, -1) - 1/2 (-1, -1) + 1/2 (1, 1) + 1/2 (-1, -1) = (0, 1), a quarter of it
        client = node(FedH2L(labels="own"), [((1, -1), 0), ((-1, -1), 0)], public, rule=Rule("sgd", lr=2.0))
        message = FedH2L(labels="own").teach(client)
        assert weights(client) == [[0, -0.5], [0, 0.5]]
        x, _ = (data := public_batch(client, 0)).take(torch.arange(len(data)))
        for image, posterior in zip(x, message.tensor("posterior"), strict=True):
            sure = [0.2689414, 0.7310586]
            assert posterior.tolist() == pytest.approx(sure if image[0, 0, 1] > 0 else sure[::-1], abs=1e-6)
        assert message.tensor("accuracy").item() == 0.5

    def test_is_made_in_eval_mode_without_a_gradient(self):
        client = node(FedH2L(), [((1, -1), 0)] * 2, {0: [((1, 1), 1)], 1: [((1, 1), 1)]})
        modes = []
        client.model.register_forward_hook(lambda model, *_: modes.append((model.training, torch.is_grad_enabled())))
        FedH2L().teach(client)
        assert modes == [(True, True), (False, False)]

    def test_no_public_data_nothing_to_teach(self):
        client = node(FedH2L(), [((1, -1), 0)], {0: [], 1: [((1, 1), 1)]})
        assert FedH2L().teach(client) is None
        assert weights(client) != [[0, 0], [0, 0]]


class TestLesson:
    """Eq. 3 to 6 at theta = 0, where q = (1/2, 1/2). Gradients of the logits: q - p_j (KL) and q - e_y (CE).

    Teacher 1 has (1, 1) of class 0 with p = (3/4, 1/4), and Acc = 1/2.
    Teacher 2 has (1, -1) of class 1 with p = (1/4, 3/4), and Acc = 1.
    Row 0 of Eq. 3: 1/2 (1/2 (-1/4)(1, 1) + 1 (1/4)(1, -1)) = (1/16, -3/16), bias 1/2 (-1/8 + 1/4) = 1/16.
    Row 0 of Eq. 5: 1/2 (-1/2 (1, 1) + 1/2 (1, -1)) = (0, -1/2), bias 0.
    """

    PUBLIC = {0: [((-1, -1), 0)], 1: [((1, 1), 0)], 2: [((1, -1), 1)]}  # noqa: RUF012
    SIGNALS = {1: ({(1, 1): [0.75, 0.25]}, 0.5), 2: ({(1, -1): [0.25, 0.75]}, 1.0)}  # noqa: RUF012

    def step(self, signals=None, public=None, local=None, **hyper) -> tuple[list[float], float]:
        """Row 0 of the weights and of the bias after one step from zero with learning rate 1: minus the gradient."""
        method = FedH2L(**hyper)
        client = node(method, [((1, 1), 0)], public or self.PUBLIC)
        if local is not None:
            client.state.local_gradient = torch.tensor(local)
        learn(method, client, taught(client, signals or self.SIGNALS))
        (a, b), (c, d) = weights(client)
        low, high = client.model.head.bias.tolist()
        assert (c, d, high) == (-a, -b, -low)
        assert not client.state.local_gradient.any()
        return [a, b], low

    def test_posteriors_and_labels(self):
        assert self.step() == ([-0.0625, 0.6875], -0.0625)

    def test_posteriors_alone(self):
        assert self.step(labels="none") == ([-0.0625, 0.1875], -0.0625)

    def test_labels_alone(self):
        """Not weighted by accuracy."""
        assert self.step(kl=False) == ([0, 0.5], 0)

    def test_labels_of_others_count_in_lessons_where_local_steps_have_only_own(self):
        assert self.step(labels="own") == self.step()

    def test_the_loss_is_the_divergence_of_the_teacher_from_the_student(self):
        """KL(p || u) = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.1308122 for both; 1/2 (1/2 + 1) of it, and ln 2 for Eq. 5.

        KL(u || p) would be 1/2 ln(2/3) + 1/2 ln 2 = 0.1438410.
        """
        losses = []

        class Watched(FedH2L):
            def public_step(self, client, batch):
                losses.append(super().public_step(client, batch).item())

        for labels in ("all", "none"):
            client = node(Watched(labels=labels), [((1, 1), 0)], self.PUBLIC)
            learn(Watched(labels=labels), client, taught(client, self.SIGNALS))
        assert losses == pytest.approx([0.0981092 + math.log(2), 0.0981092], abs=1e-6)

    def test_a_teacher_that_is_always_wrong_is_left_out_of_the_divergence_only(self):
        """Teacher 1 with Acc = 0: Eq. 3 is 1/2 (1/4)(1, -1) = (1/8, -1/8), bias 1/8; Eq. 5 stays."""
        signals = {**self.SIGNALS, 1: (self.SIGNALS[1][0], 0.0)}
        assert self.step(signals) == ([-0.125, 0.625], -0.125)

    def test_a_missing_teacher_leaves_the_mean_over_the_others(self):
        """Teacher 2 alone, 1 / |T| = 1: (1/4)(1, -1) + 1/2 (1, -1), bias 3/4."""
        assert self.step({2: self.SIGNALS[2]}) == ([-0.75, 0.75], -0.75)

    def test_mean_over_a_batch_of_its_real_size(self):
        """Teacher 2 has two samples: (1, -1) as above, and (-1, -1) of class 0 with p = (1/2, 1/2).

        Eq. 3: 1/2 (1/2 (-1/4)(1, 1) + 1/2 (1/4)(1, -1)) = (0, -1/8), bias 1/2 (-1/8 + 1/8) = 0.
        Eq. 5: 1/2 (-1/2 (1, 1) + 1/2 (1/2 (1, -1) - 1/2 (-1, -1))) = (0, -1/4), bias 1/2 (-1/2 + 0) = -1/4.
        """
        public = {**self.PUBLIC, 2: [((1, -1), 1), ((-1, -1), 0)]}
        signals = {1: self.SIGNALS[1], 2: ({(1, -1): [0.25, 0.75], (-1, -1): [0.5, 0.5]}, 1.0)}
        assert self.step(signals, public) == ([0, 0.375], 0.25)

    def test_a_conflict_is_projected_away(self):
        """g_pub = (1/16, -11/16, ..) in row 0, bias 1/16. g_loc = 1 in w_01 and -1 in w_11: <., .> = -11/8 < 0,

        v* = 11/16, which takes away just those two entries.
        """
        local = [0.0, 1.0, 0.0, -1.0, 0.0, 0.0]
        assert self.step(local=local) == ([-0.0625, 0], -0.0625)
        assert self.step(local=local, conflict="ignore") == self.step()
        assert self.step(local=[-x for x in local]) == self.step()

    def test_margin_and_eps(self):
        """margin 1: v* = 1, so w_01 gets -11/16 + 1. eps = 2: v* = (11/8) / 4, so it gets -11/16 + 11/32."""
        local = [0.0, 1.0, 0.0, -1.0, 0.0, 0.0]
        assert self.step(local=local, margin=1.0) == ([-0.0625, -0.3125], -0.0625)
        assert self.step(local=local, eps=2.0) == ([-0.0625, 0.34375], -0.0625)

    def test_both_gradients_are_projected_on_each_other_in_pcgrad(self):
        """g_pub without its part along g_loc, as above, plus g_loc without its part along g_pub.

        Row 0 and the row's opposite: <g_pub, g_pub> = 2 (1/256 + 121/256 + 1/256) = 123/128, <., .> = -11/8,
        so g_loc + (11/8)(128/123) g_pub = g_loc + 176/123 g_pub, in row 0: (11, 2, 11) / 123.
        """
        (a, b), low = self.step(local=[0.0, 1.0, 0.0, -1.0, 0.0, 0.0], conflict="pcgrad")
        assert (a, b, low) == pytest.approx((-1 / 16 - 11 / 123, -2 / 123, -1 / 16 - 11 / 123), abs=1e-6)

    def test_pcgrad_without_a_conflict_is_the_sum(self):
        (a, b), low = self.step(local=[0.0, -1.0, 0.0, 1.0, 0.0, 0.0], conflict="pcgrad")
        assert (a, b, low) == (-0.0625, 1.6875, -0.0625)

    def test_teachers_that_agree_with_the_student_teach_nothing(self):
        """At weights other than zero: L_KL = 0, and so is its gradient."""
        losses = []

        class Watched(FedH2L):
            def public_step(self, client, batch):
                losses.append(super().public_step(client, batch).item())

        method = Watched(labels="none")
        client = node(method, [((1, 1), 0)], self.PUBLIC)
        with torch.no_grad():
            client.model.head.weight.copy_(torch.tensor([[0.3, -1.2], [0.7, 0.4]]))
        before = copies(client)
        agreed = {}
        for j, pixels in ((1, (1, 1)), (2, (1, -1))):
            with torch.no_grad():
                posterior = client.model(torch.tensor(pixels, dtype=torch.float32).view(1, 1, 1, 2)).softmax(1)
            agreed[j] = ({pixels: posterior[0].tolist()}, 1.0)
        learn(method, client, taught(client, agreed))
        assert losses == [pytest.approx(0, abs=1e-7)]
        for name, value in copies(client).items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=1e-7)


class TestLessonsNeverTrainTeachers:
    def test_what_is_taught_stays_as_it_was_sent(self):
        client = node(FedH2L(), [((1, 1), 0)], TestLesson.PUBLIC)
        inbox = taught(client, TestLesson.SIGNALS)
        before = {name: value.clone() for name, value in inbox.got.items()}
        learn(FedH2L(), client, inbox)
        assert equal(before, dict(inbox.got))
        assert not any(value.requires_grad for value in inbox.got.values())


# ---- whole rounds --------------------------------------------------------------------------------------------------

local_batches: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True)
class Recorded(FedH2L):
    """FedH2L that writes down its local batches, by round and node."""

    def local_step(self, client, batch):
        local_batches[client._round, client.card.id] = (batch.x, batch.y)
        return super().local_step(client, batch)


class TestRounds:
    def test_three_rounds_as_in_algorithm_1(self):
        """Written again from the paper, with torch's own AMSGrad: one per node, two steps a round."""
        rule = {"lr": 1e-3, "weight_decay": 1e-4}
        parts = parts_of(Recorded, clients=3, models="mlp-64", optimizer="amsgrad", batch_size=16, **rule)
        hand, n = ByHand(parts), 3
        models = [copy.deepcopy(hand.host.client(i).model) for i in range(n)]
        optimizers = [torch.optim.Adam(model.parameters(), amsgrad=True, **rule) for model in models]
        losses = nn.CrossEntropyLoss()
        for t in range(3):
            hand.round(t, range(n))
            g_loc, signals, public = [], [], []
            for i in range(n):
                x, y = local_batches[t, i]
                optimizers[i].zero_grad()
                losses(models[i](x), y).backward()
                g_loc.append(vector(models[i]))
                optimizers[i].step()
                data = public_batch(hand.host.client(i), i)
                x, y = data.take(torch.arange(len(data)))
                public.append((x, y))
                with torch.no_grad():
                    p = models[i](x).softmax(1)
                signals.append((p, float((p.argmax(1) == y).sum()) / len(y)))
            for i in range(n):
                optimizers[i].zero_grad()
                loss = torch.zeros(())
                for j in range(n):
                    if j != i:
                        (x, y), (p, acc) = public[j], signals[j]
                        log_q = models[i](x).log_softmax(1)
                        kl = (p * (p.log() - log_q)).sum(1).mean()
                        loss = loss + (acc * kl - log_q[torch.arange(len(y)), y].mean()) / (n - 1)
                loss.backward()
                g_pub = vector(models[i])
                if g_pub @ g_loc[i] < 0:
                    g_pub = g_pub - (g_pub @ g_loc[i]) / (g_loc[i] @ g_loc[i]) * g_loc[i]
                nn.utils.vector_to_parameters(g_pub.float(), [p.grad for p in models[i].parameters()])
                optimizers[i].step()
        for i in range(n):
            for (name, one), other in zip(
                hand.host.client(i).model.named_parameters(), models[i].parameters(), strict=True
            ):
                # Adam divides by the size of a gradient, so that what is nearly zero carries its rounding error along
                torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")

    def test_two_steps_of_one_optimizer_that_outlives_the_round_the_memory_and_the_process(self, monkeypatch):
        how = {"rounds": 4, "optimizer": "amsgrad", "lr": 1e-3, "checkpoint_every": 1}
        straight = run(**how)
        slots = {name: value for name, value in kept(straight).items() if " opt." in name}
        assert {name.split(".")[-1] for name in slots} == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        assert {value.item() for name, value in slots.items() if name.endswith(".step")} == {8}
        assert all(value.any() for name, value in slots.items() if name.endswith(".head.bias.max_exp_avg_sq"))
        monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 1)
        assert_same(straight, run(**how))
        folder = new_folder()
        with pytest.raises(StoppedError):
            run(out=folder, observers=[StopAfter(1)], **how)
        assert_same(straight, pluribus.resume(folder, progress=False))

    def test_order_of_nodes_does_not_matter(self):
        one, other = (ByHand(parts_of(clients=4)) for _ in range(2))
        for t, order in enumerate(((2, 0, 3, 1), (3, 2, 1, 0))):
            one.round(t, range(4))
            other.round(t, order)
        assert differing(one.tensors(), other.tensors()) == []

    @pytest.mark.parametrize(
        "hyper",
        [
            {"kl": False, "conflict": "ignore"},
            {"labels": "none", "conflict": "pcgrad"},
            {"margin": 0.5, "eps": 1e-3, "lesson_lr": 0.01},
        ],
        ids=str,
    )
    def test_steps_are_pure_tensor_programs(self, hyper):
        how = {**TINY, "clients": 2, "models": "mlp-64", **hyper}
        with checked_steps(assemble_tiny("fedh2l", **how).method) as checked:
            run_tiny("fedh2l", **how)
        assert {name.split(".")[-1] for name in checked} == {"local_step", "public_step"}

    def test_one_node_learns_alone(self):
        assert_trains_like("agg", run(clients=1, data="digits", rounds=2), clients=1, data="digits")


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


# ---- E local steps between lessons ---------------------------------------------------------------------------------


class TestEvery:
    RATE = 0.05

    def hand(self, every: int) -> ByHand:
        return ByHand(
            parts_of(every=every, clients=2, models="mlp-64", optimizer="sgd", lr=self.RATE, weight_decay=0.0)
        )

    def test_the_sum_of_one_step_is_its_gradient(self):
        hand = self.hand(1)
        gradients = {}

        class Watched(FedH2L):
            def local_step(self, client, batch):
                loss = F.cross_entropy(client.model(batch.x), batch.y)
                gradients[client.card.id] = flatten(client.grads(loss), client.parameters())
                return super().local_step(client, batch)

        for t in range(2):
            for k in range(2):
                client = hand.host.client(k)
                client.begin(t, 0, {})
                Watched().teach(client)
                assert torch.equal(client.state.local_gradient, gradients[k])
                client.state.local_gradient = torch.zeros_like(client.state.local_gradient)

    def test_the_sum_is_the_way_that_sgd_went(self):
        hand = self.hand(4)
        start = [nn.utils.parameters_to_vector(hand.host.client(k).model.parameters()).detach() for k in range(2)]
        for t in range(3):
            sent = hand.round(t, range(2))
            assert set(sent.values()) == {None}
            for k in range(2):
                client = hand.host.client(k)
                now = nn.utils.parameters_to_vector(client.model.parameters()).detach()
                way = (start[k] - now) / self.RATE
                torch.testing.assert_close(client.state.local_gradient, way, rtol=0, atol=1e-5)
        assert None not in hand.round(3, range(2)).values()
        assert not any(hand.host.client(k).state.local_gradient.any() for k in range(2))

    def test_lessons_every_e_rounds_and_an_optimizer_step_for_each(self):
        result = run(every=3, rounds=7, optimizer="amsgrad", lr=1e-3)
        taught_in = {entry.round for entry in result.ledger.entries()}
        assert taught_in == {2, 5}
        steps = {v.item() for name, v in kept(result).items() if name.endswith(".step")}
        assert steps == {7 + 2}
        assert all(value.any() for name, value in kept(result).items() if name.endswith("local_gradient"))

    def test_lessons_respect_what_was_learned_since_the_last_one(self):
        """Not the last step alone: w_01 and w_11 are in the sum from an earlier step."""
        sums = []

        class Watched(FedH2L):
            def _resolve(self, lesson, local):
                sums.append(local.clone())
                return super()._resolve(lesson, local)

        method = Watched(every=2)
        client = node(method, [((1, -1), 0)], TestLesson.PUBLIC)
        assert method.teach(client) is None
        first = client.state.local_gradient.clone()
        client.begin(1, 0, {})
        assert method.teach(client) is not None
        both = client.state.local_gradient.clone()
        assert first.any()
        assert not torch.equal(first, both)
        learn(method, client, taught(client, TestLesson.SIGNALS))
        assert torch.equal(sums[0], both)


# ---- random pairs --------------------------------------------------------------------------------------------------


class TestPairs:
    def task(self, clients: int) -> Task:
        return Task(2, Input("image", (1, 1, 2)), 2, "pool", clients=clients, rounds=3, seed=0)

    @settings(deadline=None)
    @given(st.integers(0, 30), st.sets(st.integers(0, 8)))
    def test_a_perfect_matching_of_whoever_is_there(self, t, present):
        teachers = FedH2L(pairs=True).topology(self.task(9), t, tuple(sorted(present)))
        assert set(teachers) <= present
        assert len(present) - len(teachers) == len(present) % 2
        for student, (teacher,) in teachers.items():
            assert teacher != student
            assert teachers[teacher] == (student,)

    def test_every_party_derives_the_same_pairs_and_they_change(self):
        seen = []
        for t in range(20):
            one, other = (FedH2L(pairs=True).topology(self.task(4), t, (0, 1, 2, 3)) for _ in range(2))
            assert one == other
            seen.append(tuple(sorted(one.items())))
        assert len(set(seen)) == 3  # all the ways to pair four

    def test_the_odd_one_out_is_not_always_the_same(self):
        idle = {(set(range(3)) - set(FedH2L(pairs=True).topology(self.task(3), t, (0, 1, 2)))).pop() for t in range(20)}
        assert idle == {0, 1, 2}

    def test_each_learns_from_one_and_weighs_it_fully(self):
        result = run(pairs=True, rounds=3, clients=5)
        down = [entry for entry in result.ledger.entries() if (entry.direction, entry.tensor) == ("down", "accuracy")]
        for t in range(3):
            students = [entry.client for entry in down if entry.round == t]
            assert len(students) == len(set(students)) == 4

    def test_all_from_all_otherwise(self):
        assert FedH2L().topology(self.task(3), 0, (0, 1, 2)) == {0: (1, 2), 1: (0, 2), 2: (0, 1)}


# ---- the two forms of the optimizer --------------------------------------------------------------------------------


class TestOptimizers:
    def test_pcgrad_takes_one_step_from_the_weights_of_both_gradients(self):
        method = FedH2L(conflict="pcgrad")
        client = node(method, [((1, -1), 0)], TestLesson.PUBLIC, rule=Rule("amsgrad", lr=0.1))
        start = copies(client)
        message = method.teach(client)
        assert message.tensor("posterior").tolist() == [[0.5, 0.5]]
        for name, value in copies(client).items():
            assert torch.equal(value, start[name]) == ("local_gradient" not in name)
        learn(method, client, taught(client, TestLesson.SIGNALS))
        assert client.tensors()["opt.model.head.weight.step"].item() == 1
        assert client.model.head.weight.any()

    def test_a_pcgrad_step_whose_lesson_did_not_come_is_taken_with_the_local_gradient(self):
        """Round 0 without teachers: in round 1 the weights are those of Eq. 2 alone, and the gradient is new."""
        method, plain = FedH2L(conflict="pcgrad", labels="own"), FedH2L(labels="own")
        late, prompt = (node(m, [((1, -1), 0)], TestLocalStep.PUBLIC) for m in (method, plain))
        for m, client in ((method, late), (plain, prompt)):
            m.teach(client)
        assert weights(late) == [[0, 0], [0, 0]]
        for m, client in ((method, late), (plain, prompt)):
            client.begin(1, 0, {})
            if m is plain:
                expected = weights(client)
                client.state.local_gradient = torch.zeros_like(client.state.local_gradient)
            m.teach(client)
        assert weights(late) == expected == [[0, -0.5], [0, 0.5]]
        assert torch.equal(late.state.local_gradient, prompt.state.local_gradient)

    def test_lessons_with_a_rate_of_their_own(self):
        """SGD with eta = 1/2 where beta = 1: half the step of the lesson, all of the local one."""
        method = FedH2L(lesson_lr=0.5)
        client = node(method, [((1, 1), 0)], TestLesson.PUBLIC)
        learn(method, client, taught(client, TestLesson.SIGNALS))
        assert weights(client)[0] == [-0.03125, 0.34375]
        other = node(FedH2L(labels="own", lesson_lr=0.5), [((1, -1), 0)], TestLocalStep.PUBLIC)
        FedH2L(labels="own", lesson_lr=0.5).teach(other)
        assert weights(other) == [[0, -0.5], [0, 0.5]]

    def test_two_optimizers_do_not_share_their_moments(self):
        result = run(lesson_lr=0.01, rounds=3, optimizer="amsgrad", lr=1e-3)
        steps = {name.split()[2].split(".")[1]: v.item() for name, v in kept(result).items() if name.endswith(".step")}
        assert steps == {"model": 3, "lesson": 3}

    def test_frozen_weights_are_in_no_gradient(self):
        method = FedH2L()
        client = node(method, [((1, -1), 0)], TestLocalStep.PUBLIC)
        client.model.head.bias.requires_grad_(False)
        client.state = type(client.state)()
        method.prepare(client)
        client.equip(method.optimizers(client), {})
        method.teach(client)
        assert client.state.local_gradient.shape == (4,)
        assert client.model.head.bias.tolist() == [0, 0]


# ---- what travels --------------------------------------------------------------------------------------------------


class TestTraffic:
    def test_posteriors_and_one_number_up_and_those_of_all_others_down(self):
        batch = 5
        result = run(clients=4, rounds=2, batch_size=batch)
        sizes: dict[tuple[str, int, int], dict[str, list[int]]] = {}
        for e in result.ledger.entries():
            sizes.setdefault((e.direction, e.round, e.client), {}).setdefault(e.tensor, []).append(e.bytes)
        for t in range(2):
            for k in range(4):
                up, down = sizes["up", t, k], sizes["down", t, k]
                assert up["posterior"] == [4 * batch * M]
                assert up["accuracy"] == [4]
                assert sum(down["posterior"]) == 3 * 4 * batch * M
                assert sum(down["accuracy"]) == 3 * 4
                assert sum(down["(header)"]) == 3 * up["(header)"][0]
        assert len(sizes) == 2 * 2 * 4
        assert result.bytes["down"] == 3 * result.bytes["up"]

    def test_a_public_set_smaller_than_a_batch_is_used_whole(self):
        """The digits of one node in four are few; its message has the shape of the others', padded with zeros."""
        parts = parts_of(clients=4, batch_size=500)
        host = make_host(parts)
        sizes = [parts.task.public[k] for k in range(4)]
        assert min(sizes) < 500
        for k in range(4):
            posterior = decode(host.answer(Teach(k, 0)).up, host.wires(k)[0].up, "client").tensor("posterior")
            assert len(posterior) == max(sizes)
            torch.testing.assert_close(posterior.sum(1)[: sizes[k]], torch.ones(sizes[k]))
            assert not posterior[sizes[k] :].any()
        inbox = {k: host.answer(Teach(k, 1)).up for k in range(1, 4)}
        host.answer(Teach(0, 1))
        host.answer(Learn(0, 1, inbox))
        got = host.client(0).inbox.got
        assert {name: len(value) for name, value in got.items()} == dict.fromkeys(
            ("posterior", "accuracy", "share"), sum(sizes[1:])
        )
        assert got["share"].sum().item() == pytest.approx(1)
        assert got["share"].tolist() == pytest.approx([1 / (3 * n) for n in sizes[1:] for _ in range(n)])

    def test_everyone_derives_the_same_public_batch(self):
        sites = [make_host(parts_of(clients=3, batch_size=4)) for _ in range(2)]
        drawn = []
        for t in range(3):
            for teacher in range(3):
                found = []
                for host, k in zip(sites, (0, 2), strict=True):
                    client = host.client(k)
                    client.begin(t, 1, {})
                    found.append(public_batch(client, teacher).rows.tolist())
                assert found[0] == found[1]
                assert set(found[0]) <= set(sites[0].data.public[teacher].rows.tolist())
                assert len(set(found[0])) == 4
                drawn.append(tuple(found[0]))
        assert len(set(drawn)) == 9

    @pytest.mark.parametrize("trouble", [{"drop_rate": 0.4}, {"straggler_rate": 0.4}, {"participation": 0.5}])
    def test_teachers_may_be_missing(self, trouble):
        result = run(rounds=5, clients=4, seed=1, **trouble)
        down = [e for e in result.ledger.entries() if (e.direction, e.tensor) == ("down", "accuracy")]
        lessons = [sum(e.round == t for e in down) for t in range(5)]
        assert lessons == [n * (n - 1) for n in (record["answered"] for record in result.history)]
        assert len(set(lessons)) > 1 or "participation" in trouble
        assert all(value.isfinite().all() for value in kept(result).values())


class TestRefusals:
    @pytest.mark.parametrize("method", ["fedh2l", "ind", "agg"])
    def test_no_public_data(self, method):
        with refused(MismatchError, method, "public data", "--public-fraction 0.1"):
            parts_of(method, public_fraction=0.0)

    @pytest.mark.parametrize("hyper", [{"every": 2}, {"pairs": True}, {"lesson_lr": 0.1}])
    def test_pcgrad_where_there_are_two_steps(self, hyper):
        with refused(ConflictError, "--conflict pcgrad", "--every 1", "--pairs", "--lesson-lr"):
            parts_of(conflict="pcgrad", **hyper)

    def test_nothing_to_learn_from(self):
        with refused(ConflictError, "--no-kl", "--labels none"):
            parts_of(kl=False, labels="none")

    @pytest.mark.parametrize(
        ("hyper", "kind", "flag"),
        [
            ({"every": 0}, RangeError, "--every"),
            ({"margin": -0.5}, RangeError, "--margin"),
            ({"eps": -1.0}, RangeError, "--eps"),
            ({"eps": 1.0, "conflict": "ignore"}, ConflictError, "--conflict project"),
            ({"lesson_lr": 0.0}, RangeError, "--lesson-lr"),
            ({"labels": "some"}, UnknownNameError, "--labels"),
        ],
    )
    def test_values_that_make_no_sense(self, hyper, kind, flag):
        with refused(kind, flag):
            parts_of(**hyper)


# ---- IND and AGG ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone(FedH2L):
    """FedH2L without its second phase."""

    def topology(self, task, t, present):
        return {}


def assert_trains_like(name: str, result, **how) -> None:
    """The same weights and moments to the bit, and the same figures."""
    baseline = run(name, rounds=len(result.history), **how)

    def trained(of):
        return {n: v for n, v in kept(of).items() if "local_gradient" not in n}

    assert differing(trained(baseline), trained(result)) == []
    assert [r["clients"] for r in baseline.history] == [r["clients"] for r in result.history]
    assert baseline.bytes["up"] == baseline.bytes["down"] == 0


class TestBaselines:
    HOW = {"optimizer": "amsgrad", "lr": 1e-3, "rounds": 4}  # noqa: RUF012

    def test_agg_is_fedh2l_without_mutual_learning(self):
        assert_trains_like("agg", run(Alone, **self.HOW), optimizer="amsgrad", lr=1e-3)

    def test_ind_is_that_with_its_own_data_only(self):
        assert_trains_like("ind", run(Alone, labels="own", **self.HOW), optimizer="amsgrad", lr=1e-3)

    def test_lessons_make_a_difference(self):
        assert differing(kept(run(**self.HOW)), kept(run(Alone, **self.HOW)))

    @pytest.mark.parametrize(("name", "owners"), [("ind", [2]), ("agg", [0, 1, 2, 3])])
    def test_which_rows_they_train_on(self, name, owners):
        host = make_host(parts_of(name))
        client = host.client(2)
        expected = [client.data["train"].rows, *(host.data.public[k].rows for k in owners)]
        assert torch.equal(client.data["local"].rows, torch.cat(expected))
        assert len(set(client.data["local"].rows.tolist())) == len(client.data["local"])

    def test_one_optimizer_step_a_round_that_counts_on(self):
        for name in ("ind", "agg"):
            steps = {v.item() for n, v in kept(run(name, **self.HOW)).items() if n.endswith(".step")}
            assert steps == {4}


# ---- domains -------------------------------------------------------------------------------------------------------


class TestDomains:
    def test_the_defaults_are_the_papers_on_embedded_digits(self):
        for name in ("fedh2l", "ind", "agg"):
            chosen = experiment(name)
            assert (chosen.data, chosen.partition, chosen.clients) == ("rotated-digits", "auto", 4)
            assert (chosen.val_fraction, chosen.test_fraction, chosen.public_fraction) == (0.1, 0.15, 0.1)
            assert (chosen.optimizer, chosen.lr, chosen.weight_decay) == ("amsgrad", 1e-3, 1e-4)
            assert (chosen.batch_size, chosen.evaluate_every) == (32, 50)

    def test_split_and_traffic_of_the_defaults(self):
        """1,000 images a domain: 650, 100, 100 and 150; B M + 1 = 321 floats up."""
        parts = assemble(experiment("fedh2l", rounds=1))
        for k in range(4):
            sizes = {name: len(rows) for name, rows in parts.data.rows(k).items()}
            assert sizes == {"train": 650, "public": 100, "val": 100, "test": 150}
        sent = make_host(parts).answer(Teach(0, 0)).up
        assert len(sent) - 8 - int.from_bytes(sent[:8], "little") == 4 * 321

    def test_acc_is_bwt_and_fwt_by_their_samples_and_is_selected_every_50_rounds(self, tmp_path):
        how = {"rounds": 101, "models": "mlp-64", "progress": False, "out": str(tmp_path / "run")}
        result = pluribus.run("ind", **how)
        assert [record["round"] for record in result.history if record["clients"]] == [49, 99, 100]
        best: dict[str, tuple[float, dict]] = {}
        for record in result.history:
            for k, views in record["clients"].items():
                figures = views["after"]
                assert figures["acc"] == pytest.approx((figures["bwt"] + 3 * figures["fwt"]) / 4, abs=1e-12)
                if k not in best or figures["val"] > best[k][0]:
                    best[k] = figures["val"], figures
        selected = result.summary["after"]["selected"]
        for name in ("acc", "bwt", "fwt"):
            assert selected[name]["mean"] == pytest.approx(sum(f[name] for _, f in best.values()) / 4)
        assert selected["bwt"]["mean"] > selected["fwt"]["mean"]
