"""What a client is built on: batches, steps, state, clock and ledger."""
