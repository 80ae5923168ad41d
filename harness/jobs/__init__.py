"""Takes a run from its settings to its folder: prepares prompts, checks memory, generates answers
and records them."""
