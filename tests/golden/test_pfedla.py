"""pFedLA: alpha, the mix and the hypernetwork's step by hand, layers kept local, and what it must equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import pluribus
from conftest import assemble_tiny, few_digits, new_folder, run_tiny, tiny
from kit import ByHand
from parties import equal, federation_of, run_through, server_of, task_of
from pluribus.assembly import assemble
from pluribus.data import Dataset, load
from pluribus.errors import DeviceError, RangeError
from pluribus.experiment import experiment
from pluribus.federation import Federation
from pluribus.message import Message
from pluribus.methods.pfedla import HyperNetwork, PFedLA, _layers
from pluribus.result import Result
from refusals import refused


def net_of(client: int, scores: list[list[float]]) -> HyperNetwork:
    """A hypernetwork that gives these weights before they are normalized, layer by layer: x = (1, 0, 0, ...)."""
    net = HyperNetwork(client, len(scores), len(scores[0]), torch.Generator())
    with torch.no_grad():
        for value in net.parameters():
            value.zero_()
        net.hidden_bias[-1, 0] = 1
        net.weight[:, :, 0] = torch.tensor(scores)
    return net


def server_with(nets: list[HyperNetwork], **weights: list[list[float]]):
    """A server that knows each client's weights, by name; `a__b` is the tensor b of the layer a."""
    server = server_of(task_of(2, 2, clients=len(nets)), dict.fromkeys(range(len(nets)), 1))
    server.state.weights = {name.replace("__", "."): torch.tensor(rows) for name, rows in weights.items()}
    server.state.statistics = {}
    server.state.nets = nn.ModuleList(nets)
    return server


def message(**values: list[float]) -> Message:
    return Message({name.replace("__", "."): torch.tensor(value) for name, value in values.items()})


class TestAlpha:
    def test_starts_with_scores_of_order_one(self):
        """The mean is 1, the bias. 100 weights of variance 1 / (3 * 100^2) on a vector of length 10 add 0.06 or so."""
        nets = [HyperNetwork(0, 6, 8, torch.Generator().manual_seed(seed)) for seed in range(20)]
        found = torch.stack([net.scores() for net in nets])
        assert 0.95 < found.mean() < 1.05
        assert 0.03 < found.std() < 0.12

    def test_starts_near_uniform_on_the_simplex(self):
        alpha = HyperNetwork(0, 6, 8, torch.Generator().manual_seed(0))()
        assert alpha.shape == (6, 8)
        assert (alpha > 0).all()
        torch.testing.assert_close(alpha.sum(1), torch.ones(6))
        assert (alpha * 8 - 1).abs().max() < 0.6

    def test_normalized_by_layer(self):
        alpha = net_of(0, [[1.0, 3.0], [2.0, -5.0]])()
        assert alpha.tolist() == [[0.25, 0.75], [1.0, 0.0]]

    def test_a_layer_without_weight_is_the_clients_own(self):
        net = net_of(1, [[-1.0, -2.0, 0.0], [1.0, 1.0, 2.0]])
        alpha = net()
        assert alpha.tolist() == [[0, 1, 0], [0.25, 0.25, 0.5]]
        found = torch.autograd.grad((alpha * torch.arange(6.0).view(2, 3)).sum(), list(net.parameters()))
        assert all(bool(g.isfinite().all()) for g in found)
        assert not found[-2][0].any(), "it gets no gradient"

    def test_stays_on_the_simplex(self):
        federation = federation_of(assemble_tiny("pfedla", data=few_digits(160), rounds=2, hyper_lr=1.0))
        run_through(federation)
        for net in federation.server.state.nets:
            alpha = net()
            assert (alpha >= 0).all()
            torch.testing.assert_close(alpha.sum(1), torch.ones(len(alpha)))


