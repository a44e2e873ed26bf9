"""Refusals: tests assert the kind of an error and the facts in its sentence, so that the words can improve.

from refusals import refused
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pluribus.errors import PluribusError

Kind = type[PluribusError]


@contextmanager
def refused(kind: Kind, *facts: object) -> Iterator[pytest.ExceptionInfo[PluribusError]]:
    """What happens within must be refused with exactly this kind of error, whose sentence has these facts in it."""
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    assert_facts(caught.value.sentence, *facts)


def assert_facts(sentence: str, *facts: object) -> None:
    """Names, numbers and files that a sentence must have in it, in any order."""
    missing = [str(fact) for fact in facts if str(fact) not in sentence]
    assert not missing, f"{missing} not in: {sentence}"


class Refusal(str):
    """The one sentence that bad input gets on the command line, and its kind."""

    __slots__ = ("kind",)
    kind: str

    @classmethod
    def of(cls, sentence: str, kind: str) -> Refusal:
        made = cls(sentence)
        made.kind = kind
        return made

    def check(self, kind: Kind, *facts: object) -> None:
        """Assert its kind, and the facts in it."""
        assert self.kind == kind.kind, self
        assert_facts(self, *facts)
