"""The Triton backend: one file per group of operations, compiled by Triton on first use.

Without a CUDA device these modules cannot be imported, and the operations take another backend with that reason.
For tests Triton can interpret them on the CPU instead: TRITON_INTERPRET=1, and `use_backend("triton")`.
"""

import os

import torch

if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    raise ImportError("no CUDA device here, and TRITON_INTERPRET is not set")
