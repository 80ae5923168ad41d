"""From an example to token ids, and where an answer ends."""
