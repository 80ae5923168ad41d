"""Offsets into memory never pass 2^31 as int32: kernels run by Triton's interpreter as if far out in a huge tensor.

One program of each launch runs, with the number of a head, a row or a problem near 2^30. Nothing is read or written,
and the interpreter checks every sum and product of whole numbers for overflow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import gpu, ops
from kernels.dispatch import use_backend
from kernels.partial import Guess, NewPartial
from kernels.ragged import Ragged
from tests.kernels.op_cases import cases, converted, stored
from tests.kernels.ragged_cases import ragged_cases
from tests.kernels.test_block import drawn

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from kernels.gpu import top_k

FAR = 1 << 30
AXIS = {  # of a kernel's grid: that of heads, rows or problems, whose number multiplies sizes
    "_attend": 0, "_merge": 0, "_merge_apart": 1, "_channels": 1, "_log_sum_exp": 0, "_weights": 1,
    "_margins": 1, "_put": 1,
    "_from_tiers": 0, "_assign": 1, "_move": 0, "_table": 0, "_look_up": 1, "_rows": 1, "_columns": 1, "_rebuild": 1,
    "_scores": 1, "_best": 0, "_count": 0, "_place": 0, "_cells": 0, "_count_kinds": 0, "_place_kinds": 0,
    "_norm": 0, "_turn": 2, "_gate": 0, "_attend_codes": 0, "_decode_rows": 1,
    "_token_rows": 1, "_pick": 0, "_mix": 0, "_mean": 0, "_products": 1, "_turn_to": 2,
    "_encode": 1, "_best_of_piece": 1, "_best_of_all": 0, "_find": 1, "_least": 1, "_go_on": 0,
    "_estimate": 1, "_log_sum_exps": 0, "_sums": 1, "_mark": 1, "_count_read": 0, "_draw": 1, "_weigh": 0,
}  # fmt: skip
CASES = (
    "segment_attention-gqa4-dim128-per-head", "segment_attention-gqa4-dim128-weighted",
    "merge_attention-many-tokens", "windowed_attention-near-dim128",
    "windowed_sums-near-dim96", "column_sums-dim96-17of51", "row_scores-dim128-g3-65", "channel_sums-g4-16x4100",
    "channel_sums-g3-5x31", "gather_rows-gqa8-dim96-65", "group_margins-g3-30of31", "group_weights-g3-31-sum",
    "group_weights-g4-4100-sum", "pq_weights-m2b6-g4", "pq_weights-m4b8-g3", "rebuild_keys-gqa4-dim128-rank26-129",
    "top_k-1of20001", "top_k-6667of20001", "segment_attention-3-of-each-g3", "pq_weights-3-of-each",
    "pq_best-usual", "pq_best-some-3-of-each", "top_k-some-of-9001", "top_k-some-of-20001", "row_scores-3-of-each",
    "row_weights-3-of-each", "channel_sums-2-of-each-300", "channel_weights-2-of-each-300", "gather_rows-3-of-each",
    "gather_tiers-gqa8-dim96-65", "gather_tiers-one-tier",
    "group_margins-some-of-3", "group_weights-4100-and-3", "rebuild_keys-3-of-each",
    "coded_attention-3-of-each-int4", "decode_rows-some-of-each-int8",
    "pick_channels-g4-16of64", "live_scores-3-of-each", "live_scores-3-by-channel",
    "live_scores-by-channel-[20]", "rotate_to-3-of-each", "pick_channels-some-of-3",
    "attention_with_mean-gqa3-dim64",
    "page_scores-3-of-each", "token_rows-1025-of-5", "token_rows-3-of-each-and-last",
    "last_alike-37-of-20", "coded_attention-int4", "encode_codes-int4", "decode_rows-int4-some", "decode_rows-int2-all",
    "estimated_logits-3-of-each-6", "carrying-0.9-of-2050-spread2", "log_sum_exps-g3", "sampled_weights-3",
    "uniform_draws-300-of-9", "coded_attention-tq3q-dim96-turned", "coded_attention-nvfp4",
    "coded_attention-int4-kept4",
)  # fmt: skip


class Far:
    """Launches that run one program far out, and touch no memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ran: set[str] = set()
        self.sizes: dict[str, int] = {}  # arguments to pretend, by name
        self.places: dict[int, int] = {}  # program numbers by axis, besides the far one
        self.counts: dict[int, int] = {}  # and of how many
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", interpreter.InterpreterOptions(debug=True))
        patch.setattr(builder, "create_get_program_id", self._program)
        patch.setattr(builder, "create_get_num_programs", lambda axis: _whole(self.counts.get(axis, 1)))
        patch.setattr(builder, "create_masked_load", _anything)
        patch.setattr(builder, "create_masked_store", lambda *_: None)
        patch.setattr(builder, "create_atomic_rmw", lambda _, ptr, val, *rest: val)
        patch.setattr(interpreter.GridExecutor, "__call__", self._launcher(interpreter.GridExecutor.__call__))

    def _program(self, axis: int) -> Any:
        return _whole(FAR if axis == self.axis else self.places.get(axis, 0))

    def _launcher(self, launch: Callable[..., None]) -> Callable[..., None]:
        def once(executor: Any, *args: Any, **options: Any) -> None:
            self.axis, executor.grid = AXIS[executor.fn.__name__], (1, 1, 1)
            names = executor.arg_names
            changed = [self.sizes.get(name, value) for name, value in zip(names, args, strict=False)]
            launch(executor, *changed, **options)
            self.ran.add(executor.fn.__name__)

        return once


