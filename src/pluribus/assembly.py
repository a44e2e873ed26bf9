"""Makes the parts of an experiment: data, partition, task, cards, method. Runs every check that needs no training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import Thread
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from pluribus.client import Local
from pluribus.data import PARTITIONS, Dataset, Manifest, load, partition
from pluribus.data.augment import check_augmentations, parse_augmentations
from pluribus.data.dataset import PARTS
from pluribus.data.datasets import has_columns
from pluribus.data.federated import Federated, Fractions, common_test
from pluribus.data.folders import POOLED
from pluribus.data.host_store import make_store
from pluribus.data.partition import MIN_SHARE, MIN_SHARE_OF
from pluribus.data.partitions import BUILT_IN, BY_CLASS, NATURAL, OwnPartition, find_partition, name_partition
from pluribus.data.reading import DEFAULT
from pluribus.data.scaling import parse_normalize, scale_facts
from pluribus.draws import numpy_rng
from pluribus.errors import ConflictError, DataError, DeviceError, MismatchError, PartitionError, UnknownNameError
from pluribus.experiment import Experiment, check_portable
from pluribus.inputs import Input
from pluribus.internal.blame import at
from pluribus.internal.devices import NAMES, device_of_server, find_device, is_apple, is_present
from pluribus.internal.metrics import choose_metrics
from pluribus.internal.robustness import check_robustness
from pluribus.method import Method, Need, Sizes, Traffic, check_needs, describe_completed, note_weights
from pluribus.models import OwnModel, build, note_on, own_models, width_of
from pluribus.models.capacity import architecture_of, split_name
from pluribus.models.meta import without_numbers
from pluribus.privacy.check import check_private
from pluribus.server import PublicRows
from pluribus.settings import flag_name
from pluribus.targets import IN_WORDS, Target
from pluribus.task import Cards, DataFacts, Task

ENOUGH_CLIENTS = 200  # for a mean


@dataclass(frozen=True)
class Parts:
    """The parts of a federation that a server knows before the first round."""

    experiment: Experiment
    method: Method
    task: Task
    cards: Cards
    data: DataFacts
    warnings: list[str]

    @property
    def holders(self) -> Mapping[int, str]:
        """Names of the clients, if the data has names for them."""
        return {}

    @property
    def public_at_server(self) -> PublicRows | None:
        """The public rows of a method whose server needs them. A server of real sites has none."""
        return None


@dataclass(frozen=True)
class Assembly(Parts):
    """All parts of a simulated federation, including the clients' data."""

    data: Federated
    dataset: Dataset
    manifest: Manifest
    local: Local
    device: torch.device

    @property
    def holders(self) -> Mapping[int, str]:
        natural = self.experiment.partition == NATURAL
        return dict(enumerate(self.dataset.clients or self.dataset.domains)) if natural else {}

    @property
    def public_at_server(self) -> PublicRows | None:
        needed = Need.PUBLIC_AT_SERVER in self.method.needs
        return PublicRows(self.data.public_at_server(), device_of_server(self.device)) if needed else None

    def normalization(self) -> dict[str, Any] | None:
        """How rows are normalized, as plain numbers for the run folder. None: not at all, or images in [-1, 1]."""
        mode = self.data.normalization.mode
        if mode == "none":
            return None
        clients = range(self.task.clients) if self.data.normalization.by_client else range(1)
        scales = {k: self.data.scale_of(k) for k in clients}
        facts = [scale_facts(scale, self.dataset) for scale in scales.values() if scale is not None]
        return {"mode": mode, **({"clients": facts} if self.data.normalization.by_client else facts[0])}


