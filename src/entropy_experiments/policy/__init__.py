"""The model side of a policy: its files, its optimizer's state, and its scores."""
