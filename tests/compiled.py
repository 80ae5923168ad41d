"""Compiles what tests would compile when they first need it, and each worker for itself: `python -m tests.compiled`."""

from __future__ import annotations

from kernels import ops
from tests.kernels.test_tiles import MODULES, built


def main() -> None:
    for op in ops.ALL:
        if "cpu" in op.targets:
            op.backend("cpu")
    for name in MODULES:
        built(name)


if __name__ == "__main__":
    main()
