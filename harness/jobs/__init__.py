"""A run from its settings to its folder: prompts prepared, memory asked for, generations made and recorded."""
