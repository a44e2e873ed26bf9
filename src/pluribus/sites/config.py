"""federation.toml at the server and site.toml at each site. No torch: `pluribus join` needs it only in its worker."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from unicodedata import normalize

from pluribus.errors import ConfigError, ConflictError, FileAccessError, FormatError, MissingSettingError
from pluribus.internal.digits import is_whole
from pluribus.internal.paths import to_path
from pluribus.settings import check_names, convert_fields, setting
from pluribus.storage.toml import read_toml

LOOK = "docs/deployment.md"
SOURCES = ("data", "train", "val", "test", "public", "weights")  # each is a path or a name
T = TypeVar("T")


@dataclass(frozen=True)
class FederationFile:
    """federation.toml, but for training settings and hyper-parameters of the method, which it may hold too."""

    sites: tuple[str, ...]
    """Names of the sites, in the order of the clients. Each site needs a key: pluribus keys."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the labels; or of the labels or numbers to predict."""
    image: tuple[int, ...] | None = None
    """Shape of an image: channels, height, width. Rows of another kind have a table [input] instead."""
    input: dict[str, Any] | None = None
    """Rows: kind and shape; of tokens vocabulary; of tables and signals columns, and values of categories."""
    label_kind: Literal["classes", "labels", "numbers"] = "classes"
    """What is predicted: one of the classes, several labels at once, or numbers."""
    keys: Path = Path("keys")
    """Folder that pluribus keys made, with ca.crt, server/ and sites.toml."""
    listen: str = "0.0.0.0:9092"
    """Address and port at which sites reach this server."""
    superlink: str | None = None
    """HOST:PORT of a SuperLink that already runs on this machine. Default: pluribus serve starts one."""
    superlink_ca: Path | None = None
    """Root certificate of that SuperLink. Default: ca.crt in `keys`."""
    nodes: dict[str, Any] | None = None
    """Node ids of sites that the operator of that SuperLink has registered, by name of site."""
    deadline: float = setting(600.0, above=0)
    """Seconds that an exchange may last. A site that has not answered by then is missing in that round."""
    wait: float = setting(3600.0, above=0)
    """Seconds to wait for all sites before the first round."""
    largest_message: int = setting(256, at_least=1)
    """MB that a site may send at once."""
    largest_norm: float | Literal["learned"] | None = setting(None, above=0)
    """Largest norm of a field in a message of a site, such as 1000. learned: from the first rounds. Default: any."""
    out: Path = Path("federation")
    """Run folder. An existing run is resumed."""

    def __post_init__(self) -> None:
        if len(set(self.sites)) < len(self.sites) or not self.sites:
            raise FormatError("federation.toml needs 'sites': their names, each once.")
        object.__setattr__(self, "classes", tuple(normalize("NFC", name) for name in self.classes))  # as at the sites
        fewest = 2 if self.label_kind == "classes" else 1
        if len(set(self.classes)) < len(self.classes) or len(self.classes) < fewest:
            raise FormatError(
                f"federation.toml needs 'classes': at least {('one name', 'two names')[fewest - 1]}, each once."
            )
        self._check_superlink()
        if self.image is None and self.input is None:
            raise MissingSettingError("federation.toml lacks 'image', or a table [input] for rows of another kind.")
        if self.image is not None and self.input is not None:
            raise ConflictError("federation.toml has both 'image' and [input]: leave out one of them.")
        if self.image is not None and not (
            len(self.image) == 3 and all(isinstance(n, int) and n >= 1 for n in self.image)
        ):
            raise FormatError("federation.toml needs 'image': channels, height and width, such as [3, 32, 32].")

    def _check_superlink(self) -> None:
        for name in ("superlink_ca", "nodes"):
            if getattr(self, name) is not None and self.superlink is None:
                raise ConflictError(f"'{name}' is for a SuperLink that already runs: give its address as 'superlink'.")
        for site, node in (self.nodes or {}).items():
            if site not in self.sites:
                raise ConflictError(f"'nodes' names '{site}', which is none of the sites.")
            if not is_whole(str(node)):
                raise FormatError(f"'nodes' must have the number of a node for '{site}', not {node!r}.")


