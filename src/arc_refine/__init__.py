"""The ARC prompt-refinement trainer. An empty room: nothing is here yet."""
