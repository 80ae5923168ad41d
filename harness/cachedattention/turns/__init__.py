"""Conversations whose keys and values outlive the turn: they are stored at its end and come back at
the start of the next."""
