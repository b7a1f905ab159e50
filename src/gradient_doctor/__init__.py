"""Where did the gradient stop? An empty room: nothing is here yet."""
