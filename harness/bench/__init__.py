"""Benchmarks. Each compares calls that run in turn in one process, and records the load average. No
hydra here."""
