"""Data sets by name: embedded, downloaded once and cached on disk, or the user's own.

Images stay bytes from the file to the device. A downloaded set is cached as one npz file in `$PLURIBUS_DATA` (default
`~/.cache/pluribus`). The user may also put the file there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib.util
import inspect
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image

from pluribus.data.arrays import make_dataset
from pluribus.data.columns import kind_of_file, read_columns
from pluribus.data.dataset import Dataset, last_line, resize
from pluribus.data.files import READERS, is_sheet
from pluribus.data.folders import read_image_folder
from pluribus.data.given import as_dataset, name_data
from pluribus.data.hub import PREFIX, kind_of_hub, read_hub
from pluribus.data.images import pixels
from pluribus.data.npz import NPZ_KEYS, Arrays, read_kind, read_npz, write_npz
from pluribus.data.reading import DEFAULT, Columns, Reading
from pluribus.errors import (
    ConfigError,
    DamagedDataError,
    DataError,
    FormatError,
    MismatchError,
    MissingDataError,
    PluribusError,
    RangeError,
    UserCodeError,
    unknown,
)
from pluribus.inputs import Kind
from pluribus.internal.blame import at
from pluribus.internal.lookup import import_dotted, refuse_given
from pluribus.internal.paths import to_path
from pluribus.internal.registry import check_free

Loader = Callable[..., "Dataset"]
# the name or the object, the image size, the seed of a set that is drawn at random, and how columns are read
Key = tuple["str | Dataset | Loader", int | None, int | None, Reading | None]

PHOTO_SIZE = 64
SILENT_NETWORK_SECONDS = 30.0


# Names ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataEntry:
    """A registered data set: one line about it, and the function that loads it."""

    about: str
    load: Loader
    kind: Kind = "image"


_entries: dict[str, DataEntry] = {}


def register_data(name: str, about: str, kind: Kind = "image") -> Callable[[Loader], Loader]:
    """Register a function that returns a Dataset. It may take the arguments `image_size`, `seed` and `reading`.

    A function that is defined again, as in a cell of a notebook, replaces itself.
    """

    def add(loader: Loader) -> Loader:
        known = _entries.get(_normalize_name(name))
        check_free("data set", name, known and known.load, loader)
        _entries[_normalize_name(name)] = DataEntry(about, loader, kind)
        return loader

    return add


def _normalize_name(name: str) -> str:
    """Return the registry's spelling: `fashion_mnist` and `fashion-mnist` are the same name."""
    return name.replace("_", "-")


def entries() -> Mapping[str, DataEntry]:
    """All registered data sets by name."""
    return MappingProxyType(_entries)


def load(
    name: str | Dataset | Loader, *, image_size: int | None = None, seed: int = 0, reading: Reading = DEFAULT
) -> Dataset:
    """Load the data set `name`. If `image_size` is given, resize its images to squares of that size.

    `name` is a registered name, the path of an `.npz` file, the path of a folder with
    `class/*.jpg` or `domain/class/*.jpg` (also inside folders `train` and `test`), the path of a CSV, TSV, JSONL or
    Parquet file, `hf:NAME` for a data set of Hugging Face, or the dotted path `package.module.function` of a function
    that returns a Dataset. It may also be such a function, or a Dataset. The seed matters only to sets that are drawn
    at random, such as `rotated-mnist`. `reading` says how the columns of a file are read.
    """
    if image_size is not None and image_size < 1:
        raise RangeError(f"--image-size must be at least 1, not {image_size}.")
    return _load_keyed(name, image_size, seed, reading)[1]


def _load_keyed(
    source: str | Dataset | Loader, image_size: int | None, seed: int, reading: Reading
) -> tuple[Key, Dataset]:
    name, loader = name_data(source), _find(source)
    offered = {"image_size": image_size, "seed": seed, "reading": reading, "label_kind": reading.label_kind}
    try:
        signature = inspect.signature(loader)
        arguments: dict[str, Any] = {key: value for key, value in offered.items() if key in signature.parameters}
        signature.bind(**arguments)
    except (TypeError, ValueError) as reason:
        raise UserCodeError(f"{name} may take only the arguments image_size, seed and reading ({reason}).") from reason
    if reading._replace(label_kind="auto") != DEFAULT and "reading" not in arguments:
        raise MismatchError(
            f"{name} has no columns to choose from: leave out --columns, --window, --stride, --tokenizer, --vocabulary "
            f"and --length."
        )
    key = (source, image_size, arguments.get("seed"), None if reading == DEFAULT else reading)
    if _loaded_sets is not None and key in _loaded_sets:
        return key, _loaded_sets[key]
    if (counted := _counted.pop(key, None)) is not None:
        return key, counted
    with at(f"data {name}"):
        dataset = loader(**arguments)
    try:
        dataset = as_dataset(dataset, reading.label_kind)
    except FormatError as error:
        kind = type(dataset).__name__
        raise UserCodeError(f"{name} must return a Dataset or arrays (x, y), but returned {kind}.") from error
    dataset = dataset if image_size is None else resize(dataset, image_size)
    if _loaded_sets is not None:
        _loaded_sets[key] = dataset
    return key, dataset


