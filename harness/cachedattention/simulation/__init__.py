"""Simulates the store's policies at the scale of the paper: a trace of conversations, a server, and
costs. No model runs."""
