"""Contains operations on tensors: no models, no configs, no state. Import the modules; this file
must stay empty of imports.

transformers may import a top-level package named `kernels` while it is itself being imported (it
looks for the PyPI package of that name), so nothing may happen here."""