class TestServer:
    def test_mix_by_hand(self):
        """Layer a: (1, 3) / 4; layer b: all of client 1. Both tensors of a layer are mixed alike."""
        nets = [net_of(0, [[1.0, 3.0], [0.0, 2.0]]), net_of(1, [[1.0, 0.0], [1.0, 1.0]])]
        server = server_with(nets, a__weight=[[0.0, 0.0], [4.0, 8.0]], a__bias=[[8.0], [0.0]], b__weight=[[1.0], [5.0]])
        first, second = (PFedLA().download(server, k) for k in (0, 1))
        assert {n: v.tolist() for n, v in first.items()} == {"a.weight": [3, 6], "a.bias": [2], "b.weight": [5]}
        assert {n: v.tolist() for n, v in second.items()} == {"a.weight": [0, 0], "a.bias": [8], "b.weight": [3]}

    def test_a_step_by_hand(self):
        """alpha = (1, 3) / 4, mix (3, 6), trained (4, 6): Delta = (1, 0), <theta_j, Delta> = (0, 4), their mean 3.

        Scores s add to 4, so d(mix . Delta) / ds_j = (<theta_j, Delta> - 3) / 4 = (-3/4, 1/4): client 1's layer lies
        along Delta, and its weight grows.
        """
        server = server_with([net_of(0, [[1.0, 3.0]]), net_of(1, [[1.0, 1.0]])], a__weight=[[0.0, 0.0], [4.0, 8.0]])
        PFedLA(hyper_lr=0.5).aggregate(server, {0: message(a__weight=[4.0, 6.0])})
        net = server.state.nets[0]
        assert net.bias.tolist() == [[-0.375, 0.125]]
        assert net.weight[0, :, 0].tolist() == [0.625, 3.125]
        assert not net.weight[:, :, 1:].any()
        assert net()[0, 1] > 0.75
        assert server.state.weights["a.weight"].tolist() == [[4, 6], [4, 8]], "mix + Delta; the other stays"
        assert server.state.nets[1]()[0].tolist() == [0.5, 0.5], "who was not there learns nothing"

    def test_the_step_does_not_depend_on_how_far_the_client_went(self):
        """Delta twice as long in b as in a along the same models: both layers learn the same."""
        models = {"a__x": [[0.0, 1.0], [1.0, 0.0]], "b__x": [[0.0, 2.0], [2.0, 0.0]]}
        server = server_with([net_of(k, [[1.0, 1.0], [1.0, 1.0]]) for k in (0, 1)], **models)
        PFedLA(hyper_lr=0.5).aggregate(server, {0: message(a__x=[1.5, 0.5], b__x=[3.0, 1.0])})
        bias = server.state.nets[0].bias  # a: Delta (1, 0), <theta_j, Delta> = (0, 1), mean 1/2, scores add to 2
        assert bias.tolist() == [[-0.125, 0.125], [-0.125, 0.125]]

    def test_it_descends_half_the_squared_distance_as_a_share_of_delta(self):
        """The same step by autograd through the mix itself, for the embedding and all layers of the network."""
        parts = assemble_tiny("pfedla", models="cnn-16-32", clients=3)
        server, method = ByHand(parts).server, PFedLA(hyper_lr=0.01)
        generator = torch.Generator().manual_seed(0)
        for _, value in server.state.weights.items():
            value.copy_(torch.randn(value.shape, generator=generator) * (0.1 if value.dim() > 2 else 1))
        sent = method.download(server, 1)
        up = Message({n: v + 1e-2 if v.is_floating_point() else v for n, v in sent.items()})
        net, layers = server.state.nets[1], _layers([*server.state.weights, *server.state.statistics])
        apart = [torch.zeros(()) for _ in layers]
        for name, value in server.state.weights.items():
            layer = layers[name.rpartition(".")[0]]
            mix = torch.tensordot(net()[layer], value, 1)
            apart[layer] = apart[layer] + (mix - up.tensor(name)).square().sum()
        loss = sum(0.5 * value / value.detach() for value in apart)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        expected = [p.detach() - 0.01 * g for p, g in zip(net.parameters(), grads, strict=True)]
        assert all(bool(g.any()) for g in grads)
        method.aggregate(server, {1: up})
        for p, value in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach(), value, rtol=1e-4, atol=1e-6)

    def test_nothing_learned_changes_no_weights(self):
        server = server_with([net_of(0, [[1.0, 3.0]]), net_of(1, [[1.0, 1.0]])], a__weight=[[0.0, 0.0], [4.0, 8.0]])
        before = {n: v.clone() for n, v in server.state.nets.state_dict().items()}
        PFedLA(hyper_lr=1.0).aggregate(server, {0: PFedLA().download(server, 0)})
        assert equal(before, server.state.nets.state_dict())

    def test_all_learn_from_the_models_before_the_round(self):
        """Client 1's new weights are not in client 0's gradient, nor the other way."""
        both, one = (
            server_with([net_of(k, [[1.0, 1.0]]) for k in (0, 1)], a__weight=[[1.0, 0.0], [0.0, 2.0]]) for _ in range(2)
        )
        ups = {0: message(a__weight=[3.0, 1.0]), 1: message(a__weight=[0.0, 9.0])}
        PFedLA(hyper_lr=0.1).aggregate(both, ups)
        PFedLA(hyper_lr=0.1).aggregate(one, {1: ups[1]})
        assert torch.equal(both.state.nets[1].weight, one.state.nets[1].weight)

    def test_weight_bias_and_statistics_of_a_module_are_one_layer(self):
        server = ByHand(assemble_tiny("pfedla", models="cnn-16-32")).server
        modules = {n.rpartition(".")[0] for n, _ in server.state.weights.items()}
        assert len(_layers([*server.state.weights, *server.state.statistics])) == len(modules)
        assert set(_layers([*server.state.weights, *server.state.statistics])) == modules
        assert len(dict(server.state.statistics.items())) == 6  # two batch norms

    def test_statistics_are_mixed_and_counters_are_the_clients_own(self):
        server = ByHand(assemble_tiny("pfedla", models="cnn-16-32")).server
        for _, value in server.state.statistics.items():
            value.copy_(torch.arange(4).view(4, *[1] * (value.dim() - 1)).expand_as(value))
        down = PFedLA().download(server, 2)
        alpha = server.state.nets[2]()
        layers = _layers([*server.state.weights, *server.state.statistics])
        for name, value in server.state.statistics.items():
            got = down.tensor(name)
            if value.is_floating_point():
                mean = alpha[layers[name.rpartition(".")[0]]] @ torch.arange(4.0)
                torch.testing.assert_close(got, mean.detach().expand_as(got))
            else:
                assert got == 2


