"""Runs one model with one KV method: prefill, seal and decode, and the measurements taken on the
way."""
