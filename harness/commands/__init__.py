"""What a user types: one file per command, its work in the other rooms. `run` is `python -m harness` with no command's
name after it. The commands serve and bench are rooms of their own, with a `__main__.py`."""
