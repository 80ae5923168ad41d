"""Defines tasks: their prompts, references and scorers. This package knows only text, never torch,
models or methods."""