class TestRun:
    def test_everyone_starts_from_one_model(self):
        hand = ByHand(parts := assemble_tiny("pfedla"))
        common = parts.task.build("cnn-16", "global").state_dict()
        for k in parts.cards:
            assert equal(dict(hand.host.client(k).model.state_dict()), dict(common))
            for name, value in PFedLA().download(hand.server, k).items():
                torch.testing.assert_close(value, common[name])

    def test_with_all_weight_on_oneself_it_is_local_training(self):
        settings = {"models": "cnn-16-32", "rounds": 2}
        mixing, alone = (federation_of(assemble_tiny(name, **settings)) for name in ("pfedla", "local"))
        for net in mixing.server.state.nets:
            torch.nn.init.constant_(net.bias, -1e9)
        common = mixing.engine.host.client(0).model.state_dict()
        for k in range(4):
            alone.engine.host.client(k).model.load_state_dict(common)
        run_through(mixing), run_through(alone)
        for k in range(4):
            models = [dict(one.engine.host.client(k).model.state_dict()) for one in (mixing, alone)]
            assert equal(*models)

    def test_who_is_absent_keeps_its_stored_model(self):
        hand = ByHand(assemble_tiny("pfedla"))
        before = {n: v.clone() for n, v in hand.server.state.weights.items()}
        hand.round(0, [1, 2])
        for name, value in hand.server.state.weights.items():
            assert torch.equal(value[[0, 3]], before[name][[0, 3]])
            for k in (1, 2):
                assert torch.equal(value[k], hand.host.client(k).model.state_dict()[name])

    def test_traffic_is_what_the_sheet_says(self):
        """P floats each way."""
        result = run_tiny("pfedla", data=few_digits(160), rounds=2)
        model = assemble_tiny("pfedla").task.build("cnn-16")
        sizes = {name: 2 * 4 * 4 * value.numel() for name, value in model.state_dict().items()}
        for way in ("up", "down"):
            found = result.ledger.by("tensor", way)
            found.pop("(header)")
            assert found == sizes


