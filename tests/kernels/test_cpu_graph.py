"""The stand-in for CUDA graphs: what it captures does the same again on the same memory, and capturing does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.step_inputs import CaptureError
from tests.cpu_graph import CpuGraph

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def inference() -> Any:
    with torch.inference_mode():
        yield


def captured(step: Callable[[], Any]) -> tuple[CpuGraph, Any]:
    graph = CpuGraph()
    with graph.capturing():
        result = step()
    return graph, result


def assert_replays(step: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> None:
    """For inputs other than those of the capture, which are those of `step` alone."""
    graph, results = captured(lambda: step(*inputs))
    for seed in range(2):
        torch.manual_seed(seed)
        for x in inputs:
            x.copy_(torch.randint(0, 4, x.shape) if x.dtype == torch.int64 else torch.randn(x.shape))
        graph.replay()
        wanted = step(*inputs)
        for result, same in zip(*((x if isinstance(x, tuple) else (x,)) for x in (results, wanted)), strict=True):
            assert torch.equal(result, same)
            assert (result.dtype, result.stride()) == (same.dtype, same.stride())


ROWS = torch.zeros(2, 3, 4, dtype=torch.int64)
X = torch.zeros(2, 3, 5, 8)


@pytest.mark.parametrize(
    "step",
    [
        lambda x, rows: x * 2 + x.transpose(2, 3).reshape(2, 3, 5, 8),
        lambda x, rows: torch.cat([x, x.sin()], -1).to(torch.bfloat16),
        lambda x, rows: x.sum(-1).topk(3),
        lambda x, rows: (x > 0).sum(2, dtype=torch.int32),
        lambda x, rows: tuple(x.mean((1, 2), keepdim=True).expand(2, 3, 5, 8).contiguous().split(2, 2)),
        lambda x, rows: x.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, 8)).softmax(-1),
        lambda x, rows: x.new_zeros(2, 3, 5, 8).scatter_(2, rows.unsqueeze(-1).expand(-1, -1, -1, 8), x),
        lambda x, rows: torch.where(x > 0, x, torch.full((1,), 3.0)) @ x.mT,
        lambda x, rows: (x.clone().index_copy_(2, rows[0, 0, :1], x[:, :, :1]), torch.arange(4) + rows),
        lambda x, rows: ops.gather_rows(x, rows),
        lambda x, rows: ops.top_k(x.transpose(2, 3).sum(1).contiguous(), 3),
        lambda x, rows: ops.gather_rows(x, ops.top_k(x[..., 0], 2)) + ops.gather_rows(x, rows[..., :2]),
        lambda x, rows: x[:, :, 1:].permute(3, 0, 2, 1).contiguous().bool().clone(),
        lambda x, rows: rows.int().expand(4, 2, 3, 4).clone(),
    ],
)
def test_a_replay_gives_what_the_operations_give(step: Callable[[Tensor, Tensor], Any]) -> None:
    assert_replays(step, X.clone(), ROWS.clone())


def test_capturing_changes_nothing_and_reads_nothing() -> None:
    """Rows that nobody has computed may be any number."""
    x, store, counter = torch.ones(1, 2, 3, 16), torch.zeros(1, 2, 9, 16), torch.zeros(1, dtype=torch.int64)

    def step() -> Tensor:
        rows = (torch.empty(1, 2, 3, dtype=torch.int64).fill_(1 << 40) - (1 << 40) + counter).cumsum(2)
        ops.put_rows(store, rows, x)
        store.index_copy_(2, counter, x[:, :, :1])
        torch._foreach_add_([counter], 1)
        counter.add_(1)
        return ops.gather_rows(store, rows)

    graph, _ = captured(step)
    assert not store.any()
    assert counter.tolist() == [0]
    graph.replay()
    assert counter.tolist() == [2]
    assert store.any()


@pytest.mark.parametrize(
    ("asks", "named"),
    [
        (lambda x: x[0, 0].item(), "item waits"),
        (lambda x: bool(x[0, 0] > 0), "is_nonzero waits"),
        (lambda x: x.tolist(), "tolist waits"),
        (lambda x: x.numpy(), "numpy waits"),
        (lambda x: x.nonzero(), "nonzero waits"),
        (lambda x: x[x > 0], "index waits"),
        (lambda x: torch.equal(x, x), "equal waits"),
        (lambda x: torch.tensor([1, 2]), "torch.tensor brings numbers from the host"),
        (lambda x: x.to("meta"), "_to_copy makes a tensor on meta"),
    ],
)
def test_what_asks_for_a_value_is_refused(asks: Callable[[Tensor], Any], named: str) -> None:
    with pytest.raises(CaptureError, match=named):
        captured(lambda: asks(torch.zeros(2, 2) + 1))
    assert asks(torch.zeros(2, 2).fill_(1)) is not None  # and not behind it
