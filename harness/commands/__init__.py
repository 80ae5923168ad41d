"""Holds what a user types: one file per command, which calls the other folders of the harness for
the work. `run` is `python -m harness` without the name of a command. The commands serve and bench
are folders of their own, with a `__main__.py`."""
