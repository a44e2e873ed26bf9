"""Flower's SuperNode, as a process that ends.

When it gives up on a broken network its loop returns, but a thread that it started keeps its process alive for ever,
deaf to the server, and nobody would start it again.

python -m pluribus.flower.supernode [the flags of flower-supernode]
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points


def main() -> None:
    """Run it; with its loop, all of it ends."""
    (command,) = entry_points(group="console_scripts", name="flower-supernode")
    command.load()()
    os._exit(1)


if __name__ == "__main__":
    main()
