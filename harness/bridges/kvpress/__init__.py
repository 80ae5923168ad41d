"""Lets NVIDIA's kvpress choose what stays of a prompt: its presses are methods here (github.com/NVIDIA/kvpress).

`kvpress.py` has the method, `building.py` makes a press of a mapping and refuses what cannot run here, `keep.py` calls
the press when a layer is sealed, and `package.py` imports kvpress without what that changes in transformers.
"""
