"""Flower's command line, imported once for several commands: that takes longer than what they do.

python -m pluribus.sites.flower.commands < lines of JSON, each a list of words
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from pluribus.sites.flower.nursery import fork, program


def main() -> None:
    """Print what each command prints, on a line of JSON: its output, and its errors."""
    flwr = program("flwr")
    for line in sys.stdin:
        sys.argv = ["flwr", *json.loads(line)]
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("out", "err")]

            def speak_there(files: list[Path] = files) -> None:
                for stream, file in enumerate(files, start=1):
                    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
                flwr()

            os.waitpid(fork("flwr", speak_there), 0)
            print(json.dumps([file.read_text(encoding="utf-8") for file in files]), flush=True)


if __name__ == "__main__":
    main()
