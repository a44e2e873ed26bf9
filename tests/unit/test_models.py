"""Models: the papers' figures, the split into features and head, names, groups and assignments."""

import runpy
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from pluribus import draws
from pluribus.errors import FormatError, MismatchError, MissingSettingError, UnknownNameError, UserCodeError
from pluribus.inputs import as_input
from pluribus.internal import torchvision as _torchvision
from pluribus.models import GROUPS, assign, build, entries, register_model, signals, tiny, width_of, zoo
from pluribus.models.meta import without_numbers
from pluribus.models.sizes import typical_input
from pluribus.models.two_part import Pool
from processes import start
from refusals import refused

CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)
DIGITS = (1, 8, 8)
IMAGENET = (3, 224, 224)


@cache
def on_meta(name, shape=CIFAR, classes=10, **options):
    with torch.device("meta"):
        return build(name, shape=shape, classes=classes, **options)


def shape_for(name):
    if entries()[name].takes[0] != "image":
        return typical_input(name)
    if name.startswith("tiny-"):
        return (1, 16, 16)
    return (3, 64, 64) if name == "alexnet" else CIFAR


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


# ---- the papers' figures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("fedgh-cnn1", 2_621_558),
        ("fedgh-cnn2", 1_815_142),
        ("fedgh-cnn3", 1_320_558),
        ("fedgh-cnn4", 1_060_358),
        ("fedgh-cnn5", 670_058),
        ("fedfree-cnn", 3_210_706),
        ("cnn4", 878_538),
        ("resnet4", 84_170),
        ("resnet6", 314_954),
        ("resnet8", 1_235_274),
        ("resnet10", 4_910_922),
        ("resnet18", 11_181_642),
        ("resnet34", 21_289_802),
        ("resnet50", 23_528_522),
        ("resnet101", 42_520_650),
        ("resnet152", 58_164_298),
    ],
)
def test_parameters_on_cifar10(name, parameters):
    assert size(on_meta(name, CIFAR)) == parameters


def test_cnn4_on_cifar100_is_the_auxiliary_model_of_fml():
    assert size(on_meta("cnn4", classes=100)) == 924_708


def test_cnn4_takes_larger_images():
    assert on_meta("cnn4", (3, 64, 64)).features.backbone.fc1.in_features == 10_816


def layers(name, shape):
    return " ".join(type(layer).__name__ for layer in on_meta(name, shape).features.backbone)


def test_lenet_is_the_one_of_caffe():
    assert size(on_meta("lenet", MNIST)) == 431_080
    assert layers("lenet", MNIST) == "Conv2d MaxPool2d Conv2d MaxPool2d Flatten Linear ReLU"


def test_layers_of_the_plain_networks():
    convolutions = "Conv2d ReLU MaxPool2d Conv2d ReLU MaxPool2d Flatten"
    assert layers("cnn4", CIFAR) == f"{convolutions} Linear ReLU"
    assert layers("fedgh-cnn1", CIFAR) == f"{convolutions} Linear ReLU Linear ReLU"
    assert layers("mlp-128-64", DIGITS) == "Flatten Linear ReLU Linear ReLU"
    assert layers("cnn-16", DIGITS) == "Conv2d ReLU MaxPool2d Flatten Linear ReLU"
    assert layers("cnn-16-32", DIGITS) == f"{'Conv2d BatchNorm2d ReLU MaxPool2d ' * 2}Flatten Linear ReLU"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("googlenet", 6_624_904),
        ("mobilenet-v2", 3_504_872),
        ("alexnet", 61_100_840),
        ("vgg11", 132_863_336),
        ("vit-s16", 22_050_664),
        ("vit-b16", 86_567_656),
        ("vit-b32", 88_224_232),
        ("vit-l16", 304_326_632),
    ],
)
def test_parameters_on_imagenet_are_the_published_ones(name, parameters):
    assert size(on_meta(name, IMAGENET, 1000)) == parameters


def mebibytes(name):
    return size(on_meta(name, CIFAR)) * 4 / 2**20


