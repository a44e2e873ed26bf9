"""Several runs: comparisons, searches, tables of papers."""
