"""Tasks: prompts, references and scorers. This package knows text only, never torch, models or methods."""
