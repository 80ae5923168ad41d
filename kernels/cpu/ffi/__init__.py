"""How Python calls C++: described once (bindings.py), built on first use (library.py)."""
