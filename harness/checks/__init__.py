"""Checks whether a method keeps its contract: each check runs it on a small model and compares two ways to an answer,
or what it reads and holds with what it says. `CHECKS` in contract.py lists them. `python -m harness.check` makes them
of any method, and tests/methods/test_contract.py of all that are here."""
