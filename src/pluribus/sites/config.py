"""federation.toml at the server and site.toml at each site. No torch: `pluribus join` needs it only in its worker."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unicodedata import normalize

from pluribus.errors import ConfigError, FormatError, MissingSettingError
from pluribus.settings import check_names, convert_fields, setting
from pluribus.storage.toml import read_toml

LOOK = "docs/deployment.md"
IMAGES = ("data", "train", "val", "test", "public")  # each is a path, or the name of a data set
T = TypeVar("T")


@dataclass(frozen=True)
class FederationFile:
    """federation.toml, but for training settings and hyper-parameters of the method, which it may hold too."""

    sites: tuple[str, ...]
    """Names of the sites, in the order of the clients. Each site needs a key: pluribus keys."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of the labels."""
    image: tuple[int, ...]
    """Shape of an image: channels, height, width."""
    keys: Path = Path("keys")
    """Folder that pluribus keys made, with ca.crt, server/ and sites.toml."""
    listen: str = "0.0.0.0:9092"
    """Address and port at which sites reach this server."""
    deadline: float = setting(600.0, above=0)
    """Seconds that an exchange may last. A site that has not answered by then is missing in that round."""
    wait: float = setting(3600.0, above=0)
    """Seconds to wait for all sites before the first round."""
    largest_message: int = setting(256, at_least=1)
    """MB that a site may send at once."""
    out: Path = Path("federation")
    """Run folder. An existing run is resumed."""

    def __post_init__(self) -> None:
        if len(set(self.sites)) < len(self.sites) or not self.sites:
            raise FormatError("federation.toml needs 'sites': their names, each once.")
        object.__setattr__(self, "classes", tuple(normalize("NFC", name) for name in self.classes))  # as at the sites
        if len(set(self.classes)) < len(self.classes) or len(self.classes) < 2:
            raise FormatError("federation.toml needs 'classes': at least two names, each once.")
        if len(self.image) != 3 or not all(isinstance(n, int) and n >= 1 for n in self.image):
            raise FormatError("federation.toml needs 'image': channels, height and width, such as [3, 32, 32].")


@dataclass(frozen=True)
class SiteFile:
    """site.toml: the name of a site, its model and images, its state folder, and the server."""

    name: str
    """Name of this site, as in federation.toml."""
    server: str
    """HOST:PORT of the server."""
    keys: Path
    """Folder with the keys of this site: NAME.key and ca.crt."""
    model: str
    """Architecture (pluribus list models)."""
    state: Path
    """Folder for what this site learns. It is enough to resume after a crash, and to predict."""
    data: str | None = None
    """Images: a folder with one folder per class, an .npz file, or a name (pluribus list data)."""
    train: str | None = None
    """Images for training, validation and testing, instead of `data`."""
    val: str | None = None
    test: str | None = None
    public: str | None = None
    """Public images, for methods that need them. All sites need the same copy."""
    image_size: int | None = setting(None, at_least=1)
    """Resize images to this many pixels a side."""
    val_fraction: float = setting(0.1, at_least=0, below=1)
    """Share of `data` for validation."""
    test_fraction: float = setting(0.2, at_least=0, below=1)
    """Share of `data` for testing."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    threads: int | None = setting(None, at_least=1)
    """CPU threads. Default: one per core."""
    wait: float = setting(60.0, at_least=0)
    """Seconds to wait for the server when it cannot be reached at the start."""


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
    images = {name: str(folder / values[name]) for name in IMAGES if values.get(name)}
    found = {name: image for name, image in images.items() if Path(image).exists()}
    return dataclasses.replace(made, **paths, **found)  # type: ignore[type-var]
