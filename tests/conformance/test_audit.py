"""The audit runs for every method, and says for every field what was tried and why the rest was not."""

from __future__ import annotations

import pytest

import pluribus
from conftest import new_folder
from pluribus.conformance.cases import fitting_settings
from pluribus.method import methods
from pluribus.result import Result


def run_short(method: str) -> Result:
    """The shortest run that suits a method."""
    settings = fitting_settings(method) | {"clients": 3}
    return pluribus.run(method, progress=False, out=new_folder(), **settings)


@pytest.mark.parametrize("method", methods())
def test_every_method_can_be_audited(method: str) -> None:
    result = run_short(method)
    found = pluribus.audit(result.folder, clients=2, steps=2, allow_code=True)
    (run,) = found.runs
    fields = run.fields()
    assert all(0 <= one.value.low <= one.value.value <= one.value.high <= 1 for one in run.findings if one.attack == "membership" and one.value)
    print()
    for one in run.findings: print(one.field, "|", one.source, "|", one.attack, "|", one.value, one.says)
