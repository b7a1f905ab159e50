"""Checkpoints on a task: pass rate, pass@k, format, length, entropy."""
