"""What is decided of a job before any weights are loaded: its settings, its prompts, whether it can run."""
