"""Kernels stay inside their tensors: also where one is smaller than the others, and torch would broadcast it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import ops
from kernels.dispatch import REFERENCE, use_backend
from tests.kernels import op_cases
from tests.kernels.guarded import guarded, tensors_in
from tests.kernels.op_cases import OpCase, comparable, converted, stored
from tests.kernels.test_block import close, drawn, results

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter is numpy, and masked lanes warn too
]
OPS = {op.name: op for op in ops.ALL}
NAMED = {  # dimensions whose entries another tensor's numbers name, or bound: those must be there
    "gather_rows": [(0, 2)], "gather_tiers": [(0, 2), (2, 2)], "channel_sums": [(1, 2)], "channel_weights": [(1, 2)],
    "pq_weights": [(1, 3)], "pq_best": [(1, 3)],
    "rebuild_keys": [(0, 1), (3, 0), (4, 0)], "decode_rows": [(0, 2), (1, 2), (2, 2), (3, 2)],
    "attention_with_mean": [(i, 2) for i in (3, 4)], "carrying": [(1, 3)], "sampled_weights": [(0, 3), (3, 2)],
    "segment_attention": [(1, 2), (2, 2)], "segment_attention_with_lse": [(1, 2), (2, 2)],
}  # fmt: skip


def with_tensor(value: Any, place: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments in which the tensor number `place` is changed."""
    left = [place]

    def walked(part: Any) -> Any:
        if isinstance(part, Tensor):
            left[0] -= 1
            return change(part) if left[0] == -1 else part
        if isinstance(part, (list, tuple)):
            parts = [walked(inner) for inner in part]
            return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
        return part

    return walked(value)


def widest() -> Iterator[OpCase]:
    """Of each operation that Triton has, the case with the most dimensions that can shrink, and the smallest such."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_cases, "SHAPES", {"small": (2, 4, 2, 16, 9)})  # which the interpreter is soon through with
        small = [case for case in op_cases.cases.__wrapped__() if "triton" in OPS[case.op].targets]

    def width(case: OpCase) -> tuple[int, int]:
        sizes = [size for x in tensors_in(case.args) for size in x.shape]
        return sum(size > 1 for size in sizes), -max(sizes)

    for _, same in groupby(sorted(small, key=lambda case: case.op), lambda case: case.op):
        yield max(same, key=width)


@pytest.mark.parametrize("case", widest(), ids=str)
def test_a_smaller_tensor_is_broadcast_or_refused(case: OpCase) -> None:
    """Each dimension of each tensor in turn has one entry."""
    for place, x in enumerate(tensors_in(case.args)):
        for dim, size in enumerate(x.shape):
            if size > 1 and (place, dim) not in NAMED.get(case.op, ()):
                check(case, place, dim)


def check(case: OpCase, place: int, dim: int) -> None:
    op, args = OPS[case.op], converted(case.args, torch.float32)
    args = with_tensor(args, place, lambda x: x.narrow(dim, 0, 1))
    with use_backend("triton"):
        try:
            if op.refusal("triton", *args):
                return
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
            return
        with guarded(args, "triton"):
            got = op(*args)
    args = with_tensor(converted(case.args, torch.float32), place, lambda x: x.narrow(dim, 0, 1))
    wanted = op.backend(REFERENCE).run(*args)
    if case.op in ("top_k", "pq_best", "pick_channels"):
        return
    if case.op in ("channel_sums", "estimated_logits", "log_sum_exps", "row_scores_with_lse"):
        got, wanted = comparable(case.op, got), comparable(case.op, wanted)
    for one, other in zip(tensors_in(got), tensors_in(wanted), strict=True):
        assert_close(one.double(), other.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", ["qwen3-prompt", "gqa8-dim128-prompt"])
def test_a_block_turns_all_tokens_by_one_position(shape: str) -> None:
    block, x, cos, sin = drawn(shape, torch.float32)
    for one in ((cos[:, :1], sin[:, :1]), (cos[:1, :1], sin[:1, :1])):
        for ours, theirs in zip(results("triton", block, x, *one), results(REFERENCE, block, x, *one), strict=True):
            close(ours, theirs)


def test_no_tensor_of_a_block_is_broadcast_but_angles() -> None:
    block, x, cos, sin = drawn("qwen3", torch.float32)
    keys, row = stored(1, 3, 2, 9, 16), torch.tensor([1, 0, 2])
    attended = torch.zeros(3, 8, 1, 16)
    short = replace(block, mlp_norm=block.mlp_norm[:1])
    with use_backend("triton"):
        assert ops.attention_inputs_stored.refusal("triton", x, x, block, cos, sin, keys, keys, row) is None
        assert ops.block_output.refusal("triton", x, attended, block) is None
        for added, k, v, at in (
            (x[:1], keys, keys, row), (x, keys[:1], keys, row), (x, keys, keys[:, :1], row), (x, keys, keys, row[:2]),
        ):  # fmt: skip
            assert ops.attention_inputs_stored.refusal("triton", x, added, block, cos, sin, k, v, at)
        assert ops.attention_inputs.refusal("triton", x, block, cos[:2], sin)
        assert ops.block_output.refusal("triton", x, attended[:1], block)
        assert ops.block_output_apart.refusal("triton", x, attended, short)
