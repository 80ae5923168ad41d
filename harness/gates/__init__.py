"""Gates: short runs with known results that tell whether machine and versions are right."""
