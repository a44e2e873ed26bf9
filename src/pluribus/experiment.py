"""An experiment: one flat dataclass with the same names and defaults in Python, TOML files and on the command line."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import re
import shlex
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from pluribus.data import Dataset
from pluribus.data.augment import parse_augmentations
from pluribus.data.datasets import count_holders, kind_of_data, short_name
from pluribus.data.federated import SplitBy
from pluribus.data.given import name_data, take_data
from pluribus.data.host_store import Where
from pluribus.data.partitions import NATURAL, OwnPartition, name_partition, take_partition
from pluribus.data.reading import Reading, parse_columns, write_columns
from pluribus.data.scaling import parse_normalize
from pluribus.errors import ConflictError, FormatError, RangeError, UserCodeError
from pluribus.internal.arithmetic import allowed_threads
from pluribus.internal.attacks import ATTACKERS, STRENGTH, STRONG, Attack, choose_attackers
from pluribus.internal.attacks import Kind as AttackKind
from pluribus.internal.blame import first_line
from pluribus.internal.defenses import SHARE, SHARED, Defense
from pluribus.internal.defenses import Name as DefenseName
from pluribus.internal.digits import is_whole
from pluribus.internal.lookup import GIVEN
from pluribus.internal.metrics import parse_metrics
from pluribus.method import Method, find, hyperparameters, methods, name_of, takes_one_model
from pluribus.models import GROUP_OF, GROUPS, assign, find_own_builders, own_models, take_models
from pluribus.models.capacity import CapacityKind, give_capacities, name_capacities, write_capacities
from pluribus.models.own import name_model
from pluribus.optim import Rule, parse_steps
from pluribus.privacy.terms import LEAST_NOISE, MOST_CLIP, MOST_NOISE, Level, Terms
from pluribus.settings import check_names, convert_fields, flag_name, group_names, setting, settings_of
from pluribus.storage.folder import DIGEST, PUBLIC_DIGEST
from pluribus.storage.toml import read_toml
from pluribus.targets import TargetKind

SITES = "(sites)"  # `data` of a run whose data is at real sites


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run, except the method's own hyper-parameters (`hyper`)."""

    method: str = "fedgh"
    """Name of a method (pluribus list methods), or package.module.Class of your own."""

    data: Any = setting("digits", group="data")
    """Name of a data set (pluribus list data), a file, an image folder, hf:NAME, or package.module.function."""
    partition: Any = setting("dirichlet", group="data")
    """How rows are divided among clients (pluribus list partitions), or package.module.function."""
    clients: int = setting(8, group="data", at_least=1, symbol="N")
    """Number of clients."""
    classes_per_client: int = setting(2, group="data", at_least=1)
    """Classes that each client holds (pathological partition)."""
    unequal: bool = setting(False, group="data")
    """Give clients unequal shares of each class (pathological partition)."""
    mass: str = setting("8:1:1", group="data")
    """Ratio of a client's rows in its first class, its second class and so on (class-mass partition)."""
    alpha: float | None = setting(None, group="data", above=0, below=math.inf)
    """Concentration of the Dirichlet partitions: smaller is more skewed. Default: 1, or random (FedHPL)."""
    min_samples: int = setting(10, group="data", at_least=0)
    """Fewest rows that a client may hold (Dirichlet partitions)."""
    min_share: float | None = setting(None, group="data", at_least=0, at_most=1)
    """Smallest share of each class that a client holds (FedHPL partitions). Default: 0.01; cifar100 0.1, svhn 0.005."""
    val_fraction: float = setting(0.1, group="data", at_least=0, below=1)
    """Share of each client's rows for validation."""
    test_fraction: float = setting(0.2, group="data", at_least=0, below=1)
    """Share of each client's rows for testing; with --test common, of all rows."""
    public_fraction: float = setting(0.0, group="data", at_least=0, below=1)
    """Share of each client's rows that is public: all clients get these rows."""
    test: Literal["own", "official", "common"] = setting("own", group="data")
    """Test set: own rows of each client, the official test set for all, or a common share of all rows."""
    split_by: SplitBy = setting("auto", group="data")
    """Split a client's rows one by one, in groups, or by time. auto: signals by time, others in groups, if any."""
    public_data: Any = setting(None, group="data")
    """Public rows from another data set, which all clients get. Its labels count if its classes are the same."""
    image_size: int | None = setting(None, group="data", at_least=1)
    """Resize images to this many pixels a side."""
    columns: Any = setting("", group="data")
    """Roles of columns: label=NAME,client=NAME and so on, also inputs=A+B, text, group, time, split and ignore."""
    label_kind: TargetKind | Literal["auto"] = setting("auto", group="data")
    """What a label column holds: classes, several labels at once, or numbers. auto: classes."""
    window: int | None = setting(None, group="data", at_least=2)
    """Cut the rows of a file into windows of this many rows, which are signals."""
    stride: int | None = setting(None, group="data", at_least=1)
    """Rows between the starts of two windows. Default: the window, so that windows do not overlap."""
    tokenizer: str = setting("words", group="data")
    """How texts become tokens: words, or a tokenizer of Hugging Face by its name."""
    vocabulary: int = setting(8192, group="data", at_least=3, at_most=2**24)
    """Number of ids that words are hashed to."""
    length: int | None = setting(None, group="data", at_least=1, at_most=2**20)
    """Most tokens of a text. Default: enough for 95 % of the texts, at most 256."""
    normalize: str = setting("auto", group="training", simulated=True)
    """client, dataset, none, or MEAN/DEVIATION. auto: images in [-1, 1], signals and tables by each client's rows."""

    models: Any = setting("small", group="models", simulated=True)
    """A group, a model, timm:NAME, hf:NAME, or several with commas (pluribus list groups). Client i: model i mod X."""
    capacity: Any = setting("", group="models", simulated=True)
    """Share of its model's width per client: 1,0.5,0.25. Client i: number i mod X. For some methods, depth or rank."""
    split: str | None = setting(None, group="models", simulated=True)
    """Head layer of your own classifiers; none: they are backbones. Default: their last linear layer."""
    width: int | None = setting(None, group="models", at_least=1, symbol="K")
    """Common width of all clients' features. Default: the group's own."""
    projector: Literal["pool", "linear", "none"] = setting("pool", group="models")
    """How features get width K: average pooling, a private linear layer, or not at all."""
    same_init: bool = setting(False, group="models", simulated=True)
    """Start clients of the same architecture from the same weights."""
    weights: str | None = setting(None, group="models", simulated=True)
    """Source of pretrained backbones: timm, torchvision, hf, or a folder with NAME.safetensors files."""

    rounds: int = setting(20, group="rounds", at_least=1, symbol="T")
    """Number of rounds."""
    epochs: int = setting(1, group="training", at_least=1, symbol="E")
    """Local epochs per round."""
    batch_size: int = setting(10, group="training", at_least=1, symbol="B")
    """Local batch size."""
    optimizer: Literal["sgd", "adam", "amsgrad", "adamw"] = setting("sgd", group="training")
    """Optimizer of local training."""
    lr: float = setting(0.01, group="training", above=0, at_most=1e30, symbol="eta")
    """Local learning rate."""
    momentum: float = setting(0.0, group="training", at_least=0, at_most=1e30)
    """Momentum of local SGD."""
    weight_decay: float = setting(0.0, group="training", at_least=0, at_most=1e30)
    """Weight decay of local training."""
    lr_decay: float = setting(1.0, group="training", above=0, at_most=1e30)
    """The local learning rate is multiplied by this after every round."""
    lr_schedule: Literal["constant", "cosine", "steps"] = setting("constant", group="training")
    """Course of the local learning rate: constant, along a cosine to 0 at the end, or lower after --lr-steps."""
    lr_steps: str | tuple[int, ...] = setting("", group="training")
    """Numbers of rounds, comma-separated, after each of which the rate is multiplied by --lr-factor. Default: none."""
    lr_factor: float = setting(0.1, group="training", above=0, at_most=1e30)
    """Factor on the local learning rate at each of --lr-steps."""
    lr_warmup: int = setting(0, group="training", at_least=0)
    """First rounds, in which the local learning rate rises in equal steps to --lr."""
    clip_norm: float | None = setting(None, group="training", above=0, at_most=1e30)
    """Largest L2 norm of the gradient in a local step: a larger one is scaled down. Default: not clipped."""
    optimizer_life: Literal["round", "run"] = setting("round", group="training")
    """How long momentum and moments are kept: one round, or the run, even if a download replaces the weights."""
    augment: str | tuple[str, ...] = setting("", group="training")
    """Random changes to training rows: crop, flip, erase (images), jitter, scale (signals), drop (tokens)."""
    class_weights: Literal["equal", "balanced"] = setting("equal", group="training")
    """Weights of classes in the loss: equal, or balanced by each client's training rows."""
    loss: Literal["mse", "l1"] = setting("mse", group="training")
    """Loss of numbers: their squared or their absolute error."""

    dp_epsilon: float | None = setting(None, group="privacy", above=0, below=math.inf, symbol="epsilon")
    """Privacy budget of each client for the whole run, at most. Default: no differential privacy."""
    dp_level: Level = setting("row", group="privacy")
    """What is hidden: one row of a client; all of its rows, by noise in its messages; or by noise in their mean."""
    dp_delta: float = setting(1e-5, group="privacy", above=0, below=1, symbol="delta")
    """Chance that the bound of --dp-epsilon does not hold."""
    dp_clip: float = setting(1.0, group="privacy", above=0, at_most=MOST_CLIP, symbol="C")
    """Largest norm of the gradient of one row; with --dp-level client, of a whole message."""
    dp_sums_clip: float = setting(1.0, group="privacy", above=0, at_most=MOST_CLIP)
    """Largest norm of the vector of one row, such as its features, in a sum over the rows of a class."""
    dp_share: float = setting(0.5, group="privacy", above=0, below=1)
    """Share of --dp-epsilon that class sums and counts may use, if they are accounted alone."""
    dp_noise: float | None = setting(None, group="privacy", at_least=LEAST_NOISE, at_most=MOST_NOISE, symbol="sigma")
    """Noise multiplier of training or messages. Too little ends training early. Default: so that the budget lasts."""
    dp_secure: bool = setting(False, group="privacy")
    """Draw noise and batches from the system's generator, not by --seed. The run cannot be repeated to the bit."""
    share_counts: bool = setting(True, group="privacy")
    """Clients tell how many rows they have, and weigh as much in means. Otherwise all clients weigh the same."""

    participation: float = setting(1.0, group="rounds", above=0, at_most=1)
    """Share of clients sampled per round."""
    drop_rate: float = setting(0.0, group="rounds", at_least=0, below=1, simulated=True)
    """Chance that a sampled client drops out before it trains."""
    straggler_rate: float = setting(0.0, group="rounds", at_least=0, below=1, simulated=True)
    """Chance that a sampled client trains, but answers too late to count."""

    attack: AttackKind = setting("none", group="robustness", simulated=True)
    """What attackers do: train on flipped labels, or send a falsified message. Figures are of honest clients alone."""
    attackers: float | None = setting(None, group="robustness", at_least=0, below=math.inf, simulated=True)
    """Share of clients that attack, or their number if it is 1 or more. Default: 0.2."""
    attack_strength: float | None = setting(None, group="robustness", above=0, below=math.inf, simulated=True)
    """Factor of the attack scale; deviation of the attack noise, in root mean squares of the field. Default: 10."""
    defense: DefenseName = setting("none", group="robustness")
    """How messages are merged if some may be lies: number by number (median, trimmed-mean), clipped, or chosen."""
    defense_share: float | None = setting(None, group="robustness", above=0, below=0.5)
    """Share of liars that trimmed-mean and krum expect among the messages that they compare. Default: 0.2."""

    evaluate: Literal["auto", "all", "participants"] = setting("auto", group="evaluation")
    """Clients to evaluate: all, or those that took part. auto: all, up to 200 clients."""
    evaluate_every: int = setting(1, group="evaluation", at_least=1)
    """Rounds between evaluations; the last round is always evaluated."""
    metrics: str | tuple[str, ...] = setting("auto", group="evaluation")
    """What is measured: accuracy, balanced_accuracy, f1, auroc, ece, confusion; rmse, mae, r2. The first selects."""

    seed: int = setting(0, group="this run")
    """The only seed. It decides weights, shuffles, sampling and partition."""
    device: str = setting("auto", group="execution")
    """cpu, cuda, mps (an Apple GPU), or auto: cuda if there is one, otherwise cpu."""
    threads: int | None = setting(None, group="execution", at_least=1, at_most=4096)
    """CPU threads of each worker. Bit-equal results need equal threads. Default: all cores, divided among workers."""
    workers: int | Literal["auto"] = setting("auto", group="execution", at_least=1)
    """CPU processes or Ray actors that clients are spread over. auto: CPU processes if they clearly save time."""
    engine: Literal["auto", "ray"] = setting("auto", group="execution")
    """Where clients run: on this machine (auto), or on Ray actors, here or on a cluster."""
    ray_address: str | None = setting(None, group="execution")
    """Address of a running Ray cluster, or auto. Default: start one on this machine."""
    gpu_share: float = setting(0.0, group="execution", at_least=0, below=math.inf)
    """Share of a GPU that each Ray actor takes. Above 0, clients train on the GPU."""
    precision: Literal["tf32", "float32", "bfloat16"] = setting("tf32", group="this run", simulated=True)
    """Arithmetic of clients: tf32 (float32, but TF32 in convolutions on a GPU, as torch does), float32 or bfloat16."""
    channels_last: bool | None = setting(None, group="execution")
    """Store images and filters with channels last. Default: only on a GPU, where it is faster."""
    store: Where = setting("auto", group="execution")
    """Where rows are kept: on the device, or on the host, from where batches are copied. auto: on a GPU if they fit."""
    capture: bool = setting(True, group="execution")
    """On a GPU, record each training step once and replay it."""
    stack: bool = setting(True, group="execution")
    """On a GPU, run the steps of small clients of the same architecture together."""
    checkpoint_every: int | None = setting(None, group="execution", at_least=1)
    """Rounds between checkpoints. Default: chosen so that they take at most 5 % of the time."""
    out: str | None = setting(None, group="execution")
    """Run folder. Default: a new folder under runs/; from Python, none."""

    hyper: dict[str, Any] = field(default_factory=dict)
    """The method's hyper-parameters."""

    def __post_init__(self) -> None:
        values = vars(self) | ({"device": str(self.device)} if _is_device(self.device) else {})
        for name, value in convert_fields(type(self), values).items():
            object.__setattr__(self, name, value)
        taken: dict[str, Any] = {
            "data": take_data(self.data, self.label_kind),
            "partition": take_partition(self.partition),
        }
        taken |= {"models": take_models(self.models), "augment": ",".join(parse_augmentations(self.augment))}
        taken["capacity"] = write_capacities(self.capacity, self.clients)
        taken["metrics"] = ",".join(parse_metrics(self.metrics))
        taken["columns"] = write_columns(parse_columns(self.columns))
        taken["public_data"] = None if self.public_data is None else take_data(self.public_data, self.label_kind)
        parse_normalize(self.normalize)
        taken["lr_steps"] = ",".join(map(str, parse_steps(self.lr_steps)))
        for name, value in taken.items():
            object.__setattr__(self, name, value)
        divided = self.partition.clients if isinstance(self.partition, OwnPartition) else None
        if divided not in (None, self.clients):
            raise ConflictError(f"the partition is for {divided} clients, but --clients is {self.clients}.")
        if self.engine != "ray" and (self.ray_address is not None or self.gpu_share):
            raise ConflictError("--ray-address and --gpu-share need --engine ray.")
        if self.val_fraction + self.test_fraction + self.public_fraction >= 1:
            raise ConflictError("--val-fraction, --test-fraction and --public-fraction leave nothing to train on.")
        if self.public_data is not None and self.public_fraction:
            raise ConflictError("--public-data replaces --public-fraction: use one of them.")
        if self.dp_epsilon is None:
            names = [name for name in group_names(type(self))["privacy"] if name.startswith("dp_")]
            own = {name: getattr(type(self), name) for name in names}
            if changed := [flag_name(name) for name, value in own.items() if getattr(self, name) != value]:
                raise ConflictError(f"{changed[0]} needs --dp-epsilon, the privacy budget of each client.")
        if self.dp_level == "client-central" and self.defense != "none":
            raise ConflictError(
                "--dp-level client-central merges one mean, which --defense cannot judge: use one of them."
            )
        if self.dp_level != "row":
            for name in ("dp_sums_clip", "dp_share"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ConflictError(f"{flag_name(name)} is for --dp-level row: a message is noised as a whole.")
        if self.test == "common" and not self.test_fraction:
            raise ConflictError("--test common needs test data: --test-fraction must be above 0.")

        self._check_robustness()

    def _check_robustness(self) -> None:
        """Refuse settings of attacks and defenses that would do nothing, and attackers that leave nobody honest."""
        if self.attack == "none" and self.attackers is not None:
            raise ConflictError("--attackers needs --attack.")
        if self.attack not in STRONG and self.attack_strength is not None:
            raise ConflictError(f"--attack-strength is for --attack {' or '.join(STRONG)}.")
        if self.defense not in SHARED and self.defense_share is not None:
            raise ConflictError(f"--defense-share is for --defense {' or '.join(SHARED)}.")
        wanted = self.attackers
        if wanted is not None and (wanted == 0 or (wanted > 1 and wanted != int(wanted))):
            raise RangeError(f"--attackers must be a share between 0 and 1, or a whole number, not {wanted:g}.")
        if (attack := self.lies()) is not None and len(attack.clients) >= self.clients:
            raise ConflictError(f"--attackers {wanted or ATTACKERS:g} leaves none of {self.clients} clients honest.")

    def lies(self) -> Attack | None:
        """The simulated attack. None: all clients are honest."""
        if self.attack == "none":
            return None
        clients = choose_attackers(self.clients, self.attackers or ATTACKERS, self.seed)
        return Attack(self.attack, self.attack_strength or STRENGTH, clients, self.seed)

    def guard(self) -> Defense:
        """How messages are defended before they are merged."""
        return Defense(self.defense, self.defense_share or SHARE)

    def reading(self) -> Reading:
        """How files with columns are read."""
        words = self.tokenizer, self.vocabulary, self.length
        return Reading(parse_columns(self.columns), self.window, self.stride, *words, self.label_kind)

    def sampled(self) -> int:
        """Number of clients that are sampled per round."""
        return max(1, round(self.participation * self.clients))

    def evaluates_everyone(self) -> bool:
        """Whether all clients are evaluated, not only those that took part."""
        return self.evaluate == "all" or (self.evaluate == "auto" and self.clients <= 200)

    def on_gpu(self) -> bool:
        """Whether clients train on a GPU of this machine."""
        return str(self.device).startswith(("cuda", "mps")) or (self.device == "auto" and torch.cuda.is_available())

    def processes(self) -> int:
        """Most CPU processes or Ray actors that clients are spread over.

        It depends on nothing that is measured, because it decides the threads of each process, and they decide bits.
        """
        if isinstance(self.workers, int):
            return self.workers
        if self.engine == "ray" or self.on_gpu():
            return 1
        most = min(allowed_threads() // (self.threads or 1), self.sampled())
        return most if most > 1 and self.runs_without_script() else 1

    def threads_per_worker(self) -> int | None:
        """CPU threads of each process. None: torch decides."""
        if self.threads is not None or (number := self.processes()) == 1:
            return self.threads
        cores = allowed_threads() if self.workers == "auto" else os.cpu_count() or 1
        return max(1, cores // number)

    def own_builders(self) -> dict[str, Any]:
        """The user's own code that models are named by."""
        return find_own_builders(assign(self.models, self.clients))

    def client_models(self, kind: CapacityKind | None = None) -> tuple[str, ...]:
        """The name of each client's model, with its capacity. Default: what the method cuts, if it is registered, and
        the width otherwise. Nothing is imported for it."""
        known = methods().get(self.method)
        usual: CapacityKind = "width" if known is None else known.capacity
        return give_capacities(assign(self.models, self.clients), self.capacity, kind or usual)

    def runs_without_script(self) -> bool:
        """Whether another process can get the method and the models without the user's script or notebook."""
        try:
            models = [one.source for one in own_models(self.models).values()]
            code = pickle.dumps([find(self.method), *models, *self.own_builders().values()])
        except Exception:  # an object may raise anything; a model that does not exist is refused elsewhere
            return False
        return b"__main__" not in code  # neither a reference nor a dotted path

    def build_method(self) -> Method:
        """The method with its hyper-parameters."""
        cls, name = find(self.method), self.method
        check_names(self.hyper, _field_names(cls), f"hyper-parameter of {name}", f"pluribus run {name} --help")
        return cls(**convert_fields(cls, self.hyper))  # a class may override the check of its own fields

    def rule(self) -> Rule:
        """The update rule of local training. A schedule that does not fit the rounds is refused."""
        return Rule(
            self.optimizer,
            self.lr,
            self.momentum,
            self.weight_decay,
            self.lr_decay,
            self.lr_schedule,
            parse_steps(self.lr_steps),
            self.lr_factor,
            self.lr_warmup,
            self.rounds,
            self.clip_norm,
        )

    def privacy(self) -> Terms | None:
        """The terms of a private run. None: nothing is bounded."""
        if self.dp_epsilon is None:
            return None
        bounds = self.dp_delta, self.dp_clip, self.dp_sums_clip, self.dp_share
        return Terms(self.dp_epsilon, *bounds, self.dp_noise, self.dp_secure, self.dp_level)

    @property
    def data_name(self) -> str:
        """The name of the data set for a person."""
        return name_data(self.data).removeprefix(GIVEN)

    def objects(self) -> dict[str, Any]:
        """The settings that a folder cannot name: they were given as objects."""
        own: dict[str, Any] = {} if isinstance(self.data, str) else {"data": self.data}
        own |= {} if isinstance(self.partition, str) else {"partition": self.partition}
        own |= {} if isinstance(self.public_data, str | None) else {"public_data": self.public_data}
        return own | ({"models": self.models} if own_models(self.models) else {})

    def sources(self) -> dict[str, Any]:
        """The method and the objects that another process would need, by name."""
        sources: dict[str, Any] = {name: one.source for name, one in own_models(self.models).items()}
        if isinstance(self.partition, OwnPartition):
            sources[self.partition.name] = self.partition.source
        for data in (self.data, self.public_data):
            if not isinstance(data, str | Dataset | None):
                sources[name_data(data)] = data
        return {self.method: find(self.method), **sources}

    def label(self) -> str:
        """Method, data and seed, for the name of a folder. Of a path or dotted path, only the last part is used."""
        data = short_name(self.data_name)
        return f"{self.method.rpartition('.')[2]}-{data}-{self.seed}"

    def all_rounds(self) -> int:
        """Number of rounds, including the method's warm-up rounds."""
        return self.build_method().warmup_rounds() + self.rounds

    def settings(self) -> dict[str, Any]:
        """All settings as plain values, for a TOML file. `out` is left out: it is the folder of the file."""
        values = vars(self) | {"hyper": hyperparameters(self.build_method())}
        values.pop("out")
        values |= {"data": name_data(self.data), "partition": name_partition(self.partition)}
        values["public_data"] = None if self.public_data is None else name_data(self.public_data)
        if isinstance(self.models, Mapping):
            values["models"] = {str(k): name_model(one) for k, one in self.models.items()}
        elif not isinstance(self.models, str):
            values["models"] = [name_model(one) for one in self.models]
        return values

    def decisive(self) -> dict[str, Any]:
        """Settings and hyper-parameters that decide the metrics, in one dict."""
        values = self.settings()
        values |= values.pop("hyper")
        if isinstance(self.data, Dataset):
            values[DIGEST] = self.data.digest()
        if isinstance(self.public_data, Dataset):
            values[PUBLIC_DIGEST] = self.public_data.digest()
        return {name: value for name, value in values.items() if name not in SETTINGS["execution"]}


SETTINGS = group_names(Experiment)  # names by group; those in `execution` change no metric
TRAINING = [
    *SETTINGS["training"],
    *SETTINGS["privacy"],
]  # the same for all methods of a comparison, except where one method sets its own
FOR_SIMULATIONS = ("data", "execution")  # groups that each real site sets itself


def at_constant_rate(described: Experiment) -> Experiment:
    """The same work without a schedule of the learning rate, which would not fit another number of rounds."""
    names = ("lr_schedule", "lr_steps", "lr_factor", "lr_warmup")
    return dataclasses.replace(described, **{name: getattr(Experiment, name) for name in names})


def settings_of_sites() -> list[str]:
    """Settings that a federation of real sites takes."""
    known = settings_of(Experiment).items()
    return [name for name, one in known if one.group not in ("", *FOR_SIMULATIONS) and not one.simulated]


def flags(described: Experiment) -> list[str]:
    """The flags of an experiment without its folder: every value that differs from the method's default."""
    words: list[str] = []
    for name, value in _changes(described).items():
        home = Experiment if name in known_settings() else find(described.method)
        if isinstance(getattr(home, name), bool):  # one that may be None takes a value
            words.append(flag_name(name) if value else flag_name(f"no_{name}"))
        else:
            words += [flag_name(name), *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def repeat(verb: str, described: Experiment, *words: str) -> str:
    """The command that repeats an experiment, with further `words`. With objects, it is a call in Python."""
    if not (objects := described.objects()):
        return shlex.join(["pluribus", verb, described.method, *flags(described), *words])
    given = dict.fromkeys(objects, "...") | {k: repr(v) for k, v in _changes(described).items() if k not in objects}
    return f"pluribus.{verb}({described.method!r}, {', '.join(f'{name}={value}' for name, value in given.items())})"


def _changes(described: Experiment) -> dict[str, Any]:
    """The settings of an experiment, without its folder, that differ from the method's defaults."""
    usual, named, models = experiment(described.method), dict[str, str](), described.models
    if not isinstance(models, str):
        models = ",".join(assign(models, described.clients))  # client i gets name i mod X
    unset = [name for name in SETTINGS["data"] if getattr(described, name) is None and getattr(usual, name) is not None]
    if unset or described.data != usual.data:  # no flag sets None, but naming the data drops the method's own defaults
        named["data"] = name_data(described.data)
    if models != usual.models:  # as naming the models drops those for the embedded models
        named["models"] = models
    usual = experiment(described.method, **named)
    values = described.settings() | {"models": models} | hyperparameters(described.build_method())
    defaults = vars(usual) | hyperparameters(usual.build_method())
    changed = {name: value for name, value in values.items() if name in defaults and value != defaults[name]}
    return named | {name: value for name, value in changed.items() if name not in ("method", "hyper", "out")}


def experiment(
    method: str | Method | type[Method] | Experiment | None, config: str | Path | None = None, **settings: Any
) -> Experiment:
    """Make an experiment from a method, an optional TOML file, and settings that override the file.

    Settings are fields of Experiment or hyper-parameters of the method, as on the command line. An Experiment is
    returned unchanged.
    """
    if isinstance(method, Experiment):
        if config is not None or settings:
            raise ConflictError("an Experiment takes no further settings: change it with dataclasses.replace.")
        return method
    written = from_toml(Path(config)) if config is not None else {}
    if isinstance(method, type):
        method = name_of(method)
    elif isinstance(method, Method):
        settings = hyperparameters(method) | settings
        method = name_of(type(method))
    name = method or written.get("method") or Experiment.method
    cls = find(name)
    if written.pop("method", name) != name:
        written["hyper"] = {}  # those of another method
    if shadowed := [key for key in _field_names(cls) if key in known_settings()]:
        raise UserCodeError(f"{name} has a hyper-parameter '{shadowed[0]}', which is the name of a setting. Rename it.")
    names = [*known_settings(), *_field_names(cls)]
    check_names(cls.defaults, names, f"setting in {cls.__name__}.defaults:", f"pluribus run {name} --help")
    hyper = written.pop("hyper", {}) | settings.pop("hyper", {})
    hyper |= {key: settings.pop(key) for key in _field_names(cls) if key in settings}
    check_names(settings, names, "setting", f"pluribus run {name} --help")
    given = {**written, **settings}
    if "data" in given:  # once: an object becomes a Dataset, whose kind chooses the models
        given["data"] = take_data(given["data"], given.get("label_kind", Experiment.label_kind))
    hyper = embedded_hyper(cls, given) | hyper
    usual = _defaults(cls, "data" in given) | defaults_of_data(given, one_model=takes_one_model(cls))
    if "public_data" in given:
        usual.pop("public_fraction", None)
    if name_capacities(given.get("models")):
        usual.pop("capacity", None)
    if cls.capacity == "depth" and ("models" in given or usual.get("models") != cls.defaults.get("models")):
        usual.pop("capacity", None)  # numbers of stages suit the method's own model
    return Experiment(method=name, hyper=hyper, **{**usual, **given})


def defaults_of_data(given: Mapping[str, Any], one_model: bool = False) -> dict[str, Any]:
    """The number of clients and the models, if the user's data or partition decide them and the user does not."""
    found: dict[str, Any] = {} if "clients" in given else _clients_of_partition(given)
    if "data" in given and "models" not in given:
        kind = kind_of_data(given["data"], parse_columns(given.get("columns", "")), "window" in given)
        if kind != "image":
            group = GROUP_OF[kind]
            found["models"] = GROUPS[group].models[0] if one_model else group
    return found


def _clients_of_partition(given: Mapping[str, Any]) -> dict[str, Any]:
    """The number of clients of a partition that is given as an object, or that the data names."""
    partition = take_partition(given.get("partition", ""))
    if partition == NATURAL and "data" in given:
        how = {name: given[name] for name in (*SETTINGS["data"], "seed") if name in given and name != "clients"}
        one = Experiment(**how)
        number: int | None = count_holders(one.data, image_size=one.image_size, seed=one.seed, reading=one.reading())
    else:
        number = partition.clients if isinstance(partition, OwnPartition) else None
    return {} if number is None else {"clients": number}


def _defaults(cls: type[Method], named: bool) -> dict[str, Any]:
    """A method's own defaults. If the user named the data, those that suit the method's own data set are left out.

    Public rows stay, because a method may need some. A setting that is `auto` follows the data, so it stays too.
    """
    ours = {name: value for name, value in cls.defaults.items() if name not in _field_names(cls)}
    theirs = {*SETTINGS["data"]} - {"public_fraction"} if named else set()
    return {name: value for name, value in ours.items() if name not in theirs or value == "auto"}


def embedded_hyper(cls: type[Method], given: Container[str]) -> dict[str, Any]:
    """A method's hyper-parameters for the embedded data and models. They hold if the user names neither."""
    if "data" in given or "models" in given:
        return {}
    return {name: value for name, value in cls.defaults.items() if name in _field_names(cls)}


def known_settings() -> list[str]:
    """The names of all settings."""
    return [f.name for f in dataclasses.fields(Experiment)]


def from_toml(path: Path, besides: Container[str] = ()) -> dict[str, Any]:
    """Read settings from a TOML file. Unknown names are refused. `besides` are names that another reader knows."""
    return read_settings({name: value for name, value in read_toml(path).items() if name not in besides}, str(path))


def read_settings(written: dict[str, Any], where: str) -> dict[str, Any]:
    """Settings from the content of a TOML file. Unknown names are refused."""
    check_names(written, known_settings(), f"setting in {where}:", "pluribus run --help")
    models = written.get("models")
    if isinstance(models, dict):
        if stray := [key for key in models if not is_whole(str(key))]:
            raise FormatError(f"[models] in {where} maps client numbers to models, but '{stray[0]}' is not a number.")
        written["models"] = {int(key): name for key, name in models.items()}
    return convert_fields(Experiment, written)


def check_portable(experiments: Iterable[Experiment], remedy: str) -> None:
    """Refuse objects that cannot be sent to another process."""
    if why := why_not_portable(experiments):
        raise UserCodeError(f"{why}. Put it into a module, or {remedy}.")


def why_not_portable(experiments: Iterable[Experiment]) -> str:
    """Which object cannot be sent to another process, and why. Empty if all can. Each object is tried once."""
    every = {id(source): (name, source) for one in experiments for name, source in one.sources().items()}
    for name, source in every.values():
        if why := _why_not_portable(source):
            return f"{name.removeprefix(GIVEN)} cannot be sent to another process: {why}"
    return ""


def _why_not_portable(source: Any) -> str:
    """Why another process cannot get an object. Empty if it can."""
    try:
        pickle.dumps(source)
    except Exception as error:  # an object may raise anything
        return re.sub(r" at 0x[0-9a-f]+", "", first_line(error))
    home = getattr(source, "__module__", None) or type(source).__module__
    is_script = hasattr(sys.modules["__main__"], "__file__")  # other processes import it again
    return "it is defined in a notebook or a console" if home == "__main__" and not is_script else ""


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)


def _field_names(cls: type[Method]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
