"""Runs presses of NVIDIA's kvpress as methods: a press chooses what stays of a prompt
(github.com/NVIDIA/kvpress).

`kvpress.py` has the method, `building.py` makes a press from a mapping and refuses what cannot run
here, `keep.py` calls the press when a layer is sealed, and `package.py` imports kvpress without its
changes to transformers."""
