"""The table that stands in a paper: columns.py says what its columns are, cells.py computes them,
table.py puts rows and columns together, and writers.py writes it as LaTeX, CSV or Markdown."""