def _whole(number: int) -> Any:
    return interpreter.TensorHandle(np.array([number], dtype=np.int32), tl.int32)


def _anything(ptrs: Any, *_: Any) -> Any:
    """Zeros for whole numbers, which may be places; different floats, so that few are equal."""
    kind, shape = interpreter._get_np_dtype(ptrs.get_element_ty()), ptrs.data.shape
    made = np.zeros(shape, kind) if np.issubdtype(kind, np.integer) else np.arange(ptrs.data.size).reshape(shape)
    return interpreter.TensorHandle(made.astype(kind), ptrs.get_element_ty())


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    return Far(monkeypatch)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_operations(name: str, far: Far) -> None:
    case = next(case for case in [*cases(), *ragged_cases()] if str(case) == name)
    with use_backend("triton"):
        next(op for op in ops.ALL if op.name == case.op)(*converted(case.args, torch.float32))
    assert far.ran


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_pieces_of_a_very_long_row(far: Far) -> None:
    """piece * size, of a row that is cut in two thousand."""
    far.sizes, far.places, far.counts = {"size": 1 << 26}, {1: 2040}, {1: 2048}
    top_k._select(torch.zeros(1, 70_001), None, 1, 3, 1, None, None)
    assert far.ran == {"_best"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kmeans_and_blocks(far: Far) -> None:
    block, x, cos, sin = drawn("qwen3", torch.float32)
    with use_backend("triton"):
        ops.kmeans(torch.zeros(3, 200, 32), torch.arange(9), 1, 0.0)
        _, q, _, _ = ops.attention_inputs(x, block, cos, sin)
        ops.block_output(x, q, block)
        side = stored(1, 3, 2, 9, 16)
        for held in (side, Ragged(side.split(1))):
            ops.attention_inputs_stored(x, x, block, cos, sin, held, held, torch.tensor([1, 0, 2]))
        of_heads = Ragged(side.view(6, 1, 9, 16).split(1))
        ops.attention_inputs_stored(x, x, block, cos, sin, of_heads, of_heads, torch.arange(6))
        x, rows = stored(1, 1, 2, 9, 8), torch.zeros(1, 2, 3, dtype=torch.int64)
        for held in (x, Ragged([x])):
            ops.put_rows(held, rows, stored(2, 1, 2, 3, 8))
            new = NewPartial(stored(5, 1, 2, 1, 8), torch.zeros(1, 2, 8, 8), held, torch.tensor([1]))
            ops.partial_products(
                Guess(stored(6, 1, 4, 1, 8), x[0, :1, :1], x[0, :1, :1], torch.zeros(1, 2, 8, 5), 1.0), new
            )
            ops.add_received(torch.zeros(1, 2, 9), stored(3, 1, 4, 1, 8), held, torch.zeros(1, 4), 1.0, None)
        numbers = torch.zeros(3, 4, dtype=torch.int64)
        ops.pick_overwritten(torch.zeros(3, 2, 2, 4), torch.zeros(3, 4), 1.0, numbers, numbers[:, 0].clone(), numbers)
        ops.likeliest_tokens(torch.zeros(2, 5000))
        ops.count_read(torch.zeros(2, 3, 50), numbers[:2, :3])
    assert far.ran == {
        "_assign", "_move", "_turn", "_norm", "_gate", "_put", "_scores", "_products", "_least", "_go_on",
        "_count_read", "_best_of_piece", "_best_of_all",
    }  # fmt: skip


def test_every_kernel_is_among_them() -> None:
    files = [file for file in Path(gpu.__file__).parent.glob("*.py") if file.stem != "__init__"]
    found = [value for file in files for value in vars(import_module(f"kernels.gpu.{file.stem}")).values()]
    kernels = {value.fn for value in found if isinstance(value, interpreter.InterpretedFunction)}
    launched = {kernel.__name__ for kernel in kernels if re.search(r"\bprogram_(id|at)\(", getsource(kernel))}
    assert launched == {*AXIS, "program_at"}
