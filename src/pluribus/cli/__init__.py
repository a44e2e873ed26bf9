"""The command line. An experiment's fields and its method's settings are the flags of its command.

torch takes seconds to import, so commands import what they need when they run, and `pluribus --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import pluribus
from pluribus.cli import failures
from pluribus.cli.audit import audit
from pluribus.cli.check import check
from pluribus.cli.compare import compare, tune
from pluribus.cli.completion import completion
from pluribus.cli.doctor import doctor
from pluribus.cli.interrupts import end_imports_on_ctrl_c
from pluribus.cli.lists import data, show_list
from pluribus.cli.log import lines_on_stderr
from pluribus.cli.report import predict, report, watch
from pluribus.cli.reproduce import reproduce
from pluribus.cli.run import bench, resume, run
from pluribus.cli.sites import join, keys, serve
from pluribus.cli.study import study
from pluribus.errors import PluribusError, speaking_flags, unknown
from pluribus.internal.lookup import import_from_working_folder

USAGE = """\
Pluribus: heterogeneous federated learning.

  pluribus run METHOD [flags]      run a federation
  pluribus resume FOLDER           continue a stopped run
  pluribus compare METHOD... [..]  compare methods over several seeds
  pluribus study FILE [flags]      compare rows over axes, from a file
  pluribus tune METHOD... [flags]  search settings on validation data
  pluribus reproduce [NAME] [..]   run a paper's table, ours beside the paper's
  pluribus predict PATH FILES      predict with a trained model
  pluribus report RUN... [flags]   write plots and tables to one web page
  pluribus watch RUN               show that page live, during a run
  pluribus audit RUN... [flags]    attack what the clients of runs upload
  pluribus bench METHOD [flags]    measure the speed, and where the time goes
  pluribus list WHAT               list methods, models, data or partitions
  pluribus data check PATH         show what a data set holds
  pluribus check TARGET [flags]    check a method, a model or a data set
  pluribus doctor                  show what this machine has, and what is missing
  pluribus completion SHELL        print a script by which a shell completes words

  pluribus keys FOLDER [flags]     make certificates and keys for real sites
  pluribus serve METHOD [flags]    start the server of real sites
  pluribus join [flags]            join a federation as one site

  pluribus run METHOD --help       show every flag, its default and its symbol

For example: pluribus run fedgh --clients 10 --rounds 50
"""

NAMED = (
    run,
    resume,
    compare,
    study,
    tune,
    reproduce,
    predict,
    report,
    watch,
    audit,
    bench,
    data,
    check,
    doctor,
    keys,
    serve,
    join,
)
COMMANDS: dict[str, Callable[[list[str]], None]] = {one.__name__: one for one in NAMED}
COMMANDS |= {"list": show_list, "completion": lambda args: completion(args, COMMANDS, USAGE)}


@speaking_flags()
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    import_from_working_folder()  # the user's own method, model or data set
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] == "--version":
        print(pluribus.__version__)
        return 0
    try:
        if args[0] not in COMMANDS:
            raise unknown("command", args[0], COMMANDS, "pluribus --help")
        with end_imports_on_ctrl_c(), lines_on_stderr():
            COMMANDS[args[0]](args[1:])
        return 0
    except PluribusError as error:
        failures.fail(error.sentence, error.kind, "--json" in args)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nstopped. {stop}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # from the user's own code, or a bug of ours
        failures.fail_with_lines(error, "--json" in args)
        return 1
