"""Sources of pretrained weights: this package, timm, torchvision, Hugging Face, or a folder of .safetensors files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from pluribus.errors import WeightsError
from pluribus.inputs import Input
from pluribus.internal.blame import first_line
from pluribus.internal.late import import_late
from pluribus.internal.paths import to_path
from pluribus.models.hf import Encoder, hf_backbone, make_encoder
from pluribus.models.two_part import TwoPartModel

SHIPPED = Path(__file__).parent / "weights"
LIBRARIES = ("timm", "torchvision", "hf")
# Name prefixes of the last layer in a saved classifier. A backbone does not have this layer.
LAST_LAYERS = ("head.", "fc.", "classifier.")

Color = tuple[float, float, float]
HALF: Color = (0.5, 0.5, 0.5)
IMAGENET_MEAN: Color = (0.485, 0.456, 0.406)
IMAGENET_STD: Color = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Origin:
    """The source of a model's weights, its name there, and the expected mean and deviation of pixels in [0, 1]."""

    source: Literal["package", "timm", "torchvision", "hf"]
    name: str
    mean: Color = HALF
    std: Color = HALF


class Normalize(nn.Module):
    """Convert images in [-1, 1] to what a checkpoint expects: pixels in [0, 1] minus the mean, over the deviation."""

    middle: Tensor
    spread: Tensor

    def __init__(self, mean: Color, std: Color) -> None:
        super().__init__()
        # (x + 1) / 2 - mean, over std, is (x - (2 mean - 1)) / (2 std). Not persistent: they are constants.
        self.register_buffer("middle", torch.tensor(mean)[:, None, None] * 2 - 1, persistent=False)
        self.register_buffer("spread", torch.tensor(std)[:, None, None] * 2, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.middle) / self.spread


def fill_weights(
    backbone: nn.Module, model: str, origin: Origin | None, own: bool, weights: str | None, shape: Input
) -> nn.Module:
    """Load the pretrained weights of a backbone and add its normalization. On the meta device, only check the weights.

    `weights` is timm, torchvision, hf or a folder. If it is given, no model starts from random weights. It is not
    needed for models of this package, nor for builders that load their `own` weights. The head of a complete
    `TwoPartModel` stays as it is.
    """
    found = _tensors(model, origin, own, weights, shape)
    if found is None:
        return backbone
    net = backbone if own or "." in model else layers_before(backbone)[1]
    if isinstance(net, Encoder):  # its tensors have their names at Hugging Face
        net = net.net
    _copy(*found, net, model, shape)
    if origin is None or (origin.mean, origin.std) == (HALF, HALF):
        return backbone
    return nn.Sequential(OrderedDict(scale=Normalize(origin.mean, origin.std), net=backbone))


def layers_before(backbone: nn.Module) -> tuple[list[nn.Module], Any]:
    """Separate the layers that only prepare images from the network after them, whose parts have no type."""
    before: list[nn.Module] = []
    while isinstance(backbone, nn.Sequential) and "net" in (parts := dict(backbone.named_children())):
        backbone = parts.pop("net")
        before.extend(parts.values())
    return before, backbone


def _tensors(
    model: str, origin: Origin | None, own: bool, weights: str | None, shape: Input
) -> tuple[Mapping[str, Tensor], str] | None:
    """Named tensors, and the name of their source."""
    if weights is not None and weights not in LIBRARIES:
        return _read(_file(weights, model))
    if origin is not None and origin.source == "package":
        return _read(SHIPPED / f"{model}.safetensors")
    if weights is None or own:
        return None
    if origin is None or origin.source != weights:
        advice = f"Use --weights {origin.source}, or" if origin else "No library has them:"
        raise WeightsError(
            f"{weights} has no pretrained weights for '{model}'. {advice} give --weights a folder with a file "
            f"{_file_name(model)}."
        )
    return _download(model, origin, shape), weights


def _file(folder: str, model: str) -> Path:
    path = to_path(folder) / _file_name(model)
    if not path.parent.is_dir():
        raise WeightsError(
            f"--weights {folder} is not a folder. Use {', '.join(LIBRARIES)}, or a folder with a file {path.name}."
        )
    if not path.is_file():
        raise WeightsError(f"--weights {folder} has no file {path.name}. Add the file, or use other --models.")
    return path


def _file_name(model: str) -> str:
    """The name of the file with a model's weights. Names of Hugging Face have slashes."""
    return f"{model.replace('/', '--')}.safetensors"


def _read(path: Path) -> tuple[Mapping[str, Tensor], str]:
    return _load(path, path.stat().st_mtime_ns), str(path)


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> Mapping[str, Tensor]:
    """Read the tensors of a file, once unless it changes. `changed` is part of the cache key."""
    try:
        with torch.device("cpu"):
            return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} cannot be read as safetensors: {error}.") from error


@lru_cache(maxsize=8)
def _download(model: str, origin: Origin, shape: Input) -> Mapping[str, Tensor]:
    """Get the weights from their library, which caches them after the first download."""
    from pluribus.internal.torchvision import torchvision

    models: Any = torchvision.models
    try:
        with torch.device("cpu"):
            if origin.source == "hf":
                net = make_encoder(hf_backbone(origin.name).config, origin.name)
            elif origin.source == "timm":
                timm = import_late("timm")
                config = timm.get_pretrained_cfg(origin.name)
                sized: dict[str, Any] = (
                    {"img_size": shape.shape[1:]} if config is None or config.fixed_input_size else {}
                )
                net = timm.create_model(origin.name, pretrained=True, num_classes=0, **sized)
            else:
                net = models.get_model(origin.name, weights="IMAGENET1K_V1")
    except Exception as error:  # each library and its downloader raise errors of their own
        raise WeightsError(
            f"the weights of '{model}' could not be downloaded through {origin.source} ({first_line(error)}). "
            "The first download needs internet access. Without it, give --weights a folder with a file "
            f"{_file_name(model)}."
        ) from error
    state: Mapping[str, Tensor] = net.state_dict()
    return state


def _copy(tensors: Mapping[str, Tensor], source: str, net: nn.Module, model: str, shape: Input) -> None:
    """Copy weights into a network, after checking their names and shapes."""
    # The head of a complete model is for the classes of this task. The weights are for other classes.
    target = {
        n: v for n, v in net.state_dict().items() if not (isinstance(net, TwoPartModel) and n.startswith("head."))
    }
    # Batch counters do not affect a frozen network, and some formats omit them.
    missing = [n for n in target if n not in tensors and not n.endswith("num_batches_tracked")]
    stray = [n for n in tensors if n not in target and not n.startswith(LAST_LAYERS)]
    if missing or stray:
        wrong = f"lack '{missing[0]}'" if missing else f"have an unknown '{stray[0]}'"
        raise WeightsError(f"the weights for '{model}' ({source}) {wrong}: they belong to another architecture.")
    for name, value in target.items():
        if name in tensors and value.shape != tensors[name].shape:
            raise WeightsError(
                f"the weights for '{model}' ({source}) do not fit {shape}: '{name}' is "
                f"{tuple(tensors[name].shape)}, not {tuple(value.shape)}. Resize the images with --image-size."
            )
    with torch.no_grad():
        for name, value in target.items():
            if name in tensors and not value.is_meta:
                value.copy_(tensors[name])
