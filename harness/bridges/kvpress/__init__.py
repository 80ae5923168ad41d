"""Runs presses of NVIDIA's kvpress as methods: a press chooses what stays of a prompt
(github.com/NVIDIA/kvpress).

`kvpress.py` has the method, `building.py` imports kvpress, makes a press from a mapping and refuses
what cannot run here, and `keep.py` calls the press when a layer is sealed."""
