"""Operations over several sequences of different sizes, and the numbers and tensors that they take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import ops
from kernels.dispatch import use_backend
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, sequence_by_sequence, with_free_slots
from kernels.reference import Segment
from kernels.step_inputs import to_device
from methods.tiers.rows import room_for
from tests.kernels import ragged_cases as unequal
from tests.kernels.guarded import guarded, tensors_in
from tests.kernels.op_cases import OpCase, best_by_codes, comparable, converted, device_of, random
from tests.kernels.ragged_cases import ragged_cases

HAS_GPU = torch.cuda.is_available()
OPS = {op.name: op for op in ops.ALL}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
BACKENDS = "cpu", "triton"
ON_GPU = {"cpu": [], "triton": [pytest.mark.gpu] if HAS_GPU else []}  # a part of `make test-gpu` where there is one
SET_APART = re.compile("by-channel|attention_with_mean")  # the latter adds to an argument
CHOOSING = "top_k", "pq_best", "group_weights", "group_margins"  # of logits, which are fp32 whatever the keys are
SIMILAR = re.compile(r"segment_attention-\d|segment_attention_with_lse-.*-g4|.*-int8$")  # to others of the same kernels
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy, and masked lanes warn too


def runs() -> list[Any]:
    """Every case in fp32, and the last attention over several sequences, and their codes, in bf16 as well."""
    also = {
        "segment_attention_with_lse-3-of-each-g3", "pq_weights-3-of-each", "row_scores-3-of-each",
        "channel_weights-3-of-each-90", "rebuild_keys-3-of-each", "coded_attention-3-of-each-int4",
    }  # fmt: skip
    return [
        pytest.param(
            case, backend, dtype, id=f"{case}-{backend}-{str(dtype)[6:]}", marks=ON_GPU[backend] + slow(case, backend)
        )
        for case in ragged_cases()
        for backend in BACKENDS
        if backend in OPS[case.op].targets
        for dtype in TOLERANCE
        if dtype == torch.float32 or str(case) in also
    ]


def results(result: Any) -> list[Tensor]:
    """The tensors of a result, those of each sequence apart."""
    if isinstance(result, tuple):
        return [part for one in result for part in results(one)]
    return list(result.parts) if isinstance(result, Ragged) else list(result.split(1))


def slow(case: OpCase, backend: str) -> list[Any]:
    """Return the mark of a case that keeps the interpreter busy."""
    return [pytest.mark.slow] if backend == "triton" and not HAS_GPU and SIMILAR.match(str(case)) else []


def several_in_triton() -> list[Any]:
    """Return the cases of several sequences that Triton serves; the longest is slow beside a shorter one."""
    cases = [case for case in ragged_cases() if "triton" in OPS[case.op].targets]
    several = [case for case in cases if len(sequence_by_sequence(tuple(case.args))) > 1]
    longest = {"top_k-some-of-20001": [pytest.mark.slow]}
    return [pytest.param(case, marks=longest.get(str(case), slow(case, "triton"))) for case in several]


def with_free_slot(value: Any, batch: int) -> Any:
    """Return the arguments of a call for `batch` sequences with a free slot behind these."""
    if isinstance(value, Ragged):
        slotted = with_free_slots(list(value.parts), value.dim, 1)
        if value.first.stride(-1) != 1:  # the slot lies channel by channel, too
            free = value.first.new_zeros(1, *value.first.mT.shape[1:3], 16).mT
            slotted = Ragged([*value.parts, free], value.dim, 1)
        return slotted
    if isinstance(value, PerSequence):
        return PerSequence(value.values, 1)
    if isinstance(value, Tensor) and value.dim() and len(value) == batch:
        free = value.new_full((1, *value.shape[1:]), float("nan") if value.is_floating_point() else 0)
        return torch.cat([value, free])
    if isinstance(value, (list, tuple)):
        parts = [with_free_slot(part, batch) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def of_sequences(result: Any, batch: int) -> list[Tensor]:
    """Return the tensors of a result, those of each of the first sequences apart."""
    if isinstance(result, tuple):
        return [part for each in result if each is not None for part in of_sequences(each, batch)]
    return list(result.parts[:batch] if isinstance(result, Ragged) else result[:batch].split(1))


@pytest.mark.parametrize(("case", "backend", "dtype"), runs())
def test_one_call_for_all_equals_one_for_each(case: OpCase, backend: str, dtype: torch.dtype) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    op, args = OPS[case.op], converted(case.args, dtype, device_of(backend))
    with use_backend(backend):
        assert op.refusal(backend, *args) is None
        with guarded(args, backend):
            got = op(*args)
    if case.op == "pq_best":
        alone = sequence_by_sequence(tuple(args))
        assert all(torch.equal(part, best_by_codes(own)) for part, own in zip(results(got), alone, strict=True))
        return
    with use_backend("torch"):
        wanted = op(*converted(case.args, torch.float64))
    got, wanted = comparable(case.op, got), comparable(case.op, wanted)
    for place, (one, other) in enumerate(zip(results(got), results(wanted), strict=True)):
        if case.op == "top_k":
            scores = results(case.args[0])[place]
            assert one.shape == other.shape
            assert torch.equal(one.cpu().sort(-1).values, other.sort(-1).values), scores.shape
        else:
            size = max(1.0, other.abs().max().item())
            assert_close(one.double().cpu(), other.double(), atol=size * TOLERANCE[dtype], rtol=0)


@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled here, not interpreted")
@pytest.mark.parametrize("case", several_in_triton(), ids=str)
def test_a_free_slot_is_neither_read_nor_seen_by_others(case: OpCase) -> None:
    """What a free slot holds is NaN, and kernels read no more of it than there is."""
    pytest.importorskip("triton")
    op, args = OPS[case.op], converted(case.args, torch.float32)
    batch = len(sequence_by_sequence(tuple(args)))
    with use_backend("triton"):
        alone, args = op(*args), converted(with_free_slot(case.args, batch), torch.float32)
        if reason := op.refusal("triton", *args):
            pytest.skip(reason)
        with guarded(args, "triton"):
            among = op(*args)
    for numbers in (x for x in tensors_in([getattr(among, "whole", among)]) if x.dtype == torch.int64):
        assert 0 <= int(numbers[-1].min()) <= int(numbers[-1].max()) < 100  # a row that may be read
    if case.op != "pick_channels":  # in the order in which they were picked
        alone, among = comparable(case.op, alone), comparable(case.op, among)
    for left, right in zip(of_sequences(alone, batch), of_sequences(among, batch), strict=True):
        assert_close(right[tuple(map(slice, left.shape))], left, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", [case for case in ragged_cases() if not SET_APART.search(str(case))], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
def test_a_cpu_gives_a_sequence_the_same_bits_alone_and_among_others(case: OpCase, dtype: torch.dtype) -> None:
    exact = case.op in CHOOSING or case.op == "decode_rows"  # which makes fp32
    args = converted(case.args, torch.float32 if exact else dtype)
    with use_backend("cpu"):
        together, alone = OPS[case.op](*args), OPS[case.op].backend("torch").run(*args)
        if case.op == "estimated_logits":  # in plain torch for all sequences at once
            together = together[0]
            alone = torch.cat([OPS[case.op](*own)[0] for own in sequence_by_sequence(tuple(args))])
    if case.op == "pick_channels":
        together, alone = comparable(case.op, together), comparable(case.op, alone)
    for one, other in zip(results(together), results(alone), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("programs", [12, 200])
def test_attention_of_a_sequence_has_the_same_bits_alone_and_among_others(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that runs so many programs at once, so that long lists are cut into four pieces or seven."""
    pytest.importorskip("triton")
    from kernels.gpu import decode

    monkeypatch.setattr(unequal, "SIZES", ((400, 1, 130, 65),))
    monkeypatch.setattr(decode, "places", lambda shared, registers, warps: programs)
    for case in unequal.attention():
        if case.op == "segment_attention_with_lse" and "-g3" in case.name:
            q, segments, scale = converted(case.args, torch.float32, device_of("triton"))
            own = zip(*(sequence_by_sequence(tuple(segment)) for segment in segments), strict=True)
            with use_backend("triton"):
                together = ops.segment_attention_with_lse(q, segments, scale)
                alone = [
                    ops.segment_attention_with_lse(part, [Segment(*segment) for segment in some], scale)
                    for part, some in zip(q.split(1), own, strict=True)
                ]
            assert all(torch.equal(torch.cat(x), y) for x, y in zip(zip(*alone, strict=True), together, strict=True))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.uint8, 3)], ids=str)
