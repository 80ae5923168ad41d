"""Short runs with known results, which tell whether machine and versions are right."""
