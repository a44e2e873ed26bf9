"""The command line. An experiment's fields and its method's settings are the flags of its command.

torch takes seconds to import, so commands import what they need when they run, and `pluribus --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from pluribus.cli import failures
from pluribus.cli.compare import compare, tune
from pluribus.cli.interrupts import end_imports_on_ctrl_c
from pluribus.cli.lists import data, show_list
from pluribus.cli.report import predict, report, watch
from pluribus.cli.reproduce import reproduce
from pluribus.cli.run import bench, resume, run
from pluribus.cli.sites import join, keys, serve
from pluribus.errors import PluribusError, unknown

USAGE = """\
Pluribus: heterogeneous federated learning.

  pluribus run METHOD [flags]      run a federation         pluribus run fedgh --clients 10 --rounds 50
  pluribus resume FOLDER           go on with a stopped run
  pluribus compare METHOD... [..]  methods over several seeds, and which differences are more than noise
  pluribus tune METHOD... [flags]  a fair search for settings, on validation data
  pluribus reproduce [NAME] [..]   a paper's table: ours beside its figures
  pluribus predict PLACE IMAGES    classes of images, by a trained model
  pluribus report RUN... [flags]   plots and tables of runs, as one web page
  pluribus watch RUN               the same page, live, while a run goes on
  pluribus bench METHOD [flags]    how fast it runs here, and where its time goes
  pluribus list WHAT               methods, models, groups, data or partitions
  pluribus data check PATH         what a data set holds, and what happens to it when it is read

  pluribus keys FOLDER [flags]     certificates and keys for a federation of real sites
  pluribus serve METHOD [flags]    the server of a federation of real sites
  pluribus join [flags]            one site of a federation

  pluribus run METHOD --help       every flag, with the paper's symbols and the defaults
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.path.insert(0, "")  # a user's own method, model or data set lies beside where they work
    commands: dict[str, Callable[[list[str]], None]] = {
        "run": run,
        "resume": resume,
        "compare": compare,
        "tune": tune,
        "reproduce": reproduce,
        "predict": predict,
        "report": report,
        "watch": watch,
        "bench": bench,
        "list": show_list,
        "data": data,
        "keys": keys,
        "serve": serve,
        "join": join,
    }
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("pluribus"))
        return 0
    try:
        if args[0] not in commands:
            raise unknown("command", args[0], commands, "pluribus --help")
        with end_imports_on_ctrl_c():
            commands[args[0]](args[1:])
        return 0
    except PluribusError as error:
        failures.fail(str(error), error.kind, "--json" in args)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nstopped. {stop}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # of a user's own method, model or data function, or a mistake of ours
        failures.fail_with_lines(error, "--json" in args)
        return 1
