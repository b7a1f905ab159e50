"""How good a checkpoint is at a task, and how sure of itself: many checkpoints, same prompts."""
