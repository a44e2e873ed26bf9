"""TOML, read and written. No torch here: some commands answer at once."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from pluribus.errors import DamagedFileError, FileAccessError


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, with a sentence for each way this can fail."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileAccessError(f"cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
    tables = {name: table for name, table in settings.items() if isinstance(table, dict)}
    text = _pairs({name: value for name, value in settings.items() if name not in tables}, "\n")
    for name, table in tables.items():
        if table:
            text += f"\n[{_key(name)}]\n" + _pairs(table, "\n")
    return text


def _pairs(table: dict[str, Any], end: str) -> str:
    return "".join(f"{_key(name)} = {_value(value)}{end}" for name, value in table.items() if value is not None)


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """As in JSON, but TOML wants the one control character escaped that JSON takes as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    match value:
        case str():
            return _quoted(value)
        case float():
            return repr(float(value))  # inf and nan too, which JSON spells in another way
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case dict():
            return f"{{{_pairs(value, ', ').removesuffix(', ')}}}"
    return json.dumps(value)
