"""A transformers model as a `Policy`: scores of its rollouts, and their derivatives."""
