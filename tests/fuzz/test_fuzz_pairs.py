"""Pairs of settings: they are assembled or refused with a sentence, and a setting that does nothing is never silent."""

from __future__ import annotations

from typing import Any

import pytest
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import fuzzed

from conftest import few_digits
from pluribus.assembly import Assembly, assemble
from pluribus.errors import ConfigError
from pluribus.experiment import Experiment, experiment

BASE: dict[str, Any] = {"data": few_digits(80, 3), "clients": 3, "models": "mlp-64", "rounds": 4}
BASE |= {"device": "cpu", "workers": 1, "threads": 1, "partition": "iid"}

# Settings that mean nothing without others: a value, and others with which it means something.
NEEDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dp_level": ("client", {"dp_epsilon": 8.0}), "dp_delta": (1e-3, {"dp_epsilon": 8.0}),
    "dp_clip": (2.0, {"dp_epsilon": 8.0}), "dp_sums_clip": (2.0, {"dp_epsilon": 8.0}),
    "dp_share": (0.1, {"dp_epsilon": 8.0}), "dp_noise": (3.0, {"dp_epsilon": 8.0}),
    "dp_secure": (True, {"dp_epsilon": 8.0}), "attackers": (1.0, {"attack": "sign-flip"}),
    "attack_strength": (2.0, {"attack": "scale"}), "defense_share": (0.3, {"defense": "trimmed-mean"}),
    "lr_steps": ("1,2", {"lr_schedule": "steps"}), "lr_factor": (0.5, {"lr_schedule": "steps", "lr_steps": "1"}),
    "ray_address": ("auto", {"engine": "ray"}), "gpu_share": (0.5, {"engine": "ray"}),
}  # fmt: skip

# Settings that several runs may share although only some of them use it: a value, and others by which it is used.
NOTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "alpha": (0.5, {"partition": "dirichlet"}), "min_samples": (2, {"partition": "dirichlet"}),
    "classes_per_client": (1, {"partition": "pathological"}), "unequal": (True, {"partition": "pathological"}),
    "mass": ("5:5", {"partition": "class-mass"}), "min_share": (0.01, {"partition": "fedhpl-noniid"}),
    "momentum": (0.9, {}),
}  # fmt: skip


def make(settings: dict[str, Any]) -> Assembly:
    return assemble(experiment("fedgh", **BASE | settings))


@pytest.mark.parametrize("name", NEEDS)
def test_a_setting_that_needs_another(name: str) -> None:
    value, others = NEEDS[name]
    with pytest.raises(ConfigError) as refusal:
        make({name: value})
    assert f"--{name.replace('_', '-')}" in refusal.value.sentence
    experiment("fedgh", **BASE | {name: value} | others)  # not assembled: that takes a cluster, or seconds of imports


@pytest.mark.parametrize("name", NOTED)
def test_a_setting_that_is_not_used_is_noted(name: str) -> None:
    value, others = NOTED[name]
    flag = f"--{name.replace('_', '-')} "
    unused = {"optimizer": "adam"} if name == "momentum" else {}
    assert any(note.startswith(flag) for note in make({name: value} | unused).warnings)
    assert not any(note.startswith(flag) for note in make({name: value} | others).warnings)


