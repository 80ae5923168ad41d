"""Contains KV-cache methods, one file each. A method knows one layer's keys and values, never a
model, a task or a file."""
