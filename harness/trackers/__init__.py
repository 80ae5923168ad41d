"""Copies of finished runs for Weights & Biases. A run never depends on one."""
