"""Compiles what tests would compile when they first need it, and each worker for itself: `python -m tests.compiled`."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from importlib import import_module

from kernels import ops
from tests.kernels.test_tiles import MODULES, built


def compiled(name: str) -> None:
    """Build the libraries of a module of kernels.cpu."""
    import_module(f"kernels.cpu.{name}")
    if name in MODULES:
        built(name)


def main() -> None:
    names = {op.targets["cpu"].rpartition(".")[2] for op in ops.ALL if "cpu" in op.targets}
    last = names & {"prefill"}  # it would build decode and scores, too, beside the process that does
    with ProcessPoolExecutor() as pool:
        list(pool.map(compiled, [*sorted(names - last, reverse=True), *last]))


if __name__ == "__main__":
    main()
