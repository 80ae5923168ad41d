"""Many jobs as one command: the ledger that outlives it, the workers that share it, how far it is."""
