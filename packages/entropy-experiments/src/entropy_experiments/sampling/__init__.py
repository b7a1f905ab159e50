"""Prompts, rewards and rollouts: drawn from the policy, or imported from another framework."""
