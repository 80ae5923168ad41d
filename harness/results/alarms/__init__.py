"""Every alarm there is: what a run's own records give away, and what a table of runs must not hide."""
