"""Several runs: comparisons, studies, searches, tables of papers.

The package is also the function `pluribus.study`, because a package and a function cannot share a name otherwise:
`pluribus.study("my.toml")` runs a study. The fields of `pluribus.Study` are the keys of its file.
"""

import sys
from types import ModuleType
from typing import Any


class _Study(ModuleType):
    """A package that can be called."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Run a study: see `pluribus.study.study.study`."""
        from pluribus.study.study import study

        return study(*args, **settings)


sys.modules[__name__].__class__ = _Study
