"""A method's own parameters, searched at equal budget: what to try, on which examples, and what came of it."""
