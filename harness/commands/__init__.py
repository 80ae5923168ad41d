"""What a user types: one file per command, its work in the other rooms. `run` is `python -m harness` itself."""
