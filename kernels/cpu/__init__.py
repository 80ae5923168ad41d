"""This is the compiled CPU backend: one C++ file per group of operations, built by the machine's compiler on first use.

Without a compiler these modules cannot be imported, and the operations fall back to plain torch, with that as the
reason.
"""
