"""Draw the picture of the first pages: FedH2L beside its baselines, with the settings of the table `claim-fedh2l`.

python docs/pictures/claim.py
"""

from pathlib import Path

from matplotlib.figure import Figure

import pluribus
from pluribus.study.reproduce import paper

TABLE, EVERY = "claim-fedh2l", 10
ROWS = ("FedH2L", "AGG", "FedMD", "IND")


def main() -> None:
    """Run every row with three seeds and save the picture."""
    table = paper.find(TABLE)
    rows = {row.label: (row.method, row.settings) for row in table.rows if row.label in ROWS}
    settings = {**table.settings, "evaluate_every": EVERY}
    compared = pluribus.compare(rows, **settings, seeds=3, progress=False)
    compared.plot(Path(__file__).with_suffix(".png"), Figure(figsize=(7, 3.6)).add_subplot())
    print(compared)


if __name__ == "__main__":
    main()
