"""`python -m entropy_experiments.cli` is `entropy-probe`."""

from entropy_experiments.cli import main

main()
