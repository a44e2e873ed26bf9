"""Several runs: comparisons, studies, searches, tables of papers.

The package is also the function `pluribus.study`: `pluribus.study("my.toml")` runs a study. The fields of
`pluribus.Study` are the keys of its file.
"""

from pluribus.internal.packages import make_callable

make_callable(__name__, "study")
