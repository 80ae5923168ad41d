"""Notices on stderr while a command runs."""

from __future__ import annotations

import sys
from functools import cache

SLOW_FP16 = "fp16 is about ten times slower than bf16 on a CPU: use dtype=bf16, or fp32"


@cache
def say_once(message: str) -> None:
    """Once per process, however many jobs of a sweep it concerns."""
    print(f"note: {message}.", file=sys.stderr, flush=True)
