"""Measures statistics of a model's keys and attention weights that papers report, and that no run of a method
shows."""
