"""The ledger of a whole run: the parts of `entropy-probe explain`."""