@pytest.mark.parametrize("backend", [pytest.param(backend, marks=ON_GPU[backend]) for backend in BACKENDS])
def test_rows_are_put_where_each_sequence_lies(backend: str, dtype: torch.dtype, width: int) -> None:
    """One lies head by head, the others token by token, in the midst of a buffer."""
    if backend == "triton":
        pytest.importorskip("triton")
    sizes, on = (40, 1, 9), device_of(backend)
    parts = [(100 * random(seed, 1, size + 2, 3, width)).abs().to(on, dtype) for seed, size in enumerate(sizes)]
    parts = [part.transpose(1, 2)[:, :, 2:] for part in parts]
    parts[0] = parts[0].contiguous()
    rows = torch.tensor([[0, 39], [0, 0], [8, 3]], device=on).view(3, 1, 2).expand(3, 3, 2)
    values = (100 * random(9, 3, 3, 1, width)).abs().to(on, dtype).repeat(1, 1, 2, 1)
    wanted = [part.clone() for part in parts]
    for part, row, value in zip(wanted, rows, values, strict=True):
        part.scatter_(2, row[None, :, :, None].expand(1, 3, 2, width), value[None])
    with use_backend(backend):
        assert ops.put_rows.refusal(backend, Ragged(parts), rows, values) is None
        ops.put_rows(Ragged(parts), rows, values)
    assert all(torch.equal(part, other) for part, other in zip(parts, wanted, strict=True))


