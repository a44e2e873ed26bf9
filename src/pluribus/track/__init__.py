"""Observers of the loop: each watches a run and tells someone."""