def test_sizes_of_fedgh_table_2():
    assert [round(mebibytes(f"fedgh-cnn{i}"), 2) for i in (1, 2, 3)] == [10.00, 6.92, 5.04]
    assert mebibytes("fedgh-cnn5") == pytest.approx(2.55, abs=0.01)


def test_fedgh_table_2_misprints_cnn4():
    """The layers it lists come to 4.04 MB; the 3.81 MB that it prints would take 753 units in fc1, not 800."""
    assert round(mebibytes("fedgh-cnn4"), 2) == 4.04


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("mlp-64", 64),
        ("mlp-128-64", 64),
        ("cnn-16", 64),
        ("cnn-16-32", 64),
        ("lenet", 500),
        ("fedfree-cnn", 500),
        ("fedgh-cnn1", 500),
        ("fedgh-cnn5", 500),
        ("cnn4", 512),
        ("googlenet", 1024),
        ("mobilenet-v2", 1280),
        ("resnet4", 64),
        ("resnet6", 128),
        ("resnet8", 256),
        ("resnet10", 512),
        ("resnet18", 512),
        ("resnet34", 512),
        ("resnet50", 2048),
        ("resnet101", 2048),
        ("resnet152", 2048),
        ("alexnet", 4096),
        ("vgg11", 4096),
        ("vit-s16", 384),
        ("vit-b16", 768),
        ("vit-b32", 768),
        ("vit-l16", 1024),
        ("vit-b16-mlp", 768),
        ("vit-b32-mlp", 768),
    ],
)
def test_native_width(name, width):
    model = on_meta(name, shape_for(name))
    assert model.width == width
    assert isinstance(model.features.projector, nn.Identity)


@pytest.mark.parametrize(("name", "layer"), [("googlenet", "dropout"), ("mobilenet-v2", "classifier")])
def test_dropout_stays_in_the_features(name, layer):
    kept = [module.p for module in getattr(on_meta(name).features.backbone, layer).modules() if hasattr(module, "p")]
    assert kept == [0.2]


# ---- features and head -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", entries())
def test_every_model_gives_k_features_and_logits(name):
    model = on_meta(name, shape_for(name), classes=7, width=512)
    features = model.features(as_input(shape_for(name)).zeros(3, device=torch.device("meta")))
    assert model.width == 512
    assert features.shape == (3, 512)
    assert model.head(features).shape == (3, 7)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("projector", ["pool", "linear"])
