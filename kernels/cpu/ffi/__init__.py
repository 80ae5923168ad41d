"""Lets Python call C++: bindings.py describes the calls once, library.py builds the code on first
use."""
