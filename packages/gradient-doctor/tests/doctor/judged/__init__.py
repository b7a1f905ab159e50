"""Held-out cases: whoever writes or tunes a detector must not read this folder."""