def contradicting(rows: int = 640) -> Dataset:
    """Digits of two domains that look alike; in the second one every digit has the name of the next."""
    digits = load(few_digits(rows), image_size=None, seed=0)
    domain = torch.arange(rows) % 2
    return replace(digits, y=(digits.y + domain) % 10, domain=domain, domains=("right", "wrong"))


def two_groups(method: str, **settings) -> Federation:
    """Clients 0 and 2 hold the first domain, 1 and 3 the second. All settings of the method are its defaults."""
    how = {"models": "mlp-64", "partition": "domain", "rounds": 12, "lr": 0.1, "evaluate_every": 12}
    return federation_of(assemble(experiment(method, **tiny(**how | settings)), contradicting()))


def own_domain(result: Result) -> float:
    """Mean accuracy on the client's own domain, before local training, in the last round."""
    return result.summary["before"]["last"]["bwt"]["mean"]


class TestPersonalizes:
    def test_clients_that_contradict_each_other_part(self):
        """At its defaults, at the end of 12 rounds: much weight on oneself and one's like, little on the others."""
        federation = two_groups("pfedla")
        before = torch.stack([net().detach().mean(0) for net in federation.server.state.nets])
        assert (before - 1 / 4).abs().max() < 0.05
        learned, uniform = run_through(federation), run_through(two_groups("fedavg"))
        alpha = torch.stack([net().detach().mean(0) for net in federation.server.state.nets])
        own, like = alpha.diagonal(), alpha[[0, 1, 2, 3], [2, 3, 0, 1]]
        others = 1 - own - like
        assert (own > 1 / 4 + 0.1).all()
        assert (own + like > 0.75).all()
        assert (like > others / 2 + 0.05).all(), "one's like has more weight than either of the others"
        assert own_domain(uniform) < 0.6, "one model cannot give two names to one digit"
        assert own_domain(learned) > own_domain(uniform) + 0.2

    def test_weights_leave_uniform_averaging_at_all_defaults(self):
        """20 rounds on digits: eight clients begin with 1/8 each."""
        result = pluribus.run("pfedla", out=new_folder(), progress=False, device="cpu", evaluate_every=20)
        told = [record["notes"]["own_weight"] for record in result.history]
        assert told[0] == pytest.approx(1 / 8, abs=0.01)
        assert told[-1] > 1 / 8 + 0.1

    def test_the_learning_rate_matters(self):
        slow, fast = (two_groups("pfedla", rounds=4, evaluate_every=4, hyper_lr=rate) for rate in (0.001, 0.01))
        told = [run_through(one).history[-1]["notes"]["own_weight"] for one in (slow, fast)]
        assert told[1] > told[0] + 0.03
        alphas = [torch.stack([net().detach() for net in one.server.state.nets]) for one in (slow, fast)]
        assert (alphas[0] - alphas[1]).abs().max() > 0.1

    def test_a_rounds_record_has_the_weights_on_oneself_of_those_who_answered(self):
        nets = [net_of(0, [[1.0, 3.0], [1.0, 1.0]]), net_of(1, [[1.0, 3.0], [0.0, 1.0]])]
        server = server_with(nets, a__x=[[0.0], [1.0]], b__x=[[0.0], [1.0]])
        PFedLA().aggregate(server, {k: PFedLA().download(server, k) for k in (0, 1)})  # nothing was learned
        assert server.notes == {"own_weight": 0.625, "own_weights": {"0": 0.375, "1": 0.875}}
        PFedLA().aggregate(server, {1: PFedLA().download(server, 1)})
        assert server.notes == {"own_weight": 0.875, "own_weights": {"1": 0.875}}


