"""Notices and tables on a terminal."""
