"""The store's policies at the paper's scale: a trace of conversations, a server, costs; nothing is computed."""
