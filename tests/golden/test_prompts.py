"""Prompts before frozen backbones, counted and placed as FedHPL's tables and equations say; where weights come from."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pluribus
from conftest import assemble_tiny, make_host, new_folder, run_tiny
from kit import StopAfter, StoppedError, assert_same, differing, kept
from pluribus.draws import generator, seeded
from pluribus.errors import MismatchError, WeightsError
from pluribus.models import GROUPS, TwoPartModel, build, entries, has_weights
from pluribus.models import pretrained as source
from pluribus.models.pretrained import IMAGENET_MEAN, IMAGENET_STD, SHIPPED, Normalize, Origin
from pluribus.models.prompts import PaddedImage, PromptedTransformer, Prompting, is_transformer, prompts_of
from pluribus.models.tiny import SHAPE, TinyViT
from refusals import refused

DEEP, SHALLOW = Prompting("deep", 3, 3), Prompting("shallow", 3, 3)
PHOTO, SMALL_PHOTO = (3, 224, 224), (3, 32, 32)


def learned(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def skeleton(name: str, prompting: Prompting, classes: int = 10, shape=PHOTO) -> TwoPartModel:
    with torch.device("meta"):
        model = build(name, shape=shape, classes=classes)
    return prompting.skeleton(model, shape, name)


def tiny(name: str, prompting: Prompting = DEEP, shape=SHAPE) -> TwoPartModel:
    """A tiny pretrained model with drawn prompts."""
    with seeded("head"):
        model = build(name, shape=shape, classes=10)
    prompting.attach(model, shape).draw(generator("prompts"))
    return model


def images(number: int = 4, shape=SHAPE) -> torch.Tensor:
    return torch.rand(number, *shape, generator=generator("images")) * 2 - 1


class TestTables:
    """Trainable parameters in the tables are multiples of 1024 with two digits; each stands beside the exact count."""

    @pytest.mark.parametrize(
        ("name", "prompting", "classes", "count", "printed"),
        [
            ("vit-s16", DEEP, 10, 17_674, 17.26),
            ("vit-s16", DEEP, 100, 52_324, 37.60 + 4.5 * 3),
            ("vit-b16", DEEP, 10, 35_338, 34.51),
            ("vit-b16", DEEP, 100, 104_548, 75.10 + 9 * 3),
            ("vit-l16", DEEP, 10, 83_978, 82.01),
            ("vit-l16", DEEP, 100, 176_228, 100.10 + 24 * 3),
            ("vit-s16", SHALLOW, 10, 5_002, 4.89),
            ("vit-b16", SHALLOW, 10, 9_994, 9.76),
            ("vit-l16", SHALLOW, 10, 13_322, 13.01),
        ],
    )
    def test_table_6(self, name, prompting, classes, count, printed):
        assert learned(skeleton(name, prompting, classes)) == count
        assert count / 1024 == pytest.approx(printed, abs=0.011)

    @pytest.mark.parametrize(
        ("name", "shape", "classes", "count", "printed"),
        [
            ("resnet18", PHOTO, 10, 13_302, 12.99),
            ("resnet34", PHOTO, 10, 13_302, 12.99),
            ("resnet18", PHOTO, 100, 59_472, 58.08),
            ("resnet50", PHOTO, 10, 28_662, 27.99),
            ("resnet50", PHOTO, 100, 213_072, 208.08),
            ("resnet18", SMALL_PHOTO, 10, 6_390, 6.24),
            ("resnet50", SMALL_PHOTO, 10, 21_750, 21.24),
            ("resnet50", SMALL_PHOTO, 100, 206_160, 201.33),
        ],
    )
    def test_table_8(self, name, shape, classes, count, printed):
        model = skeleton(name, DEEP, classes, shape)
        assert learned(model) == count
        assert count / 1024 == pytest.approx(printed, abs=0.01)

    @pytest.mark.parametrize(("shape", "lr", "tb"), [(SMALL_PHOTO, 576, 684), (PHOTO, 4032, 4140)])
    def test_table_8_frames(self, shape, lr, tb):
        prompts = prompts_of(skeleton("resnet18", DEEP, shape=shape))
        assert {name: p.numel() for name, p in prompts.items()} == {"prompt_lr": lr, "prompt_tb": tb}

    @pytest.mark.parametrize(("group", "total"), [("fedhpl-vit", 190_002), ("fedhpl-resnet", 81_870)])
    def test_table_2_sums_over_five_clients(self, group, total):
        counts = {name: learned(skeleton(name, DEEP)) for name in set(GROUPS[group].models)}
        assert sum(counts[name] for name in GROUPS[group].models) == total


class TestFrozen:
    @pytest.mark.parametrize("name", GROUPS["tiny"].models)
    def test_only_prompts_and_head_learn(self, name):
        model = tiny(name)
        named = {n for n, p in model.named_parameters() if p.requires_grad}
        prompts = {f"features.backbone.{n}" for n in prompts_of(model)}
        assert named == prompts | {"head.weight", "head.bias"}
        model(images()).square().sum().backward()
        for n, p in model.named_parameters():
            assert (p.grad is not None) == (n in named), n
            assert n not in named or bool(p.grad.any()), n

    def test_the_backbone_stays_in_eval_mode(self):
        model = tiny("tiny-cnn-64")
        before = {n: v.clone() for n, v in model.state_dict().items()}
        model.train()
        assert model.training
        assert model.head.training
        assert not any(module.training for module in model.features.backbone.net.modules())
        model(images(16))
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items()), "batch-norm statistics moved"

    def test_one_image_does_not_depend_on_its_batch(self):
        model = tiny("tiny-cnn-64").train()
        torch.testing.assert_close(model(images(8))[:1], model(images(8)[:1]))


def by_hand(vit: TinyViT, x: torch.Tensor, tokens: list[torch.Tensor | None]) -> torch.Tensor:
    """Eq. 3 to 5: [cls, prompts, patches] into each block; None lets the prompts' outputs flow on."""
    patches = vit.patch_embed.proj(x).flatten(2).transpose(1, 2) + vit.pos_embed[:, 1:]
    cls = (vit.cls_token + vit.pos_embed[:, :1]).expand(len(x), -1, -1)
    flowing = None
    for block, prompt in zip(vit.blocks, tokens, strict=True):
        flowing = flowing if prompt is None else prompt.expand(len(x), -1, -1)
        out = block(torch.cat([cls, flowing, patches], 1))
        cls, flowing, patches = out[:, :1], out[:, 1:4], out[:, 4:]
    return vit.norm(cls)[:, 0]


