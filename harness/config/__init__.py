"""Turns the words of a command line into checked settings and plug-ins, lists what can be named,
and puts errors into words."""