def assemble(experiment: Experiment, dataset: Dataset | None = None, method: Method | None = None) -> Assembly:
    """Load, partition and check. Raises ConfigError or DataError with a sentence that says what to change.

    `dataset` and `method` replace those that the experiment names. They need not have a name that can be looked up.
    """
    given, rule = method or experiment.build_method(), experiment.rule()
    device = _device(experiment)
    dataset = dataset or load_data(experiment)
    # a real site may hold one class: its classes are agreed on
    if dataset.target == "classes" and len(dataset.classes) < 2:
        raise DataError(f"data set {dataset.name} must have at least 2 classes, not {len(dataset.classes)}.")
    if _asks_for_processes(experiment) and experiment.engine != "ray":
        check_portable([experiment], "leave out --workers")
        dataset = dataset.shared()
    one = experiment
    fractions = Fractions(one.val_fraction, one.test_fraction, one.public_fraction, one.test, one.split_by)
    tested = common_test(dataset, fractions, experiment.seed)
    class_notes = _check_classes(_kind(experiment, dataset), dataset)
    parts = _partition(experiment, dataset, tested)
    manifest = _manifest(experiment, dataset, parts)
    notes = [note for note in dataset.notes if note != POOLED or experiment.test != "official"]
    rows = len(dataset.y) - (0 if tested is None else len(tested))
    disjoint = find_partition(_kind(experiment, dataset)).disjoint
    warnings = [
        *notes,
        *_note_holders(experiment, dataset),
        *_note_unused(experiment, dataset, given),
        *class_notes,
        *_check_parts(experiment, parts, manifest),
        *(_note_left_out(manifest, rows) if disjoint else ()),
    ]
    _check_fixed_split(experiment, dataset, parts)
    channels_last = device.type == "cuda" if experiment.channels_last is None else experiment.channels_last
    domain_of = _domain_of(experiment, dataset)
    normalize, foreign = parse_normalize(one.normalize), _public_data(experiment)
    store = partial(make_store, where=one.store)
    data = Federated(dataset, parts, fractions, one.seed, device, channels_last, domain_of, normalize, foreign, store)
    if one.store == "auto" and not data.store.resident:
        warnings.append(f"the data ({dataset.x.nbytes / 2**30:.1f} GiB) stay on the host: they do not fit on the GPU.")
    warnings += _check_split(data)
    task, cards, width_notes = _task(experiment, dataset, data, domain_of, given)
    architectures = cards.architectures()
    warnings += [*width_notes, *(note for model in architectures if (note := _note_on_model(task, model)))]
    _check_normalization(task, data, architectures)
    method = given.complete(task, architectures)
    check_needs(method, task, cards, rule)
    warnings += [*describe_completed(given, method), *method.warnings(task, architectures), *note_weights(method, task)]
    warnings += check_robustness(experiment, method, task, cards)
    if one.attack == "label-flip":
        _flip_labels(experiment, data, disjoint)
    bfloat16, names = one.precision == "bfloat16", parse_augmentations(one.augment)
    check_augmentations(names, dataset.kind)
    local = Local(
        rule,
        one.epochs,
        one.batch_size,
        bfloat16,
        channels_last,
        one.optimizer_life,
        names,
        one.class_weights,
        one.privacy(),
    )
    if local.privacy is not None:
        check_private(method, task, cards.firsts(), local, data.normalization.mode)
    return Assembly(experiment, method, task, cards, data, warnings, dataset, manifest, local, device)


def _flip_labels(experiment: Experiment, data: Federated, disjoint: bool) -> None:
    """Let attackers train on wrong labels. Rows are stored once, so no honest client may hold one of theirs."""
    attack = experiment.lies()
    assert attack is not None
    if not disjoint:
        raise ConflictError(
            f"--attack label-flip needs clients that share no rows, but partition "
            f"'{name_partition(experiment.partition)}' gives rows to several: use another --partition or --attack."
        )
    data.flip_labels(attack.clients)


def load_data(experiment: Experiment) -> Dataset:
    """The data set of an experiment."""
    one = experiment
    return load(one.data, image_size=one.image_size, seed=one.seed, reading=one.reading())


def _public_data(experiment: Experiment) -> Dataset | None:
    """The other data set that public rows come from."""
    if experiment.public_data is None:
        return None
    one = experiment
    reading = one.reading() if has_columns(one.public_data) else DEFAULT
    return load(one.public_data, image_size=one.image_size, seed=one.seed, reading=reading)


def _check_split(data: Federated) -> list[str]:
    """Every client needs rows to train on. Note rows that a split by time leaves out."""
    if data.split_by == "rows":
        return []  # such a split always has rows for training
    left = 0
    for k, part in enumerate(data.parts):
        rows = data.rows(k)
        if not len(rows["train"]):
            raise PartitionError(f"client {k} has no rows to train on: use another --split-by, or smaller fractions.")
        left += len(part) - sum(len(own) for name, own in rows.items() if name != "test" or data.tests_on_own)
    if left <= 0:
        return []
    return [f"{left:,} rows overlap a later part of the split by time, and are left out."]


