"""A GRPO training by TRL with this project's tasks, the probe on, and every step on record."""
