"""What the policy is asked, and what its answers are worth."""
