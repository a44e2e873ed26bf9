"""Where pretrained backbones come from: this package, timm, torchvision, or a folder with NAME.safetensors files."""

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
from pluribus.models.probe import Shape, shape_text
from pluribus.models.two_part import TwoPartModel

SHIPPED = Path(__file__).parent / "weights"
LIBRARIES = ("timm", "torchvision")
# A saved classifier carries the layer that a backbone lacks, under one of these names.
LAST_LAYERS = ("head.", "fc.", "classifier.")

Colour = tuple[float, float, float]
HALF: Colour = (0.5, 0.5, 0.5)
IMAGENET_MEAN: Colour = (0.485, 0.456, 0.406)
IMAGENET_STD: Colour = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Origin:
    """Who has weights for a model, under which name, and the mean and deviation of pixels in [0, 1] they expect."""

    source: Literal["package", "timm", "torchvision"]
    name: str
    mean: Colour = HALF
    std: Colour = HALF


class Normalise(nn.Module):
    """Images in [-1, 1] as a checkpoint wants them: pixels in [0, 1], less their mean, over their deviation."""

    middle: Tensor
    spread: Tensor

    def __init__(self, mean: Colour, std: Colour) -> None:
        super().__init__()
        # (x + 1) / 2 - mean, over std, is (x - (2 mean - 1)) / (2 std). Not persistent: nothing here is learnt.
        self.register_buffer("middle", torch.tensor(mean)[:, None, None] * 2 - 1, persistent=False)
        self.register_buffer("spread", torch.tensor(std)[:, None, None] * 2, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W), or (B, 1, H, W) which becomes three channels."""
        return (x - self.middle) / self.spread


def filled(
    backbone: nn.Module, model: str, origin: Origin | None, own: bool, weights: str | None, shape: Shape
) -> nn.Module:
    """The backbone with its pretrained weights and normalisation, if it has any; on the meta device they are checked.

    `weights` is timm, torchvision or a folder; then nobody starts from random weights. Models that come with the
    package need none, nor do builders that load `own` weights. Of a ready `TwoPartModel` all but the head is written.
    """
    found = _tensors(model, origin, own, weights, shape)
    if found is None:
        return backbone
    net = backbone if "." in model else layers_before(backbone)[1]
    _copy(*found, net, model, shape)
    if origin is None or (origin.mean, origin.std) == (HALF, HALF):
        return backbone
    return nn.Sequential(OrderedDict(scale=Normalise(origin.mean, origin.std), net=backbone))


def layers_before(backbone: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """The layers that only prepare images, and the network itself behind them."""
    before: list[nn.Module] = []
    while isinstance(backbone, nn.Sequential) and "net" in (parts := dict(backbone.named_children())):
        backbone = parts.pop("net")
        before.extend(parts.values())
    return before, backbone


def _tensors(
    model: str, origin: Origin | None, own: bool, weights: str | None, shape: Shape
) -> tuple[Mapping[str, Tensor], str] | None:
    """Named tensors and where they come from, in words."""
    if weights is not None and weights not in LIBRARIES:
        return _read(_file(weights, model))
    if origin is not None and origin.source == "package":
        return _read(SHIPPED / f"{model}.safetensors")
    if weights is None or own:
        return None
    if origin is None or origin.source != weights:
        other = f"They come from {origin.source}" if origin else "No library has any"
        raise WeightsError(
            f"{weights} has no pretrained weights for '{model}'. {other}; or give --weights a folder with a file "
            f"{model}.safetensors."
        )
    return _downloaded(model, origin, shape), weights


def _file(folder: str, model: str) -> Path:
    path = Path(folder).expanduser() / f"{model}.safetensors"
    if not path.parent.is_dir():
        raise WeightsError(
            f"--weights {folder} is not a folder. Use timm, torchvision, or a folder with a file {path.name}."
        )
    if not path.is_file():
        raise WeightsError(f"--weights {folder} has no file {path.name}. Put one there, or use other --models.")
    return path


def _read(path: Path) -> tuple[Mapping[str, Tensor], str]:
    return _loaded(path, path.stat().st_mtime_ns), str(path)


@lru_cache(maxsize=8)
def _loaded(path: Path, changed: int) -> Mapping[str, Tensor]:
    """What a file holds, read once unless it has changed since."""
    try:
        with torch.device("cpu"):
            return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} cannot be read as safetensors: {error}.") from error


@lru_cache(maxsize=8)
def _downloaded(model: str, origin: Origin, shape: Shape) -> Mapping[str, Tensor]:
    """The library's own weights, which it keeps in its cache after the first download."""
    from pluribus.internal.torchvision import torchvision

    models: Any = torchvision.models
    try:
        with torch.device("cpu"):
            if origin.source == "timm":
                import timm

                net = timm.create_model(origin.name, pretrained=True, img_size=shape[1:], num_classes=0)
            else:
                net = models.get_model(origin.name, weights="IMAGENET1K_V1")
    except Exception as error:  # each library and its downloader fails in a way of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise WeightsError(
            f"the weights of '{model}' could not be fetched through {origin.source}, which needs the internet once "
            f"({reason}). Without it, give --weights a folder with a file {model}.safetensors."
        ) from error
    state: Mapping[str, Tensor] = net.state_dict()
    return state


def _copy(tensors: Mapping[str, Tensor], source: str, net: nn.Module, model: str, shape: Shape) -> None:
    """Write weights into a network, after checking that names and shapes are the network's own."""
    # A ready model has a head for the classes of this task; the weights are of others.
    target = {
        n: v for n, v in net.state_dict().items() if not (isinstance(net, TwoPartModel) and n.startswith("head."))
    }
    # Counters of batches say nothing to a frozen network, and some formats leave them out.
    missing = [n for n in target if n not in tensors and not n.endswith("num_batches_tracked")]
    stray = [n for n in tensors if n not in target and not n.startswith(LAST_LAYERS)]
    if missing or stray:
        wrong = f"lack '{missing[0]}'" if missing else f"have an unknown '{stray[0]}'"
        raise WeightsError(f"the weights for '{model}' ({source}) {wrong}: they belong to another architecture.")
    for name, value in target.items():
        if name in tensors and value.shape != tensors[name].shape:
            raise WeightsError(
                f"the weights for '{model}' ({source}) do not fit {shape_text(shape)} images: '{name}' is "
                f"{tuple(tensors[name].shape)}, not {tuple(value.shape)}. Resize the images with --image-size."
            )
    with torch.no_grad():
        for name, value in target.items():
            if name in tensors and not value.is_meta:
                value.copy_(tensors[name])
