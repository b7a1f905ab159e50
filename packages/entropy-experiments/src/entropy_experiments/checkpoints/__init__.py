"""What training left on disk: weights, optimizer state, and what is recorded of the step."""
