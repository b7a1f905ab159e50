"""Who moved the entropy: tokens, rollouts and terms of the optimizer; and what if."""
