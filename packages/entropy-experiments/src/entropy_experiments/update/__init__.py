"""From a batch of rollouts to the step an optimizer makes of it."""
