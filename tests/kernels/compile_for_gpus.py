"""Compiles every Triton kernel for a GPU that is not here: `python -m tests.kernels.compile_for_gpus 90 bfloat16`.

Launches are turned into compilations, down to machine code, for a driver that only names its target: the first word, a
compute capability such as 80 (A100), 89 (L4), 90 (H100), 100 (B200) or 120 (RTX 5090). The interpreter takes what the
compiler refuses, so both are needed. With the word `once` each kernel is compiled for its first launch alone.

Prints two tables. The first has a line for each kernel: how many variants the test cases ask for, and the most
registers, stack (bytes of a thread that did not fit into registers) and shared memory that one of them takes.

The second has a line for each launch at the shape of an 8B model over 131072 tokens in bf16, of which 2048 are chosen:
what the operation must read, what the kernel asks for, how many programs a multiprocessor then holds, how often the
launch fills all multiprocessors of an H200 (its waves), and what its loops read in pieces that are too small.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

torch.cuda.is_available = lambda: True

import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from harness.bench import op_cases  # noqa: E402
from harness.bench.common.operations import bytes_read  # noqa: E402
from harness.bench.common.synthetic import LayerShape  # noqa: E402
from harness.bench.op_cases import Inputs, OpCase  # noqa: E402
from harness.terminal.tables import Column, text_table  # noqa: E402
from kernels import ops  # noqa: E402
from kernels.block import DecoderBlock, Head  # noqa: E402
from kernels.coded import Coded  # noqa: E402
from kernels.dispatch import use_backend  # noqa: E402
from kernels.gpu import block, common, rope  # noqa: E402
from kernels.partial import Guess, NewPartial  # noqa: E402
from kernels.ragged import Ragged, with_sizes  # noqa: E402
from kernels.reference import pq_held  # noqa: E402
from tests.kernels.machine_code import SHARED, WARPS, MachineCode  # noqa: E402
from tests.kernels.op_cases import cases, converted  # noqa: E402
from tests.kernels.ragged_cases import ragged_cases  # noqa: E402
from tests.kernels.test_block import drawn  # noqa: E402

# each way through a kernel that the shape of an 8B model below does not take, and the widest heads and tables
CASES = (
    "segment_attention-gqa8-dim96-three", "segment_attention-gqa4-dim128-per-head",
    "segment_attention-gqa4-dim128-live", "segment_attention-gqa5-dim48-weighted", "merge_attention-three",
    "merge_attention_with_lse-views-dim48", "prefill_attention-gqa8-dim96-43of131", "windowed_sums-near-dim96",
    "column_sums-dim128-32of300", "row_scores-dim256-g4-128", "gather_rows-gqa8-dim96-65", "group_margins-g3-30of31",
    "top_k-333of1000", "top_k-1of20001", "pq_best-wide", "pq_best-some-3-of-each", "top_k-6667of20001",
    "top_k-some-of-20001", "group_weights-g3-31-sum", "group_weights-g8-333-largest", "pq_weights-m4b8-g3",
    "rebuild_keys-gqa4-dim128-rank26-129", "rebuild_keys-32-of-48-turned", "segment_attention-3-of-each-g3",
    "segment_attention-rows-of-one-number", "pq_weights-3-of-each", "top_k-some-of-3", "top_k-some-of-9001",
    "row_scores-3-of-each", "row_weights-3-of-each", "attention_with_mean-gqa5-dim48", "row_weights-[20]-of-70",
    "channel_sums-2-of-each-300", "channel_weights-2-of-each-300", "gather_rows-3-of-each",
    "gather_tiers-gqa8-dim96-65", "gather_tiers-held-of-3", "gather_tiers-numbers", "group_margins-some-of-3",
    "group_weights-4100-and-3", "rebuild_keys-3-of-each", "coded_attention-3-of-each-int4",
    "decode_rows-some-of-each-int8", "live_scores-3-of-each", "live_scores-3-by-channel",
    "row_scores-dim25-by-channel", "partial_products-dim64-25", "partial_products-dim96-50",
    "rotate_to-dim64-64-10-to-[8]", "rotate_to-3-of-each", "rotate-dim256-64-19-by-token", "pick_channels-some-of-3",
    "page_scores-dim256-g4-128", "page_scores-3-of-each", "token_rows-3-of-each-and-last", "segment_attention-five",
    "coded_attention-int4", "coded_attention-int2", "coded_attention-int4-dim96", "decode_rows-int8-some",
    "decode_rows-int4-moved", "decode_rows-int2-all", "coded_attention-fp8-dim96", "decode_rows-fp8-some",
    "coded_attention-int8-and-others", "decode_rows-int4-recent", "decode_rows-int2-values-int8-dim96-some",
    "decode_rows-last-of-each-int4", "encode_codes-int2", "coded_attention-int4-kept4", "decode_rows-int4-kept4-some",
    "coded_attention-nvfp4", "coded_attention-nvfp4-dim80", "decode_rows-nvfp4-some", "decode_rows-nvfp4-dim80-all",
    "coded_attention-tq2", "coded_attention-tq3", "coded_attention-tq4", "coded_attention-tq2q",
    "coded_attention-tq3q-dim96-turned", "coded_attention-tq4q-turned", "coded_attention-int4-turned",
    "coded_attention-3-of-each-tq3", "decode_rows-tq3-some", "decode_rows-tq4-some", "last_alike-300-of-128",
    "last_alike-37-of-20",
    "estimated_logits-gqa4-dim128-2", "estimated_logits-3-of-each-6", "log_sum_exps-g3", "carrying-0.9-of-2050-spread2",
    "carrying-1.0-of-333-spread9", "row_scores_with_lse-g4-1024", "uniform_draws-300-of-9", "sampled_weights-3",
)  # fmt: skip
BLOCKS = ("smollm", "qwen3", "dim96-prompt", "glm-prompt")
LOGITS = "carrying", "sampled_weights"  # take them in fp32, whatever the keys are
OPS = {op.name: op for op in ops.ALL}
SMS = 132  # multiprocessors of an H100 or H200
HEAD = (
    "operation", "MB", "kernel", "warps", "registers", "stack", "shared", "per SM", "programs", "waves", "instructions",
    "in loops", "narrow global", "narrow shared", "by column",
)  # fmt: skip


class Driver:
    """As much of a driver as a compilation asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Multiprocessors:
    """What a launch asks of a card's properties."""

    multi_processor_count = SMS

    def __init__(self, capability: int) -> None:
        self.shared_memory_per_multiprocessor = SHARED[capability]
        self.max_threads_per_multi_processor = 32 * WARPS[capability]


