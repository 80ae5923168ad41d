"""Makes the table that stands in a paper: columns.py says what its columns are, cells.py computes
their cells, table.py puts rows and columns together, and writers.py writes LaTeX, CSV or
Markdown."""
