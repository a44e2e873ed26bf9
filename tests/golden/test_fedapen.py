"""FedAPEN: the losses and the weight of the private model by hand, which rows are held out, and what it must equal."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import assemble_tiny, make_host, run_tiny
from parties import client_of, data_of, equal, federation_of, flat_split, run_through, signs
from pluribus.client import Batch, Client
from pluribus.errors import RangeError
from pluribus.methods.fedapen import FedAPEN, blend
from pluribus.optim import Rule
from refusals import refused

LN3 = math.log(3)
HALFWAY = math.sqrt(3) / (1 + math.sqrt(3))  # softmax of (ln 3 / 2, 0)


def pair(weight: float = 0.5, label: int = 0) -> Client:
    """One sample (1, -1), lr 1. Private logits (ln 3, 0), so (3/4, 1/4); shared logits 0, so (1/2, 1/2)."""
    own, shared = flat_split(2, 2), flat_split(2, 2)
    own.head.load_state_dict({"weight": torch.tensor([[LN3, 0.0], [0.0, 0.0]]), "bias": torch.zeros(2)})
    shared.head.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})
    rows = data_of(signs([(1, -1)]), [label])
    client = client_of(own, {"train": rows, "held out": rows, "rest": rows}, rule=Rule(lr=1.0))
    client.state.shared, client.state.weight = shared, torch.tensor(weight)
    client.equip(FedAPEN().optimizers(client), {})
    return client


class TestStep:
    @pytest.mark.parametrize(
        ("weight", "share", "own", "shared"),
        [
            # labels 3/4 - 1 and 1/2 - 1; teachers 3/4 - 1/2 and 1/2 - 3/4
            (0.5, 0.0, 0.0, -3 / 4),
            # and the ensemble: lambda (p - 1) and (1 - lambda) (p - 1)
            (0.5, 1.0, 0.5 * (HALFWAY - 1), -3 / 4 + 0.5 * (HALFWAY - 1)),
            (1.0, 1.0, -1 / 4, -3 / 4),  # p = 3/4, of the private model alone
            (0.0, 1.0, 0.0, -3 / 4 - 1 / 2),  # p = 1/2, of the shared model alone
            (1.0, 2.0, -1 / 2, -3 / 4),
        ],
    )
    def test_by_hand(self, weight, share, own, shared):
        client = pair(weight)
        x, y = client.data["train"].take(torch.arange(1))
        loss = FedAPEN(ensemble_weight=share).step(client, Batch(x, y, torch.arange(1), 1))
        p = math.exp(weight * LN3) / (1 + math.exp(weight * LN3))
        assert loss.item() == pytest.approx(-math.log(p)), "the ensemble's task loss is logged"
        for model, error in ((client.model, own), (client.state.shared, shared)):
            assert model.head.bias.tolist() == pytest.approx([-error, error], abs=1e-6)
        assert client.state.weight.item() == weight


class TestWeight:
    @pytest.mark.parametrize(
        ("label", "lr", "steps", "expected"),
        [
            # the slope is (p - y) ln 3 for class 0
            (0, 0.1, 1, 0.5 - 0.1 * (HALFWAY - 1) * LN3),
            (1, 0.1, 1, 0.5 - 0.1 * HALFWAY * LN3),
            (0, 100.0, 1, 1.0),
            (1, 100.0, 1, 0.0),
            (0, 100.0, 2, 1.0),
            (0, 0.1, 0, 0.5),
            (0, 0.0, 9, 0.5),
        ],
    )
    def test_a_step_by_hand(self, label, lr, steps, expected):
        client = pair(label=label)
        before = {name: value.clone() for name, value in client.model.state_dict().items()}
        FedAPEN(adapt_lr=lr, adapt_steps=steps).adapt_weight(client)
        assert client.state.weight.item() == pytest.approx(expected)
        assert not client.state.weight.requires_grad
        assert equal(before, dict(client.model.state_dict()))

    def test_two_steps(self):
        first = 0.5 - (HALFWAY - 1) * LN3 * 0.1
        p = math.exp(first * LN3) / (1 + math.exp(first * LN3))
        client = pair()
        FedAPEN(adapt_lr=0.1, adapt_steps=2).adapt_weight(client)
        assert client.state.weight.item() == pytest.approx(first - 0.1 * (p - 1) * LN3)

    def test_it_is_learned_before_training(self):
        """Training changes the slope: a weight that was learned afterwards would be another one."""
        client = pair()
        FedAPEN(adapt_steps=1, adapt_lr=0.1).local_update(client)
        assert client.state.weight.item() == pytest.approx(0.5 - 0.1 * (HALFWAY - 1) * LN3)

    def test_without_held_out_rows_it_stays(self):
        client = pair()
        client.data["held out"] = client.data["train"][:0]
        FedAPEN().adapt_weight(client)
        assert client.state.weight.item() == 0.5

    def test_the_prediction(self):
        own, shared = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 5.0]])
        assert blend(torch.tensor(0.25), own, shared).tolist() == [[1.5, 4.0]]
        assert blend(torch.tensor(1.0), own, shared).tolist() == own.tolist()
        assert blend(torch.tensor(0.0), own, shared).tolist() == shared.tolist()
        client = pair(0.25)
        x, _ = client.data["train"].take(torch.arange(1))
        assert FedAPEN().predict(client, x)[0].tolist() == pytest.approx([0.25 * LN3, 0])


class TestHeldOut:
    @pytest.mark.parametrize(
        ("share", "rows", "expected"),
        [(0.05, 100, 5), (0.05, 20, 1), (0.05, 2, 1), (0.05, 1, 0), (0.05, 0, 0), (0.9, 3, 2), (0.0, 100, 0)],
    )
    def test_how_many(self, share, rows, expected):
        assert FedAPEN(held_out=share).held(rows) == expected

    def test_no_row_of_them_is_trained_on(self):
        parts = assemble_tiny("fedapen", held_out=0.25)
        for k in range(4):
            data = make_host(parts).client(k).data
            train, held, rest = (set(data[name].rows.tolist()) for name in ("train", "held out", "rest"))
            assert held | rest == train
            assert not held & rest
            assert len(held) == round(len(train) / 4)

    def test_models_train_on_the_rest_alone(self):
        """With all rows held out, only lambda changes."""
        client = pair()
        client.data["rest"] = client.data["train"][:0]
        before = {name: value.clone() for name, value in client.tensors().items()}
        FedAPEN().local_update(client)
        changed = {name for name, value in client.tensors().items() if not torch.equal(value, before[name])}
        assert changed == {"state.weight"}

    def test_they_are_the_same_in_every_process(self):
        parts = assemble_tiny("fedapen", held_out=0.25)
        one, other = (make_host(parts).client(1).data["held out"].rows for _ in range(2))
        assert torch.equal(one, other)


def private_scores(client: Client, x: torch.Tensor) -> torch.Tensor:
    return client.model(x)


class TestEquals:
    def test_without_an_ensemble_it_is_mutual_learning(self):
        """CE + KL is twice FML's loss at alpha = beta = 1/2, and SGD at half the learning rate takes the same steps."""
        settings = {"rounds": 2, "aux_model": "mlp-64"}
        alone = {"ensemble_weight": 0.0, "held_out": 0.0, "lr": 0.025}
        apen, mutual = (
            federation_of(assemble_tiny(name, **settings, **hyper))
            for name, hyper in (("fedapen", alone), ("fml", {"lr": 0.05}))
        )
        run_through(apen)
        run_through(mutual)
        assert equal(*(dict(one.server.state.shared.state_dict()) for one in (apen, mutual)))
        for k in range(4):
            assert equal(*(dict(one.engine.host.client(k).model.state_dict()) for one in (apen, mutual)))

    def test_at_one_half_it_is_the_mean_of_both(self):
        federation = federation_of(assemble_tiny("fedapen", adapt_steps=0))
        run_through(federation)
        method, client = federation.parts.method, federation.engine.host.client(2)
        assert client.state.weight.item() == 0.5
        client.begin(2, 0, {})
        own, shared = client.sweep(private_scores), client.sweep(method.shared_scores)
        torch.testing.assert_close(client.sweep(method.predict), (own + shared) / 2)

    def test_weights_differ_between_clients(self):
        federation = federation_of(assemble_tiny("fedapen", held_out=0.3, rounds=3))
        run_through(federation)
        found = {round(federation.engine.host.client(k).state.weight.item(), 4) for k in range(4)}
        assert len(found) > 1
        assert all(0 <= weight <= 1 for weight in found)


def test_traffic_is_what_the_page_says():
    """The shared model each way; the weight stays with the client."""
    result = run_tiny("fedapen", aux_model="cnn-16-32")
    sizes = {n: v.nbytes for n, v in assemble_tiny("fedapen").task.build("cnn-16-32").state_dict().items()}
    for way in ("up", "down"):
        sent = result.ledger.by("tensor", way)
        del sent["(header)"]
        assert sent == {name: 2 * 4 * size for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("hyper", "facts"),
    [
        ({"held_out": 1.0}, ("--held-out", 0, 1)),
        ({"held_out": -0.1}, ("--held-out", 0, -0.1)),
        ({"adapt_steps": -1}, ("--adapt-steps", 0, -1)),
        ({"adapt_lr": -0.1}, ("--adapt-lr", 0, -0.1)),
        ({"start": 1.5}, ("--start", 0, 1, 1.5)),
        ({"ensemble_weight": -1.0}, ("--ensemble-weight", 0, -1.0)),
    ],
)
def test_numbers_that_make_no_sense(hyper, facts):
    with refused(RangeError, *facts):
        assemble_tiny("fedapen", **hyper)