def compile_block(layer: DecoderBlock, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _, q, _, _ = block.attention_inputs(x, layer, cos, sin)
    if x.shape[1] == 1:
        side = x.new_zeros(len(x), len(layer.k.weight) // layer.head_dim, 9, layer.head_dim)
        for held in (side, Ragged(side.split(1))):
            block.attention_inputs_stored(x, x, layer, cos, sin, held, held, torch.zeros(len(x), dtype=torch.int64))
        of_heads = Ragged([head for part in side.split(1) for head in part.split(1, 1)])
        row = torch.zeros(len(of_heads.parts), dtype=torch.int64)
        block.attention_inputs_stored(x, x, layer, cos, sin, of_heads, of_heads, row)
    block.block_output(x, q, layer)
    block.token_logits(x[:, -1:], Head(layer.eps, layer.norm, layer.up))


def compile_cases(dtypes: list[torch.dtype]) -> None:
    found = {str(case): case for case in [*cases(), *ragged_cases()]}
    for dtype in dtypes:
        for name in CASES:
            args = converted(found[name].args, torch.float32 if found[name].op in LOGITS else dtype)
            if "heads of up to" not in str(refused(found[name].op, *args)):  # in fp32, 256 channels are too wide
                launch(found[name].op, *args)
        for shape in BLOCKS:
            compile_block(*drawn(shape, dtype))
        launch("count_read", torch.zeros(1, 8, 9), torch.zeros(1, 32, dtype=torch.int64)[:, :8])
        launch("likeliest_tokens", torch.zeros(2, 128_256, dtype=dtype))
        for tokens, count in ((131_072, 2048), (8192, 128)):  # of an 8B model, as below
            launch("top_k", torch.zeros(1, 8, tokens), count)
        q, centroids = torch.zeros(1, 32, 1, 128, dtype=dtype), torch.zeros(1, 8, 2, 64, 64, dtype=dtype)
        codes = torch.zeros(1, 8, 130_048, 2, dtype=torch.uint8)
        launch("pq_best", q, centroids, codes, pq_held(codes, 64), 0.1, 1008)
        index, live = torch.empty(1, 8, 50, 131_136, dtype=dtype).mT, torch.ones(1, dtype=torch.int64)
        several = Ragged([index], dead=0)
        several.mT.alignment = 16 * dtype.itemsize
        for held in (index, several):
            launch("live_scores", torch.empty(1, 8, 4, 50, dtype=dtype), held, live)
        launch("group_margins", torch.empty(1, 8, 4, 131_136), torch.empty(1, 8, 4, 513), 131_072, 5.0, 2048)
        launch("page_scores", torch.empty(1, 8, 4, 128, dtype=dtype), torch.empty(1, 8, 8192, 256, dtype=dtype))
        x = torch.zeros(1, 2, 50, 128, dtype=dtype)
        for held in (x, Ragged([x])):
            lse, query, at = torch.zeros(1, 8), x.new_zeros(1, 8, 1, 128), torch.ones(1, dtype=torch.int64)
            launch("add_received", torch.zeros(1, 2, 64), query, held, lse, 0.1, at)
            scores: Any = torch.zeros(1, 2, 4, 50)
            scores = with_sizes(scores, held, 3)
            launch("pick_overwritten", scores, lse, 0.1, at.new_zeros(1, 64), at, at.new_zeros(1, 4))
            basis, columns = query.new_zeros(1, 2, 128, 50), torch.zeros(1, 2, 50, 64, dtype=dtype).mT
            new = NewPartial(x[:, :, :1], basis, Ragged([columns]) if isinstance(held, Ragged) else columns, at)
            launch("partial_products", Guess(query, x[0, :1, :1], x[0, :1, :1], basis, 0.1), new)
            launch("partial_products", None, new._replace(rows=held, basis=basis[..., :40].contiguous()))
            launch("put_rows", held, torch.zeros(1, 2, 9, dtype=torch.int64), x[:, :, :9])
        keys = torch.zeros(1, 2, 600, 128, dtype=dtype)
        for parts, clusters in ((4, 256), (4, 70)):
            launch("kmeans", keys.unflatten(3, (parts, -1)).transpose(2, 3), torch.arange(clusters), 1, 0.0)


def launch(name: str, *args: Any) -> None:
    """Compile what an operation launches."""
    reason = refused(name, *args)
    assert reason is None, f"{name}: {reason}"
    OPS[name].backend("triton").run(*args)


def refused(name: str, *args: Any) -> str | None:
    """Return the reason why Triton does not take a call, or None."""
    common.INTERPRETED = True  # for this question only: nothing lies on a device here
    with use_backend("triton"):
        reason = OPS[name].refusal("triton", *args)
    common.INTERPRETED = False
    return reason


class Compilations:
    """Stands where Triton launches kernels, and compiles them in place of running."""

    def __init__(self, capability: int, once: bool) -> None:
        self.codes: dict[str, dict[int, MachineCode]] = {}  # by kernel, of each variant
        self.launches: list[tuple[str, int, MachineCode]] = []  # kernel and programs, since they were last taken
        self._capability, self._once = capability, once
        self._run = JITFunction.run
        driver.set_active(Driver(capability))
        JITFunction.run = lambda kernel, *args, **options: self.compile(kernel, *args, **options)
        common._device = lambda: Multiprocessors(capability)

    def compile(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name = f"{function.__module__}.{function.__name__}"
        variants = self.codes.setdefault(name, {})
        if variants and self._once:
            self.launches.append((name, prod(grid), next(iter(variants.values()))))
            return None
        kernel = self._run(function, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"], function
        if function is rope._turn:
            # a bf16 product is one below sm_90, which has no other: it is rounded all the same
            assert "fma.rn.f32" not in kernel.asm["ptx"], "each product of a rotation is rounded, as in torch"
        if id(kernel) not in variants:
            variants[id(kernel)] = MachineCode(kernel, self._capability)
        self.launches.append((name, prod(grid), variants[id(kernel)]))
        return kernel

    def of_all(self) -> str:
        """Return a table of what each kernel takes at most."""
        kinds = [(name, [*variants.values()]) for name, variants in sorted(self.codes.items())]
        rows = [
            (name, len(codes), *(max(getattr(code, key) for code in codes) for key in ("registers", "stack", "shared")))
            for name, codes in kinds
        ]
        return table(("kernel", "variants", "registers", "stack", "shared"), rows)

    def of_launches(self, operations: Iterable[OpCase]) -> str:
        """Return a table of what the kernels of these operations take, a line for each launch. What Triton refuses is
        left out, and so is what a kernel takes if it may have been compiled for another launch."""
        rows = []
        for case in operations:
            self.launches.clear()
            if "triton" in OPS[case.op].targets and refused(case.op, *case.args) is None:
                launch(case.op, *case.args)
                megabytes = f"{bytes_read(case.op, case.args) / 1e6:.3g}"
                described = [(name,) if self._once else _launch(name, *how) for name, *how in self.launches]
                rows += [(f"{case.op} {case.what}", megabytes, *row) for row in described]
        return table(HEAD[:3] if self._once else HEAD, rows)


def _launch(name: str, programs: int, code: MachineCode) -> tuple[Any, ...]:
    wave = SMS * code.programs
    return (
        name.removeprefix("kernels.gpu."), code.warps, code.registers, code.stack, code.shared, code.programs, programs,
        f"{programs / wave:.2f}", code.instructions, code.looped, code.narrow_global, code.narrow_shared, code.columns,
    )  # fmt: skip


class LargeInputs(Inputs):
    """Inputs of the size of a long prompt, in memory that nobody fills: no kernel runs."""

    def random(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype or self.shape.dtype)

    def rows(self, heads: int, among: int, count: int) -> Tensor:
        return torch.zeros(1, heads, min(count, among), dtype=torch.int64)

    def coded(self, bits: int) -> Coded:
        """Return codes of the right shapes: those of a few tokens, as often as they are needed."""
        few = Inputs(self.shape, tokens=128, budget=65, prefill=1)
        codes = few.coded(bits)
        k, v, k_range, v_range = (part.repeat(1, 1, self.tokens // 128, 1) for part in codes.all_four)
        return codes._replace(k=k, v=v, k_range=k_range, v_range=v_range)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    columns = zip(head, *([str(entry) for entry in row] for row in rows), strict=True)
    return text_table([Column(name, "", cells, left=True) for name, *cells in columns], width=sys.maxsize)


def main(words: list[str]) -> None:
    capability, once = int(words[0]), "once" in words
    compilations = Compilations(capability, once)
    shape = LayerShape(32, 8, 128, torch.bfloat16, torch.device("cpu"))
    inputs = LargeInputs(shape, tokens=131072, budget=2048, prefill=1024)
    launches = compilations.of_launches(op_cases.cases(inputs))
    compile_cases([getattr(torch, name) for name in words[1:] if name != "once"])
    print(f"triton {triton.__version__}, sm_{capability}", compilations.of_all(), launches, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