@dataclass(frozen=True)
class SiteFile:
    """site.toml: the name of a site, its model and data, its state folder, and the server."""

    name: str
    """Name of this site, as in federation.toml."""
    server: str
    """HOST:PORT of the server."""
    keys: Path
    """Folder with the keys of this site: NAME.key and ca.crt."""
    model: str
    """Architecture (pluribus list models), or your own: timm:NAME, hf:NAME, or package.module.builder."""
    state: Path
    """Folder for what this site learns. It is enough to resume after a crash, and to predict."""
    data: str | None = None
    """Data: a folder with one folder of images per class, a file (.npz, .csv), or a name (pluribus list data)."""
    train: str | None = None
    """Data for training, validation and testing, instead of `data`."""
    val: str | None = None
    test: str | None = None
    public: str | None = None
    """Public rows, for methods that need them. All sites need the same copy."""
    image_size: int | None = setting(None, at_least=1)
    """Resize images to this many pixels a side."""
    val_fraction: float = setting(0.1, at_least=0, below=1)
    """Share of `data` for validation."""
    test_fraction: float = setting(0.2, at_least=0, below=1)
    """Share of `data` for testing."""
    split_by: Literal["auto", "rows", "group", "time"] = "auto"
    """Split `data` row by row, in groups, or by time. auto: signals by time, others in groups, if any."""
    columns: str | dict[str, Any] = ""
    """Roles of columns: label=NAME, text, inputs=A+B, group, time, split, ignore; or a table of them."""
    label_kind: Literal["auto", "classes", "labels", "numbers"] = "auto"
    """What a label column holds: classes, several labels at once, or numbers. auto: classes."""
    window: int | None = setting(None, at_least=2)
    """Cut the rows of a file into windows of this many rows, which are signals."""
    stride: int | None = setting(None, at_least=1)
    """Rows between the starts of two windows. Default: the window."""
    tokenizer: str = "words"
    """How texts become tokens: words, or a tokenizer of Hugging Face by its name. The same at all sites."""
    vocabulary: int = setting(8192, at_least=3, at_most=2**24)
    """Number of ids that words are hashed to. The same at all sites."""
    length: int | None = setting(None, at_least=1, at_most=2**20)
    """Tokens of a row. The same at all sites."""
    normalize: str = "auto"
    """client, none, or MEAN/DEVIATION. auto: images in [-1, 1], signals and tables by this site's training rows."""
    classes: tuple[str, ...] = ()
    """The classes of federation.toml, if known: pluribus join then checks those of the data and of the model early."""
    weights: str | None = None
    """Pretrained weights for `model`: timm, torchvision, or a folder with a file MODEL.safetensors."""
    allow: tuple[str, ...] = ()
    """Models, such as package.module.builder, that the server may name besides registered ones."""
    share_counts: bool = True
    """Tell the server how many rows this site has. false: refuse a federation that asks."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    threads: int | None = setting(None, at_least=1, at_most=4096)
    """CPU threads. Default: one per core."""
    wait: float = setting(60.0, at_least=0)
    """Seconds to wait for the server when it cannot be reached at the start."""
    ca: Path | None = None
    """Root certificate of the server. Default: ca.crt in `keys`."""
    key: Path | None = None
    """Private key of this site's SuperNode. Default: NAME.key in `keys`."""

    def ca_file(self) -> Path:
        """The root certificate."""
        return self.ca or self.keys / "ca.crt"

    def key_file(self) -> Path:
        """The private key."""
        return self.key or self.keys / f"{self.name}.key"


def read_site(path: Path) -> SiteFile:
    """Read site.toml."""
    written = read_toml(path)
    check_names(written, setting_names(SiteFile), f"setting in {path}:", LOOK)
    return make_from(SiteFile, written, path)


def setting_names(cls: type) -> list[str]:
    """Names of the settings that a file may hold."""
    return [one.name for one in dataclasses.fields(cls)]


def make_from(cls: type[T], written: dict[str, Any], path: Path) -> T:
    """Settings of a file as its dataclass. Paths are relative to the file."""
    for one in dataclasses.fields(cls):  # type: ignore[arg-type]
        if one.default is dataclasses.MISSING and one.name not in written:
            raise MissingSettingError(f"{path} lacks the setting '{one.name}'. {LOOK} shows a complete file.")
    try:
        made = cls(**convert_fields(cls, written))
    except ConfigError as error:
        raise type(error)(f"{path}: {error.sentence.removeprefix('--')}") from error
    values, folder = vars(made), path.absolute().parent
    paths = {name: folder / value for name, value in values.items() if isinstance(value, Path)}
    sources = {name: str(folder / values[name]) for name in SOURCES if values.get(name)}
    try:
        found = {name: source for name, source in sources.items() if to_path(source).exists()}
    except FileAccessError as error:
        raise FileAccessError(f"{path}: {error.sentence}") from error
    return dataclasses.replace(made, **paths, **found)  # type: ignore[type-var]
