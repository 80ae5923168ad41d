"""Moves rows beside the model's own work: threads, streams, and the spans of time in which they
ran."""