class TestTransformer:
    @pytest.mark.parametrize("name", ["tiny-vit-32", "tiny-vit-48"])
    def test_deep_and_shallow_by_hand(self, name):
        for prompting in (DEEP, SHALLOW):
            frozen = tiny(name, prompting).features.backbone
            tokens = list(frozen.tokens) if prompting is DEEP else [frozen.tokens, None, None, None]
            torch.testing.assert_close(frozen(images()), by_hand(frozen.net, images(), tokens))

    def test_what_a_block_makes_of_its_prompts_is_dropped_by_deep_only(self):
        for prompting, dropped in ((DEEP, True), (SHALLOW, False)):
            frozen = tiny("tiny-vit-32", prompting).features.backbone
            plain = frozen(images())

            def shout(block, inputs, output):
                return torch.cat([output[:, :1], output[:, 1:4] + 100, output[:, 4:]], 1)

            handle = frozen.net.blocks[1].register_forward_hook(shout)
            assert torch.equal(frozen(images()), plain) == dropped
            handle.remove()

    def test_every_prompt_of_deep_matters(self):
        frozen = tiny("tiny-vit-32").features.backbone
        frozen(images()).sum().backward()
        assert frozen.tokens.shape == (4, 3, 32)
        assert bool(frozen.tokens.grad.flatten(1).any(1).all())

    def test_one_block_of_prompts_is_not_shallow(self):
        deep, shallow = (tiny("tiny-vit-32", prompting).features.backbone for prompting in (DEEP, SHALLOW))
        with torch.no_grad():
            deep.tokens.zero_()
            deep.tokens[0] = shallow.tokens
        assert not torch.allclose(deep(images()), shallow(images()), atol=1e-4)

    def test_initial_prompts(self):
        """U(-v, v) with v = sqrt(6 / (c patch^2 + d))."""
        bound = math.sqrt(6 / (16 + 32))
        tokens = tiny("tiny-vit-32", Prompting("deep", 50, 3)).features.backbone.tokens.detach()
        assert bound * 0.99 < tokens.abs().max() <= bound
        assert tokens.mean().abs() < 0.02
        assert torch.equal(tokens, tiny("tiny-vit-32", Prompting("deep", 50, 3)).features.backbone.tokens)

    def test_a_transformer_of_timm(self):
        from pluribus.internal import torchvision as _torchvision  # noqa: F401

        from timm.models.vision_transformer import VisionTransformer  # isort: skip

        with seeded("timm"):
            vit = VisionTransformer(16, 4, 3, 0, embed_dim=32, depth=3, num_heads=4).eval()
        scale, x = Normalize(IMAGENET_MEAN, IMAGENET_STD), images()  # gray ones, which become color
        for backbone, seen in ((vit, scale(x)), (nn.Sequential(OrderedDict(scale=scale, net=vit)), x)):
            assert is_transformer(backbone)
            frozen = PromptedTransformer(backbone, "shallow", 3)
            frozen.draw(generator("prompts"))
            with torch.no_grad():
                tokens = vit._pos_embed(vit.patch_embed(scale(x)))
                tokens = torch.cat([tokens[:, :1], frozen.tokens.expand(4, -1, -1), tokens[:, 1:]], 1)
                torch.testing.assert_close(frozen(seen), vit.norm(vit.blocks(tokens))[:, 0])
                assert not torch.allclose(frozen(seen), vit(scale(x)), atol=1e-3)
        assert not is_transformer(VisionTransformer(16, 4, 1, 0, global_pool="avg", embed_dim=32, depth=1, num_heads=4))


