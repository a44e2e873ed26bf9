"""The verbs of a client: who sees which sample when, what moves, and what is left as it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from parties import client_of, copies, data_of, descend, equal, flat_split, noise, server_of, task_of
from pluribus import draws
from pluribus.client import Client, batch_sizes, trainable
from pluribus.engines.capture import name_of_step
from pluribus.internal.steps import Descent
from pluribus.message import Dim, Field, Message, Rows
from pluribus.models import TwoPartModel
from pluribus.optim import Opt, Rule


def labels(samples: int) -> list[int]:
    return [i % 2 for i in range(samples)]


def linear_client(samples: int = 7, **settings):
    return client_of(flat_split(16, 2), data_of(noise(samples), labels(samples)), **settings)


def normed_client(samples: int, *, side: int = 4, seed: int = 0, **settings):
    """A model with batch normalization over maps of side x side."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten())
        model = TwoPartModel(features, nn.Linear(3 * side * side, 2), 3 * side * side)
    return client_of(model, data_of(noise(samples, (1, side, side)), labels(samples)), **settings)


class Visits:
    """A step that writes down which samples it was shown."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, client, batch) -> None:
        assert batch.n == len(batch.x) == len(batch.y) == len(batch.i)
        self.batches.append(batch.i.tolist())

    @property
    def samples(self) -> list[int]:
        return [i for batch in self.batches for i in batch]


def visits(client, **how) -> Visits:
    seen = Visits()
    assert client.fit(seen, **how) == len(seen.batches)
    return seen


class TestBatchSizes:
    @settings(deadline=None)
    @given(samples=st.integers(0, 300), batch=st.integers(1, 40))
    def test_promises(self, samples, batch):
        sizes = batch_sizes(samples, batch)
        assert sum(sizes) == samples
        assert all(size == batch for size in sizes[:-1])
        assert all(0 < size <= batch + 1 for size in sizes[-1:])
        if samples > 1 and batch > 1:
            assert 1 not in sizes

    @settings(deadline=None)
    @given(samples=st.integers(8, 300), batch=st.integers(8, 40))
    def test_promises_where_batches_are_normalized(self, samples, batch):
        sizes = batch_sizes(samples, batch, least=8)
        assert sum(sizes) == samples
        assert all(size == batch for size in sizes[:-1])
        assert 8 <= sizes[-1] <= batch + 7

    def test_by_hand(self):
        assert batch_sizes(10, 10) == [10]
        assert batch_sizes(12, 10) == [10, 2]
        assert batch_sizes(11, 10) == [11]
        assert batch_sizes(5, 10) == [5]
        assert batch_sizes(3, 1) == [1, 1, 1]


class TestFit:
    @pytest.mark.parametrize("samples", [1, 2, 9, 10, 11, 23])
    def test_every_sample_once_per_epoch(self, samples):
        seen = visits(linear_client(samples), epochs=3)
        per_epoch = len(batch_sizes(samples, 10))
        assert len(seen.batches) == 3 * per_epoch
        for epoch in range(3):
            shown = [i for batch in seen.batches[epoch * per_epoch : (epoch + 1) * per_epoch] for i in batch]
            assert sorted(shown) == list(range(samples))

    def test_the_last_small_batch_is_kept(self):
        assert [len(b) for b in visits(linear_client(23)).batches] == [10, 10, 3]

    def test_images_and_labels_belong_to_the_positions(self):
        client = linear_client(23)
        data = client.data["train"]

        def check(client, batch) -> None:
            x, y = data.take(batch.i)
            assert torch.equal(batch.x, x)
            assert torch.equal(batch.y, y)

        assert client.fit(check, epochs=2) == 6

    def test_another_order_each_epoch_fit_exchange_round_client_and_seed(self):
        def order(client, t: int = 0, exchange: int | str = 0, fits: int = 1):
            client.begin(t, exchange, {})
            for _ in range(fits):
                seen = visits(client, epochs=2)
            return seen.samples

        client = linear_client(30)
        base = order(client)
        orders = [
            base[:30],
            base[30:],
            order(client, t=1)[:30],
            order(client, exchange=1)[:30],
            order(client, exchange="evaluation before")[:30],
            order(client, fits=2)[:30],
            order(linear_client(30, k=1))[:30],
            order(linear_client(30, seed=1))[:30],
        ]
        assert len({tuple(one) for one in orders}) == len(orders)
        assert order(linear_client(30)) == base, "the order depends on the keys alone"

    @pytest.mark.parametrize("steps", [0, 1, 3, 7])
    def test_exactly_so_many_steps(self, steps):
        seen = visits(linear_client(23), steps=steps)
        assert [len(b) for b in seen.batches] == [10, 10, 3, 10, 10, 3, 10][:steps]
        assert sorted(seen.samples[:23]) == list(range(23)) or steps < 3

    def test_epochs_and_batch_come_from_the_experiment_unless_given(self):
        client = linear_client(8, epochs=3, batch=4)
        assert [len(b) for b in visits(client).batches] == [4] * 6
        assert [len(b) for b in visits(client, epochs=1, batch=3).batches] == [3, 3, 2]
        assert visits(client, epochs=0).batches == []

    def test_on_another_set_by_name_or_as_it_is(self):
        model = flat_split(16, 2)
        sets = {"train": data_of(noise(4), labels(4)), "public": data_of(noise(6, seed=1), labels(6))}
        client = client_of(model, sets)
        assert sorted(visits(client, on="public").samples) == list(range(6))
        assert sorted(visits(client, on=sets["public"]).samples) == list(range(6))

    def test_a_loss_is_descended_by_the_named_optimizers_alone(self):
        """Bit for bit what a step that descends it does."""

        def client() -> Client:
            made = linear_client(23)
            made.state.other = nn.Linear(16, 2)
            made.equip({"model": Opt(made.model), "other": Opt(made.state.other, Rule(lr=0.5))}, {})
            made.begin(0, 0, {})
            return made

        def loss(client, batch):
            x = batch.x.flatten(1)
            return F.cross_entropy(client.model(batch.x) + client.state.other(x), batch.y)

        def step(client, batch):
            value = loss(client, batch)
            client.descend(value, "other")
            return value

        one, other = client(), client()
        other.state.load_state_dict(one.state.state_dict())
        before = copies(one)
        assert one.fit(loss, opts=("other",)) == other.fit(step) == 3
        assert equal(copies(one), copies(other))
        assert one.loss() == other.loss()
        moved = {name for name, value in copies(one).items() if not torch.equal(value, before[name])}
        assert moved == {"state.other.weight", "state.other.bias"}
        one.fit(loss, opts=("model", "other"))
        assert not torch.equal(copies(one)["model.head.weight"], before["model.head.weight"])

    def test_a_loss_is_one_step_to_an_engine_however_often_it_is_fit(self):
        class Method:
            def loss(self, client, batch): ...

        def names(*opts: str):
            return name_of_step(Descent(Method.loss, opts)), name_of_step(Descent(Method().loss, opts))

        assert isinstance(names("model")[0], str), "a nested function is another one every time"
        Method.loss.__qualname__ = "Method.loss"
        one, other = names("model")
        assert one == other
        assert hash(one) == hash(other)
        assert names("model", "other")[0] != one

    def test_no_data_no_steps(self):
        client = client_of(flat_split(16, 2), data_of(noise(1)[:0], []))
        assert client.fit(descend, epochs=3) == 0
        assert client.fit(descend, steps=3) == 0
        assert client.loss() is None

    def test_the_loss_is_the_mean_over_samples(self):
        client = linear_client(5, batch=3)
        losses = {3: 1.0, 2: 6.0}
        client.fit(lambda c, b: torch.tensor(losses[b.n]))
        assert client.loss() == pytest.approx((3 * 1.0 + 2 * 6.0) / 5)
        client.begin(1, 0, {})
        assert client.loss() is None

    def test_steps_without_a_loss_leave_that_of_an_earlier_fit(self):
        client = linear_client(5, batch=3)
        client.fit(lambda c, b: None)
        assert client.loss() is None
        client.fit(lambda c, b: torch.tensor(4.0))
        client.fit(lambda c, b: None)
        assert client.loss() == 4

    def test_results_do_not_depend_on_the_chunk(self, monkeypatch):
        def trained():
            client = normed_client(23, epochs=2, batch=4)
            client.fit(descend)
            return copies(client) | {"features": client.sweep(Client.features)}

        whole = trained()
        for chunk in (1, 16 * 4 * 2, 16 * 4 * 3):
            monkeypatch.setattr("pluribus.internal.batches.CHUNK", chunk)
            assert equal(trained(), whole)

    def test_two_epochs_by_hand(self):
        """Plain SGD on the same batches, written out."""
        client = linear_client(5, epochs=2, batch=2, rule=Rule(lr=0.1))
        twin = flat_split(16, 2)
        order = visits(linear_client(5, epochs=2, batch=2)).batches
        assert [len(b) for b in order] == [2, 3, 2, 3]
        client.fit(descend)
        for batch in order:
            x, y = client.data["train"].take(torch.tensor(batch))
            grads = torch.autograd.grad(F.cross_entropy(twin(x), y), list(twin.parameters()))
            with torch.no_grad():
                for p, g in zip(twin.parameters(), grads, strict=True):
                    p.sub_(g, alpha=0.1)
        assert equal(dict(client.model.state_dict()), dict(twin.state_dict()))


class TestTime:
    def test_no_round_number_inside_a_step(self):
        client = linear_client()
        client.begin(4, 0, {})
        assert client.t == 4
        with pytest.raises(RuntimeError, match="schedule"):
            client.fit(lambda c, b: c.t)
        assert client.t == 4, "and it is there again after the step"

    def test_a_schedule_is_read_from_tensors_that_stay_in_place(self):
        client = linear_client()
        client.begin(0, 0, {"tau": 0.5})
        tau = client.now["tau"]
        client.begin(1, 0, {"tau": 0.25})
        assert client.now["tau"] is tau
        assert tau.item() == 0.25
        assert tau.shape == ()

    def test_what_is_made_is_initialized_by_the_draw_of_its_key(self):
        client, task = linear_client(), task_of(2, 16)
        server = server_of(task, {0: 1})
        keyed = torch.Generator().manual_seed(draws.number(task.seed, "prompt"))
        for party, draw in ((client, client.draw("prompt")), (server, server.draw("prompt")), (task, keyed)):
            before = torch.random.get_rng_state()
            made = party.make("prompt", lambda: torch.randn(5))
            assert torch.equal(made, torch.randn(5, generator=draw))
            assert not torch.equal(made, party.make("other", lambda: torch.randn(5)))
            assert torch.equal(torch.random.get_rng_state(), before)

    def test_draws_depend_on_who_when_and_what(self):
        def drawn(client, *key) -> float:
            return torch.rand(1, generator=client.draw(*key)).item()

        client, other = linear_client(), linear_client(k=1)
        first = [drawn(client, "a"), drawn(client, "b"), drawn(other, "a")]
        client.begin(1, 0, {})
        first.append(drawn(client, "a"))
        client.begin(0, 1, {})
        first.append(drawn(client, "a"))
        client.begin(0, 0, {})
        assert len(set(first)) == 5
        assert drawn(client, "a") == first[0]


class TestOneSample:
    @pytest.mark.parametrize("side", [1, 4])
    def test_a_client_with_one_sample_and_batch_norm_trains(self, side):
        client = normed_client(1, side=side, rule=Rule(lr=0.1), epochs=3)
        before = copies(client)
        assert client.fit(descend) == 3
        after = copies(client)
        assert not torch.equal(before["model.head.weight"], after["model.head.weight"])
        assert not torch.equal(before["model.features.0.weight"], after["model.features.0.weight"])
        assert torch.equal(before["model.features.1.running_mean"], after["model.features.1.running_mean"])
        assert all(torch.isfinite(value).all() for value in after.values())

    @pytest.mark.parametrize(
        ("side", "samples", "batches"),
        [(1, 7, 0), (1, 8, 1), (1, 11, 1), (1, 17, 1), (1, 18, 2), (1, 28, 3), (2, 2, 1), (2, 12, 2), (2, 11, 1)],
    )
    def test_batch_norm_never_sees_few_numbers(self, side, samples, batches):
        """Fewer than eight: of one pixel each, so many rows; of four, two rows have them."""
        client = normed_client(samples, side=side)
        client.fit(descend, epochs=2)
        assert client.model.features[1].num_batches_tracked == 2 * batches


class TestDropout:
    def dropping(self, k: int = 0, seed: int = 0):
        model = flat_split(16, 2, 0, nn.Dropout(0.5))
        return client_of(model, data_of(noise(20), labels(20)), k=k, seed=seed, rule=Rule(lr=0.5))

    def trained(self, client, t: int = 0):
        client.begin(t, 0, {})
        client.fit(descend)
        return copies(client)

    def test_reproducible_whatever_ran_before(self):
        alone = self.trained(self.dropping())
        torch.manual_seed(5)
        self.trained(self.dropping(k=1))
        assert equal(self.trained(self.dropping()), alone)

    def test_other_keys_other_masks(self):
        def mask(client, t: int = 0):
            masks = []
            client.begin(t, 0, {})
            client.fit(lambda c, b: masks.append(F.dropout(torch.ones(64), 0.5).tolist()), steps=2)
            return masks

        base = mask(self.dropping())
        others = [mask(self.dropping(k=1))[0], mask(self.dropping(seed=1))[0], mask(self.dropping(), t=1)[0], base[1]]
        assert base == mask(self.dropping())
        assert all(other != base[0] for other in others)

    def test_the_global_generator_is_as_it_was(self):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        self.trained(self.dropping())
        assert torch.equal(torch.get_rng_state(), before)


class TestSweep:
    def test_every_sample_once_in_order(self, monkeypatch):
        monkeypatch.setattr("pluribus.internal.steps.SWEEP_BATCH", 4)
        client, sizes = linear_client(11), []

        def images(client, x):
            sizes.append(len(x))
            return x

        swept = client.sweep(images)
        train = client.data["train"]
        assert sizes == [4, 4, 3]
        assert torch.equal(swept, train.take(torch.arange(11))[0])

    def test_a_last_batch_of_one_and_no_data(self, monkeypatch):
        monkeypatch.setattr("pluribus.internal.steps.SWEEP_BATCH", 4)
        assert len(linear_client(5).sweep(Client.features)) == 5
        assert len(client_of(flat_split(16, 2), data_of(noise(1)[:0], [])).sweep(Client.features)) == 0

    def test_eval_mode_without_gradients(self):
        client = normed_client(6)
        client.state.extra = nn.Dropout(0.5)
        client.fit(descend)
        before = copies(client)

        def checked(client, x):
            assert not client.model.training
            assert not client.state.extra.training
            assert not torch.is_grad_enabled()
            return client.features(x)

        assert not client.sweep(checked).requires_grad
        assert equal(copies(client), before), "running statistics stay"
        client.fit(lambda c, b: None if c.model.training and c.state.extra.training else pytest.fail("not train mode"))


class TestFork:
    def test_everything_comes_back(self):
        down = {"p": Field((2, 3), form="rows"), "v": Field((2,))}
        model = normed_client(6).model
        opts = {"model": Opt(model, Rule("amsgrad"), life="run")}
        client = client_of(model, data_of(noise(6), labels(6)), opts=opts, down=down)
        client.state.memory = torch.zeros(3)
        client.fit(descend)
        before, places = copies(client), {n: v.data_ptr() for n, v in client.tensors().items()}
        with client.fork():
            client.take(Message({"p": Rows(torch.ones(2, 3), torch.tensor([True, False])), "v": torch.ones(2)}))
            client.state.memory += 1
            client.fit(descend, epochs=2)
            inside = copies(client)
        assert equal(copies(client), before)
        assert {n: v.data_ptr() for n, v in client.tensors().items()} == places
        for name in ("model.features.1.running_mean", "model.features.1.num_batches_tracked", "model.head.weight"):
            assert not torch.equal(inside[name], before[name])
        for name in ("got.p.value", "got.p.held", "got.v", "state.memory", "opt.model.head.weight.exp_avg"):
            assert not torch.equal(inside[name], before[name])

    def test_also_after_an_error(self):
        client = normed_client(6)
        before = copies(client)

        def fail(client, batch) -> None:
            descend(client, batch)
            raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"), client.fork():
            client.fit(fail)
        assert equal(copies(client), before)

    def test_training_after_a_fork_is_as_without_it(self):
        plain, forked = (normed_client(12, rule=Rule(momentum=0.9)) for _ in range(2))
        with forked.fork():
            forked.begin(0, "evaluation before", {})
            forked.fit(descend)
        for client in (plain, forked):
            client.begin(0, 0, {})
            client.fit(descend)
        assert equal(copies(plain), copies(forked))


class TestGradients:
    def two_optimizers(self, rule: Rule | None = None):
        model = flat_split(16, 2, 0, nn.Linear(4, 4))
        opts = {"body": Opt(model.features, rule), "top": Opt(model.head, Rule(lr=0.5))}
        return client_of(model, data_of(noise(6), labels(6)), opts=opts, rule=Rule(lr=0.1))

    def batch_loss(self, client):
        x, y = client.data["train"].take(torch.arange(6))
        return F.cross_entropy(client.model(x), y)

    def test_descend_with_two_optimizers_moves_both_by_one_backward(self):
        client = self.two_optimizers()
        before = copies(client)
        loss = self.batch_loss(client)
        wanted = dict(zip([n for n, _ in client.model.named_parameters()], self.grads_of(client), strict=True))
        client.descend(loss, "body", "top")
        for name, value in client.model.named_parameters():
            lr = 0.5 if name.startswith("head") else 0.1
            expected = before[f"model.{name}"].sub(wanted[name], alpha=lr)
            assert torch.equal(value, expected), name
        with pytest.raises(RuntimeError, match="second time"):
            client.descend(loss, "top")

    def grads_of(self, client):
        return torch.autograd.grad(self.batch_loss(client), list(client.model.parameters()))

    def test_descend_moves_only_the_named(self):
        client = self.two_optimizers()
        before = copies(client)
        client.descend(self.batch_loss(client), "top")
        after = copies(client)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {"model.head.weight", "model.head.bias"}

    @pytest.mark.parametrize("rule", [Rule(), Rule(momentum=0.9, weight_decay=0.01), Rule("adam"), Rule("amsgrad")])
    def test_grads_then_apply_equals_descend(self, rule):
        one, other = (normed_client(12, rule=rule, epochs=3, batch=4) for _ in range(2))

        def in_two_parts(client, batch) -> None:
            client.apply(client.grads(F.cross_entropy(client.model(batch.x), batch.y)))

        one.fit(descend)
        other.fit(in_two_parts)
        assert equal(copies(one), copies(other))

    def test_parameters_that_the_loss_does_not_use(self):
        client = self.two_optimizers()
        x, _ = client.data["train"].take(torch.arange(6))
        loss = client.features(x).square().mean()
        assert client.grads(loss, "top") == {}
        before = copies(client)
        client.descend(client.features(x).square().mean(), "body", "top")
        after = copies(client)
        assert torch.equal(before["model.head.weight"], after["model.head.weight"])
        assert not torch.equal(before["model.features.0.weight"], after["model.features.0.weight"])

    def test_trainable(self):
        model = flat_split(16, 2)
        assert trainable(model) == 16 * 2 + 2
        model.head.bias.requires_grad_(False)
        assert trainable(model) == 16 * 2


class TestLifeOfSlots:
    def client_with(self, life):
        model = flat_split(16, 2)
        return client_of(model, data_of(noise(6), labels(6)), opts={"model": Opt(model, Rule(momentum=0.9), life=life)})

    def slots(self, client) -> bool:
        return any(bool(value.any()) for value in client.optimizers["model"].slots().values())

    def test_a_round_starts_afresh(self):
        client = self.client_with("round")
        client.fit(descend)
        client.begin(0, 1, {})
        assert self.slots(client), "the second exchange of a round goes on"
        client.begin(1, 0, {})
        assert not self.slots(client)
        assert not [name for name in client.tensors() if name.startswith("opt.")]

    def test_evaluation_starts_afresh_too(self):
        """Or its figures would depend on whether the client has trained since the run was resumed."""
        client = self.client_with("round")
        client.fit(descend)
        client.begin(0, "evaluation adapted", {})
        assert not self.slots(client)

    def test_a_run_persists_and_is_kept(self):
        client = self.client_with("run")
        client.fit(descend)
        before = copies(client)
        client.begin(1, 0, {})
        assert self.slots(client)
        assert equal(copies(client), before)
        assert "opt.model.head.weight.momentum_buffer" in before

    @pytest.mark.parametrize(("life", "moved"), [("round", 0.5 + 0.5), ("run", 0.5 + 0.75)])
    def test_two_rounds_by_hand(self, life, moved):
        """A gradient of 1 and momentum 0.5: the second velocity is 1 afresh, and 0.5 * 1 + 1 where the first lasts."""
        client = linear_client(life=life, rule=Rule(lr=0.5, momentum=0.5))
        start = client.model.head.bias.detach().clone()

        def step(client, batch):
            client.descend(client.model.head.bias.sum())

        for t in range(2):
            client.begin(t, 0, {})
            client.fit(step, steps=1)
        torch.testing.assert_close(client.model.head.bias.detach(), start - moved, rtol=0, atol=1e-6)

    @pytest.mark.parametrize(("own", "life"), [("round", "run"), ("run", "round")])
    def test_what_a_method_names_stands(self, own, life):
        model = flat_split(16, 2)
        client = client_of(model, data_of(noise(2), labels(2)), life=life, opts={"model": Opt(model, life=own)})
        assert client.optimizers["model"].life == own


class TestGot:
    DOWN = {  # noqa: RUF012
        "proto": Field((3, 2), form="rows"),
        "vector": Field((2,), torch.float64),
        "once": Field((5,), kept=False),
    }

    def client(self):
        return client_of(flat_split(16, 2), data_of(noise(2), labels(2)), down=self.DOWN)

    def test_empty_until_the_first_message(self):
        got = self.client().got
        assert set(got) == {"proto", "vector"}
        assert not got["proto"].held.any()
        assert not got["proto"].value.any()
        assert got["vector"].dtype == torch.float64

    def test_take_fills_the_same_buffers(self):
        client = self.client()
        proto, vector = client.got["proto"], client.got["vector"]
        place = proto.value.data_ptr(), vector.data_ptr()
        rows = Rows(torch.tensor([[1.0, 2], [0, 0], [3, 4]]), torch.tensor([True, False, True]))
        down = Message({"proto": rows, "vector": torch.tensor([5.0, 6.0]).double(), "once": torch.ones(5)})
        client.take(down)
        assert client.got["proto"] is proto
        assert (proto.value.data_ptr(), vector.data_ptr()) == place
        assert proto.value.tolist() == [[1, 2], [0, 0], [3, 4]]
        assert proto.held.tolist() == [True, False, True]
        assert vector.tolist() == [5, 6]

    def test_a_later_message_replaces_rows_and_mask(self):
        client = self.client()
        client.take(Message({"proto": Rows(torch.ones(3, 2), torch.tensor([True, True, True]))}))
        client.take(Message({"proto": Rows(torch.zeros(3, 2), torch.tensor([False, True, False]))}))
        assert client.got["proto"].held.tolist() == [False, True, False]
        assert not client.got["proto"].value.any()

    def test_fields_of_another_exchange_stay(self):
        client = self.client()
        client.take(Message({"vector": torch.ones(2).double()}))
        client.take(Message({"proto": Rows(torch.ones(3, 2), torch.ones(3, dtype=torch.bool))}))
        assert client.got["vector"].tolist() == [1, 1]

    def test_a_size_known_only_at_run_time_cannot_be_kept(self):
        with pytest.raises(TypeError, match="kept=False"):
            client_of(flat_split(16, 2), data_of(noise(2), labels(2)), down={"z": Field((Dim("b", 3),))})
