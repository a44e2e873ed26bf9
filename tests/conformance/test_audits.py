"""The audit runs for every method, and says for every field of its uploads what was tried, or why it was not."""

from __future__ import annotations

import pytest

import pluribus
from conftest import new_folder
from pluribus.audit.findings import CARD, MODEL
from pluribus.conformance.cases import fitting_settings
from pluribus.method import methods

NUMBERS = ("membership", "inversion")


@pytest.mark.parametrize("method", methods())
def test_every_method_can_be_audited(method: str) -> None:
    settings = fitting_settings(method) | {"clients": 3}
    result = pluribus.run(method, progress=False, out=new_folder(), **settings)
    (run,) = pluribus.audit(result, clients=2, steps=2).runs
    fields = run.fields()
    assert fields.pop((CARD, "-")).keys() == {"disclosure"}
    assert fields.pop((MODEL, "-"))["membership"].was_tried
    assert bool(fields) == bool(result.ledger.total["up"]), "what is sent is audited"
    for (name, _), attacks in fields.items():
        assert attacks["disclosure"].says
        assert attacks.keys() == {"disclosure", *([] if "enrolment" in name else NUMBERS)}
    for one in run.findings:
        assert one.value is not None or one.attack == "disclosure" or one.says.startswith("Not tried")
        if one.value is not None:
            assert one.value.low <= one.value.value <= one.value.high
            assert one.attack == "inversion" or 0 <= one.value.low <= one.value.high <= 1