def _check_normalization(task: Task, data: Federated, models: Iterable[str]) -> None:
    """Pretrained backbones normalize images themselves."""
    if data.normalization.mode == "none" or task.input.kind != "image":
        return
    if pretrained := [model for model in models if task.has_weights(model)]:
        raise ConflictError(
            f"model {pretrained[0]} is pretrained and normalizes images as in its training: leave out --normalize."
        )


def _device(experiment: Experiment) -> torch.device:
    name = experiment.device
    if experiment.engine == "ray":
        return torch.device("cpu")  # this process only aggregates; actors have devices of their own
    device = find_device(name)
    if device is None:
        raise UnknownNameError(f"unknown device '{name}': use {NAMES}.")
    if not is_present(device):
        kind = "Apple GPU" if is_apple(device) else "GPU"
        raise DeviceError(f"torch finds no {kind}: use --device cpu.")
    if device.type != "cpu" and _asks_for_processes(experiment):
        raise ConflictError("--workers is for CPUs; a GPU has one process: add --device cpu, or leave out --workers.")
    if is_apple(device):
        _check_apple(experiment)
    if device.type == "cuda":
        Thread(target=_start_gpu, args=(device,), daemon=True).start()
    return device


def _check_apple(experiment: Experiment) -> None:
    """Refuse what nobody has tried on an Apple GPU, and what needs float64 there."""
    if experiment.precision == "bfloat16":
        raise ConflictError("an Apple GPU computes in float32 here: leave out --precision bfloat16.")
    if experiment.dp_epsilon is not None:
        raise ConflictError("differential privacy is not tried on an Apple GPU: use --device cpu with --dp-epsilon.")


