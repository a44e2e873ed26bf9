"""FedHPL, by hand from Eq. 2 and 7 to 10 of the paper, its ablations, and the promises of its page."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import pluribus
from conftest import assemble_tiny, few_digits, make_host, new_folder, run_tiny
from kit import ByHand, StopAfter, StoppedError, assert_same, kept
from parties import GivenCards, client_of, copies, data_of, equal, flat_split, signs, task_of
from pluribus.client import Batch
from pluribus.errors import ConflictError, MismatchError, RangeError, SchemaError
from pluribus.message import Message, Rows, decode, encode
from pluribus.methods.fedhpl import FedHPL
from pluribus.models import TwoPartModel
from pluribus.models.prompts import prompts_of
from pluribus.request import Work
from pluribus.server import Server
from pluribus.task import Card
from refusals import refused

C = 10
WIDTHS = {"tiny-vit-32": 32, "tiny-vit-48": 48, "tiny-cnn-64": 64}


def run(method="fedhpl", **settings):
    return run_tiny(method, **{"data": few_digits(160), **settings})


def server_with(method: FedHPL, widths: list[int], classes: int = 2) -> Server:
    """A server that knows clients of these widths."""
    cards = {k: Card(k, f"toy-{width}", 1, width, ()) for k, width in enumerate(widths)}
    server = Server(task_of(classes, 0, clients=len(widths)), GivenCards(cards))
    method.setup(server)
    return server


def logits_of(*rows: tuple[int, list[float]], classes: int = 2) -> dict[int, list[torch.Tensor]]:
    """Logits by class: `(1, [..])` is one of class 1."""
    found: dict[int, list[torch.Tensor]] = {}
    for label, logit in rows:
        found.setdefault(label, []).append(torch.tensor(logit, dtype=torch.float64))
    return found


def averaged(found: dict[int, list[torch.Tensor]], classes: int = 2, sizes: list[int] | None = None) -> Message:
    rows = Rows(torch.zeros(classes, classes, dtype=torch.float64), torch.zeros(classes, dtype=torch.bool))
    counts = torch.zeros(classes, dtype=torch.int32)
    for label, some in found.items():
        rows.value[label], rows.held[label], counts[label] = torch.stack(some).mean(0), True, len(some)
    extra = {"sizes": torch.tensor(sizes, dtype=torch.int32)} if sizes else {}
    return Message({"logits": rows, "counts": counts, **extra})


def full(found: dict[int, list[torch.Tensor]], classes: int = 2) -> Message:
    labels = [label for label, some in found.items() for _ in some]
    rows = [one for some in found.values() for one in some]
    logits = torch.stack(rows) if rows else torch.zeros(0, classes, dtype=torch.float64)
    return Message({"logits": logits, "labels": torch.tensor(labels, dtype=torch.int32)})


def taught(method: FedHPL, server: Server, k: int) -> tuple[list, list]:
    rows = method.download(server, k).rows("logits")
    return rows.value.tolist(), rows.held.tolist()


class TestServer:
    """Eq. 7 and 8."""

    def test_one_correct_logit_is_halved(self):
        """One client, one logit p, beta = 1: p / (1 + 1)."""
        method = FedHPL()
        server = server_with(method, [4])
        method.aggregate(server, {0: averaged(logits_of((1, [2.0, 6.0])))})
        assert taught(method, server, 0) == ([[0, 0], [1, 3]], [False, True])

    def test_by_hand(self):
        """Widths 2, 4 and 8. beta_0 = (1, 1/2, 1/4), beta_1 = (1/2, 1, 1/2), beta_2 = (1/4, 1/2, 1).

        Class 0: client 0 sends (8, 0), client 1 sends (4, 4) and (0, 8), client 2 nothing.
        p~_0 = (1 (8, 0) + 1/2 (4, 12)) / (1 + 1 + 1/2 2) = (10, 6) / 3.
        p~_1 = (1/2 (8, 0) + 1 (4, 12)) / (1 + 1/2 + 2) = (8, 12) / 3.5.
        p~_2 = (1/4 (8, 0) + 1/2 (4, 12)) / (1 + 1/4 + 1/2 2) = (4, 6) / 2.25.
        Class 1: only client 2, once, (0, 4): p~_0 = 1/4 (0, 4) / (1 + 1/4), p~_1 = (0, 2) / 1.5, p~_2 = (0, 4) / 2.
        """
        method = FedHPL()
        server = server_with(method, [2, 4, 8])
        uploads = [logits_of((0, [8.0, 0.0])), logits_of((0, [4.0, 4.0]), (0, [0.0, 8.0])), logits_of((1, [0.0, 4.0]))]
        method.aggregate(server, {k: averaged(found) for k, found in enumerate(uploads)})
        expected = [
            [[10 / 3, 6 / 3], [0, 1 / 1.25]],
            [[8 / 3.5, 12 / 3.5], [0, 2 / 1.5]],
            [[4 / 2.25, 6 / 2.25], [0, 4 / 2]],
        ]
        for k in range(3):
            value, held = taught(method, server, k)
            assert held == [True, True]
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[k]))

    @pytest.mark.parametrize(
        ("one", "other", "beta"), [(384, 768, 0.5), (384, 1024, 0.375), (768, 1024, 0.75), (512, 2048, 0.25)]
    )
    def test_weights_of_the_papers_models(self, one, other, beta):
        """A single logit (1, 0) of the other: p~ = beta (1, 0) / (1 + beta), whichever of the two teaches."""
        for widths in ([one, other], [other, one]):
            method = FedHPL()
            server = server_with(method, widths)
            method.aggregate(server, {1: averaged(logits_of((0, [1.0, 0.0])))})
            assert taught(method, server, 0)[0][0] == pytest.approx([beta / (1 + beta), 0])

    def test_equal_widths_give_everyone_the_same(self):
        method = FedHPL()
        server = server_with(method, [6, 6, 6])
        method.aggregate(server, {0: averaged(logits_of((0, [3.0, 0.0]))), 2: averaged(logits_of((0, [0.0, 3.0])))})
        assert taught(method, server, 0) == taught(method, server, 1) == taught(method, server, 2)
        assert taught(method, server, 0)[0][0] == [1, 1]  # (3, 3) / (1 + 1 + 1)

    def test_average_aggregation_forgets_the_widths(self):
        method = FedHPL(aggregation="average")
        server = server_with(method, [2, 8])
        method.aggregate(server, {0: averaged(logits_of((0, [3.0, 0.0]))), 1: averaged(logits_of((0, [0.0, 3.0])))})
        assert taught(method, server, 0)[0][0] == taught(method, server, 1)[0][0] == [1, 1]

    def test_the_denominator_of_all_samples(self):
        """Two of client 0's three samples are right: (4, 4) / (1 + 3), not / (1 + 2)."""
        method = FedHPL(denominator="all")
        server = server_with(method, [2])
        found = logits_of((0, [4.0, 0.0]), (0, [0.0, 4.0]))
        method.aggregate(server, {0: averaged(found, sizes=[3, 5])})
        assert taught(method, server, 0) == ([[1, 1], [0, 0]], [True, False])

    @pytest.mark.parametrize("aggregation", ["weighted", "average"])
    def test_full_and_average_upload_are_the_same(self, aggregation):
        """Eq. 36, in double precision."""
        random = torch.Generator().manual_seed(0)
        found = [
            {c: list(torch.randn(n, 4, generator=random, dtype=torch.float64)) for c, n in enumerate(counts) if n}
            for counts in ((5, 0, 2, 1), (1, 7, 0, 0), (0, 0, 3, 0))
        ]
        servers = []
        for method, form in (
            (FedHPL(aggregation=aggregation), averaged),
            (FedHPL(aggregation=aggregation, upload="full"), full),
        ):
            server = server_with(method, [4, 6, 9], classes=4)
            method.aggregate(server, {k: form(one, classes=4) for k, one in enumerate(found)})
            servers.append(server)
            assert method.download(server, 0).rows("logits").held.tolist() == [True, True, True, True]
        one, other = (dict(server.state.named_buffers()) for server in servers)
        assert one["sums"].dtype == torch.float64
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-13, atol=1e-13)

    def test_only_the_last_rounds_answers_count(self):
        method = FedHPL()
        server = server_with(method, [2, 2])
        method.aggregate(server, {0: averaged(logits_of((0, [2.0, 2.0])))})
        method.aggregate(server, {1: averaged(logits_of((1, [4.0, 4.0])))})
        assert taught(method, server, 0) == ([[0, 0], [2, 2]], [False, True])

    def test_before_anyone_answered_nothing_is_known(self):
        method = FedHPL()
        server = server_with(method, [2, 3])
        assert taught(method, server, 1) == ([[0, 0], [0, 0]], [False, False])

    def test_a_label_outside_the_classes_counts_for_nothing(self):
        method = FedHPL(upload="full")
        server = server_with(method, [2])
        labels = torch.tensor([0, 7, -1], dtype=torch.int32)
        method.aggregate(server, {0: Message({"logits": torch.ones(3, 2), "labels": labels})})
        assert taught(method, server, 0) == ([[0.5, 0.5], [0, 0]], [True, False])


