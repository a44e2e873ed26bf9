"""Settings that change how clients compute: schedules of the learning rate, clipping, precision, memory layout."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

import pluribus
from conftest import assemble_tiny, make_host, run_tiny, tiny
from kit import numbers
from pluribus.cli.flags import begin, parse_experiment
from pluribus.client import Batch, Client
from pluribus.errors import ConflictError, FormatError, MissingSettingError, RangeError, UnknownNameError
from pluribus.experiment import experiment, flags
from pluribus.inputs import Input
from pluribus.ops import flatten
from pluribus.optim import Opt, Optimizer, Rule
from pluribus.sites.agreement import Agreement, Form
from pluribus.storage.checkpoint import Checkpoint
from pluribus.study.bench import bench
from pluribus.study.budget import equal_rounds
from refusals import refused


class TestLearningRate:
    def test_by_hand(self):
        assert [Rule(lr=0.8, decay=0.5).rate(t) for t in range(3)] == [0.8, 0.4, 0.2]
        assert Rule(lr=0.3).rate(1000) == 0.3

    def test_a_step_in_round_t_uses_the_rate_of_round_t(self):
        client = make_host(assemble_tiny("local", models="mlp-64", lr=0.8, lr_decay=0.5)).client(0)
        x, y = client.data["train"].take(torch.arange(8))
        for t in (0, 1, 3):
            client.begin(t, 0, {})
            assert client.now["lr"].item() == 0.8 * 0.5**t
            before = client.model.head.bias.detach().clone()
            grad = torch.autograd.grad(F.cross_entropy(client.model(x), y), client.model.head.bias)[0]
            client.descend(F.cross_entropy(client.model(x), y))
            torch.testing.assert_close(client.model.head.bias, before - 0.8 * 0.5**t * grad)

    def test_fedl2g_looks_ahead_by_the_rate_of_the_round(self):
        """Its gradient has the rate as a factor, and depends on it a little besides."""
        method = assemble_tiny("fedl2g-l", lr=1e-5, lr_decay=0.5, warmup=0)
        client = make_host(method).client(0)
        found = []
        for t in (0, 1):
            client.begin(t, 0, {})
            data = client.data["study"]
            batch = Batch(*data.take(torch.arange(6)), torch.arange(6), 6)
            method.method.guide_step(client, batch)
            found.append(client.state.gradient.clone())
        largest = found[0].abs().max().item()
        assert largest > 0
        torch.testing.assert_close(found[1], found[0] / 2, rtol=0, atol=1e-4 * largest)

    def test_a_run_without_decay_is_as_ever(self):
        one, other = run_tiny("local"), run_tiny("local", lr_decay=0.5)
        assert one.history[0]["loss"] == other.history[0]["loss"]
        assert one.history[1]["loss"] != other.history[1]["loss"]

    @pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
    def test_nonsense_is_refused(self, value):
        with refused(RangeError, "--lr-decay", value):
            run_tiny("local", lr_decay=value)


class TestSchedule:
    """In thousandths of the full rate, by hand."""

    @pytest.mark.parametrize(
        ("schedule", "expected"),
        [
            # cos of 0, 45, 90 and 135 degrees: 1, 0.7071, 0, -0.7071
            ({"schedule": "cosine"}, [1000, 854, 500, 146]),
            # a third of the way up in each round, then cos of 0 and 90 degrees
            ({"schedule": "cosine", "warmup": 2}, [333, 667, 1000, 500]),
            ({"warmup": 1}, [500, 1000, 1000, 1000]),
            ({"warmup": 3}, [250, 500, 750, 1000]),
            ({"schedule": "steps", "steps": (1, 3)}, [1000, 100, 100, 10]),
            ({"schedule": "steps", "steps": (2,), "factor": 0.5}, [1000, 1000, 500, 500]),
            ({"schedule": "steps", "steps": (2,), "factor": 0.5, "warmup": 1}, [500, 1000, 500, 500]),
            # a cosine of 1, 0.854, 0.5 and 0.146 times 1, 1/2, 1/4 and 1/8
            ({"schedule": "cosine", "decay": 0.5}, [1000, 427, 125, 18]),
        ],
        ids=str,
    )
    def test_by_hand(self, schedule, expected):
        rule = Rule(lr=2.0, rounds=4, **schedule)
        assert [round(500 * rule.rate(t)) for t in range(4)] == expected

    def test_a_cosine_is_torchs_own(self):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
        for t in range(7):
            assert Rule(lr=0.3, schedule="cosine", rounds=7).rate(t) == pytest.approx(theirs.get_last_lr()[0])
            optimizer.step()
            theirs.step()

    def test_no_round_of_a_run_has_a_rate_of_0(self):
        """SCAFFOLD divides by it."""
        rule = Rule(schedule="cosine", rounds=1000)
        assert rule.rate(999) > 0
        assert rule.rate(1000) == rule.rate(1001) == 0

    def test_clients_step_by_it(self):
        settings = {"lr": 0.8, "rounds": 4, "lr_schedule": "cosine", "lr_warmup": 2}
        client = make_host(assemble_tiny("local", models="mlp-64", **settings)).client(0)
        for t, rate in enumerate((0.8 / 3, 1.6 / 3, 0.8, 0.4)):
            client.begin(t, 0, {})
            assert client.now["lr"].item() == pytest.approx(rate)
            assert client.optimizers["model"]._torch.param_groups[0]["lr"] == pytest.approx(rate)

    def test_rounds_of_a_methods_warm_up_do_not_count(self):
        settings = {"lr": 0.5, "warmup": 3, "rounds": 2, "lr_schedule": "steps", "lr_steps": "1"}
        client = make_host(assemble_tiny("fedl2g-l", **settings)).client(0)
        found = []
        for t in range(5):
            client.begin(t, 0, {})
            found.append(client.now["lr"].item())
        assert found == [pytest.approx(rate) for rate in (0.5, 0.5, 0.5, 0.5, 0.05)]

    def test_a_border_of_pfedpt_follows_it(self):
        settings = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 1.0, "lr_schedule": "cosine"}
        method = assemble_tiny("pfedpt", models="cnn-16-32", prompt_lr=0.2, **settings)
        rule = make_host(method).client(0).optimizers["prompt"].rule
        assert (rule.momentum, rule.weight_decay, rule.clip_norm) == (0, 0, None)
        assert [rule.rate(0), rule.rate(1)] == pytest.approx([0.2, 0.1])

    def test_steps_are_text_or_a_list(self):
        found = [
            experiment("local", lr_schedule="steps", lr_steps=given).lr_steps for given in ("1, 3", [1, 3], (1, 3))
        ]
        assert found == ["1,3"] * 3
        made = parse_experiment("run", *begin(["local", "--lr-schedule=steps", "--lr-steps", "1,3"]), [])[0]
        assert made.rule().steps == (1, 3)
        assert "--lr-steps 1,3" in " ".join(flags(made))

    def test_real_sites_agree_on_it(self):
        settings = {"lr_schedule": "steps", "lr_steps": "2,3", "lr_factor": 0.5, "lr_warmup": 1, "clip_norm": 2.0}
        described = experiment("fedgh", rounds=4, **settings)
        agreement = Agreement.of_experiment(described, "a", ("x", "y"), Form(Input("image", (1, 8, 8))))
        sent = Agreement.of(json.loads(json.dumps(agreement.facts())))
        assert (
            sent.local().rule
            == described.rule()
            == Rule(schedule="steps", steps=(2, 3), factor=0.5, warmup=1, rounds=4, clip_norm=2.0)
        )

    def test_work_of_few_rounds_is_measured_without_it(self):
        """`bench` and `compare --equal-steps` run fewer rounds than a schedule may need."""
        described = experiment("local", **tiny(rounds=9, models="mlp-64", lr_schedule="steps", lr_steps="5,7"))
        assert equal_rounds({"local": described}) == {"local": 9}
        assert len(bench(described, rounds=1, bare=False, progress=False).each) == 1

    @pytest.mark.parametrize("given", ["1,x", "1.5", [2.5], [True], "-1", "1,,3"])
    def test_steps_that_are_not_numbers_of_rounds(self, given):
        with refused(FormatError, "--lr-steps"):
            experiment("local", lr_schedule="steps", lr_steps=given)

    @pytest.mark.parametrize(
        ("settings", "kind", "facts"),
        [
            ({"lr_schedule": "steps"}, MissingSettingError, ["--lr-steps"]),
            ({"lr_steps": "2"}, ConflictError, ["--lr-steps", "--lr-schedule steps"]),
            ({"lr_steps": "2", "lr_schedule": "cosine"}, ConflictError, ["--lr-steps", "--lr-schedule steps"]),
            ({"lr_factor": 0.5, "lr_schedule": "cosine"}, ConflictError, ["--lr-factor", "--lr-schedule steps"]),
            ({"lr_schedule": "steps", "lr_steps": "3,2"}, ConflictError, ["3,2"]),
            ({"lr_schedule": "steps", "lr_steps": "2,2"}, ConflictError, ["2,2"]),
            ({"lr_schedule": "steps", "lr_steps": "0,2"}, ConflictError, ["0,2"]),
            ({"lr_schedule": "steps", "lr_steps": "2,4"}, ConflictError, ["2,4", "--rounds (4)"]),
            ({"lr_schedule": "steps", "lr_steps": "2", "lr_warmup": 2}, ConflictError, ["--lr-warmup (2)"]),
            ({"lr_warmup": 4}, ConflictError, ["--lr-warmup", "--rounds (4)"]),
            ({"lr_schedule": "cosine", "lr_warmup": 5}, ConflictError, ["--lr-warmup", "--rounds (4)"]),
        ],
        ids=str,
    )
    def test_what_means_nothing_is_refused_before_anything_is_written(self, settings, kind, facts, tmp_path):
        with refused(kind, *facts):
            run_tiny("local", str(tmp_path / "run"), rounds=4, **settings)
        assert not (tmp_path / "run").exists()


class TestClipping:
    def test_by_hand(self):
        """(3, 4) has the norm 5: at most 1 makes it (0.6, 0.8), in any number of tensors."""
        p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
        Optimizer(Opt([p, q]), Rule(lr=1.0, clip_norm=1.0)).apply(gradients)
        assert [-p.item(), -q.item()] == pytest.approx([0.6, 0.8], rel=1e-6)
        assert gradients == [3.0, 4.0]  # they are the caller's

    def test_a_small_gradient_keeps_its_bits(self):
        found = []
        for clip_norm in (None, 5.1):
            p = torch.nn.Parameter(torch.zeros(2))
            Optimizer(Opt([p]), Rule(lr=0.1, clip_norm=clip_norm)).apply([torch.tensor([3.0, 4.0])])
            found.append(p)
        assert torch.equal(*found)

    def test_a_parameter_without_gradient_has_no_part(self):
        p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = Optimizer(Opt([p, q]), Rule(lr=1.0, clip_norm=1.0))
        optimizer.apply([None, torch.tensor([3.0, 4.0])])
        assert p.tolist() == [0, 0]
        assert q.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)
        optimizer.apply([None, None])
        assert q.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)

    def test_stacked_clients_have_a_norm_each(self):
        """Norms 5, 0.5 and 0, of a vector and a number per client: the first is clipped to 1, the others are not."""
        p, q = torch.nn.Parameter(torch.zeros(3, 1, 2)), torch.nn.Parameter(torch.zeros(3))
        gradients = [torch.tensor([[[3.0, 0.0]], [[0.3, 0.0]], [[0.0, 0.0]]]), torch.tensor([4.0, 0.4, 0.0])]
        Optimizer(Opt([p, q]), Rule(lr=1.0, clip_norm=1.0), stacked=True).apply(gradients)
        assert p[:, 0, 0].tolist() == pytest.approx([-0.6, -0.3, 0.0], rel=1e-6)
        assert q.tolist() == pytest.approx([-0.8, -0.4, 0.0], rel=1e-6)

    def test_both_verbs_of_a_client_clip(self):
        """`descend` and `apply` move all weights by the rate times the norm, whatever the loss."""
        client = make_host(assemble_tiny("local", models="mlp-64", lr=0.5, clip_norm=0.01)).client(0)
        x, y = client.data["train"].take(torch.arange(8))
        client.begin(0, 0, {})
        for verb in (client.descend, lambda loss: client.apply(client.grads(loss))):
            before = flatten({name: p.detach().clone() for name, p in client.parameters().items()}, client.parameters())
            verb(1000 * F.cross_entropy(client.model(x), y))
            after = flatten({name: p.detach() for name, p in client.parameters().items()}, client.parameters())
            assert torch.linalg.vector_norm(after - before).item() == pytest.approx(0.005, rel=1e-3)

    def test_each_optimizer_has_its_own_norm(self):
        """FedRep trains head and body apart, and the rule that a method names has no norm unless it says so."""
        p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        ours = Rule(lr=1.0, clip_norm=1.0)
        for opt in (Opt([p]), Opt([q], Rule(lr=1.0))):
            Optimizer(opt, ours).apply([torch.tensor([4.0])])
        assert [p.item(), q.item()] == pytest.approx([-1.0, -4.0], rel=1e-6)

    def test_a_norm_that_no_gradient_has_changes_no_bit_of_a_run(self):
        one, other, clipped = (run_tiny("local", clip_norm=norm) for norm in (None, 1e6, 1e-3))
        assert numbers(one) == numbers(other)
        assert numbers(one) != numbers(clipped)


class TestLayout:
    def test_channels_last_trains_alike(self):
        settings = {"models": "cnn-16-32,cnn-16", "rounds": 1}
        plain, last = (run_tiny("fedgh", channels_last=value, **settings) for value in (False, True))
        assert last.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=1e-4)
        assert last.history[0]["bytes"] == plain.history[0]["bytes"]
        one, other = (Checkpoint(result.folder / "state").client(0) for result in (plain, last))
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name].is_contiguous()
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)

    def test_images_and_filters_lie_so(self):
        client = make_host(assemble_tiny("local", models="cnn-16-32", channels_last=True)).client(0)
        x, _ = client.data["train"].take(torch.arange(2))
        assert x.is_contiguous(memory_format=torch.channels_last)
        weights = client.model.features.backbone.conv2.weight
        assert weights.is_contiguous(memory_format=torch.channels_last)
        assert not weights.is_contiguous()

    def test_a_cpu_keeps_torchs_layout_unless_asked(self):
        client = make_host(assemble_tiny("local", models="cnn-16-32")).client(0)
        assert client.model.features.backbone.conv2.weight.is_contiguous()


class TestPrecision:
    def test_bfloat16_is_for_the_arithmetic_not_for_what_is_kept(self):
        plain, half = (run_tiny("fedgh", precision=name, rounds=1) for name in ("float32", "bfloat16"))
        assert half.history[0]["loss"] != plain.history[0]["loss"]
        assert half.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=0.05)
        state = Checkpoint(half.folder / "state").client(0)
        assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}

    def test_sweeps_too(self):
        client = make_host(assemble_tiny("local", precision="bfloat16")).client(0)
        features = client.sweep(Client.features)
        assert features.dtype == torch.float32
        assert torch.equal(features, features.bfloat16().float())

    def test_float32_means_float32_and_leaves_torch_as_it_was(self):
        seen = {}

        class Watch:
            def start(self, federation):
                pass

            def round(self, record, ledger):
                seen[name] = torch.backends.cudnn.allow_tf32

            def finish(self, result):
                pass

        before = torch.backends.cudnn.allow_tf32
        for name in ("tf32", "float32"):
            run_tiny("local", precision=name, rounds=1, observers=[Watch()])
        assert seen == {"tf32": True, "float32": False}
        assert torch.backends.cudnn.allow_tf32 == before

    def test_an_unknown_one_is_refused(self):
        with refused(UnknownNameError, "--precision", "tf32", "float32", "bfloat16", "fp8"):
            pluribus.run("local", precision="fp8")