@pytest.mark.parametrize("name", ["mlp-64", "cnn-16-32", "resnet6", "mobilenet-v2"])
def test_real_models_train(name, projector):
    model = build(name, shape=DIGITS, classes=10, width=100, projector=projector)
    model(torch.randn(4, *DIGITS)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.eval()(torch.randn(1, *DIGITS)).shape == (1, 10)


def test_forward_is_the_head_of_the_features():
    model = build("cnn-16", shape=DIGITS, classes=10)
    x = torch.randn(5, *DIGITS)
    assert torch.equal(model(x), model.head(model.features(x)))


def test_pool_averages_four_neighbors():
    x = torch.arange(2 * 2048.0).reshape(2, 2048)
    assert torch.equal(Pool(512)(x), x.reshape(2, 512, 4).mean(2))


def test_pool_repeats_eight_times():
    x = torch.randn(3, 64)
    assert torch.equal(Pool(512)(x), x.repeat_interleave(8, dim=1))


def test_pool_takes_overlapping_windows():
    assert Pool(2)(torch.tensor([[1.0, 2.0, 6.0]])).tolist() == [[1.5, 4.0]]


@pytest.mark.parametrize("batch", [1, 2, 512])
def test_pool_treats_every_image_alone(batch):
    x = torch.randn(batch, 768)
    assert torch.equal(Pool(512)(x), torch.cat([Pool(512)(row[None]) for row in x]))


def test_projectors():
    assert isinstance(on_meta("resnet4", width=512).features.projector, Pool)
    linear = on_meta("resnet4", width=512, projector="linear").features.projector
    assert (linear.in_features, linear.out_features) == (64, 512)
    assert isinstance(on_meta("resnet18", width=512, projector="linear").features.projector, nn.Identity)
    assert on_meta("resnet4", width=512, projector="none").width == 64


def test_unknown_projector():
    with refused(UnknownNameError, "'mean'", "pool", "linear", "none"):
        build("mlp-64", shape=DIGITS, classes=10, width=32, projector="mean")


def test_gray_images_are_seen_as_three_equal_channels():
    with draws.seeded(0):
        gray = build("resnet6", shape=DIGITS, classes=10).eval()
    with draws.seeded(0):
        color = build("resnet6", shape=(3, 8, 8), classes=10).eval()
    x = torch.randn(2, *DIGITS)
    assert torch.equal(gray(x), color(x.repeat(1, 3, 1, 1)))


def test_gray_vit():
    assert build("vit-s16", shape=(1, 16, 32), classes=10)(torch.zeros(2, 1, 16, 32)).shape == (2, 10)


def test_heads_of_htm10_differ():
    models = [on_meta(name, CIFAR, classes=7, width=512) for name in GROUPS["htm10"].models]
    linear, mlp = [(7, 512), (7,)], [(768, 512), (768,), (7, 768), (7,)]
    assert [[tuple(p.shape) for p in model.head.parameters()] for model in models] == [linear] * 8 + [mlp] * 2
    assert isinstance(models[-1].head[1], nn.Tanh)
    assert entries()["vit-b16-mlp"].head == "mlp"


# ---- initial weights -------------------------------------------------------------------------------------------------


def weights(name, *key):
    with draws.seeded(*key):
        return build(name, shape=CIFAR, classes=10, width=100, projector="linear").state_dict()


def equal(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["mlp-64", "cnn4", "mobilenet-v2"])
def test_weights_depend_on_the_key_alone(name):
    zoo._native_widths.clear()
    measured = weights(name, 0, "init", 3)
    remembered = weights(name, 0, "init", 3)
    assert equal(measured, remembered)
    assert not equal(measured, weights(name, 0, "init", 4))


def test_building_leaves_batch_norm_untouched():
    zoo._native_widths.clear()
    norm = build("cnn-16-32", shape=DIGITS, classes=10).features.backbone.conv1_norm
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_var, torch.ones(16))


# ---- names -----------------------------------------------------------------------------------------------------------


def test_unknown_model():
    with refused(UnknownNameError, "'resnet1522'", "'resnet152'", "pluribus list models"):
        build("resnet1522", shape=CIFAR, classes=10)


@pytest.mark.parametrize(
    ("name", "shape", "facts"),
    [
        ("alexnet", (3, 8, 8), ("3x8x8",)),
        ("cnn4", DIGITS, ("1x8x8",)),
        ("resnet18", (2, 32, 32), ("2x32x32",)),
        ("vit-b16", MNIST, ("1x28x28", "patches of 16x16")),
        ("vit-b32", (3, 16, 16), ("3x16x16", "patches of 32x32")),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_images_that_do_not_fit(name, shape, facts, device):
    with torch.device(device), refused(MismatchError, f"'{name}'", *facts) as caught:
        build(name, shape=shape, classes=10)
    assert "\n" not in str(caught.value)


def test_a_name_is_registered_once_and_without_separators():
    with refused(UserCodeError, "'cnn4'", "built in"):
        register_model("cnn4", "another")(lambda shape: nn.Flatten())
    for name in ("my.net", "a,b"):
        with refused(UserCodeError, f"'{name}'", "dot", "comma"):
            register_model(name, "unreachable")(lambda shape: nn.Flatten())
    assert "my.net" not in entries()


def test_registered_models_are_built_and_listed(monkeypatch):
    monkeypatch.setattr(zoo, "_entries", entries())
    register_model("flat", "pixels")(lambda shape: nn.Flatten())
    assert entries()["flat"].about == "pixels"
    assert build("flat", shape=DIGITS, classes=3).width == 64
    assert assign("flat", 1) == ("flat",)


def test_a_model_that_is_registered_again_is_measured_again(monkeypatch):
    monkeypatch.setattr(zoo, "_entries", entries())
    for width in (8, 16):  # the same cell of a notebook, changed

        @register_model("again", "of a cell")
        def backbone(shape, width=width):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, width))

        assert build("again", shape=DIGITS, classes=3).width == width
    with refused(UserCodeError, "'again'", "test_models"):
        register_model("again", "of another function")(lambda shape: nn.Flatten())