def student(method: FedHPL, teacher: list[list[float]], held: list[bool], rows=((1, 1), (-1, 1)), labels=(0, 1)):
    """A linear client of two pixels and classes whose logits are the pixels, its batch, and what came down."""
    model = flat_split(2, 2)
    model.head.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    data = data_of(signs(rows), labels)
    task = task_of(2, 2)
    client = client_of(model, data, down=method.schema(task, Card(0, "toy", 2, 2, ())).down)
    if client.got and teacher:
        client.take(Message({"logits": Rows(torch.tensor(teacher), torch.tensor(held))}))
    x, y = data.take(torch.arange(len(labels)))
    return client, Batch(x, y, torch.arange(len(labels)), len(labels))


def cross_entropy(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(z) for z in logits)) - logits[label]


def divergence(teacher: list[float], logits: list[float], temperature: float) -> float:
    """KL(softmax(teacher / T) || softmax(logits / T))."""
    p, q = ([math.exp(z / temperature) for z in scores] for scores in (teacher, logits))
    p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


class TestLoss:
    """Eq. 2 and 9. Logits are (1, 1) with label 0 and (-1, 1) with label 1."""

    TEACHER = [[3.0, -1.0], [0.5, 2.0]]  # noqa: RUF012

    def loss(self, method: FedHPL, held=(True, True)) -> float:
        client, batch = student(method, self.TEACHER, list(held))
        return float(method.loss(client, batch).detach())

    CE = (cross_entropy([1, 1], 0) + cross_entropy([-1, 1], 1)) / 2
    KD = divergence([3, -1], [1, 1], 4.5), divergence([0.5, 2], [-1, 1], 4.5)

    def test_by_hand(self):
        """CE: ln 2 = 0.6931472 and ln(1 + e^-2) = 0.1269280.

        KD at T = 4.5: first, p = (sigma(4/T), ..) = (0.7086608, 0.2913392) against q = (1/2, 1/2):
        0.7086608 ln 1.4173217 + 0.2913392 ln 0.5826783 = 0.0898008. Second, p_1 = sigma(1.5/T) = 0.5825702 against
        q_1 = sigma(2/T) = 0.6093175: 0.0014912. Their sum over two is 0.4556836.
        """
        assert (cross_entropy([1, 1], 0), cross_entropy([-1, 1], 1)) == pytest.approx((0.6931472, 0.1269280), abs=1e-7)
        assert self.loss(FedHPL()) == pytest.approx(self.CE + sum(self.KD) / 2, abs=1e-6)
        assert pytest.approx((0.0898008, 0.0014912), abs=1e-7) == self.KD
        assert self.loss(FedHPL()) == pytest.approx(0.4556836, abs=1e-6)

    def test_gamma_temperature_and_its_square(self):
        assert self.loss(FedHPL(gamma=0.5)) == pytest.approx(self.CE + 0.5 * sum(self.KD) / 2, abs=1e-6)
        assert self.loss(FedHPL(kd_t2=True)) == pytest.approx(self.CE + 4.5**2 * sum(self.KD) / 2, abs=1e-5)
        hot = (divergence([3, -1], [1, 1], 2.0) + divergence([0.5, 2], [-1, 1], 2.0)) / 2
        assert self.loss(FedHPL(temperature=2.0)) == pytest.approx(self.CE + hot, abs=1e-6)

    def test_a_class_without_a_global_logit_adds_nothing_but_counts_in_the_mean(self):
        assert self.loss(FedHPL(), (True, False)) == pytest.approx(self.CE + self.KD[0] / 2, abs=1e-6)
        assert self.loss(FedHPL(), (False, False)) == pytest.approx(self.CE, abs=1e-7)

    def test_a_masked_class_has_exactly_no_gradient(self):
        def gradient(method: FedHPL, held: list[bool]) -> torch.Tensor:
            client, batch = student(method, self.TEACHER, held)
            return torch.autograd.grad(method.loss(client, batch), client.model.head.weight)[0]

        plain = gradient(FedHPL(upload="none"), [])
        assert torch.equal(gradient(FedHPL(), [False, False]), plain)
        assert torch.equal(gradient(FedHPL(gamma=0.0), [True, True]), plain)
        assert not torch.equal(gradient(FedHPL(), [True, False]), plain)

    def test_the_teacher_is_a_constant(self):
        client, batch = student(FedHPL(), self.TEACHER, [True, True])
        assert not client.got["logits"].value.requires_grad
        distance = FedHPL().loss(client, batch) - FedHPL(gamma=0.0).loss(client, batch)
        (weight,) = torch.autograd.grad(distance, client.model.head.weight)
        q = [torch.softmax(torch.tensor(z) / 4.5, 0) for z in ([1.0, 1.0], [-1.0, 1.0])]
        p = [torch.softmax(torch.tensor(z) / 4.5, 0) for z in self.TEACHER]
        by_hand = sum(torch.outer((q[i] - p[i]) / 4.5, batch.x[i].flatten()) for i in range(2)) / 2
        torch.testing.assert_close(weight, by_hand, rtol=0, atol=1e-7)


