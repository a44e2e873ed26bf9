"""FedAvg: means by hand, what travels, and what it must equal in the simplest cases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import assemble_tiny, make_host, run_tiny
from parties import equal, federation_of, run_through, server_of, task_of
from pluribus.errors import UnknownNameError
from pluribus.evaluate import measure
from pluribus.message import Message, encode
from pluribus.method import Method, methods
from pluribus.methods.fedavg import FedAvg
from pluribus.request import Evaluate
from refusals import refused


def small_model(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model(torch.randn(8, 2))  # so that the running statistics are not the initial ones
    return model


def aggregated(uploads: dict[int, Message], samples: dict[int, int]) -> dict[str, torch.Tensor]:
    """The global model after these uploads."""
    server = server_of(task_of(3, 2), samples)
    server.state.shared = small_model(99)
    FedAvg().aggregate(server, uploads)
    return dict(server.state.shared.state_dict())


def of_constant(value: float, batches: int = 0) -> Message:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
        model[1].num_batches_tracked.fill_(batches)
    return Message.of(model)


class TestWeighting:
    """Client 0 has 1 sample and sends 0, client 1 has 3 and sends 4: (1 * 0 + 3 * 4) / 4 = 3, or (0 + 4) / 2 = 2."""

    UNIFORM = ("fml", "fedapen")  # by default
    FAMILY = "fedavg fedprox fedbabu fedrep pfedpt per-fedavg lg-fedavg fedavg-matched fedprox-matched fedmrl"

    def merged(self, method: Method) -> dict[str, list]:
        server = server_of(task_of(2, 1), {0: 1, 1: 3})
        server.state.shared = nn.Linear(1, 1)
        sent = {k: {"weight": torch.full((1, 1), 4.0 * k), "bias": torch.full((1,), 4.0 * k)} for k in range(2)}
        method.aggregate(server, {k: Message(tensors) for k, tensors in sent.items()})
        return {name: value.tolist() for name, value in server.state.shared.state_dict().items()}

    @pytest.mark.parametrize("name", [*FAMILY.split(), *UNIFORM])
    def test_by_hand(self, name):
        method = methods()[name]
        assert self.merged(method(weighting="samples")) == {"weight": [[3]], "bias": [3]}
        assert self.merged(method(weighting="uniform")) == {"weight": [[2]], "bias": [2]}
        assert self.merged(method()) == self.merged(method(weighting="uniform" if name in self.UNIFORM else "samples"))

    def test_in_a_run(self):
        """The first round is the same, and from then on nothing is."""
        settings = {"models": "mlp-64", "partition": "dirichlet"}
        by_samples, even = run_tiny("fedavg", **settings), run_tiny("fedavg", weighting="uniform", **settings)
        losses = [[record["loss"] for record in result.history] for result in (by_samples, even)]
        assert losses[0][0] == losses[1][0]
        assert losses[0][1] != losses[1][1]

    def test_nothing_else(self):
        with refused(UnknownNameError, "--weighting", "samples", "uniform", "size"):
            assemble_tiny("fedavg", weighting="size")

    def test_scaffold_has_no_choice(self):
        """c is the mean of the c_i, each counted once, whatever their samples; x must follow the same mean."""
        with refused(UnknownNameError, "weighting", "scaffold"):
            assemble_tiny("scaffold", weighting="samples")


class TestAggregate:
    def test_one_client_is_copied(self):
        model = small_model(0)
        assert equal(aggregated({4: Message.of(model)}, {4: 7}), dict(model.state_dict()))

    def test_two_equal_clients_are_a_fixed_point(self):
        """Bit by bit, as halves add up without rounding."""
        model = small_model(0)
        found = aggregated({k: Message.of(model) for k in range(2)}, {0: 5, 1: 5})
        assert equal(found, dict(model.state_dict()))

    def test_equal_clients_of_unequal_size_are_a_fixed_point(self):
        model = small_model(0)
        found = aggregated({k: Message.of(model) for k in range(3)}, {0: 3, 1: 5, 2: 11})
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value)

    def test_weighted_by_training_samples(self):
        """(1 * 0 + 3 * 4) / 4 = 3."""
        found = aggregated({0: of_constant(0.0), 1: of_constant(4.0)}, {0: 1, 1: 3})
        assert all((found[name] == 3).all() for name in ("0.weight", "0.bias", "1.weight", "1.bias"))

    def test_who_did_not_answer_does_not_count(self):
        """(2 * 1 + 6 * 5) / 8 = 4."""
        found = aggregated({0: of_constant(1.0), 2: of_constant(5.0)}, {0: 2, 1: 1000, 2: 6})
        assert (found["0.weight"] == 4).all()

    def test_running_statistics_are_averaged_and_counters_take_the_largest(self):
        found = aggregated({0: of_constant(0.0, batches=9), 1: of_constant(4.0, batches=2)}, {0: 1, 1: 3})
        assert (found["1.running_mean"] == 3).all()
        assert (found["1.running_var"] == 3).all()
        assert found["1.num_batches_tracked"] == 9


class TestRun:
    def test_everyone_starts_from_the_global_model(self):
        host = make_host(parts := assemble_tiny("fedavg"))
        server = server_of(parts.task, dict.fromkeys(range(4), 1), model="cnn-16")
        FedAvg().setup(server)
        for k in range(4):
            FedAvg().receive(host.client(k), FedAvg().download(server, k))
            assert equal(dict(host.client(k).model.state_dict()), dict(server.state.shared.state_dict()))

    def test_whole_models_travel(self):
        result = run_tiny("fedavg", models="cnn-16-32", rounds=2)
        model = assemble_tiny("fedavg", models="cnn-16-32").task.build("cnn-16-32")
        sizes = {name: value.nbytes for name, value in model.state_dict().items()}
        assert sum(p.nbytes for p in model.parameters()) < sum(sizes.values()), "statistics travel too"
        for way in ("up", "down"):
            by_tensor = result.ledger.by("tensor", way)
            headers = by_tensor.pop("(header)")
            assert by_tensor == {name: 2 * 4 * size for name, size in sizes.items()}
            assert result.bytes[way] == 2 * 4 * sum(sizes.values()) + headers

    @pytest.mark.parametrize(
        "settings",
        [
            {"models": "cnn-16-32"},
            {"models": "mlp-64", "momentum": 0.9, "weight_decay": 0.001},
            {"models": "mlp-64", "optimizer": "adam", "lr": 0.001},
        ],
        ids=["batch-norm", "momentum", "adam"],
    )
    def test_with_one_client_it_is_local_training(self, settings):
        settings |= {"clients": 1, "rounds": 3, "epochs": 2}
        averaging = federation_of(assemble_tiny("fedavg", **settings))
        alone = federation_of(assemble_tiny("local", **settings))
        averaging.server.state.shared.load_state_dict(alone.engine.host.client(0).model.state_dict())
        results = run_through(averaging), run_through(alone)
        models = [dict(one.engine.host.client(0).model.state_dict()) for one in (averaging, alone)]
        assert equal(*models)
        assert equal(dict(averaging.server.state.shared.state_dict()), models[1])
        figures = [[r["clients"]["0"]["after"] for r in result.history] for result in results]
        assert figures[0] == figures[1]
        assert [r["loss"] for r in results[0].history] == [r["loss"] for r in results[1].history]

    def test_evaluation_repeats_and_leaves_no_trace(self):
        federation = federation_of(assemble_tiny("fedavg", rounds=1))
        run_through(federation)
        host, server = federation.engine.host, federation.server
        for k in range(4):
            trained = {name: value.clone() for name, value in host.client(k).model.state_dict().items()}
            assert not equal(trained, dict(server.state.shared.state_dict()))
            down = encode(FedAvg().download(server, k), host.wires(k)[0].down, "server")
            assert host.answer(Evaluate(k, 0, down)).figures == federation.history[0]["clients"][str(k)]
            assert equal(dict(host.client(k).model.state_dict()), trained)

    def test_before_is_the_global_model(self):
        federation = federation_of(assemble_tiny("fedavg", rounds=1))
        run_through(federation)
        for k in range(4):
            client = federation.engine.host.client(k)
            FedAvg().receive(client, FedAvg().download(federation.server, k))
            assert measure(FedAvg().predict, client) == federation.history[0]["clients"][str(k)]["before"]