OWN_MODELS = """
import torch
from torch import nn
from pluribus.models import TwoPartModel

def backbone(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 24))

def ready(shape):
    return TwoPartModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), nn.Linear(12, 10), 12)

def boastful(shape):
    return TwoPartModel(nn.Flatten(), nn.Linear(64, 10), 128)

class Hollow(TwoPartModel):
    def __init__(self):
        nn.Module.__init__(self)

def hollow(shape):
    return Hollow()

def images(shape):
    return nn.Identity()

class Grid(nn.Module):
    def forward(self, x):
        return (x + torch.zeros(8)).flatten(1)

def makes_tensors(shape):
    return Grid()

def silent(shape):
    raise RuntimeError

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_models", None)


@pytest.mark.usefixtures("own")
class TestOwnBuilders:
    def test_backbone_is_projected(self):
        model = build("own_models.backbone", shape=DIGITS, classes=10, width=8)
        assert model.width == 8
        assert model(torch.zeros(2, *DIGITS)).shape == (2, 10)
        assert on_meta("own_models.backbone", DIGITS).width == 24

    def test_ready_split_is_used_as_it_is(self):
        model = build("own_models.ready", shape=DIGITS, classes=10)
        assert (model.width, size(model)) == (12, 64 * 12 + 12 + 12 * 10 + 10)

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_forward_may_make_tensors(self, device):
        with torch.device(device):
            assert build("own_models.makes_tensors", shape=DIGITS, classes=10).width == 64

    @pytest.mark.parametrize(
        ("name", "classes", "width", "kind", "facts"),
        [
            ("ready", 5, None, MismatchError, ("10 logits", "5 classes")),
            ("ready", 10, 64, MismatchError, ("TwoPartModel", "width 12", 64)),
            ("boastful", 10, None, UserCodeError, ("width", 128, 64)),
            ("hollow", 10, None, UserCodeError, ("TwoPartModel", "features")),
            ("images", 10, None, MismatchError, ("1x8x8", "flat vector")),
            ("silent", 10, None, MismatchError, ("1x8x8", "RuntimeError")),
            ("number", 10, None, UserCodeError, ("function",)),
            ("missing", 10, None, UserCodeError, ("'own_models'", "'missing'")),
        ],
    )
    def test_refusals(self, name, classes, width, kind, facts):
        with refused(kind, f"'own_models.{name}'", *facts):
            build(f"own_models.{name}", shape=DIGITS, classes=classes, width=width)


def test_own_builder_that_is_not_there():
    with refused(UserCodeError, "'nowhere.net'", "No module named 'nowhere'"):
        build("nowhere.net", shape=CIFAR, classes=10)


# ---- groups and assignments ------------------------------------------------------------------------------------------


def test_all_groups():
    htfe8 = ("cnn4", "googlenet", "mobilenet-v2", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
    assert {name: group.models for name, group in GROUPS.items()} == {
        "small": ("mlp-64", "cnn-16", "mlp-128-64", "cnn-16-32"),
        "small-gn": ("mlp-64", "cnn-16", "mlp-128-64", "cnn-16-32-gn"),
        "tiny": ("tiny-vit-32", "tiny-vit-48", "tiny-cnn-64"),
        "htfe2": ("cnn4", "resnet18"),
        "htfe3": ("resnet10", "resnet18", "resnet34"),
        "htfe4": htfe8[:4],
        "htfe8": htfe8,
        "htfe9": ("resnet4", "resnet6", "resnet8", "resnet10", *htfe8[3:]),
        "htm10": (*htfe8, "vit-b16-mlp", "vit-b32-mlp"),
        "fedgh": ("fedgh-cnn1", "fedgh-cnn2", "fedgh-cnn3", "fedgh-cnn4", "fedgh-cnn5"),
        "fedfree": ("fedfree-cnn", *htfe8[3:], "googlenet", "mobilenet-v2"),
        "fedhpl-vit": ("vit-s16", "vit-b16", "vit-l16", "vit-b16", "vit-s16"),
        "fedhpl-resnet": ("resnet18", "resnet34", "resnet50", "resnet34", "resnet18"),
        "fedhpl-homogeneous": ("vit-b16",),
        "sensor5": ("cnn1d-3", "resnet1d", "lstm1d", "gru1d", "transformer1d"),
        "text6": ("fasttext", "textcnn", "textlstm", "textbilstm", "textgru", "texttransformer-2"),
        "table4": ("table-mlp-2", "table-resnet", "ft-transformer", "logistic"),
    }


def test_widths_of_groups():
    by_width = {
        "small": 64,
        "small-gn": 64,
        "tiny": None,
        "fedgh": 500,
        "fedfree": None,
        "sensor5": 64,
        "text6": 64,
        "table4": 64,
    }
    by_width |= dict.fromkeys(("htfe2", "htfe3", "htfe4", "htfe8", "htfe9", "htm10"), 512)
    by_width |= dict.fromkeys(("fedhpl-vit", "fedhpl-resnet", "fedhpl-homogeneous"))
    assert {name: width_of(name) for name in GROUPS} == by_width
    assert width_of("resnet18") is width_of(["cnn4", "resnet18"]) is width_of({0: "cnn4"}) is None


def test_groups_hold_known_models_and_do_not_shadow_one():
    assert {name for group in GROUPS.values() for name in group.models} <= entries().keys()
    assert not GROUPS.keys() & entries().keys()


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ("htfe3", ("resnet10", "resnet18", "resnet34", "resnet10", "resnet18")),
        ("cnn4", ("cnn4",) * 5),
        ("my.own.net", ("my.own.net",) * 5),
        ("cnn4, resnet18", ("cnn4", "resnet18", "cnn4", "resnet18", "cnn4")),
        (["cnn4", "my.net", "lenet"], ("cnn4", "my.net", "lenet", "cnn4", "my.net")),
        (("lenet",), ("lenet",) * 5),
        ({4: "lenet", 0: "cnn4", 1: "cnn4", 2: "cnn4", 3: "cnn4"}, ("cnn4",) * 4 + ("lenet",)),
    ],
)
def test_assign(models, expected):
    assert assign(models, 5) == expected


def test_assign_ten_thousand():
    assert set(Counter(assign("small", 10_000)).values()) == {2500}


@pytest.mark.parametrize(
    ("models", "kind", "facts"),
    [
        ("htfe80", UnknownNameError, ("'htfe80'", "'htfe8'", "pluribus list models")),
        ("resnet81", UnknownNameError, ("'resnet81'", "'resnet8'", "pluribus list models")),
        ("cnn4, lenett", UnknownNameError, ("'lenett'", "'lenet'")),
        ({0: "cnn4", 2: "cnn4"}, MissingSettingError, ("client 1", 3)),
        (["cnn4", "htfe8"], FormatError, ("'htfe8'", "group")),
    ],
)
def test_assign_refuses(models, kind, facts):
    with refused(kind, *facts):
        assign(models, 3)


# ---- torchvision's door ----------------------------------------------------------------------------------------------


def test_torchvision_and_timm_are_loaded_late_and_even_after_a_failed_try():
    program = """
