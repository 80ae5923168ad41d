"""Methods to begin with, which `python -m harness.new` copies and docs/extending.md shows: a module and a yaml each."""
