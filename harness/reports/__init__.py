"""Reports on finished runs: which runs share a table, its cells, its notes, its pictures."""