_loaded_sets: dict[Key, Dataset] | None = None  # None outside of `loaded_once`


@contextlib.contextmanager
def load_once(known: Mapping[Key, Dataset] = MappingProxyType({})) -> Iterator[dict[Key, Dataset]]:
    """Decode each data set only once inside this context. Data sets in `known` are not decoded at all."""
    global _loaded_sets
    before = _loaded_sets
    _loaded_sets = {**known} if before is None else before
    try:
        yield _loaded_sets
    finally:
        _loaded_sets = before


def load_shared(
    name: str | Dataset | Loader, *, image_size: int | None = None, seed: int = 0, reading: Reading = DEFAULT
) -> dict[Key, Dataset]:
    """Load a data set into shared memory and return what `loaded_once` takes. Empty if shared memory is full."""
    with load_once() as kept:
        key, dataset = _load_keyed(name, image_size, seed, reading)
        try:
            kept[key] = dataset.shared()
        except ConfigError:
            return {}
        return {key: kept[key]}


def has_columns(source: str | Dataset | Loader) -> bool:
    """Whether the settings of columns say how a data set is read."""
    return "reading" in inspect.signature(_find(source)).parameters


def count_holders(name: str | Dataset | Loader, **how: Any) -> int | None:
    """The number of clients that a data set names; None if it names none. The next `load` does not read it again."""
    global _counted
    key, dataset = _load_keyed(name, **how)
    _counted = {key: dataset}
    return len(dataset.clients or dataset.domains) or None


_counted: dict[Key, Dataset] = {}


def kind_of_data(source: Any, columns: Columns, windows: bool) -> Kind:
    """The kind of a data set, as far as it can be told without reading it. Otherwise `image`.

    `windows`: whether the user asks for windows.
    """
    if isinstance(source, Dataset):
        return source.kind
    if not isinstance(source, str | os.PathLike):
        return "image"
    if entry := _entries.get(_normalize_name(str(source))):
        return entry.kind
    reading = Reading(columns, window=2 if windows else None)
    if str(source).startswith(PREFIX):
        return kind_of_hub(str(source), reading)
    path = to_path(source)
    if is_sheet(path):
        return kind_of_file(path, reading)
    return read_kind(path) if path.suffix == ".npz" and path.is_file() else "image"


def short_name(name: str) -> str:
    """The name of a data set in the names of folders and rows, without folders, modules and the form of a file.

    >>> short_name("wards/patients.csv"), short_name("package.module.function"), short_name("hf:glue:sst2")
    ('patients', 'function', 'glue-sst2')
    """
    path = Path(name.removeprefix(PREFIX).replace(":", "-") if name.startswith(PREFIX) else name)
    return path.stem if path.suffix.lower() in (".npz", *READERS) else path.name.rpartition(".")[2]


def are_read_by_settings(name: Any) -> bool:
    """Whether settings such as `tokenizer` decide how data are read: those of files with columns, and named ones."""
    if not isinstance(name, str):
        return False
    return _normalize_name(name) in _entries or name.startswith(PREFIX) or is_sheet(to_path(name))


def _find(name: str | Dataset | Loader) -> Loader:
    if not isinstance(name, str):
        return partial(_identity, name) if isinstance(name, Dataset) else name
    refuse_given("data set", name)
    if entry := _entries.get(_normalize_name(name)):
        return entry.load
    if name.startswith(PREFIX):
        return partial(read_hub, name)
    path = to_path(name)
    if is_sheet(path):
        return partial(read_columns, path)
    if path.is_dir():
        return partial(read_image_folder, path)
    if path.suffix == ".npz":
        return partial(read_npz, path)
    if len(path.parts) > 1:
        raise MissingDataError(
            f"folder {path} does not exist: give a folder, a file, or a name from pluribus list data."
        )
    if is_code(name):
        loader: Loader = import_dotted(name, "data set")
        if not callable(loader):
            raise UserCodeError(f"{name} is not a function that loads a data set.")
        return loader
    raise unknown("data set", name, _entries, "pluribus list data")


