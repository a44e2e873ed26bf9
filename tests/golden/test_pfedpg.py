"""pFedPG: the generator and its step by hand, who moves and who does not, and what travels."""

from __future__ import annotations

import math

import pytest
import torch

import pluribus
from conftest import assemble_tiny, few_digits, new_folder, run_tiny
from kit import ByHand, StopAfter, StoppedError, assert_same
from parties import copies, equal, server_of, task_of
from pluribus.errors import MismatchError, RangeError
from pluribus.message import Message
from pluribus.methods.pfedpg import Generator, PFedPG
from pluribus.models.prompts import prompts_of
from pluribus.optim import Rule
from refusals import refused

FEW = {"data": few_digits(160)}


def generator_of(tokens: int = 3, width: int = 4, clients: int = 3, heads: int = 2, head_width: int = 5) -> Generator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Generator(torch.randn(tokens, width), clients, heads, head_width)


def server_with(generator: Generator, rule: Rule):
    """A server with this generator."""
    clients = len(generator.descriptors)
    server = server_of(task_of(2, 2, clients=clients), dict.fromkeys(range(clients), 1))
    server.state.generator = generator
    server.optimize("generator", generator, rule)
    return server


def trained(server, **moves: float) -> dict[int, Message]:
    """Uploads: `c1=0.5` is client 1, all of whose prompts grew by a half."""
    return {
        int(name[1:]): Message({"prompts": PFedPG().download(server, int(name[1:])).tensor("prompts") + move})
        for name, move in moves.items()
    }


def phi(server) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in server.state.generator.named_parameters()}


class TestGenerator:
    def test_size_of_the_papers(self):
        """d = 768, n = 10, 5 clients: 3 d 512 + (512 d + d) + n d + 5 d."""
        assert sum(p.numel() for p in generator_of(10, 768, 5, 8, 64).parameters()) == 1_585_152

    def test_by_hand(self):
        """n = 2, d = 1, one head of width 1, all weights 1: attention softmax(0, ln 3) = (1/4, 3/4)."""
        generator = generator_of(2, 1, 1, 1, 1)
        with torch.no_grad():
            for value in generator.parameters():
                value.fill_(1.0)
            generator.base.copy_(torch.tensor([[0.0], [math.log(3)]]))
            generator.out_bias.fill_(0.5)
        found = 0.75 * math.log(3) + 0.5
        torch.testing.assert_close(generator(0).detach(), torch.tensor([[found], [math.log(3) + found]]))

    def test_heads(self):
        """Head by head, with the usual scale 1 / sqrt(head width)."""
        generator = generator_of()
        with torch.no_grad():
            base, v = generator.base, generator.descriptors[1]
            found = []
            for h in range(2):
                rows = slice(5 * h, 5 * h + 5)
                q, k, value = generator.query[rows] @ v, base @ generator.key[rows].T, base @ generator.value[rows].T
                found.append((k @ q / 5**0.5).softmax(0) @ value)
            expected = base + generator.out @ torch.cat(found) + generator.out_bias
            torch.testing.assert_close(generator(1), expected)

    def test_all_tokens_of_a_client_get_the_same(self):
        generator = generator_of()
        added = (generator(0) - generator.base).detach()
        torch.testing.assert_close(added, added[:1].expand(3, -1))
        assert not torch.allclose(generator(0), generator(1))