class TestKeepLocal:
    def test_layers_that_lean_on_the_client_most_are_not_sent(self):
        nets = [net_of(0, [[1.0, 3.0], [3.0, 1.0], [1.0, 1.0]]), net_of(1, [[1.0, 3.0], [3.0, 1.0], [1.0, 1.0]])]
        server = server_with(nets, a__x=[[0.0], [1.0]], b__x=[[0.0], [1.0]], b__y=[[0.0], [1.0]], c__x=[[0.0], [1.0]])
        sent = {(k, n): set(PFedLA(keep_local=n).download(server, k)) for k in (0, 1) for n in (0, 1, 2, 3)}
        assert sent[0, 0] == sent[1, 0] == {"a.x", "b.x", "b.y", "c.x"}
        assert sent[0, 1] == {"a.x", "c.x"}
        assert sent[0, 2] == {"a.x"}
        assert sent[1, 1] == {"b.x", "b.y", "c.x"}
        assert sent[0, 3] == sent[1, 3] == set()

    def test_a_layer_that_was_not_mixed_teaches_nothing(self):
        nets = [net_of(0, [[1.0, 3.0], [3.0, 1.0]]), net_of(1, [[1.0, 1.0], [1.0, 1.0]])]
        server = server_with(nets, a__x=[[0.0], [1.0]], b__x=[[0.0], [1.0]])
        PFedLA(keep_local=1, hyper_lr=1.0).aggregate(server, {0: message(a__x=[2.0], b__x=[2.0])})
        assert nets[0].bias[0].any()
        assert not nets[0].bias[1].any()
        assert server.state.weights["b.x"].tolist() == [[2], [1]], "but its owner's weights are stored"

    def test_the_client_keeps_its_own_and_less_comes_down(self):
        method = PFedLA(keep_local=2)
        hand = ByHand(replace(assemble_tiny("pfedla", models="cnn-16-32"), method=method))
        hand.round(0, range(4))
        client = hand.host.client(1)
        down = method.download(hand.server, 1)
        trained = {n: v.clone() for n, v in client.model.state_dict().items()}
        method.receive(client, down)
        after = client.model.state_dict()
        kept = {name.rpartition(".")[0] for name in trained.keys() - set(down)}
        assert len(kept) == 2
        assert all(torch.equal(after[n], trained[n]) == (n not in down) for n in trained if n.endswith("weight"))
        assert all(torch.equal(after[n], down.tensor(n)) for n in down)
        stored = dict(hand.server.state.weights.items())
        for name in trained.keys() - set(down):
            if name in stored:
                assert torch.equal(stored[name][1], trained[name])

    def test_traffic_falls(self):
        whole, less = (run_tiny("pfedla", data=few_digits(160), rounds=2, keep_local=k).bytes for k in (0, 1))
        assert less["up"] == whole["up"]
        assert less["down"] < whole["down"]


class TestRefusals:
    def test_values(self):
        with refused(RangeError, "--hyper-lr", 0):
            assemble_tiny("pfedla", hyper_lr=0)
        with refused(RangeError, "--keep-local", 0, -1):
            assemble_tiny("pfedla", keep_local=-1)
        with refused(RangeError, "--keep-local", 3, "'cnn-16'", 4):
            assemble_tiny("pfedla", keep_local=4)

    def test_more_models_than_fit_into_memory(self):
        parts = assemble_tiny("pfedla")
        many = replace(parts.task, clients=20_000)
        with refused(DeviceError, "pfedla", 20_000, "'cnn-16'", "GiB", 4, "--clients"):
            parts.method.check(many, parts.cards)
