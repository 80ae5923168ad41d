"""Finished runs side by side: what belongs into one table, its cells, its notes, its pictures."""
