"""Holds the benchmarks. Each compares calls that run in turn in one process, and records the load
average. None of them imports hydra."""
