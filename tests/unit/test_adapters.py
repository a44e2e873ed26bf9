"""Adapters for frozen backbones: what they compute, where they are attached, and what becomes of them in a file."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import pluribus
from adapter_toys import adapted, only, toy
from conftest import assemble_tiny, few_digits, make_host, run_tiny
from pluribus.errors import ConflictError, MismatchError, MissingSettingError, RangeError
from pluribus.inputs import Input
from pluribus.models import TwoPartModel, build
from pluribus.models.adapters import adapters_of, attach_adapters, check_adapters, merge_adapters, parameters_beside
from pluribus.models.hf import make_encoder
from pluribus.request import Work
from refusals import refused

FEW = {"data": few_digits(120), "rounds": 1, "image_size": 16}
METHODS = pytest.mark.parametrize("method", ["hetlora", "flora", "flexlora"])
IMAGE = Input("image", (1, 16, 16))


def drawn(seed: int = 0, rank: int = 2) -> TwoPartModel:
    """A small transformer whose adapters are random."""
    model = build("tiny-vit-32", shape=IMAGE, classes=10)
    attach_adapters(model, rank, 0.5)
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters_of(model).values():
        adapter.draw(generator)
        adapter.b.data.copy_(torch.randn(adapter.b.shape, generator=generator) * 0.1)
    return model


class TestAdapter:
    def test_by_hand(self):
        """x = (1, 0, 2). W x = 1, 2; A x = 5, 1; the gains are 2 and 0; B (10, 0) = 10, 30."""
        adapter = only(adapted(2))
        with torch.no_grad():
            adapter.base.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 0, 1]]))
            adapter.a.copy_(torch.tensor([[1.0, 0, 2], [1, 1, 0]]))
            adapter.b.copy_(torch.tensor([[1.0, 7], [3, 7]]))
            adapter.gain.copy_(torch.tensor([2.0, 0.0]))
        assert adapter(torch.tensor([[1.0, 0, 2]])).tolist() == [[11, 32]]

    def test_what_is_folded_is_part_of_the_weight(self):
        adapter = only(adapted(1, folds=True))
        adapter.folded.copy_(torch.tensor([[1.0, 2, 3], [0, 0, 1]]))
        assert adapter(torch.tensor([[1.0, 1, 1]])).tolist() == [[6, 1]]

    def test_a_new_adapter_changes_nothing(self):
        plain, model = build("tiny-vit-32", shape=IMAGE, classes=10), drawn()
        model.head.load_state_dict(plain.head.state_dict())
        x = torch.rand(3, 1, 16, 16)
        assert not torch.equal(model(x), plain(x))
        for adapter in adapters_of(model).values():
            adapter.draw(torch.Generator().manual_seed(1))
            assert adapter.a.std().item() == pytest.approx(32**-0.5, rel=0.3)
        assert torch.equal(model(x), plain(x))

    def test_models_can_be_stacked(self):
        """One program runs several clients."""
        models, x = [drawn(0), drawn(1)], torch.rand(3, 1, 16, 16)
        parameters, buffers = stack_module_state(models)
        shared = copy.deepcopy(models[0])
        found = vmap(lambda p, b: functional_call(shared, (p, b), (x,)))(parameters, buffers)
        torch.testing.assert_close(found, torch.stack([model(x) for model in models]))


def encoder(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = {
        "bert": lambda: transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2
        ),
        "distilbert": lambda: transformers.DistilBertConfig(vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=8),
        "t5": lambda: transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2),
    }[kind]()
    return make_encoder(config)


class TestLayers:
    @pytest.mark.parametrize(
        ("kind", "names"), [("bert", "query key value"), ("distilbert", "q_lin k_lin v_lin"), ("t5", "q k v")]
    )
    def test_of_text_encoders(self, kind, names):
        """Three layers in each of two blocks; not the output of attention, not the layers after it."""
        model = TwoPartModel(nn.Sequential(encoder(kind)), nn.Linear(8, 2), 8)
        attach_adapters(model, 2, 1.0)
        found = [path.rpartition(".")[2] for path in adapters_of(model)]
        assert sorted(found) == sorted(names.split() * 2)

    @pytest.mark.parametrize("name", ["tiny-vit-32", "timm:vit_tiny_patch16_224"])
    def test_of_vision_transformers(self, name):
        side = 16 if name == "tiny-vit-32" else 32
        with torch.device("meta"):
            model = build(name, shape=(1 if side == 16 else 3, side, side), classes=10)
            attach_adapters(model, 2, 1.0)
        blocks = len(model.get_submodule("features.backbone.net").get_submodule("blocks"))
        assert [path.endswith("qkv") for path in adapters_of(model)] == [True] * blocks

    def test_only_adapters_and_head_learn(self):
        model = drawn()
        adapters = adapters_of(model).values()
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        beside = parameters_beside(model)
        assert list(beside) == ["head.weight", "head.bias"]
        assert trained == {id(p) for one in adapters for p in (one.a, one.b)} | {id(p) for p in beside.values()}
        assert not any(module.training for module in model.train().get_submodule("features.backbone.net").modules())

    def test_a_model_that_takes_its_layers_apart_is_refused(self):
        class Apart(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qkv = nn.Linear(256, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.flatten(1) @ self.qkv.weight.T

        class Idle(Apart):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.flatten(1)[:, :4]

        for net in (Apart(), Idle()):
            with refused(MismatchError, "'own'", "transformer"):
                check_adapters(TwoPartModel(net, nn.Linear(4, 2), 4), 2, IMAGE, "own")


class TestMerging:
    def test_the_same_outputs_without_adapters(self):
        model, x = drawn(), torch.rand(3, 1, 16, 16)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        plain = merge_adapters(model)
        torch.testing.assert_close(plain(x), model(x))
        assert plain.state_dict().keys() == build("tiny-vit-32", shape=IMAGE, classes=10).state_dict().keys()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_what_was_folded_is_merged_too(self):
        model = adapted(1, scale=2.0, folds=True)
        with torch.no_grad():
            only(model).folded.fill_(3.0)
            only(model).a.fill_(1.0)
            only(model).b.fill_(5.0)
        assert merge_adapters(model).features.qkv.weight.tolist() == [[13, 13, 13]] * 2

    def test_a_model_without_adapters_stays(self):
        model = toy()
        assert merge_adapters(model) is model

    @METHODS
    def test_a_file_holds_a_plain_model(self, method, tmp_path):
        result, x = run_tiny(method, **FEW), torch.rand(4, 1, 16, 16)
        result.save_model(1, tmp_path / "model")
        loaded = pluribus.load_model(tmp_path / "model")
        assert not adapters_of(loaded)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), result.model(1)(x), rtol=1e-4, atol=1e-5)


@METHODS
def test_the_backbone_is_neither_changed_nor_saved(method):
    host = make_host(assemble_tiny(method, **FEW))
    client = host.client(0)
    frozen = [name for name in client.model.state_dict() if name.startswith("features.") and ".base." in name]
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    host.answer(Work(0, 0))
    after = client.model.state_dict()
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not torch.equal(
        before["features.backbone.net.blocks.0.qkv.b"], after["features.backbone.net.blocks.0.qkv.b"]
    )
    saved = {name.rpartition(".")[2] for name in client.tensors() if "features." in name}
    assert saved <= {"a", "b", "gain", "folded"}


class TestRefusals:
    @METHODS
    @pytest.mark.parametrize(
        ("kind", "settings", "facts"),
        [
            (RangeError, {"capacity": 0}, ("rank", 0)),
            (RangeError, {"capacity": 2.5}, ("rank", 2.5)),
            (RangeError, {"capacity": "4,33"}, ("33", "32", "qkv")),
            (MissingSettingError, {"capacity": ""}, ("--capacity",)),
            (MismatchError, {"models": "cnn-16"}, ("pretrained", "cnn-16.safetensors")),
            (MismatchError, {"models": "tiny-cnn-64"}, ("tiny-cnn-64", "attention")),
            (MismatchError, {"models": "tiny-vit-32,tiny-vit-48"}, ("tiny-vit-48", "--capacity")),
            (ConflictError, {"models": "tiny-vit-32@rank4", "capacity": 2}, ("tiny-vit-32@rank4", "--capacity")),
        ],
    )
    def test_before_round_0(self, method, kind, settings, facts):
        with refused(kind, *facts):
            assemble_tiny(method, **FEW | settings)

    def test_ranks_in_names_replace_the_default(self):
        parts = assemble_tiny("flora", **FEW, models="tiny-vit-32@rank4,tiny-vit-32@rank1")
        assert [parts.cards[k].model for k in range(3)] == [f"tiny-vit-32@rank{r}" for r in (4, 1, 4)]
