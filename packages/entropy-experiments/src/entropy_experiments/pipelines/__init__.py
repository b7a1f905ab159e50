"""Whole analyses, from a checkpoint to files: thin, resumable, and the only ones that write."""