class TestUpload:
    """Eq. 10, over all of D_k. Logits are the pixels; class 0 wins with (1, -1), class 1 with (-1, 1)."""

    ROWS = (1, -1), (-1, 1), (-1, 1), (1, -1), (1, 1)
    LABELS = 0, 0, 1, 0, 1

    def sent(self, **settings) -> Message:
        client, _ = student(method := FedHPL(**settings), [], [], self.ROWS, self.LABELS)
        return Message(method._report(client))

    def test_mean_and_count_of_correct_logits(self):
        """Class 0: two of three are right. Class 1: one; (1, 1) is a tie, which argmax gives to class 0."""
        sent = self.sent()
        assert set(sent) == {"logits", "counts"}
        assert sent.tensor("counts").tolist() == [2, 1]
        assert sent.rows("logits").value.tolist() == [[1, -1], [-1, 1]]
        assert sent.rows("logits").held.tolist() == [True, True]

    def test_all_logits(self):
        sent = self.sent(send="all")
        assert sent.tensor("counts").tolist() == [3, 2]
        assert sent.rows("logits").value.tolist() == [pytest.approx([1 / 3, -1 / 3]), [0, 1]]

    def test_every_logit_with_its_label(self):
        sent = self.sent(upload="full")
        assert set(sent) == {"logits", "labels"}
        assert sent.tensor("labels").tolist() == [0, 1, 0]
        assert sent.tensor("logits").tolist() == [[1, -1], [-1, 1], [1, -1]]
        assert self.sent(upload="full", send="all").tensor("labels").tolist() == list(self.LABELS)

    def test_sizes_travel_only_for_the_denominator_of_all(self):
        assert self.sent(denominator="all").tensor("sizes").tolist() == [3, 2]
        assert self.sent(denominator="all", upload="full").tensor("sizes").tolist() == [3, 2]

    def test_a_class_that_is_never_right_is_not_sent(self):
        client, _ = student(method := FedHPL(), [], [], ((1, -1), (1, -1)), (0, 1))
        assert Message(method._report(client)).rows("logits").held.tolist() == [True, False]


