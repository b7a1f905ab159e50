"""Readers of rollout dumps, one file per framework."""
