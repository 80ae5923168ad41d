"""The stand-in for CUDA graphs: what it captures does the same again on the same memory, and capturing does nothing."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any
from weakref import ref

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


@pytest.mark.parametrize(
    "reshapes",
    [
        lambda x: torch.add(x, x, out=torch.empty(0)),
        lambda x: torch.topk(x, 1, out=(torch.empty(2, 1), torch.empty(0, dtype=torch.int64))),
        lambda x: torch.empty(0).resize_(2),
        lambda x: torch.empty(0).set_(x),
        lambda x: x.clone().t_(),
    ],
)
def test_what_gives_a_tensor_another_shape_is_refused(reshapes: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="gives a tensor another shape"):
        captured(lambda: reshapes(torch.ones(2, 3)))


def test_results_go_to_a_tensor_that_has_their_shape() -> None:
    assert_replays(lambda x: torch.add(x, x, out=torch.empty_strided((2, 3), (1, 2))), torch.ones(2, 3))


def test_what_nobody_refers_to_is_overwritten_and_nothing_else() -> None:
    """Compiled calls know addresses alone: they do not keep what they were given."""
    x, rows = torch.randn(1, 1, 64, 16), torch.arange(64).view(1, 1, 64)

    def step() -> tuple[Tensor, ...]:
        kept = ops.gather_rows(x, rows)
        for _ in range(5):
            last = ops.gather_rows(ops.gather_rows(x, rows), rows)
        return kept, last

    graph, (kept, last) = captured(step)
    assert len(graph.rooms) == 4  # of `kept`, of `last`, of the one before it, and between two gathers
    graph.replay()
    assert torch.equal(kept, x)
    assert torch.equal(last, x)


def test_operations_of_torch_keep_what_they_read() -> None:
    x = torch.randn(64, 16)

    def step() -> Tensor:
        return (x + 1) * (x + 2) + (x + 3)

    graph, result = captured(step)
    graph.replay()
    assert torch.equal(result, step())


def test_other_threads_are_not_captured() -> None:
    x, seen = torch.zeros(1, 1, 8, 16), list[Tensor]()

    def step() -> None:
        other = Thread(target=lambda: seen.append(ops.gather_rows(x + 1, torch.zeros(1, 1, 2, dtype=torch.int64)) * 2))
        other.start()
        other.join()

    graph, _ = captured(step)
    assert not graph.calls
    assert seen[0].unique().tolist() == [2]


def test_memory_goes_with_the_graph() -> None:
    """At once, without a pass for cycles."""
    x = torch.randn(1, 1, 8, 16)
    graph, result = captured(lambda: ops.gather_rows(x, torch.zeros(1, 1, 2, dtype=torch.int64)) * 2)
    replay, room = graph.replay, ref(next(iter(graph.rooms)))
    del graph
    replay()
    assert result is not None
    assert room() is not None
    del replay
    assert room() is None
