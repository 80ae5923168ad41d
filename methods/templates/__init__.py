"""Methods to begin with, which `python -m harness.new` copies: a module and a yaml each."""
