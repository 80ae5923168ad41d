"""Compiles every Triton kernel for an H100 without one: `python -m tests.kernels.compile_for_hopper bfloat16 float32`.

Launches are turned into compilations, down to machine code, for a driver that only names its target. The interpreter
takes what the compiler refuses, so both are needed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

torch.cuda.is_available = lambda: True

import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kernels import ops  # noqa: E402
from kernels.block import Block, Head  # noqa: E402
from kernels.gpu import block, common, copy, kmeans, prefill  # noqa: E402
from tests.kernels.op_cases import cases, converted  # noqa: E402
from tests.kernels.test_block import drawn  # noqa: E402

# of each operation: group sizes and head dims that are no powers of two, chosen rows, lengths that need several pieces
CASES = (
    "segment_attention-gqa8-dim96-three", "segment_attention-gqa4-dim128-per-head",
    "segment_attention-gqa4-dim128-live", "merge_attention-three",
    "prefill_attention-gqa8-dim96-43of131", "prefill_attention_with_column_sums-dim128-70of140",
    "windowed_attention-near-dim128", "windowed_sums-near-dim96",
    "column_sums-dim96-17of51", "row_scores-dim256-g4-128", "channel_scores-g4-16x4100", "channel_sums-g3-5x31",
    "gather_rows-gqa8-dim96-65", "group_margins-g3-30of31", "top_k-333of1000", "top_k-1of70001",
    "group_weights-g3-31-sum", "group_weights-g8-333-largest", "pq_scores-m2b6-g4", "pq_weights-m4b8-g3",
    "rebuild_keys-gqa4-dim128-rank26-129", "rebuild_keys-32-of-48-turned",
)  # fmt: skip
BLOCKS = ("smollm", "qwen3", "dim96-prompt")


class Hopper:
    """As much of a driver as a compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_block(layer: Block, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _, q, _, _ = block.attention_inputs(x, layer, cos, sin)
    block.block_output(x, q, layer)
    block.token_logits(x[:, -1:], Head(layer.eps, layer.norm, layer.up))


def main(dtypes: list[str]) -> None:
    compiled: dict[str, set[int]] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"], self
        assert kernel.metadata.shared <= common._SHARED, f"{self.__name__} asks for {kernel.metadata.shared} bytes"
        if self is block._turn:
            assert "fma" not in kernel.asm["ptx"], "each product of a rotation is rounded, as in torch"
        compiled.setdefault(f"{self.__module__}.{self.__name__}", set()).add(id(kernel))
        return kernel

    driver.set_active(Hopper())
    JITFunction.run = compile_only
    common._programs_wanted = lambda: 528
    found = {str(case): case for case in cases()}
    for name in CASES:
        op = next(op for op in ops.ALL if op.name == found[name].op)
        assert not isinstance(op._import("triton"), str), op._import("triton")
        for dtype in dtypes:
            op._load("triton")[0](*converted(found[name].args, getattr(torch, dtype)))
    for dtype in dtypes:
        for shape in BLOCKS:
            compile_block(*drawn(shape, getattr(torch, dtype)))
        x = torch.zeros(1, 2, 50, 128, dtype=getattr(torch, dtype))
        copy.put_rows(x, torch.zeros(1, 2, 9, dtype=torch.int64), x[:, :, :9])
    widest = torch.zeros(1, 1, 200, 256, dtype=torch.bfloat16)
    prefill.prefill_attention_with_column_sums(widest, widest, widest, 1.0)
    x = torch.zeros(3, 500, 32)
    kmeans._means(x, kmeans._assign(x, x[:, :70].contiguous()), x[:, :70])
    print(
        f"triton {triton.__version__}:", ", ".join(f"{name} x{len(kinds)}" for name, kinds in sorted(compiled.items()))
    )


if __name__ == "__main__":
    main(sys.argv[1:])
