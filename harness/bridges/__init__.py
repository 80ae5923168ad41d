"""Holds what makes other projects' code run here: a room for each project, which needs that project installed."""
