"""pluribus predict, report and watch: use trained models, and show the results of runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from pluribus.cli.flags import allow_flags, allowed, flag, parse, word
from pluribus.cli.greeter import print_answer

ABOUT_PREDICT = """\
Predicts with a model that a run has trained: classes, several labels at once, or numbers.

  pluribus predict runs/a scans/ one.png --client 0      the model of a client of a simulation
  pluribus predict runs/a scans/ --global                the server's model, if the method has one
  pluribus predict state scans/                          the model of a real site; site.toml names its state folder

Images are resized to the shape that the model takes. The model is the one whose metrics the run reports: that of the
round that validation selects. --round last takes the model of the last round. The score is the softmax of the method's
scores per class: a probability if the scores are logits, and only a number if they are distances. Tables, texts and
signals are files with the columns of the run's data file; labels are not needed.
"""

SERVER = "Predict with the server's model of the last round, for methods that have one (heterofl, feddf and others)."

ABOUT_REPORT = """\
Writes plots and tables of runs to one self-contained web page. It can be mailed, and read without a network.

  pluribus report runs/a                              report.html
  pluribus report runs/a runs/b --out both.html       several runs in the same plots
  pluribus report runs --figures figures              all runs below a folder; figures for a paper, as PNG and PDF

Runs that differ only in the seed are one line with a band. A run may be running, stopped or finished. Features of
models come from its last checkpoint.
"""

ABOUT_WATCH = """\
Shows the page of pluribus report live, during a run. Only this machine can read it. Ctrl-C ends the page, not the run.

  pluribus watch runs/a      the page of one run
  pluribus watch runs        a list of all runs below a folder, with the time left, and a page for each of them

A run on another machine: ssh -L 9999:127.0.0.1:PORT MACHINE, then open http://localhost:9999/ on this one.
"""


def predict(args: list[str]) -> None:
    """pluribus predict: predict with a trained model."""
    import tyro

    words, path = tyro.conf.Positional[tuple[str, ...]], "The folder of a run, or the state folder of a site."
    flags: list[Any] = [
        ("path", word(tyro.conf.Positional[str], "PATH", path, "(required)")),
        ("rows", word(words, "FILES...", "Images and folders of them, or files with columns.", "(required)")),
        ("client", word(int | None, "K", "The client whose model predicts.", "(needed for a run)"), None),
        flag("round", Literal["selected", "last"], "selected", "The round whose model predicts."),
        ("server", Annotated[bool, tyro.conf.arg(name="global", help=SERVER)], False),
        flag("json", bool, False, "Print the predictions as one JSON list, and nothing else."),
        ("out", word(str | None, "FILE", "Write the predictions to a CSV file, too.", "(default: none)"), None),
        *allow_flags(),
    ]
    given = parse(dataclasses.make_dataclass("Predict", flags), "pluribus predict", ABOUT_PREDICT, args)
    from pluribus.prediction import predict, to_csv
    from pluribus.terminal import print_predictions

    which = given.path, given.rows, given.client, given.round
    predictions = predict(*which, server=given.server, allow_code=allowed(given))
    if given.out:
        to_csv(predictions, Path(given.out))
    rows = [dataclasses.asdict(one) for one in predictions]
    print_answer(given.json, lambda: rows, lambda: print_predictions(predictions))


def report(args: list[str]) -> None:
    """pluribus report: write plots and tables to a web page."""
    import tyro

    words, paths = tyro.conf.Positional[tuple[str, ...]], "Run folders, or folders that contain run folders."
    folder, features = "Write every plot to this folder, too, as PNG and PDF.", "How features of models are shown."
    flags: list[Any] = [
        ("runs", word(words, "RUN...", paths, "(required)")),
        ("out", word(str, "FILE", "The page.", "(default: report.html)"), "report.html"),
        ("figures", word(str | None, "FOLDER", folder, "(default: none)"), None),
        flag("embeddings", Literal["tsne", "pca", "none"], "pca", features),
        *allow_flags(),
    ]
    given = parse(dataclasses.make_dataclass("Report", flags), "pluribus report", ABOUT_REPORT, args)
    from pluribus.report import write_report

    how = given.out, given.figures, given.embeddings
    for path in write_report(given.runs, *how, allow_code=allowed(given)):
        print(f"wrote {path}")


def watch(args: list[str]) -> None:
    """pluribus watch: show the pages of runs live."""
    import tyro

    run = "The folder of a run, or a folder that contains run folders."
    flags: list[Any] = [
        ("run", word(tyro.conf.Positional[str], "RUN", run, "(required)")),
        ("port", word(int, "INT", "Port of the page.", "(default: 0, any free one)"), 0),
        *allow_flags(),
    ]
    given = parse(dataclasses.make_dataclass("Watch", flags), "pluribus watch", ABOUT_WATCH, args)
    from pluribus.report.watch import watch

    watch(given.run, given.port, tell=lambda text: print(text, flush=True), allow=allowed(given))
