"""Flower's command line for several commands in one process, because its import takes longer than the commands.

python -m pluribus.sites.flower.commands < lines of JSON, each a list of arguments
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from pluribus.sites.flower.forkserver import fork, program


def main() -> None:
    """Run each command, and print its output and its errors as one line of JSON."""
    flwr = program("flwr")
    for line in sys.stdin:
        sys.argv = ["flwr", *json.loads(line)]
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("out", "err")]

            def run_redirected(files: list[Path] = files) -> None:
                for stream, file in enumerate(files, start=1):
                    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
                flwr()

            os.waitpid(fork("flwr", run_redirected), 0)
            print(json.dumps([file.read_text(encoding="utf-8") for file in files]), flush=True)


if __name__ == "__main__":
    main()
