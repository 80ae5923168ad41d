"""Simulates the store's policies at the paper's scale: a trace of conversations, a server, and
costs; no model runs."""