class TestFreezing:
    def test_the_backbone_is_the_same_bits_after_training(self):
        host = make_host(parts := assemble_tiny("fedhpl", data=few_digits(160)))
        for k in range(3):
            client = host.client(k)
            net = client.model.features.backbone.net
            before = {name: value.clone() for name, value in net.state_dict().items()}
            learned = {name: p.detach().clone() for name, p in client.parameters().items()}
            client.begin(0, 0, {})
            parts.method.local_update(client)
            assert equal(dict(net.state_dict()), before)
            assert all(not p.requires_grad and p.grad is None for p in net.parameters())
            assert all(not torch.equal(p, learned[name]) for name, p in client.parameters().items())

    def test_what_is_kept_is_what_learns_and_what_came_down(self):
        host = make_host(assemble_tiny("fedhpl", data=few_digits(160)))
        prompts = [["tokens"], ["tokens"], ["prompt_lr", "prompt_tb"]]
        for k, names in enumerate(prompts):
            expected = {f"model.features.backbone.{name}" for name in names}
            expected |= {"model.head.weight", "model.head.bias", "got.logits.value", "got.logits.held"}
            assert set(host.client(k).tensors()) == expected
            assert set(host.client(k).parameters()) == {
                n.removeprefix("model.") for n in expected if not n.startswith("got")
            }

    def test_a_checkpoint_holds_no_backbone(self):
        result = run(rounds=1)
        assert not [name for name in kept(result) if "backbone.net" in name]

    def test_prompts_are_drawn_by_client(self):
        host = make_host(assemble_tiny("fedhpl", data=few_digits(160), models="tiny-vit-32"))
        one, other = (prompts_of(host.client(k).model)["tokens"] for k in (0, 1))
        assert not torch.equal(one, other)
        again = make_host(assemble_tiny("fedhpl", data=few_digits(160), models="tiny-vit-32"))
        assert torch.equal(prompts_of(again.client(0).model)["tokens"], one)


