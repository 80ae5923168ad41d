"""Searches a method's own parameters at equal budget: what to try, on which examples, and what was
found."""