def test_rows_of_any_length_are_loaded_sixteen_bytes_at_a_time() -> None:
    """Also by a captured step, which then serves all lengths, where rows lie as on a GPU."""
    on = torch.device("cuda")
    rows = [torch.zeros(1, 2, 5, room_for(size, on), dtype=torch.bfloat16)[..., :size] for size in (33, 64, 7)]
    slots = [with_free_slots(some, 3, dead=2) for some in (rows, rows[:2], rows[1:])]
    assert {(batch.alignment, batch.dense) for batch in slots} == {(16, False)}
    assert room_for(33, torch.device("cpu")) == 33


@pytest.mark.parametrize("backend", ["cpu", "torch", "triton"])
def test_a_sequence_too_short_for_its_count_is_left_to_torch(backend: str) -> None:
    """Which raises: no backend reads what lies behind it, of however many sequences."""
    if backend == "triton":
        pytest.importorskip("triton")
    scores = Ragged([random(1, 1, 2, size) for size in (9, 9, 9, 9, 2)])
    for count in (5, PerSequence((1, 1, 1, 1, 3))):
        with use_backend(backend), pytest.raises((RuntimeError, IndexError), match=r"range|count|beyond"):
            ops.top_k(scores, count)


SIZES = (5, 70, 33, 64, 18)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ragged(*shape: int, dim: int = 2, sizes: Sequence[int] = SIZES) -> Ragged:
    """Of sequences with `shape` [1 ...], which have `sizes` in dimension `dim`."""
    return Ragged([rows(*shape[:dim], size, *shape[dim + 1 :], seed=i) for i, size in enumerate(sizes)], dim)


def test_numbers_of_several_sequences_add_and_subtract() -> None:
    lengths = PerSequence([4, 9, 6])
    assert lengths + 2 == PerSequence([6, 11, 8])
    assert lengths + PerSequence([1, 0, 3]) == PerSequence([5, 9, 9])
    assert lengths - 4 == PerSequence([0, 5, 2])
    assert lengths - PerSequence([4, 1, 1]) == PerSequence([0, 8, 5])
    assert 10 - lengths == PerSequence([6, 1, 4])


@pytest.mark.parametrize(("shape", "dim"), [((1, 2, 0, 16), 2), ((1, 2, 16, 0), 3), ((1, 2, 3, 0, 4), 3)])
def test_the_whole_has_every_sequence_at_its_beginning(shape: tuple[int, ...], dim: int) -> None:
    x = ragged(*shape, dim=dim)
    assert x.whole.shape == x.shape
    for i, (part, size) in enumerate(zip(x.parts, SIZES, strict=True)):
        assert torch.equal(x.whole[i : i + 1].narrow(dim, 0, size), part)


@pytest.mark.parametrize("waits", [False, True], ids=["the model's stream", "another stream"])
def test_numbers_go_to_a_gpu_from_pinned_memory(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait on the stream of the model alone: what another stream makes, the model may read at once."""
    sent: list[Any] = []
    monkeypatch.setattr("kernels.step_inputs.on_default_stream", lambda device: not waits)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: sent.append("pinned") or x)
    monkeypatch.setattr(Tensor, "to", lambda x, device, **how: sent.append((device.type, how)) or x)
    assert torch.equal(to_device([(1, 2), (3, 4)], torch.device("cuda")), torch.tensor([[1, 2], [3, 4]]))
    assert sent == ([("cuda", {})] if waits else ["pinned", ("cuda", {"non_blocking": True})])