def is_code(name: str) -> bool:
    """Whether a name is the dotted path of a function, because it is neither registered nor a file or folder."""
    if _normalize_name(name) in _entries or name.startswith(PREFIX):
        return False
    path = to_path(name)
    if is_sheet(path) or path.is_dir() or path.suffix == ".npz":
        return False
    return "." in name and all(part.isidentifier() for part in name.split("."))


def _identity(dataset: Dataset) -> Dataset:
    return dataset


# The cache ------------------------------------------------------------------------------------------------------------


def data_folder() -> Path:
    """The folder of data sets: `$PLURIBUS_DATA`, by default `~/.cache/pluribus`."""
    return Path(os.environ.get("PLURIBUS_DATA") or "~/.cache/pluribus").expanduser()


def cache_file(name: str) -> Path:
    """The path of a data set's cache file.

    >>> cache_file("fashion-mnist").name
    'fashion_mnist.npz'
    """
    return data_folder() / f"{name.replace('-', '_')}.npz"


# Downloads ------------------------------------------------------------------------------------------------------------

Fetch = Callable[[Path], Arrays]


def _downloadable(name: str, about: str, *, merged: bool = False) -> Callable[[Fetch], Fetch]:
    """Register a data set that the decorated function downloads into a scratch folder if it is not cached.

    `merged`: drop the official split, as the papers do.
    """

    def add(fetch: Fetch) -> Fetch:
        def loader() -> Dataset:
            file = cache_file(name)
            if not file.exists():
                _download(name, fetch, file)
            dataset = read_npz(file, name)
            return dataclasses.replace(dataset, official=None) if merged else dataset

        register_data(name, about)(loader)
        return fetch

    return add


def _download(name: str, fetch: Fetch, file: Path, original: str = "") -> None:
    """`original`: what a user may put beside the file instead, in words."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=file.parent) as scratch, _fail_quickly():
            write_npz(file, fetch(Path(scratch)))
    except PluribusError:
        raise
    except Exception as reason:
        raise MissingDataError(
            f"{name} is not at {file} and could not be downloaded ({last_line(reason)}). "
            f"Put the file there{original and f', or {original}'}, or run on a machine with internet access."
        ) from reason


def load_original(name: str, original: str, read: Fetch, fetch: Fetch) -> Dataset:
    """Load a data set from its cache file. Without one, make it of the original in that folder, or download it.

    `read` reads the original, and `fetch` downloads into a scratch folder.
    """
    file, by_hand = cache_file(name), data_folder() / original
    if not file.exists() and by_hand.exists():
        arrays = read(by_hand)
        try:
            make_dataset(arrays, name)
            write_npz(file, arrays)
        except DataError as refusal:
            raise DamagedDataError(f"{by_hand} cannot be used: {refusal.sentence}") from refusal
        except OSError as error:
            raise MissingDataError(f"{by_hand} was read, but {file} cannot be written: {error.strerror}.") from error
    elif not file.exists():
        _download(name, fetch, file, f"the original '{original}'")
    return read_npz(file, name)


def fetch_url(url: str, file: Path) -> Path:
    """Download a file."""
    import shutil
    from urllib.request import Request, urlopen

    request = Request(url, headers={"User-Agent": "pluribus"})  # some servers refuse the name of Python
    with urlopen(request, timeout=SILENT_NETWORK_SECONDS) as answer, file.open("wb") as out:
        shutil.copyfileobj(answer, out)
    return file


@contextlib.contextmanager
def reading_original(file: Path) -> Iterator[None]:
    """Any error in a file that a user put there by hand is a sentence about the file."""
    try:
        yield
    except PluribusError:
        raise
    except Exception as reason:  # archives and texts raise almost any error, depending on the damage
        raise DamagedDataError(
            f"{file} cannot be read ({type(reason).__name__}: {last_line(reason)}): get it again or delete it."
        ) from reason


@contextlib.contextmanager
def _fail_quickly() -> Iterator[None]:
    """Time out on a network that does not answer, and print the downloaders' output to stderr."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENT_NETWORK_SECONDS)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        socket.setdefaulttimeout(before)


