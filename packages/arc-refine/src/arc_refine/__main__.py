"""`python -m arc_refine` is `entropy-probe arc`."""

from arc_refine.command import main

main()