class TestPaddedImage:
    def test_a_frame_by_hand(self):
        """R = 2, p = 1: one pixel on each side. Prompts are pixels in [0, 1], images in [-1, 1]: v becomes 2v - 1."""
        frozen = PaddedImage(nn.Identity(), (1, 2, 2), 1)
        with torch.no_grad():
            frozen.prompt_lr.copy_(torch.tensor([[[0.0, 1.0], [0.5, 0.75]]]))
            frozen.prompt_tb.copy_(torch.tensor([[[0.0, 0.25, 0.5, 0.75], [1.0, 1.0, 0.0, 0.0]]]))
        x = torch.tensor([[[[0.1, 0.2], [0.3, 0.4]]]])
        expected = [[-1, -0.5, 0, 0.5], [-1, 0.1, 0.2, 1], [0, 0.3, 0.4, 0.5], [1, 1, -1, -1]]
        torch.testing.assert_close(frozen(x)[0, 0], torch.tensor(expected))

    def test_images_that_are_not_square(self):
        frozen = PaddedImage(nn.Identity(), (3, 4, 6), 2)
        assert (frozen.prompt_lr.shape, frozen.prompt_tb.shape) == ((3, 4, 4), (3, 4, 10))
        assert frozen(images(2, (3, 4, 6))).shape == (2, 3, 8, 10)

    def test_initial_prompts(self):
        frozen = tiny("tiny-cnn-64").features.backbone
        pixels = torch.cat([p.detach().flatten() for p in frozen.prompts().values()])
        assert 0 <= pixels.min() < 0.05
        assert 0.95 < pixels.max() < 1

    def test_prompts_are_normalized_like_the_image(self):
        """Black is (0 - mean) / std, white (1 - mean) / std, as torchvision does it."""
        frozen = PaddedImage(Normalize(IMAGENET_MEAN, IMAGENET_STD), (3, 1, 1), 1)
        with torch.no_grad():
            frozen.prompt_lr.fill_(1)
        seen = frozen(torch.full((1, 3, 1, 1), -1.0))[0]
        for channel, (mean, std) in enumerate(zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)):
            line = [(1 - mean) / std, -mean / std, (1 - mean) / std]
            torch.testing.assert_close(seen[channel, 1], torch.tensor(line))
        assert list(Normalize(IMAGENET_MEAN, IMAGENET_STD).state_dict()) == []

    def test_models_of_one_image_size_are_refused(self):
        for name in ("mlp-64", "cnn-16"):
            with refused(MismatchError, "prompts", f"'{name}'", "--models"):
                skeleton(name, DEEP, shape=(1, 8, 8))


