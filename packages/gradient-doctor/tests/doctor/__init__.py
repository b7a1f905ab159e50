"""The doctor's cases: clean recipes, the same recipes with one fault each, and a harness."""
