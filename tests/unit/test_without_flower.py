"""Commands of real sites where Flower and its packages are not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import start

WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    assert name not in sys.modules
    sys.modules[name] = None
from pluribus.cli import main
sys.exit(main(sys.argv[2:]))
"""
BROUGHT = "flwr,uvicorn,starlette,httpx,httpcore"  # by Flower


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        (("serve", "fedgh"), BROUGHT),
        (("serve", "fedgh"), "uvicorn"),
        (("join",), BROUGHT),
        (("join",), f"{BROUGHT},cryptography"),
    ],
    ids=["serve", "uvicorn", "join", "cryptography"],
)
def test_a_missing_extra_is_named(command: tuple[str, ...], absent: str, tmp_path: Path) -> None:
    files = {"federation.toml": FEDERATION, "site.toml": SITE}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    process = start(absent, *command, program=WITHOUT, cwd=tmp_path)
    assert process.wait() == 2, process.err
    assert "Traceback" not in process.err
    assert "pluribus[flower]" in process.err


FEDERATION = 'sites = ["north"]\nclasses = ["cat", "dog"]\nimage = [1, 8, 8]\n'
SITE = 'name = "north"\nserver = "127.0.0.1:9092"\nkeys = "keys"\nmodel = "mlp-64"\nstate = "state"\n'
