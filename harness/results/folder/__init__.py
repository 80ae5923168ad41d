"""The folder of a run as files: where it is, what can be believed of it, and how a damaged one is made whole."""
