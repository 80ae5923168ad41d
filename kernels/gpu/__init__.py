"""Contains the Triton backend: one file per group of operations, compiled by Triton on first use.

Without a CUDA device, or without what Triton needs to build its launchers, the import fails;
another backend then runs the operations, with that as the reason. Tests let Triton interpret the
kernels on the CPU: TRITON_INTERPRET=1 and `use_backend("triton")`."""

import os

import torch

from kernels import toolchain

if not os.environ.get("TRITON_INTERPRET"):
    if not torch.cuda.is_available():
        raise ImportError("no CUDA device here, and TRITON_INTERPRET is not set")
    if reason := toolchain.unfit():
        raise ImportError(reason)

from triton import knobs
from triton.runtime.errors import OutOfResources

if not knobs.runtime.interpret:
    toolchain.clock_compiling(knobs.runtime)

# a kernel wants more shared memory than the card has, as compiling it shows
TOO_LARGE = (OutOfResources,)
