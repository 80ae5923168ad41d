"""Searches a method's own parameters at equal budget."""
