"""Serves loops that are not ours, such as `model.generate`: their caches, and how a forward gets
one."""