OWN, READY, LOADED = "test_prompts.own_net", "test_prompts.ready_net", "test_prompts.loaded_net"


def own_net(shape) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(shape[0], 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(OrderedDict(net=net))


def ready_net(shape) -> TwoPartModel:
    return TwoPartModel(own_net(shape), nn.Linear(32, 10), 32)


def loaded_net(shape) -> nn.Module:
    """It would load weights of its own here."""
    return own_net(shape)


loaded_net.pretrained = True


def own_file(folder, name, change=MappingProxyType({})) -> dict[str, torch.Tensor]:
    """Weights of a model of one's own under its dotted name, with changes; None leaves a tensor out."""
    with seeded("a file"):
        net = {OWN: own_net, READY: ready_net}[name]((1, 8, 8))
    tensors = {n: value for n, value in {**net.state_dict(), **change}.items() if value is not None}
    save_file({n: value.contiguous() for n, value in tensors.items()}, folder / f"{name}.safetensors")
    return tensors


class TestWeights:
    def test_the_package_ships_half_a_megabyte_at_most(self):
        files = {path.stem: path for path in SHIPPED.glob("*.safetensors")}
        assert files.keys() == set(GROUPS["tiny"].models)
        assert sum(path.stat().st_size for path in files.values()) < 500_000
        for name, path in files.items():
            tensors = load_file(path)
            assert {value.dtype for value in tensors.values()} == {torch.float16}
            backbone = build(name, shape=SHAPE, classes=10).features.backbone
            for key, value in backbone.state_dict().items():
                if key in tensors:
                    assert torch.equal(value, tensors[key].float())
                else:
                    assert key.endswith("num_batches_tracked")

    def test_who_has_weights(self):
        assert has_weights("tiny-vit-32")
        assert not has_weights("test_prompts.own_net")
        assert has_weights("test_prompts.own_net", "somewhere")
        assert has_weights("test_prompts.loaded_net"), "it says so"
        assert not has_weights("vit-s16")
        assert has_weights("vit-s16", "timm")
        assert {e.origin.source for e in entries().values() if e.origin} == {"package", "timm", "torchvision"}

    def folder(self, tmp_path, change=lambda tensors: tensors, name="cnn-16-32"):
        with seeded("a folder"):
            backbone = build(name, shape=(1, 8, 8), classes=10).features.backbone
        tensors = change({key: value.clone() for key, value in backbone.state_dict().items()})
        save_file(tensors, tmp_path / f"{name}.safetensors")
        return tensors, str(tmp_path)

    def test_a_folder(self, tmp_path):
        tensors, folder = self.folder(tmp_path)
        model = build("cnn-16-32", shape=(1, 8, 8), classes=10, weights=folder)
        state = model.features.backbone.state_dict()
        assert all(torch.equal(state[name], value) for name, value in tensors.items())

    def test_a_classifier_of_the_file_and_missing_counters_are_left_out(self, tmp_path):
        def change(tensors):
            kept = {n: v for n, v in tensors.items() if "num_batches" not in n}
            return kept | {"fc.weight": torch.ones(7, 64), "head.bias": torch.ones(7)}

        _, folder = self.folder(tmp_path, change)
        assert build("cnn-16-32", shape=(1, 8, 8), classes=10, weights=folder)

    @pytest.mark.parametrize(
        ("change", "facts"),
        [
            (lambda t: {n: v for n, v in t.items() if n != "fc1.bias"}, ("'fc1.bias'",)),
            (lambda t: t | {"extra": torch.ones(1)}, ("'extra'",)),
            (lambda t: t | {"fc1.bias": torch.ones(65)}, ("'fc1.bias'", "(65,)", "(64,)", "--image-size")),
        ],
    )
    def test_files_that_do_not_fit_are_refused_before_round_0(self, tmp_path, change, facts):
        _, folder = self.folder(tmp_path, change)
        with refused(WeightsError, "'cnn-16-32'", folder, *facts):
            assemble_tiny("local", models="cnn-16-32", weights=folder)

    def test_a_folder_without_the_file_and_a_file_without_tensors(self, tmp_path):
        with refused(WeightsError, f"--weights {tmp_path}", "cnn-16-32.safetensors"):
            assemble_tiny("local", models="cnn-16-32", weights=str(tmp_path))
        (tmp_path / "cnn-16-32.safetensors").write_bytes(b"nonsense")
        with refused(WeightsError, tmp_path / "cnn-16-32.safetensors"):
            assemble_tiny("local", models="cnn-16-32", weights=str(tmp_path))

    @pytest.mark.parametrize("method", ["local", "fedhpl"])
    @pytest.mark.parametrize("models", ["tiny-cnn-64", "cnn-16-32", OWN, LOADED, f"{OWN},tiny-cnn-64"])
    def test_a_folder_without_a_clients_file_is_refused_for_every_model(self, tmp_path, method, models):
        with refused(WeightsError, f"--weights {tmp_path / 'nowhere'}", ".safetensors"):
            assemble_tiny(method, models=models, weights=str(tmp_path / "nowhere"))
        with refused(WeightsError, f"--weights {tmp_path}", f"{models.partition(',')[0]}.safetensors"):
            assemble_tiny(method, models=models, weights=str(tmp_path))

    @pytest.mark.parametrize("library", ["timm", "torchvision"])
    def test_no_library_has_weights_of_ones_own_model(self, library):
        with refused(WeightsError, library, f"'{OWN}'", f"{OWN}.safetensors"):
            assemble_tiny("local", models=OWN, weights=library)
        assert assemble_tiny("local", models=f"{LOADED},tiny-cnn-64", weights=library)

    @pytest.mark.parametrize("name", [OWN, READY])
    def test_ones_own_model_starts_from_the_file_of_its_dotted_name(self, tmp_path, name):
        tensors = own_file(tmp_path, name)
        client = make_host(assemble_tiny("local", models=name, weights=str(tmp_path))).client(1)
        state = client.model.state_dict() if name == READY else client.model.features.backbone.state_dict()
        assert all(torch.equal(state[n], value) for n, value in tensors.items() if not n.startswith("head."))
        if name == READY:
            assert not torch.equal(state["head.weight"], tensors["head.weight"]), "a head is of the task, not of a file"

    @pytest.mark.parametrize("name", [OWN, READY])
    @pytest.mark.parametrize(
        ("change", "facts"),
        [
            (lambda first: {first: None}, ("'{first}'",)),
            (lambda first: {"extra": torch.ones(1)}, ("'extra'",)),
            (lambda first: {first: torch.ones(3)}, ("'{first}'", "(3,)", "(8, 1, 3, 3)")),
        ],
    )
    def test_a_file_of_ones_own_model_that_does_not_fit(self, tmp_path, name, change, facts):
        first = "net.0.weight" if name == OWN else "features.net.0.weight"
        own_file(tmp_path, name, change(first))
        file = tmp_path / f"{name}.safetensors"
        with refused(WeightsError, file, *(fact.replace("{first}", first) for fact in facts)):
            assemble_tiny("local", models=name, weights=str(tmp_path))

    @pytest.mark.parametrize("method", ["fedhpl", "pfedpg"])
    def test_a_method_for_pretrained_backbones_and_ones_own_model(self, method):
        with refused(MismatchError, method, f"client 0 ({OWN})", f"{OWN}.safetensors", "pretrained = True"):
            assemble_tiny(method, models=OWN)

    def test_ones_own_model_with_its_file_serves_such_a_method(self, tmp_path):
        tensors = own_file(tmp_path, OWN)
        host = make_host(assemble_tiny("fedhpl", models=OWN, weights=str(tmp_path)))
        state = host.client(0).model.features.backbone.net.state_dict()
        assert all(torch.equal(state[n], value) for n, value in tensors.items())
        assert assemble_tiny("fedhpl", models=LOADED)

    def test_worker_processes_and_a_resumed_run_have_the_same_weights(self, tmp_path):
        own_file(tmp_path, OWN)
        settings = {"models": OWN, "weights": str(tmp_path), "checkpoint_every": 1, "threads": 1, "participation": 0.5}
        whole, folder = run_tiny("fedhpl", **settings), new_folder()
        assert differing(kept(whole), kept(run_tiny("fedhpl", workers=2, **settings))) == []
        with pytest.raises(StoppedError):
            run_tiny("fedhpl", folder, observers=[StopAfter(0)], **settings)
        assert_same(whole, pluribus.resume(folder, progress=False))

    def test_a_file_that_changed_is_read_again(self, tmp_path):
        for value in (1.0, 2.0):
            own_file(tmp_path, OWN, {"net.0.bias": torch.full((8,), value)})
            os.utime(tmp_path / f"{OWN}.safetensors", (value, value))
            backbone = build(OWN, shape=(1, 8, 8), classes=10, weights=str(tmp_path)).features.backbone
            assert backbone.state_dict()["net.0.bias"].tolist() == [value] * 8

    def test_any_method_can_start_from_them(self, tmp_path):
        _, folder = self.folder(tmp_path)
        assert run_tiny("fedavg", models="cnn-16-32", weights=folder, rounds=1).accuracy is not None

    def test_a_library_that_does_not_have_them(self):
        with refused(WeightsError, "timm", "'resnet18'", "torchvision"):
            build("resnet18", shape=(3, 32, 32), classes=10, weights="timm")
        with refused(WeightsError, "torchvision", "'cnn-16'", "cnn-16.safetensors"):
            build("cnn-16", shape=(1, 8, 8), classes=10, weights="torchvision")

    def test_a_library_without_internet(self, monkeypatch):
        from pluribus.internal.torchvision import torchvision

        def offline(name, weights):
            raise OSError("no route to host.\nmore")

        monkeypatch.setattr(torchvision.models, "get_model", offline)
        with refused(WeightsError, "'resnet18'", "(no route to host)", "resnet18.safetensors"):
            build("resnet18", shape=(3, 32, 32), classes=10, weights="torchvision")

    def test_a_library_with_them(self, monkeypatch):
        from pluribus.internal.torchvision import torchvision

        with seeded("downloaded"):
            theirs = torchvision.models.resnet18(weights=None)
        monkeypatch.setattr(torchvision.models, "get_model", lambda name, weights: theirs)
        source._download.cache_clear()
        model = build("resnet18", shape=(1, 32, 32), classes=10, weights="torchvision")
        source._download.cache_clear()
        net = model.features.backbone.net.net
        assert torch.equal(net.conv1.weight, theirs.conv1.weight)
        assert isinstance(model.features.backbone.scale, Normalize)
        assert model(images(2, (1, 32, 32))).shape == (2, 10)
        frozen = DEEP.attach(model, (1, 32, 32))
        assert frozen.prompt_lr.shape == (1, 32, 6)

    def test_weights_for_pixels_in_minus_one_to_one_need_no_normalization(self):
        assert entries()["vit-b16"].origin == Origin("timm", "vit_base_patch16_224")
        assert isinstance(build("tiny-vit-32", shape=SHAPE, classes=10).features.backbone, TinyViT)
