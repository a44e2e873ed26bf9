"""Below a client: batches, steps, state and the books of a run."""
