"""Loops that are not ours, such as `model.generate`: their caches, and how a forward comes by one."""
