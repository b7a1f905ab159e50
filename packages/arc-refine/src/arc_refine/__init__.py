"""The ARC prompt-refinement trainer: its modules are imported one by one, so this costs nothing."""
