"""Promises about odd clients: with one class or one sample, absent, late, or the only ones that answer."""

from __future__ import annotations

from pluribus.conformance.bits import state_of, tensor_difference
from pluribus.conformance.cases import Case
from pluribus.conformance.hands import present, worked
from pluribus.conformance.learning import finite_numbers
from pluribus.conformance.promise import BrokenError

# Of clients 0 and 3 the latter is late, then 1 is alone, then come 1 and 3 again and 2 for the first time.
EVENTFUL = {"rounds": 3, "participation": 0.75, "drop_rate": 0.3, "straggler_rate": 0.3, "seed": 1}


def runs(case: Case) -> None:
    """Every client is asked and answers in every round, and is evaluated in every view, with finite numbers."""
    result, parts = case.result, case.seen_parts
    warmup = parts.task.warmup
    for record in result.history:
        t, expected = record["round"], len(present(parts, record["round"]))
        if not record["present"] == record["answered"] == expected:
            raise BrokenError(f"round {t}: {record['answered']} of {expected} clients answered")
        if t >= warmup and len(record["clients"]) != case.settings["clients"]:
            raise BrokenError(f"round {t}: {len(record['clients'])} of {case.settings['clients']} were evaluated")
    for k, views in result.history[-1]["clients"].items():
        if views.keys() != set(result.views):
            raise BrokenError(f"client {k} was evaluated in the views {sorted(views)}, not {sorted(result.views)}")
        if result.clients[int(k)].test and any(figures["test"] is None for figures in views.values()):
            raise BrokenError(f"client {k} has test data, but no {result.metric}")


def runs_to_finite_numbers(case: Case) -> None:
    """As `runs`, for clients that are easily divided by zero."""
    runs(case)
    finite_numbers(case)


def absent_and_late_clients(case: Case) -> None:
    """Some take part, some drop out, some are late; all are evaluated."""
    for record in case.result.history:
        if len(record["clients"]) != case.settings["clients"]:
            raise BrokenError(f"round {record['round']}: {len(record['clients'])} clients were evaluated, not all")
    finite_numbers(case)


def no_answer_no_change(case: Case) -> None:
    """A round without answers leaves the server as it was, whether clients drop out or are late."""
    before = case.but(rounds=2).once(worked).server[0]
    for trouble in ("drop_rate", "straggler_rate"):
        result = case.but(**{trouble: 0.999999}).result
        if found := tensor_difference(before, state_of(result).server()):
            raise BrokenError(f"nobody answers ({trouble}), but server.state {found}")
