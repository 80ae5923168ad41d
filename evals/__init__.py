"""Defines tasks: their prompts, references and scorers. This package knows text alone, never torch, models or
methods."""