class TestRounds:
    def test_a_whole_round_by_hand(self):
        """Round 1 has no teacher; what comes down in round 2 is Eq. 8 of everyone's correct logits."""
        parts = assemble_tiny("fedhpl", data=few_digits(160), rounds=2)
        hand = ByHand(parts)
        first = decode(hand.download(0, 0), hand.host.wires(0)[0].down, "server").rows("logits")
        assert not first.held.any()
        hand.round(0, parts.cards)
        sums, counts = {}, {}
        for k in parts.cards:
            client = hand.host.client(k)
            x, y = client.data["train"].take(torch.arange(len(client.data["train"])))
            client.model.eval()
            with torch.no_grad():
                logits = client.model(x).double()
            right = logits.argmax(1) == y
            sums[k] = torch.stack([logits[right & (y == c)].sum(0) for c in range(C)])
            counts[k] = torch.stack([(right & (y == c)).sum() for c in range(C)]).double()
        assert sum(counts.values()).min() < sum(counts.values()).max()
        for k in parts.cards:
            d = {j: WIDTHS[parts.cards[j].model] for j in parts.cards}
            beta = {j: min(d[k] / d[j], d[j] / d[k]) for j in parts.cards}
            above = sum(beta[j] * sums[j] for j in parts.cards)
            below = 1 + sum(beta[j] * counts[j] for j in parts.cards)
            got = decode(hand.download(0, k), hand.host.wires(k)[0].down, "server").rows("logits")
            assert torch.equal(got.held, sum(counts.values()) > 0)
            torch.testing.assert_close(got.value, (above / below[:, None]).float(), rtol=1e-4, atol=1e-5)

    def test_gamma_zero_is_local_prompt_tuning(self):
        silent, deaf = run(upload="none"), run(gamma=0.0)
        assert silent.bytes == {"up": 0, "down": 0, "evaluation": 0}
        weights = {n: v for n, v in kept(silent).items() if n.startswith("client")}
        assert weights
        assert all(torch.equal(kept(deaf)[name], value) for name, value in weights.items())
        both = run()
        assert any(not torch.equal(kept(both)[name], value) for name, value in weights.items())

    def test_the_first_round_is_local_and_the_second_is_not(self):
        one = [run(rounds=1, upload=upload) for upload in ("none", "average")]
        assert one[0].history[0]["clients"] == one[1].history[0]["clients"]

    def test_full_and_average_runs_agree(self):
        average, every = run(), run(upload="full")
        for name, value in kept(average).items():
            if name.startswith("client"):
                torch.testing.assert_close(kept(every)[name].float(), value.float(), rtol=1e-3, atol=1e-4)

    def test_who_is_absent_keeps_its_last_global_logits(self):
        parts = assemble_tiny("fedhpl", data=few_digits(160), rounds=3)
        hand = ByHand(parts)
        hand.round(0, parts.cards)
        hand.round(1, parts.cards)
        before = copies(hand.host.client(0))
        assert before["got.logits.held"].any()
        hand.round(2, [1, 2])
        assert equal(copies(hand.host.client(0)), before)
        after = decode(hand.download(0, 0), hand.host.wires(0)[0].down, "server").rows("logits")
        assert not torch.equal(after.value, before["got.logits.value"])

    @pytest.mark.parametrize(
        "settings",
        [
            {"upload": "full", "send": "all", "denominator": "all"},
            {"share_prompts": True, "share_head": True, "aggregation": "average"},
            {"prompt": "shallow", "prompts": 1, "padding": 1, "kd_t2": True},
            {"upload": "none"},
        ],
    )
    def test_every_variant_stops_and_resumes_to_the_same_bits(self, settings):
        settings = settings | {"rounds": 3, "participation": 0.5, "checkpoint_every": 1, "data": few_digits(160)}
        straight, folder = run_tiny("fedhpl", **settings), new_folder()
        with pytest.raises(StoppedError):
            run_tiny("fedhpl", folder, observers=[StopAfter(1)], **settings)
        assert_same(straight, pluribus.resume(folder, progress=False))


