"""Turns examples into token ids, and decides where an answer ends."""
