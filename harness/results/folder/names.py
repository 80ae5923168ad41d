"""What the files of a run's folder are called."""

INFO = "run.json"  # status, times, provenance, and the digests of the files below
CONFIG = "config.yaml"  # resolved
EXAMPLES = "examples.jsonl"  # the results themselves
RESCORED = "rescored.jsonl"  # id, score, details, turns: what later scorers made of the outputs in examples.jsonl
SUMMARY = "summary.json"  # a copy for other programs
ERROR = "error.txt"  # the traceback of a session that failed
DAMAGED = ".damaged"  # behind the name of a file: what was taken out of it
