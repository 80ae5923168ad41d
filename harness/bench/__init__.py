"""Benchmarks: ratios from one run, side by side, with the load average beside them. No hydra here."""