class TestServerStep:
    """phi <- phi - eta sum_i (dP_i / dphi)^T (P_sent - P_trained)."""

    def test_by_hand(self):
        """dP / d out_bias adds over tokens: with n = 3, it moves by eta (3 * 0.5 + 3 * -0.25) = 0.75 eta."""
        server = server_with(generator_of(), Rule(lr=0.1))
        before = phi(server)
        PFedPG().aggregate(server, trained(server, c0=0.5, c2=-0.25))
        torch.testing.assert_close(phi(server)["out_bias"], before["out_bias"] + 0.075)

    def test_it_is_the_jacobian_times_the_progress(self):
        generator = generator_of()
        server = server_with(generator, Rule(lr=0.1))
        uploads, before = trained(server, c0=0.5, c1=0.2), phi(server)
        parameters = list(generator.parameters())
        expected = {name: value.clone() for name, value in before.items()}
        for i, upload in uploads.items():
            prompts = generator(i)
            progress = (upload.tensor("prompts") - prompts).detach()
            grads = torch.autograd.grad(prompts, parameters, progress, allow_unused=True)
            for value, g in zip(expected.values(), grads, strict=True):
                if g is not None:
                    value += 0.1 * g
        PFedPG().aggregate(server, uploads)
        after = phi(server)
        for name, value in expected.items():
            torch.testing.assert_close(after[name], value)
            assert torch.equal(value, before[name]) == (name == "descriptors.2")

    @pytest.mark.parametrize("rule", [Rule(lr=1e-3), Rule("adamw", lr=1e-3)], ids=["sgd", "adamw"])
    def test_a_small_step_moves_prompts_toward_the_trained_ones(self, rule):
        server = server_with(generator_of(), rule)
        upload = trained(server, c1=0.5)
        target = upload[1].tensor("prompts")
        distance = [float((PFedPG().download(server, 1).tensor("prompts") - target).norm())]
        for _ in range(3):
            PFedPG().aggregate(server, upload)
            distance.append(float((PFedPG().download(server, 1).tensor("prompts") - target).norm()))
        assert distance == sorted(distance, reverse=True)
        assert distance[-1] < distance[0]

    @pytest.mark.parametrize(
        ("settings", "kept", "step"),
        [
            ({"server_optimizer": "adamw"}, 1 - 0.5 * 0.01, 1.0),
            ({"server_optimizer": "adamw", "server_weight_decay": 0.2}, 1 - 0.5 * 0.2, 1.0),
            ({"server_optimizer": "adamw", "server_weight_decay": 0.0}, 1.0, 1.0),
            ({}, 1.0, 5.0),
            ({"server_weight_decay": 0.2}, 1 - 0.5 * 0.2, 5.0),
        ],
    )
    def test_weight_decay_by_hand(self, settings, kept, step):
        """phi <- (1 - eta_s decay) phi - eta_s g / (|g| + 1e-8): AdamW's first step, as m = g and v = g^2 there.

        Here eta_s is 1/2, and g of out_bias is -10 * 0.5, by 10 prompts that grew by a half. AdamW has its usual decay
        of 0.01 unless another is set. SGD has none; with one it moves by g + decay phi.
        """
        hand = ByHand(assemble_tiny("pfedpg", server_lr=0.5, **settings, **FEW))
        before = phi(hand.server)["out_bias"]
        hand.method.aggregate(hand.server, trained(hand.server, c0=0.5))
        expected = before * kept + 0.5 * step
        torch.testing.assert_close(phi(hand.server)["out_bias"], expected, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("rule", [Rule(lr=1.0), Rule("adamw", lr=1.0)], ids=["sgd", "adamw"])
    def test_no_progress_no_change(self, rule):
        server = server_with(generator_of(), rule)
        before = phi(server)
        PFedPG().aggregate(server, trained(server, c0=0.0, c1=0.0, c2=0.0))
        assert equal(phi(server), before)

    @pytest.mark.parametrize("rule", [Rule(lr=0.1), Rule("adamw", lr=0.1)], ids=["sgd", "adamw"])
    def test_the_descriptor_of_who_is_absent_stays(self, rule):
        """Also where an optimizer remembers where it went before."""
        server = server_with(generator_of(), rule)
        PFedPG().aggregate(server, trained(server, c0=0.5, c1=0.5, c2=0.5))
        before = phi(server)
        PFedPG().aggregate(server, trained(server, c0=0.5, c1=-0.5))
        after = phi(server)
        assert torch.equal(after["descriptors.2"], before["descriptors.2"])
        assert not torch.equal(after["descriptors.1"], before["descriptors.1"])
        assert not torch.equal(after["base"], before["base"])


class TestClient:
    def test_starts_from_what_came_and_trains_prompts_and_head_alone(self):
        parts = assemble_tiny("pfedpg", **FEW)
        hand = ByHand(parts)
        client = hand.host.client(1)
        down = parts.method.download(hand.server, 1)
        assert torch.equal(down.tensor("prompts"), hand.server.state.generator(1))
        parts.method.receive(client, down)
        tokens = prompts_of(client.model)["tokens"]
        assert torch.equal(tokens, down.tensor("prompts"))
        before = {name: value.detach().clone() for name, value in client.model.state_dict().items()}
        client.begin(0, 0, {})
        up = parts.method.local_update(client)
        after = client.model.state_dict()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {"features.backbone.tokens", "head.weight", "head.bias"}
        assert set(up) == {"prompts"}
        assert torch.equal(up.tensor("prompts"), tokens)
        assert not any(name.startswith("model.features.backbone.net.") for name in copies(client)), "never saved"

    def test_one_class_per_client(self):
        result = run_tiny("pfedpg", rounds=1, partition="pathological", classes_per_client=1, **FEW)
        assert all(len(facts.classes) == 1 for facts in result.clients.values())


class TestRun:
    @pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
    def test_a_stopped_run_resumes_to_the_same_bits(self, optimizer):
        settings = {"server_optimizer": optimizer, "rounds": 3, "participation": 0.5, "checkpoint_every": 1, **FEW}
        settings |= {"heads": 2, "head_width": 3}
        straight, folder = run_tiny("pfedpg", **settings, prompts=2), new_folder()
        with pytest.raises(StoppedError):
            run_tiny("pfedpg", folder, observers=[StopAfter(0)], **settings, prompts=2)
        assert_same(straight, pluribus.resume(folder, progress=False))

    def test_traffic_is_what_the_sheet_says(self):
        """n d floats each way."""
        for n, model, width in ((10, "tiny-vit-32", 32), (3, "tiny-vit-48", 48)):
            result = run_tiny("pfedpg", rounds=2, prompts=n, models=model, **FEW)
            for way in ("up", "down"):
                found = result.ledger.by("tensor", way)
                found.pop("(header)")
                assert found == {"prompts": 2 * 4 * 4 * n * width}


class TestRefusals:
    def test_a_backbone_that_is_no_transformer(self):
        with refused(MismatchError, "transformer", "'tiny-cnn-64'", "--models tiny-vit-32"):
            assemble_tiny("pfedpg", models="tiny-cnn-64")

    def test_random_weights(self):
        with refused(MismatchError, "pfedpg", "pretrained", "client 0 (cnn-16)"):
            assemble_tiny("pfedpg", models="cnn-16")

    def test_values(self):
        for name in ("prompts", "heads", "head_width", "server_lr"):
            with refused(RangeError, f"--{name.replace('_', '-')}", 0):
                assemble_tiny("pfedpg", **{name: 0})
        with refused(RangeError, "--server-weight-decay", 0, -0.1):
            assemble_tiny("pfedpg", server_weight_decay=-0.1)
