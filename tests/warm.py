"""Imported by the server of tests/forks.py: what each run would import, look up and compose anew, its forks have."""

from __future__ import annotations

from importlib import import_module

import pytest

from harness.config.compose import composed
from harness.results.provenance import provenance
from kernels import ops
from tests.fast import MODEL_ARGS, TASK_ARGS
from tests.once import look_up_once

IMPORTED_LATE = (  # by a run
    "harness.commands.report",
    "pydoc_data.topics",
    "scipy.stats",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.processing_utils",
    "transformers.tokenization_utils_tokenizers",
)

for module in IMPORTED_LATE:
    import_module(module)
for op in ops.ALL:
    for backend in op.targets:
        op.backend(backend)
look_up_once(pytest.MonkeyPatch())  # for good
provenance()
composed(("method=streaming", *MODEL_ARGS, *TASK_ARGS))
