"""Copies of finished runs for experiment trackers. A run never depends on one."""
