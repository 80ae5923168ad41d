"""Conversations whose keys and values outlive the turn: stored at its end, back at the start of the next."""