class TestSharing:
    """+P and +H: means among clients of one width, weighted by n_k."""

    MODELS = "tiny-vit-32,tiny-vit-48,tiny-vit-32,tiny-cnn-64"

    def after_one_round(self, **shares):
        parts = assemble_tiny("fedhpl", data=few_digits(160), models=self.MODELS, **shares)
        hand = ByHand(parts)
        first = decode(hand.download(0, 0), hand.host.wires(0)[0].down, "server")
        assert set(first) == {"logits"}, "before anyone sent any, everyone keeps its own"
        hand.round(0, parts.cards)
        return parts, hand

    def test_prompts(self):
        parts, hand = self.after_one_round(share_prompts=True)
        n = {k: parts.cards[k].samples for k in parts.cards}
        tokens = {k: prompts_of(hand.host.client(k).model)["tokens"].detach().clone() for k in (0, 1, 2)}
        mean = (n[0] * tokens[0] + n[2] * tokens[2]) / (n[0] + n[2])
        down = {k: hand.parts.method.download(hand.server, k) for k in parts.cards}
        for k, expected in ((0, mean), (1, tokens[1]), (2, mean)):
            assert set(down[k]) == {"logits", "prompts.tokens"}
            torch.testing.assert_close(down[k].tensor("prompts.tokens"), expected)
        assert set(down[3]) == {"logits", "prompts.prompt_lr", "prompts.prompt_tb"}
        client = hand.host.client(0)
        head = client.model.head.weight.clone()
        parts.method.receive(client, down[0])
        torch.testing.assert_close(prompts_of(client.model)["tokens"].detach(), mean)
        assert torch.equal(client.model.head.weight, head)

    def test_heads(self):
        parts, hand = self.after_one_round(share_head=True)
        n = {k: parts.cards[k].samples for k in parts.cards}
        heads = {k: hand.host.client(k).model.head.weight.detach() for k in parts.cards}
        mean = (n[0] * heads[0] + n[2] * heads[2]) / (n[0] + n[2])
        down = {k: parts.method.download(hand.server, k) for k in parts.cards}
        assert set(down[0]) == {"logits", "head.weight", "head.bias"}
        for k, expected in ((0, mean), (1, heads[1]), (2, mean), (3, heads[3])):
            torch.testing.assert_close(down[k].tensor("head.weight"), expected)

    def test_prompts_of_equal_shape_but_other_width_stay_apart(self):
        """Frames have the image's shape whatever the network's width."""
        settings = {"models": "tiny-cnn-64,test_fedhpl.narrow_cnn", "share_prompts": True}
        parts = assemble_tiny("fedhpl", data=few_digits(160), **settings)
        hand = ByHand(parts)
        hand.round(0, parts.cards)
        one, other = (parts.method.download(hand.server, k).tensor("prompts.prompt_lr") for k in (0, 1))
        assert one.shape == other.shape
        assert not torch.equal(one, other)

    def test_absent_groups_keep_what_they_had(self):
        parts, hand = self.after_one_round(share_prompts=True)
        before = parts.method.download(hand.server, 1).tensor("prompts.tokens")
        hand.round(1, [0, 3])
        assert torch.equal(parts.method.download(hand.server, 1).tensor("prompts.tokens"), before)


