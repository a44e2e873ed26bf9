"""Draw the README's picture: what a person sees after the command that `make run` runs.

python docs/picture.py
"""

import io
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

import pluribus
from pluribus.terminal import Progress, print_partition, print_table

LR, ROUNDS = 0.1, 50
COMMAND = f"pluribus run fedgh --against local --lr {LR} --rounds {ROUNDS}"


class Heading:
    """Prints who holds what, before the first run."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self, federation) -> None:
        """Print the command and the partition."""
        self._console.print(f"$ {COMMAND}\n", style="bold", highlight=False)
        print_partition(federation.parts, self._console)
        self._console.print()

    def round(self, record, ledger) -> None:
        """Nothing to say."""

    def finish(self, result) -> None:
        """Nothing to say."""


def main() -> None:
    """Run both methods and save the picture."""
    console = Console(record=True, width=100, force_terminal=True, file=io.StringIO())
    with TemporaryDirectory() as folder:
        results = []
        for number, method in enumerate(("local", "fedgh")):
            progress = Progress(Console(file=io.StringIO()))
            watching = [progress] if number else [Heading(console), progress]
            how = {"lr": LR, "rounds": ROUNDS, "out": f"{folder}/{method}"}
            results.append(pluribus.run(method, progress=False, observers=watching, **how))
            console.print(progress.bar.get_renderable())
        console.print()
        print_table(results, console)
    svg = console.export_svg(title="pluribus")
    # rich points at fonts on the web; a picture in a README should need nothing from elsewhere
    Path(__file__).with_name("run.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
