"""Read and write TOML. This module does not import torch, so that some commands answer at once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from pluribus.errors import DamagedFileError, FileAccessError


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileAccessError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too deep, or a number of too many digits
        raise DamagedFileError(f"{path} is not valid TOML: {error}.") from error


def to_toml(settings: dict[str, Any]) -> str:
    """Settings as TOML: plain values first, then one table per dictionary. None and empty tables are left out.

    >>> print(to_toml({"data": "digits", "lr": 0.1, "hyper": {"server_lr": 0.01}}), end="")
    data = "digits"
    lr = 0.1
    <BLANKLINE>
    [hyper]
    server_lr = 0.01
    """
    return tomli_w.dumps(_drop_empty(settings))


def _drop_empty(table: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null. A missing value means the default."""
    kept = {name: value for name, value in table.items() if value is not None and value != {}}
    return {name: _drop_empty(value) if isinstance(value, dict) else value for name, value in kept.items()}
