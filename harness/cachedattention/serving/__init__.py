"""A serving loop in real time: conversations arrive, wait for a slot, are answered, think, and come back."""