def _start_gpu(device: torch.device) -> None:
    """Use a GPU for the first time, which takes half a second. Meanwhile another thread loads data and builds models,
    and tells of any error when it uses the GPU itself."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _asks_for_processes(experiment: Experiment) -> bool:
    """Whether the user wants several worker processes. With `auto`, they are started when they save time."""
    return experiment.workers != "auto" and experiment.processes() > 1


def _kind(experiment: Experiment, dataset: Dataset) -> str | OwnPartition:
    """The partition. `auto` depends on whether the data set has domains."""
    if experiment.partition != "auto":
        chosen: str | OwnPartition = experiment.partition
        return chosen
    return "dirichlet" if dataset.domain is None else "domain"


def _partition(experiment: Experiment, dataset: Dataset, tested: np.ndarray | None) -> list[np.ndarray]:
    """Rows of each client. No client holds rows of the common test set."""
    _check_domains(experiment, dataset, tested)
    rows = np.delete(np.arange(len(dataset.y)), [] if tested is None else tested)
    kind = _kind(experiment, dataset)
    parts = partition(
        kind if isinstance(kind, str) else kind.within(rows, len(dataset.y)),
        dataset.strata.numpy()[rows],
        experiment.clients,
        numpy_rng(experiment.seed, "partition"),
        domain=None if dataset.domain is None else dataset.domain.numpy()[rows],
        holder=None if (holder := _holders(dataset)) is None else holder.numpy()[rows],
        **_partition_parameters(experiment, dataset),
    )
    return [rows[part] for part in parts]


def _holders(dataset: Dataset) -> torch.Tensor | None:
    """Who holds each row, for the partition `natural`: the clients that the data names, or else its domains."""
    return dataset.client if dataset.client is not None else dataset.domain


def _check_classes(kind: str | OwnPartition, dataset: Dataset) -> list[str]:
    """Without classes, refuse partitions by class. Note that the Dirichlet partition divides rows by number alone."""
    if dataset.target == "classes" or kind not in BY_CLASS:
        return []
    if kind != "dirichlet":
        raise PartitionError(
            f"partition '{kind}' divides classes, but {dataset.name} has {IN_WORDS[dataset.target]} to predict: use "
            f"another --partition (iid, dirichlet or natural)."
        )
    return [f"{dataset.name} has no classes: partition 'dirichlet' gives clients random numbers of rows, and no more."]


def _note_unused(experiment: Experiment, dataset: Dataset, method: Method) -> list[str]:
    """Notes on settings that were changed, but do nothing in this run. Runs of a study share them: none is refused."""
    kind, optimizer = _kind(experiment, dataset), experiment.optimizer
    used = find_partition(kind).reads
    every = dict.fromkeys(name for known in BUILT_IN for name in PARTITIONS[known].reads)
    idle = {name: f"partition '{name_partition(kind)}' does not use it" for name in every if name not in used}
    if optimizer != "sgd":
        idle["momentum"] = f"it is for sgd, and --optimizer is {optimizer}"
    if dataset.target != "numbers":
        idle["loss"] = f"{dataset.name} has {IN_WORDS[dataset.target]} to predict"
    defaults = vars(Experiment) | dict(method.defaults)
    changed = [name for name in idle if getattr(experiment, name) != defaults[name]]
    return [f"{flag_name(name)} has no effect: {idle[name]}." for name in changed]


def _note_holders(experiment: Experiment, dataset: Dataset) -> list[str]:
    if experiment.partition != NATURAL or dataset.client is not None:
        return []
    return [f"the {len(dataset.domains)} domains of {dataset.name} are the clients, because it names no others."]


def _check_domains(experiment: Experiment, dataset: Dataset, tested: np.ndarray | None) -> None:
    """Each domain needs rows to train on and rows to test on, or a client would have no test set."""
    if _kind(experiment, dataset) != "domain" or dataset.domain is None:
        return
    domains = dataset.domain.numpy()
    parts = {dataset.name: domains}
    if tested is not None:
        sides = {"training": np.delete(domains, tested), "test": domains[tested]}
        parts = {f"the {experiment.test} {side} set of {dataset.name}": domain for side, domain in sides.items()}
    for part, domain in parts.items():
        held = set(domain.tolist())
        if missing := [name for number, name in enumerate(dataset.domains) if number not in held]:
            instead = "use another --partition" if tested is None else f"leave out --test {experiment.test}"
            raise PartitionError(f"{part} has no rows of domain '{missing[0]}': add some, or {instead}.")


def _partition_parameters(experiment: Experiment, dataset: Dataset) -> dict[str, Any]:
    parameters = {name: getattr(experiment, name) for kind in BUILT_IN for name in PARTITIONS[kind].reads}
    if experiment.min_share is None:
        parameters["min_share"] = MIN_SHARE_OF.get(dataset.name, MIN_SHARE)
    return parameters


def _manifest(experiment: Experiment, dataset: Dataset, parts: list[np.ndarray]) -> Manifest:
    kind, parameters = _kind(experiment, dataset), _partition_parameters(experiment, dataset)
    strata = len(dataset.classes) if dataset.target == "classes" else 1
    return Manifest.of(name_partition(kind), parameters, experiment.seed, dataset.strata.numpy(), parts, strata)


def _check_parts(experiment: Experiment, parts: list[np.ndarray], manifest: Manifest) -> list[str]:
    fewest = 2 if experiment.test == "own" else 1
    for k, rows in enumerate(parts):
        if len(rows) < fewest:
            raise PartitionError(
                f"client {k} holds {len(rows)} sample, too few to train and test on. "
                f"Use fewer clients (--clients) or a larger --min-samples."
            )
    single = [k for k, counts in enumerate(manifest.counts) if sum(count > 0 for count in counts) == 1]
    if not single or len(manifest.counts[0]) == 1:
        return []
    shown = ", ".join(map(str, single[:5])) + (", ..." if len(single) > 5 else "")
    return [f"{len(single)} of {len(parts)} clients hold only one class ({shown}): their accuracy means little."]


def _note_left_out(manifest: Manifest, rows: int) -> list[str]:
    """Note how many rows no client holds."""
    left = rows - sum(map(sum, manifest.counts))
    if left <= 0:
        return []
    return [f"no client holds {left:,} of {rows:,} rows: partition '{manifest.kind}' leaves them out."]


def _check_fixed_split(experiment: Experiment, dataset: Dataset, parts: list[np.ndarray]) -> None:
    """A fixed split ignores the partition, so each client may lack rows to train or to test on."""
    if dataset.part is None:
        return
    if experiment.test != "own":
        raise MismatchError(f"{dataset.name} has a fixed split with a test part: leave out --test {experiment.test}.")
    if experiment.split_by != "auto":
        raise MismatchError(f"{dataset.name} has a fixed split: leave out --split-by {experiment.split_by}.")
    part = dataset.part.numpy()
    for k, rows in enumerate(parts):
        held = set(part[rows].tolist())
        if missing := [name for number, name in enumerate(PARTS) if number not in held and name != "val"]:
            raise PartitionError(
                f"client {k} holds no {missing[0]} rows of the fixed split of {dataset.name}: use fewer clients "
                f"(--clients) or another --partition."
            )


def _domain_of(experiment: Experiment, dataset: Dataset) -> dict[int, int]:
    """The domain of each client, if each client holds one domain."""
    if _kind(experiment, dataset) != "domain":
        return {}
    return {k: k % len(dataset.domains) for k in range(experiment.clients)}


def _task(
    experiment: Experiment, dataset: Dataset, data: Federated, domain_of: dict[int, int], method: Method
) -> tuple[Task, Cards, list[str]]:
    """What all clients agree on, their cards, and notes about the width of features."""
    if experiment.projector == "none" and experiment.width is not None:
        raise ConflictError("--width needs a projector: use --projector pool or --projector linear.")
    models, own = experiment.client_models(method.capacity), own_models(experiment.models)
    shape, classes, warmup = dataset.input, len(dataset.classes), method.warmup_rounds()
    declared = experiment.width or (width_of(experiment.models) if isinstance(experiment.models, str) else None)
    # whole models, too: a method may build them, although no client has one
    built = (*models, *map(architecture_of, models))
    native = cache(partial(native_widths, shape, classes, built, own, experiment.split))
    common = common_width(declared, experiment.projector, native, Need.SAME_WIDTH in method.needs)
    task = Task(
        classes=classes,
        input=shape,
        width=common,
        projector=experiment.projector,
        clients=experiment.clients,
        rounds=warmup + experiment.rounds,
        seed=experiment.seed,
        warmup=warmup,
        names=dataset.classes,
        public={k: len(rows) for k, rows in data.public.items()},
        exams={domain: len(exam["test"]) for domain, exam in data.exams.items()},
        domain_of=domain_of,
        weights=experiment.weights,
        own=own,
        split=experiment.split,
        target=Target(dataset.target, experiment.loss),
        metrics=choose_metrics(experiment.metrics, dataset.target),
        public_labels=data.public_labels,
        share_counts=experiment.share_counts,
    )
    return task, Cards(task, models, data), _note_width(declared, common, native)


def native_widths(
    shape: Input,
    classes: int,
    models: Sequence[str],
    own: Mapping[str, OwnModel] = MappingProxyType({}),
    split: str | None = None,
) -> set[int]:
    """The widths of the models' own features."""
    native = set()
    for name in dict.fromkeys(models):
        with without_numbers(), at(f"client {models.index(name)}"):
            architecture, capacity = split_name(name)
            source = own.get(architecture, architecture)
            native.add(build(source, shape=shape, classes=classes, split=split, capacity=capacity).width)
    return native


