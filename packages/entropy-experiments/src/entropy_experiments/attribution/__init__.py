"""Who changed the entropy: tokens, rollouts and terms of the optimizer; and what if."""
