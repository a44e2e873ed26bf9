"""The settings of run, compare, tune and bench as typed keyword arguments, for editors and type checkers.

The hyper-parameters are those of the built-in methods. Nothing is checked here: `Experiment` checks what is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from pluribus.data.dataset import Dataset

Array: TypeAlias = np.ndarray[Any, Any] | Tensor
Pair: TypeAlias = tuple[Any, Any]  # rows and labels: arrays, tensors, lists or data frames
DataLike: TypeAlias = (
    str | Path | Dataset | torch.utils.data.Dataset[Any] | Pair | Mapping[str, Any] | Callable[..., Any]
)
OneModel: TypeAlias = str | nn.Module | Callable[..., Any]
ModelsLike: TypeAlias = OneModel | Sequence[OneModel] | Mapping[int, OneModel]
ClientRows: TypeAlias = Array | Sequence[int]
PartitionLike: TypeAlias = str | ClientRows | Sequence[ClientRows] | Mapping[int, ClientRows] | Callable[..., Any]
DeviceLike: TypeAlias = str | torch.device


# ---- generated: python docs/generate.py refreshes this ---------------------------------------------------------------


class CommonSettings(TypedDict, total=False):
    """Settings that run, compare, tune and bench take."""

    data: DataLike
    partition: PartitionLike
    clients: int
    classes_per_client: int
    unequal: bool
    mass: str
    alpha: float | None
    min_samples: int
    min_share: float | None
    val_fraction: float
    test_fraction: float
    public_fraction: float
    test: Literal["own", "official", "common"]
    split_by: Literal["auto", "rows", "group", "time"]
    public_data: Any
    image_size: int | None
    columns: Any
    label_kind: Literal["classes", "labels", "numbers", "auto"]
    window: int | None
    stride: int | None
    tokenizer: str
    vocabulary: int
    length: int | None
    normalize: str
    models: ModelsLike
    capacity: Any
    split: str | None
    width: int | None
    projector: Literal["pool", "linear", "none"]
    same_init: bool
    weights: str | Path | None
    epochs: int
    batch_size: int
    optimizer: Literal["sgd", "adam", "amsgrad", "adamw"]
    lr: float
    momentum: float
    weight_decay: float
    lr_decay: float
    lr_schedule: Literal["constant", "cosine", "steps"]
    lr_steps: str | Sequence[int]
    lr_factor: float
    lr_warmup: int
    clip_norm: float | None
    optimizer_life: Literal["round", "run"]
    augment: str | Sequence[str]
    class_weights: Literal["equal", "balanced"]
    loss: Literal["mse", "l1"]
    dp_epsilon: float | None
    dp_level: Literal["row", "client", "client-central"]
    dp_delta: float
    dp_clip: float
    dp_sums_clip: float
    dp_share: float
    dp_noise: float | None
    dp_secure: bool
    share_counts: bool
    participation: float
    drop_rate: float
    straggler_rate: float
    attack: Literal["none", "label-flip", "sign-flip", "noise", "scale", "nan", "replay"]
    attackers: float | None
    attack_strength: float | None
    defense: Literal["none", "median", "trimmed-mean", "clip", "krum"]
    defense_share: float | None
    evaluate: Literal["auto", "all", "participants"]
    evaluate_every: int
    metrics: str | Sequence[str]
    device: DeviceLike
    threads: int | None
    workers: int | Literal["auto"]
    engine: Literal["auto", "ray"]
    ray_address: str | None
    gpu_share: float
    precision: Literal["tf32", "float32", "bfloat16"]
    channels_last: bool | None
    store: Literal["auto", "device", "host"]
    capture: bool
    stack: bool
    checkpoint_every: int | None
    hyper: dict[str, Any]
    distill: float
    ramp_up: int
    weighting: Literal["samples", "uniform", "norm"]
    pull: float
    align: int
    public_epochs: int
    public_batch: int
    public_lr: float
    redundancy: float
    inter: float
    intra: float
    pretrain_private: int
    gamma: float
    exclude_self: bool
    average: Literal["logits", "probabilities"]
    aux_model: str | None
    held_out: float
    adapt_steps: int
    adapt_lr: float
    start: float
    ensemble_weight: float
    matched_batch: int
    finetune_epochs: int
    finetune: Literal["model", "head"]
    server_steps: int
    server_lr: float
    server_batch: int
    top_k: int
    select: Literal["change", "random"]
    global_model: str
    probes: int | None
    merge: Literal["probe", "average"]
    same_start: bool
    warm_start: bool
    entropy: Literal["shannon", "tsallis", "collision"]
    tsallis_q: float
    bins: int
    distribution: Literal["aligned", "any-depth"]
    projection: Literal["block_retain", "flat_retain", "flat_zero"]
    teach: float
    guide: float
    fade: float
    diversity: float
    noise: int
    hidden: int
    generator_lr: float
    generator_steps: int
    generator_batch: int
    server_step: Literal["class", "client"]
    labels: Literal["all", "own", "none"]
    every: int
    pairs: bool
    kl: bool
    conflict: Literal["project", "ignore", "pcgrad"]
    margin: float
    eps: float
    lesson_lr: float | None
    mode: Literal["sync", "async"]
    turn_batches: int
    temperature: float
    prompt: Literal["deep", "shallow"]
    prompts: int
    padding: int
    upload: Literal["average", "full", "none"]
    send: Literal["correct", "all"]
    aggregation: Literal["weighted", "average"]
    denominator: Literal["correct", "all"]
    kd_t2: bool
    share_prompts: bool
    share_head: bool
    mentee_lr: float | None
    losses: Literal["joint", "own"]
    what: Literal["updates", "parameters"]
    energy_start: float
    energy_end: float
    warmup: int
    quiz: int | None
    digest_epochs: int
    digest_steps: int | None
    revisit_steps: int | None
    pretrain_public: int
    small_width: int | None
    small_weight: float
    head_epochs: int
    rebuild: bool
    last_epoch: bool
    mu: float
    scaler: bool
    masked: bool
    threshold: float
    server_epochs: int
    widths: int
    alone: bool
    lora_alpha: float
    label_weight: float
    meme_label_weight: float
    lora_scale: float
    penalty: float
    transfer_epochs: int
    transfer_weight: float
    coefficient_lr: float
    uniformity: float
    inner_lr: float
    variant: Literal["exact", "hessian-free", "first-order"]
    difference: float
    hyper_lr: float
    keep_local: int
    heads: int
    head_width: int
    server_optimizer: Literal["sgd", "adamw"]
    server_weight_decay: float | None
    border: int
    prompt_epochs: int
    prompt_lr: float


class StudySettings(CommonSettings, total=False):
    """Settings of compare and tune, which name seed and out."""

    rounds: int


class BenchSettings(CommonSettings, total=False):
    """Settings of bench."""

    seed: int
    out: str | Path | None


class Settings(StudySettings, total=False):
    """All settings of one run."""

    seed: int
    out: str | Path | None