import sys
from pluribus.models import build
build("mlp-64", shape=(1, 8, 8), classes=10)
assert not {"torchvision", "timm"} & sys.modules.keys()
try:
    import torchvision
except RuntimeError:
    pass
build("vit-s16", shape=(3, 16, 16), classes=10)
build("resnet4", shape=(3, 16, 16), classes=10)
"""
    process = start(program=program)
    assert process.wait() == 0, process.err


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "vit-s16"])
def test_a_library_is_not_imported_inside_a_context_of_torch(name):
    """Tensors that it makes when it is imported would have no numbers, and torch 2.8 cannot import timm there."""
    program = f"""
import sys, threading
import torch
from pluribus.models import build
from pluribus.models.meta import without_numbers

class Watch:
    def find_spec(self, found, path=None, target=None):
        if found == "timm":
            print(torch.ones(1).device, threading.current_thread() is threading.main_thread())

sys.meta_path.insert(0, Watch())
with without_numbers():
    print(build({name!r}, shape=(3, 32, 32), classes=10).width)
"""
    process = start(program=program)
    assert process.wait() == 0, process.err
    assert process.out.split()[:2] == ["cpu", "False"]


@pytest.mark.parametrize(
    ("made", "first", "positions"),
    [
        (lambda: tiny.TinyViT(32, 16).pos_embed, lambda: nn.Conv2d(1, 32, 4, 4), (1, 17, 32)),
        (lambda: signals.Transformer(3, 50).positions, lambda: nn.Conv1d(3, 64, 4, 4), (1, 13, 64)),
    ],
    ids=["tiny-vit", "transformer1d"],
)
def test_positions_are_small_normal_numbers_of_the_generator(made, first, positions):
    """They are drawn after the patches, in place, and have the bits of a plain draw."""
    torch.manual_seed(0)
    found = made()
    torch.manual_seed(0)
    first()
    assert torch.equal(found, torch.randn(positions) * 0.02)


@pytest.fixture
def other_torchvision(tmp_path, monkeypatch):
    def install(source):
        (tmp_path / "torchvision.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torchvision", raising=False)
        return runpy.run_path(str(Path(_torchvision.__file__)))

    return install


def test_a_whole_torchvision_is_left_alone(other_torchvision):
    door = other_torchvision("here = True")
    assert door["torchvision"].here
    assert door["_stand_ins"] is None


def test_other_troubles_of_torchvision_are_not_hidden(other_torchvision):
    with pytest.raises(RuntimeError, match="different CUDA major versions"):
        other_torchvision("raise RuntimeError('different CUDA major versions')")


@pytest.mark.parametrize("model", ["resnet18", "mobilenet-v2", "cnn4"])
def test_a_model_without_numbers_has_the_shapes_of_one_with_numbers(model):
    with without_numbers():
        empty = build(model, shape=(3, 32, 32), classes=10)
    full = build(model, shape=(3, 32, 32), classes=10)
    shapes = {name: (value.shape, value.dtype) for name, value in empty.state_dict().items()}
    assert shapes == {name: (value.shape, value.dtype) for name, value in full.state_dict().items()}
    assert all(value.is_meta for value in empty.state_dict().values())


def test_a_tensor_with_numbers_is_filled_beside_those_without():
    with without_numbers():
        assert torch.zeros(2, device="cpu").fill_(3).tolist() == [3, 3]
        assert nn.init.constant_(torch.zeros(2, device="cpu"), 4).tolist() == [4, 4]


def test_assembling_known_networks_does_not_import_torchs_compiler():
    script = (
        "import sys, torch, pluribus\n"
        "from pluribus.assembly import assemble\n"
        "from pluribus.experiment import Experiment\n"
        "assemble(Experiment(method='fedgh', models='htfe4', image_size=32, clients=4, device='cpu'))\n"
        "assemble(Experiment(method='fedgh', models='tiny', image_size=16, clients=4, device='cpu'))\n"
        "assemble(Experiment(method='fedgh', models='transformer1d', data='watch', clients=4, device='cpu'))\n"
        "assemble(Experiment(method='fedgh', models='texttransformer-1', data='speeches', clients=4, device='cpu'))\n"
        "print('torchvision' in sys.modules, 'torch._dynamo' in sys.modules)\n"
        "from torchvision.ops import roi_align\n"
        "from torch._dynamo.utils import is_compile_supported\n"
        "print(sys.modules['torchvision.ops.roi_align'].is_compile_supported('cpu') == is_compile_supported('cpu'))\n"
    )
    process = start(program=script)
    assert process.wait() == 0, process.err
    assert process.out.split() == ["True", "False", "True"]
