"""Lets NVIDIA's kvpress choose what stays of a prompt: each of its presses is a method here (github.com/NVIDIA/kvpress).

`method.py` has the method, `building.py` makes a press of a mapping and refuses what cannot run here, `keep.py` calls
the press when a layer is sealed, and `package.py` imports kvpress without what that changes in transformers.
"""
