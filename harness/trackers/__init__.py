"""Copies finished runs to Weights & Biases. A run never depends on its copy."""