# A few values of every setting, right and wrong.
VALUES: dict[str, list[Any]] = {
    "data": [few_digits(40, 3), "missing"], "partition": ["iid", "dirichlet", "pathological", "natural", "domain", "x"],
    "clients": [1, 2, 3, 50], "classes_per_client": [1, 4], "unequal": [True], "mass": ["5:5", "1:0:0", "x"],
    "alpha": [1e-9, 0.1, 1e9], "min_samples": [1, 30, 10**9], "min_share": [0.0, 0.5, 1.0],
    "val_fraction": [0.0, 0.5, 0.9], "test_fraction": [0.0, 0.5, 0.9], "public_fraction": [0.1, 0.5, 0.9],
    "test": ["own", "common", "official"], "split_by": ["rows", "group", "time"],
    "public_data": [few_digits(40, 3)], "image_size": [1, 8, 9], "columns": ["label=a"],
    "label_kind": ["classes", "labels", "numbers"], "window": [2], "stride": [1], "tokenizer": ["words"],
    "vocabulary": [100], "length": [5], "normalize": ["none", "client", "dataset", "0.5/0.5", "0.5/0"],
    "models": ["mlp-64", "cnn-16,mlp-64", "tiny-cnn", "resnet8", "x"], "split": ["head", "none"], "width": [1, 8, 64],
    "capacity": ["1,0.5", "0.01", "2", "x"],
    "projector": ["linear", "none"], "same_init": [True], "weights": ["missing"], "rounds": [1, 2],
    "epochs": [1, 3], "batch_size": [1, 7, 10**6], "optimizer": ["adam", "amsgrad", "adamw"],
    "lr": [1e-30, 1.0, 1e30], "momentum": [0.5, 1e9], "weight_decay": [0.1, 1e9], "lr_decay": [0.5, 1e9],
    "lr_schedule": ["cosine", "steps"], "lr_steps": ["1", "1,2", "2,1", "99", (1, 3)], "lr_factor": [0.5],
    "lr_warmup": [1, 3, 4], "clip_norm": [1e-9, 1.0], "optimizer_life": ["run"],
    "augment": ["crop", "crop,flip", "jitter", "drop"], "class_weights": ["balanced"], "loss": ["l1"],
    "dp_epsilon": [0.1, 8.0, 1e9], "dp_level": ["client", "client-central"], "dp_delta": [1e-300, 0.5],
    "dp_clip": [1e-30, 1e30], "dp_sums_clip": [1e-30, 1e30], "dp_share": [0.01, 0.99], "dp_noise": [0.01, 1.0, 1e6],
    "dp_secure": [True], "share_counts": [False],
    "participation": [0.01, 0.5], "drop_rate": [0.5, 0.99], "straggler_rate": [0.5, 0.99],
    "attack": ["label-flip", "sign-flip", "scale", "noise"], "attackers": [0.0, 0.3, 1.0, 2.0, 99.0, 1.5],
    "attack_strength": [1e-30, 1e30], "defense": ["median", "trimmed-mean", "clip", "krum"],
    "defense_share": [0.01, 0.3, 0.49], "evaluate": ["all", "participants"], "evaluate_every": [1, 99],
    "metrics": ["f1", "ece,accuracy", "rmse", "accuracy,confusion"], "seed": [1, -1, 2**62], "device": ["cuda", "x"],
    "engine": ["stacked", "serial", "x"], "workers": [2, "auto", 0], "threads": [1], "store": ["host", "device"],
    "channels_last": [True], "capture": [False], "stack": [False],
    "precision": ["bfloat16", "float32"], "checkpoint_every": [1, 99], "ray_address": ["x:1"],
    "gpu_share": [0.5], "out": ["missing/x"],
}  # fmt: skip
METHODS = ("local", "fedgh", "fedproto", "fedavg", "fedmd", "fedh2l", "heterofl", "depthfl")


@st.composite
def pairs(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=2, max_size=3, unique=True))
    return {name: draw(st.sampled_from(VALUES[name])) for name in names}


@fuzzed()
@given(st.sampled_from(METHODS), pairs())
def test_pairs_of_settings(method: str, settings: dict[str, Any]) -> None:
    with scratch() as folder:
        found = survives(lambda: assemble(experiment(method, **BASE | settings)), folder)
    if isinstance(found, Assembly):
        told = " ".join(found.warnings)
        for name, (_, others) in {**NEEDS, **NOTED}.items():
            if name in settings and not (others.keys() | {"partition", "optimizer"}) & settings.keys():
                assert name == "momentum" or f"--{name.replace('_', '-')}" in told, "a setting does nothing, silently"


def test_every_setting_has_values() -> None:
    assert set(VALUES) == set(Experiment.__dataclass_fields__) - {"method", "hyper"}
