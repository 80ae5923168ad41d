"""Connects other projects: kvpress's presses as methods, and our methods as a model of
lm-evaluation-harness."""
