"""Rollouts drawn, stored and imported: what a policy said, as the mathematics reads it."""
