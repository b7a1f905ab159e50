"""The same numbers inside training: predict before the step, measure after it."""
