"""Runs several sequences together: who joins and leaves, the cache that the model sees, and what
each sequence gave."""