def common_width(
    declared: int | None, projector: str, native: Callable[[], set[int]], needed: bool = False
) -> int | None:
    """K: the declared width, or the one that all models have. If models differ, the smallest if one is needed.

    Measuring the native widths builds every model, so that is left out if a width is declared.
    """
    if projector != "none" and declared is not None:
        return declared
    found = native()
    return min(found) if len(found) == 1 or (needed and projector != "none") else None


def _note_on_model(task: Task, model: str) -> str:
    """How a user's own model becomes a model in two parts."""
    return note_on(task.own.get(architecture_of(model), model), task.input, task.classes, task.width, task.split)


def _note_width(declared: int | None, width: int | None, native: Callable[[], set[int]]) -> list[str]:
    """Note a width that the user did not set, if it changes models."""
    if declared is not None or width is None or len(native()) == 1:
        return []
    return [f"the features of all models get the width {width}, the smallest of theirs: --width sets another."]


def bytes_per_round(parts: Assembly) -> Traffic:
    """Most bytes that a client uploads and downloads in a round, without headers. The mean over clients."""
    clients = range(min(parts.task.clients, ENOUGH_CLIENTS))
    held = {k: [count > 0 for count in parts.data.counts(k)] for k in clients}
    known = sum(map(any, zip(*held.values(), strict=True)))
    alike: dict[tuple[str, int], Traffic] = {}
    for k in clients:
        kind = parts.cards[k].model, sum(held[k])
        if kind not in alike:
            sizes = Sizes(kind[1], known, parts.local.batch)
            alike[kind] = parts.method.traffic(parts.task, parts.cards[k], sizes)
    found = [alike[parts.cards[k].model, sum(held[k])] for k in clients]
    return Traffic(sum(one.up for one in found) / len(found), sum(one.down for one in found) / len(found))
