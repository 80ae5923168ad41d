"""Notices and tables on a terminal, and the signals that come from there."""
