"""What every method promises, one line each, and the check of one method."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pluribus.conformance import clients, equality, every_kind, learning, messages
from pluribus.conformance.cases import PAIR, STATISTICS, Case
from pluribus.conformance.digits import LONELY, TWO_CLASSES
from pluribus.conformance.promise import Promise
from pluribus.conformance.report import Line
from pluribus.errors import MessageError, NotFiniteError, UserCodeError
from pluribus.method import Method

SMALLER = ({"clients": 2, "rounds": 1}, {"clients": 2})
TWO_CLIENTS = ({"clients": 2},)
STATE = "Keep all that changes in client.state (from prepare) or server.state (from setup), not in global variables."
DRAWS = "Take every random number from client.draw, server.draw, task.draw or their make()."
ODD = "Handle a class that the client does not hold, a batch of one sample, and a mean over nobody."

WELL_FORMED = Promise(
    "the class is well formed",
    learning.well_formed,
    "Put @dataclass(frozen=True) above the class.",
    errors=(UserCodeError,),
)
SAME_SEED = Promise("same seed, same bits", equality.same_seed_same_bits, STATE, smaller=SMALLER)
RUNS = Promise("runs to the end", clients.runs, "Mend the line that raises the error.", smaller=SMALLER)

PROMISES: tuple[Promise[Case], ...] = (
    WELL_FORMED,
    RUNS,
    SAME_SEED,
    Promise(
        "its numbers are finite",
        learning.finite_numbers,
        "Guard divisions and logarithms, and clamp what can be zero.",
        smaller=SMALLER,
        errors=(NotFiniteError,),
    ),
    Promise(
        "bytes are as declared",
        messages.bytes_as_declared,
        "Declare every field in schema, with the shape and dtype that is sent.",
        smaller=SMALLER,
        errors=(MessageError,),
    ),
    Promise(
        "no more traffic than it says",
        messages.traffic_within_bound,
        "Raise what traffic() returns to the largest message.",
        smaller=SMALLER,
    ),
    Promise(
        "one schema for all clients of a model",
        messages.one_schema_per_model,
        "Derive the schema from the task, card.model, card.width and card.head alone.",
        {"clients": 8},
    ),
    Promise(
        "download is pure",
        messages.pure_download,
        "Change the server in aggregate alone: download only builds a message.",
        smaller=SMALLER,
    ),
    Promise(
        "every field is used",
        messages.every_field_is_used,
        "Use the field in aggregate (uploads), in receive or in the loss (downloads), or do not send it.",
        smaller=TWO_CLIENTS,
        compares=True,
    ),
    Promise("evaluation changes nothing", equality.pure_evaluation, STATE, smaller=SMALLER, compares=True),
    Promise("another seed, other numbers", equality.other_seed_other_numbers, DRAWS),
    Promise(
        "the order of clients does not matter",
        equality.any_order_of_clients,
        "Let clients share nothing but messages: no class attribute, no global variable.",
        smaller=SMALLER,
        compares=True,
    ),
    Promise(
        "resumes to the same bits",
        equality.resumed_equal,
        STATE,
        clients.EVENTFUL,
        ({"clients": 2, "rounds": 2, "participation": 1.0, "drop_rate": 0.0, "straggler_rate": 0.0, "seed": 0},),
        compares=True,
    ),
    Promise("clients may leave memory", equality.clients_may_leave_memory, STATE, smaller=TWO_CLIENTS, compares=True),
    Promise(
        "worker processes give the same bits",
        equality.workers_equal,
        "Let clients share nothing but messages: each process has its own global variables.",
        {"clients": 2},
        compares=True,
    ),
    Promise(
        "steps are pure tensor programs",
        learning.pure_steps,
        "In a step, use masks and torch.where instead of values, and read client.now instead of the round.",
        {"clients": 2, "partition": "iid", "models": PAIR},
    ),
    Promise(
        "captured steps give the same bits",
        equality.captured_equals_eager,
        "In a step, use tensor operations on client.state, client.got and client.now alone.",
        {"device": "cuda"},
        SMALLER,
        compares=True,
    ),
    Promise(
        "training is kept",
        learning.training_is_kept,
        "Train with client.fit, and leave client.model and client.state as trained.",
        smaller=TWO_CLIENTS,
    ),
    Promise(
        "rounds build on each other",
        learning.rounds_build_on_each_other,
        "Install in receive only what was sent, and build modules in prepare alone.",
        smaller=TWO_CLIENTS,
    ),
    Promise(
        "the server learns from uploads",
        learning.server_learns,
        "Write what aggregate computes to server.state.",
        smaller=SMALLER,
    ),
    Promise(
        "predictions depend on the image",
        learning.predictions_differ,
        "Let predict return the scores of its images.",
    ),
    Promise(
        "clients with one class or one sample",
        clients.runs_to_finite_numbers,
        ODD,
        {"data": LONELY, "partition": "pathological", "classes_per_client": 1, "models": STATISTICS, "rounds": 1},
    ),
    Promise("two classes", clients.runs_to_finite_numbers, ODD, {"data": TWO_CLASSES, "rounds": 1}, TWO_CLIENTS),
    Promise(
        "less data than a batch", clients.runs_to_finite_numbers, ODD, {"batch_size": 500, "rounds": 1}, TWO_CLIENTS
    ),
    Promise(
        "absent and late clients",
        clients.absent_and_late_clients,
        "Work with the uploads of those who answered, and with clients that missed rounds.",
        clients.EVENTFUL,
    ),
    Promise(
        "no answer, no change",
        clients.no_answer_no_change,
        "Change the server in aggregate alone, which is not called if nobody answers.",
        {"rounds": 1},
        TWO_CLIENTS,
    ),
    *every_kind.PROMISES,
)


def check_method(method: str | Method | type[Method], scratch: Path, device: str = "auto") -> Iterator[Line]:
    """Check all promises of a method. If it does not run at all, one line says why, and the others are skipped."""
    try:
        case = Case(method, scratch)
    except UserCodeError as error:  # what a run refuses, too
        yield Line(WELL_FORMED.name, "failed", str(error))
        yield from _skip(WELL_FORMED)
        return
    try:
        _ = case.result
    except Exception as error:
        broken = next((one for one in PROMISES if isinstance(error, one.errors)), RUNS)
        yield broken.failure(case, error)
        yield from _skip(broken)
        return
    repeats = True
    for promise in PROMISES:
        if promise.settings.get("device") == "cuda" and device == "cpu":
            yield Line(promise.name, "skipped", "only on a GPU.")
        elif promise.compares and not repeats:
            yield Line(promise.name, "skipped", "equal runs differ already.")
        else:
            line = promise.check(case)
            repeats = repeats and not (promise is SAME_SEED and line.status == "failed")
            yield line


def _skip(but: Promise[Case]) -> Iterator[Line]:
    return (Line(one.name, "skipped", "it does not run yet.") for one in PROMISES if one is not but)