def narrow_cnn(shape) -> nn.Module:
    return nn.Sequential(nn.Conv2d(shape[0], 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def ready(shape) -> TwoPartModel:
    return TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(256, 8)), nn.Linear(8, C), 8)


narrow_cnn.pretrained = ready.pretrained = True  # as far as these tests go


class TestTraffic:
    """Tables 9 and 10, in numbers of four bytes."""

    def numbers(self, result, way: str, t: int = 1) -> dict[int, dict[str, int]]:
        found: dict[int, dict[str, int]] = {}
        for e in result.ledger.entries():
            if (e.round, e.direction) == (t, way) and e.tensor != "(header)":
                found.setdefault(e.client, {})[e.tensor] = e.bytes // 4
        return found

    def test_average_upload_is_n_c_squared_and_n_c(self):
        result = run(partition="iid", data=few_digits(320), rounds=6, lr=0.1)
        sent = self.numbers(result, "up", 5)
        everything = [one for one in sent.values() if one["logits.ids"] == C]
        assert everything, "some client is right in every class"
        for one in sent.values():
            rows = one.pop("logits.ids")  # which classes, so that those never right need not be sent
            assert one == {"logits": rows * C, "counts": C}
        assert everything[0] == {"logits": 100, "counts": 10}  # 110, Table 9
        assert 5 * sum(everything[0].values()) / 1024 == pytest.approx(0.54, abs=0.005)  # K over five clients, Table 10

    def test_full_upload_is_n_c_plus_one_for_each_correct_logit(self):
        average, every = run(rounds=1), run(rounds=1, upload="full")
        parts = assemble_tiny("fedhpl", data=few_digits(160))
        host = make_host(parts)
        for k, one in self.numbers(every, "up", 0).items():
            reply = host.answer(Work(k, 0))
            right = int(decode(reply.up, host.wires(k)[0].up, "client").tensor("counts").sum())
            assert sum(one.values()) == (C + 1) * right
        assert average.history[0]["clients"] == every.history[0]["clients"]

    def test_down_is_n_c_squared(self):
        result = run()
        for one in self.numbers(result, "down").values():
            assert one["logits"] == C * one["logits.ids"] <= C * C
        assert sum(sum(one.values()) for one in self.numbers(result, "down", 0).values()) == 0

    def test_prompts_and_heads(self):
        sent = self.numbers(run(models="tiny-vit-48", share_prompts=True, share_head=True), "up")
        for one in sent.values():
            assert one["prompts.tokens"] == 4 * 3 * 48  # N n d
            assert one["head.weight"] + one["head.bias"] == 48 * C + C  # d n_c + n_c


class TestRefusals:
    def test_a_backbone_without_weights(self):
        with refused(MismatchError, "fedhpl", "pretrained", "client 0 (cnn-16-32)", "--weights"):
            assemble_tiny("fedhpl", models="cnn-16-32")

    def test_a_backbone_of_one_image_size(self):
        with refused(MismatchError, "prompts", "'test_fedhpl.ready'", "--models"):
            assemble_tiny("fedhpl", models="test_fedhpl.ready")

    def test_images_of_another_size(self):
        with refused(MismatchError, "--image-size 16"):
            assemble_tiny("fedhpl", image_size=8)

    def test_settings_that_mean_nothing(self):
        with refused(ConflictError, "--upload none", "--share-prompts", "--share-head"):
            assemble_tiny("fedhpl", upload="none", share_head=True)
        for name in ("prompts", "padding", "temperature"):
            with refused(RangeError, f"--{name}", 0):
                assemble_tiny("fedhpl", **{name: 0})

    def test_more_logits_than_declared(self):
        method = FedHPL(upload="full")
        wire = method.schema(task_of(2, 2), Card(0, "toy", 2, 2, ()))
        samples, classes = wire.up["logits"].shape
        assert samples.most == 2**20
        small = wire.up | {"logits": replace(wire.up["logits"], shape=(replace(samples, most=1), classes))}
        with refused(SchemaError, "'logits'", "samples <= 1", "(2, 2)"):
            encode(Message({"logits": torch.ones(2, 2), "labels": torch.zeros(2, dtype=torch.int32)}), small, "client")