def _torchvision_datasets() -> Any:
    from pluribus.internal.torchvision import torchvision

    return torchvision.datasets


def _pack(parts: Iterable[tuple[Any, Any]], classes: Sequence[str]) -> Arrays:
    (x_train, y_train), (x_test, y_test) = parts
    columns = (x_train, y_train, x_test, y_test, classes)
    return {key: np.asarray(column) for key, column in zip(NPZ_KEYS, columns, strict=True)}


def _train_and_test(kind: str, folder: Path, classes: Sequence[str] | None = None) -> Arrays:
    maker = getattr(_torchvision_datasets(), kind)
    sets = [maker(folder, train=train, download=True) for train in (True, False)]
    return _pack([(part.data, part.targets) for part in sets], classes or sets[0].classes)


def _photos(rows: Iterable[tuple[Image.Image, int]]) -> tuple[np.ndarray, np.ndarray]:
    small = [(pixels(image, (3, PHOTO_SIZE, PHOTO_SIZE)).permute(1, 2, 0), label) for image, label in rows]
    return np.stack([image.numpy() for image, _ in small]), np.array([label for _, label in small])


def sklearn_file(name: str) -> Path:
    """One of scikit-learn's own data files. Importing sklearn.datasets to read it takes more than a second."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None, "a dependency of this library"
    return Path(str(package.origin)).parent / "datasets" / "data" / name


DIGITS = tuple("0123456789")


@register_data("digits", "1,797 handwritten digits of 8 x 8, 10 classes, part of scikit-learn: no download")
def _digits() -> Dataset:
    with gzip.open(sklearn_file("digits.csv.gz"), "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",")
    images, labels = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
    x = torch.from_numpy(np.rint(images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    return Dataset("digits", x, torch.from_numpy(labels), DIGITS)


_downloadable("mnist", "70,000 handwritten digits of 28 x 28, 10 classes")(
    partial(_train_and_test, "MNIST", classes=DIGITS)
)
_downloadable("fashion-mnist", "70,000 pieces of clothing of 28 x 28, 10 classes")(
    partial(_train_and_test, "FashionMNIST")
)
_downloadable("cifar10", "60,000 photos of 32 x 32, 10 classes")(partial(_train_and_test, "CIFAR10"))
_downloadable("cifar100", "60,000 photos of 32 x 32, 100 classes")(partial(_train_and_test, "CIFAR100"))


@_downloadable("svhn", "99,289 house numbers of 32 x 32, 10 classes")
def _svhn(folder: Path) -> Arrays:
    maker = _torchvision_datasets().SVHN
    sets = [maker(folder, split=split, download=True) for split in ("train", "test")]
    return _pack([(part.data.transpose(0, 2, 3, 1), part.labels) for part in sets], DIGITS)


@_downloadable(
    "flowers102", "8,189 flowers of 64 x 64, 102 classes, official splits merged as in the papers", merged=True
)
def _flowers102(folder: Path) -> Arrays:
    maker = _torchvision_datasets().Flowers102
    train, val, test = (maker(folder, split=split, download=True) for split in ("train", "val", "test"))
    return _pack([_photos(chain(train, val)), _photos(test)], train.classes)


def fetch_from_hub(name: str, source: str, splits: Sequence[str], folder: Path, instead: str = "") -> list[Any]:
    """Splits of a data set of Hugging Face. `instead`: what the user may do without its packages."""
    try:
        import datasets
        import huggingface_hub
    except ImportError as missing:
        raise MissingDataError(
            f"{name} is not at {cache_file(name)} and its download needs a package that is missing: "
            f"pip install 'pluribus[hf]'.{instead}"
        ) from missing
    # one request first, because load_dataset retries for half a minute without internet
    huggingface_hub.dataset_info(source, timeout=SILENT_NETWORK_SECONDS)
    return [datasets.load_dataset(source, split=split, cache_dir=str(folder)) for split in splits]


@_downloadable("tiny-imagenet", "110,000 photos of 64 x 64, 200 classes; needs pluribus[hf] to download")
def _tiny_imagenet(folder: Path) -> Arrays:
    sets = fetch_from_hub("tiny-imagenet", "zh-plus/tiny-imagenet", ("train", "valid"), folder)
    parts = [_photos((row["image"], row["label"]) for row in part) for part in sets]
    return _pack(parts, sets[0].features["label"].names)
