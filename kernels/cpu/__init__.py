"""Contains the compiled CPU backend: one C++ file per group of operations, built by the machine's
compiler on first use.

Without a compiler these modules cannot be imported; the operations then run in plain torch, with
that as the reason."""
