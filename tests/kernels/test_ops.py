"""Every backend of every operation against its definition in plain torch, evaluated on float64 inputs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from kernels import ops, reference
from kernels.dispatch import REFERENCE, use_backend
from kernels.partial import Guess, NewPartial
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged
from kernels.rope import rotate
from tests.kernels.guarded import guarded
from tests.kernels.op_cases import (
    OpCase,
    best_by_codes,
    cases,
    comparable,
    converted,
    device_of,
    draw,
    pick,
    random,
    stored,
)  # fmt: skip

HAS_GPU = torch.cuda.is_available()
OPS = {op.name: op for op in ops.ALL}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INDICES = {"top_k"}  # compared by the scores they point at: ties may fall either way
# cases that keep the interpreter busy, beside smaller ones of the same operation
LONG = re.compile(
    r"prefill_attention-gqa[348]|channel_sums-g4-16x4100|segment_attention_with_lse-gqa|segment_attention-gqa[34]"
    r"|prefill_attention_with_column_sums-dim128|top_k-(20001of20001|\d+of70001)"
    r"|pq_weights-m(1b3|2b9|4b8)-g[148]|pq_weights-m2b6-g8|windowed_(attention|sums)-.*-dim(96|128)"
    r"|row_scores-dim(96|128|256)|carrying-0.9-of-2050"
)


def dtypes(backend: str, device: str, place: int) -> list[torch.dtype]:
    """Triton's interpreter takes one per case, in turn, since it is slow; float16 is for GPUs."""
    if device == "cuda":
        return [] if backend == "cpu" else list(TOLERANCE)
    if backend == "fused":  # test_fused.py
        return []
    return [list(TOLERANCE)[place % 3]] if backend == "triton" else [torch.float32, torch.bfloat16]


def marks(case: OpCase, backend: str, dtype: torch.dtype, device: str) -> list[pytest.MarkDecorator]:
    interpreted = backend == "triton" and device == "cpu" and LONG.match(str(case))
    easy = backend == REFERENCE and dtype == torch.float32  # beside 16 bits
    return [pytest.mark.slow] if interpreted or easy else []


def runs(device: str) -> list[Any]:
    return [
        pytest.param(
            case, backend, dtype, id=f"{case}-{backend}-{NAMES[dtype]}", marks=marks(case, backend, dtype, device)
        )
        for place, case in enumerate(cases())
        for backend in OPS[case.op].targets
        for dtype in dtypes(backend, device, place)
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy, and masked lanes warn too
@pytest.mark.parametrize(("case", "backend", "dtype"), runs("cpu"))
def test_backend_equals_reference(case: OpCase, backend: str, dtype: torch.dtype) -> None:
    check(case, backend, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device on this machine")
@pytest.mark.parametrize(("case", "backend", "dtype"), runs("cuda")[: None if HAS_GPU else 1])
def test_backend_equals_reference_on_the_gpu(case: OpCase, backend: str, dtype: torch.dtype) -> None:
    check(case, backend, dtype, "cuda")


def check(case: OpCase, backend: str, dtype: torch.dtype, device: str) -> None:
    """The backend's error is small, and Triton's no more than twice that of plain torch in the same dtype."""
    if case.op == "sampled_weights":
        dtype = torch.float32  # of logits, whatever the keys are
    op, args = OPS[case.op], converted(case.args, dtype, device)
    with use_backend(backend):
        if reason := op.refusal(backend, *args):
            pytest.skip(f"{op.name}: {backend}: {reason}")
        with guarded(args, backend):
            got = op(*args)
    if case.op == "pq_best":
        wanted = best_by_codes(args)
        assert got.shape == wanted.shape
        assert backend == REFERENCE or torch.equal(got, wanted)  # torch takes any of equal weights
        return
    if case.op in INDICES:
        _assert_best(args[0], got)
        return
    args = converted(case.args, dtype, device)  # anew: some operations change them
    wanted = _reference(case.op)(*converted(args, torch.float64, device))
    plain = _reference(case.op)(*args)
    got, wanted, plain = (comparable(case.op, result) for result in (got, wanted, plain))
    for one, other, twin in zip(_each(got), _each(wanted), _each(plain), strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.isinf(), other.isinf())
        one, other, twin = (x.masked_fill(x.isinf(), 0) for x in (one, other, twin))
        size = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        assert_close(one.double(), other.double(), atol=size * TOLERANCE[dtype], rtol=0)
        if backend == "triton" and other.numel():
            error, usual = ((x.double() - other.double()).abs().max().item() for x in (one, twin))
            assert one.dtype == twin.dtype
            assert error <= 2 * usual + size * max(2e-6, torch.finfo(dtype).eps), f"{error:.2g}, in torch {usual:.2g}"


def _each(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _reference(name: str) -> Any:
    op = OPS[name]
    assert op.refusal(REFERENCE) is None
    return op.backend(REFERENCE).run


def _assert_best(scores: Tensor, rows: Tensor) -> None:
    """`rows` names as many different entries as asked for, and none outside is larger."""
    assert all(len(set(row.tolist())) == rows.shape[-1] for row in rows.flatten(0, -2))
    best = scores.topk(rows.shape[-1], dim=-1).values
    assert_close(scores.gather(-1, rows.long()).sort(-1, descending=True).values, best, atol=0, rtol=0)


def test_every_operation_has_cases() -> None:
    elsewhere = {
        "add_received", "count_read", "pick_overwritten", "kmeans", "put_rows", "attention_inputs",
        "attention_inputs_stored",
        "block_output", "block_output_apart", "token_logits", "likeliest_tokens",
    }  # fmt: skip
    assert {case.op for case in cases()} == set(OPS) - elsewhere


# The reference itself, against torch's own or a plain loop:


def test_segments_are_one_softmax_over_their_union() -> None:
    k, v = stored(2, 2, 2, 50, 32).double(), stored(3, 2, 2, 50, 32).double()
    q, rows = random(1, 2, 6, 1, 32).double(), pick(4, 2, 2, 30, 8)
    parts = [(k[:, :, :5], v[:, :, :5], None), (k[:, :, 5:35], v[:, :, 5:35], rows), (k[:, :, 35:], v[:, :, 35:], None)]
    inside = (rows + 5).unsqueeze(-1).expand(-1, -1, -1, 32)
    joined = [torch.cat([x[:, :, :5], x.gather(2, inside), x[:, :, 35:]], 2) for x in (k, v)]
    keys, values = (x.repeat_interleave(3, 1) for x in joined)
    wanted = scaled_dot_product_attention(q, keys, values, scale=0.3)
    got = reference.segment_attention(q, [reference.Segment(*part) for part in parts], 0.3)
    assert_close(got, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", ops.segment_attention.targets)
def test_log_weights_count_rows_several_times(backend: str) -> None:
    """Zeros change no bit; a row with log 2 counts as two, and one with minus infinity as none."""
    q, k, v = random(1, 2, 6, 1, 64), stored(2, 2, 2, 90, 64), stored(3, 2, 2, 90, 64)
    rows = pick(4, 2, 2, 60, 40)
    plain = [reference.Segment(k, v, rows), reference.Segment(k[:, :, 60:], v[:, :, 60:])]
    zeros = [plain[0]._replace(log_weights=torch.zeros(2, 2, 40)), plain[1]]
    added = torch.zeros(2, 2, 40)
    added[..., :9], added[..., 30:] = torch.tensor(2.0).log(), -float("inf")
    again = torch.cat([rows[..., :9], rows[..., :30]], -1)
    with use_backend(backend):
        if reason := ops.segment_attention_with_lse.refusal(backend, q, zeros, 0.2):
            pytest.skip(reason)
        for one, other in zip(*(ops.segment_attention_with_lse(q, x, 0.2) for x in (plain, zeros)), strict=True):
            assert torch.equal(one, other)
        got = ops.segment_attention_with_lse(q, [plain[0]._replace(log_weights=added), plain[1]], 0.2)
        wanted = ops.segment_attention_with_lse(q, [plain[0]._replace(rows=again), plain[1]], 0.2)
        assert_close(got, wanted, atol=1e-6, rtol=1e-5)
        nothing = [plain[0]._replace(log_weights=torch.full((2, 2, 40), -float("inf")))]
        out, lse = ops.segment_attention_with_lse(q, nothing, 0.2)
    assert torch.equal(lse, torch.full_like(lse, -float("inf")))
    assert not out.any()


@pytest.mark.parametrize("backend", ops.segment_attention.targets)
def test_rows_that_are_not_live_may_be_any_numbers(backend: str) -> None:
    rows, live = torch.tensor([[[3, 1, 900, 7]], [[2, 0, 6, 900]]]), torch.tensor([2, 3])
    q, k, v = converted((random(1, 2, 2, 1, 16), random(2, 2, 1, 9, 16), random(3, 2, 1, 9, 16)), torch.float32, "cpu")
    segments = [reference.Segment(k, v, rows, live)]
    if reason := ops.segment_attention.refusal(backend, q, segments, 0.3) or device_of(backend) != "cpu":
        pytest.skip(str(reason))
    with use_backend(backend):
        got = ops.segment_attention(q, segments, 0.3)
    for sequence, count in enumerate(live.tolist()):
        chosen = rows[sequence, 0, :count]
        wanted = scaled_dot_product_attention(
            q[sequence], k[sequence, :, chosen].expand(2, -1, -1), v[sequence, :, chosen].expand(2, -1, -1), scale=0.3
        )
        assert_close(got[sequence], wanted)


@pytest.mark.parametrize("layout", ["by row", "by channel", "unequal", "unequal by channel"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=NAMES.get)
@pytest.mark.parametrize("backend", ops.partial_products.targets)
def test_a_partial_key_is_written_beside_the_guess(backend: str, dtype: torch.dtype, layout: str) -> None:
    """The second sequence has fewer columns than its basis, and nothing else is written."""
    basis, other, k = random(1, 2, 3, 32, 20), random(2, 2, 3, 32, 9), random(3, 2, 3, 1, 32)
    basis[1, ..., 12:] = 0
    turn = random(4, 2, 6, 1, 32), random(5, 2, 1, 32), random(6, 2, 1, 32)
    rows = random(7, 2, 3, 20, 40).mT if "channel" in layout else random(7, 2, 3, 40, 20)
    rows[1, ..., 12:] = 0
    given = converted([basis, k, rows, Guess(*turn, other, 0.3)], dtype, device_of(backend))
    basis, k, rows, guess = given
    at = torch.tensor([30, 7], device=rows.device)
    parts = list(rows.split(1)) if "unequal" in layout else [rows]
    if layout == "unequal by channel":
        parts[1] = parts[1].mT[:, :, :12].mT
    before, narrow = rows.clone(), (k.double() @ basis.double()).squeeze(2)
    with use_backend(backend), guarded((basis, k, rows, *guess), backend):
        new = NewPartial(k, basis, Ragged(parts) if len(parts) > 1 else rows, at if len(parts) > 1 else at[:1])
        assert ops.partial_products.refusal(backend, guess, new) is None
        got = ops.partial_products(guess, new)
    wanted = before.double()
    for sequence, row in enumerate(at.tolist() if len(parts) > 1 else [30, 30]):
        wanted[sequence, :, row] = narrow[sequence]
    assert_close(rows.double(), wanted, atol=12 * TOLERANCE[dtype], rtol=0)
    assert torch.equal(rows[:, :, 31:], before[:, :, 31:])
    queries = rotate(*(x.double() for x in guess[:3])).view(2, 3, 2, 32) @ guess.basis.double() * 0.3
    assert_close(got.double(), queries, atol=12 * TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("backend", ops.rotate_to.targets)
def test_rows_of_any_dtype_are_rotated_in_fp32(backend: str) -> None:
    x, cos, sin, at = (
        x.to(device_of(backend)) for x in (random(1, 1, 2, 9, 32), *random(2, 2, 1, 7, 32), torch.tensor([6]))
    )
    with use_backend(backend):
        exact = ops.rotate_to(x, cos.bfloat16(), sin.bfloat16(), at, torch.float32)
        rounded = ops.rotate_to(x, cos.bfloat16(), sin.bfloat16(), at, torch.bfloat16)
    wanted = rotate(x, *(part[:, 6:].bfloat16().float() for part in (cos, sin)))
    assert_close(exact, wanted, atol=0, rtol=0)
    assert_close(rounded, wanted.bfloat16())


@pytest.mark.parametrize("backend", ops.group_margins.targets)
def test_what_is_read_is_added_up(backend: str) -> None:
    logits, read = 9 * random(1, 2, 2, 3, 300), torch.tensor([10, 20])
    logits, read = logits.to(device_of(backend)), read.to(device_of(backend))
    with use_backend(backend):
        _, counts = ops.group_margins(logits, None, 290, 8.0, 1000, read)
    assert counts.min() > 1
    assert torch.equal(read, counts + torch.tensor([10, 20], device=read.device))


@pytest.mark.parametrize("unequal", [False, True], ids=["alike", "unequal"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=NAMES.get)
@pytest.mark.parametrize("backend", ops.add_received.targets)
def test_received_attention_is_added_to_what_there_is(backend: str, dtype: torch.dtype, unequal: bool) -> None:
    """Behind the tokens that there are memory holds anything, and sums stay as they were."""
    keys, live = stored(1, 2, 3, 150, 48), torch.tensor([70, 131])
    keys[0, :, 70:], keys[1, :, 131:] = float("nan"), float("nan")
    given = random(3, 2, 3, 160), random(4, 2, 6, 1, 48), keys, 3 + random(5, 2, 6)
    sums, q, keys, lse = converted(given, dtype, device_of(backend))
    sums, lse, live = sums.float(), lse.float(), live.to(sums.device)
    weights = (q.double().view(2, 3, 2, 48) @ keys.double().mT * 0.3 - lse.view(2, 3, 2, 1)).exp().sum(2)
    wanted = sums.double() + torch.cat([weights, torch.zeros_like(weights[..., :10])], -1).nan_to_num(0)
    held = Ragged([keys[:1, :, :100], keys[1:, :, :140]]) if unequal else keys
    with use_backend(backend), guarded((q, keys), backend):
        assert ops.add_received.refusal(backend, sums, q, held, lse, 0.3, live) is None
        ops.add_received(sums, q, held, lse, 0.3, live)
    assert_close(sums.double(), wanted, atol=TOLERANCE[dtype] * wanted.abs().max().item(), rtol=0)


@pytest.mark.parametrize("unequal", [False, True], ids=["alike", "unequal"])
@pytest.mark.parametrize("count", [300, 1])
@pytest.mark.parametrize("backend", ops.pick_overwritten.targets)
def test_the_row_that_goes_next_has_the_least_weight(backend: str, count: int, unequal: bool) -> None:
    """Of equal ones the latest; the newest token's row stays, and of two sequences one may have fewer rows."""
    sizes = [count, max(1, count - 60) if unequal else count]
    logits, lse = 6 * random(1, 2, 5, 7, count).round(), random(2, 2, 35)
    logits[..., ::9] = logits.amin(-1, keepdim=True) - 2000  # these weigh nothing
    places = torch.stack([torch.randperm(count, generator=draw(3)) for _ in sizes])
    row = torch.tensor([count // 2, 0])
    counts = torch.tensor([[count - 1 + sequence, 4, 100, count // 2] for sequence in (0, 9)])
    wanted = places.clone(), row.clone(), counts.clone()
    for own, size in enumerate(sizes):
        weights = (logits[own] * 0.3 - lse[own].view(5, 7, 1)).exp().sum((0, 1))[:size]
        left = 4 - int(places[own, row[own]] < count // 2)
        newest = int(counts[own, 0]) + 1
        wanted[0][own, row[own]] = newest
        wanted[2][own, :3] = torch.tensor([newest, left, 100 + left])
        least = min(float(weights[i]) for i in range(size) if i != row[own]) if size > 1 else None
        others = [i for i in range(size) if i != row[own] and float(weights[i]) == least]
        wanted[1][own] = max(others, key=lambda i: int(places[own, i])) if others else 0
    logits, lse, *changed = converted((logits, lse, places, row, counts), torch.float32, device_of(backend))
    scores = Ragged.filled_up(logits, PerSequence(sizes), 3) if unequal else logits
    with use_backend(backend), guarded((logits, lse), backend):
        assert ops.pick_overwritten.refusal(backend, scores, lse, 0.3, *changed) is None
        ops.pick_overwritten(scores, lse, 0.3, *changed)
    for got, one in zip(changed, wanted, strict=True):
        assert torch.equal(got.cpu(), one)


@pytest.mark.parametrize("layout", ["heads outside", "tokens outside", "inner view"])
@pytest.mark.parametrize("backend", ops.put_rows.targets)
def test_rows_put_are_the_rows_gathered(layout: str, backend: str) -> None:
    x = random(1, 2, 9, 3, 8).transpose(1, 2) if layout == "tokens outside" else stored(1, 2, 3, 9, 8)
    x = x[:, :, 2:] if layout == "inner view" else x
    args = x, pick(2, 2, 3, x.shape[2], 4), random(3, 2, 3, 4, 8)
    x, rows, values = converted(args, torch.float32, device_of(backend))
    before = x.clone()
    with use_backend(backend), guarded((x, rows, values), backend):
        ops.put_rows(x, rows, values)
    assert torch.equal(ops.gather_rows(x, rows), values)
    untouched = torch.ones(x.shape[:3], dtype=torch.bool, device=x.device).scatter(2, rows, False)
    assert torch.equal(x[untouched], before[untouched])


@pytest.mark.parametrize(
    ("count", "among"),
    [(7, 60), (900, 5000), (120, 9000)]
    + [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((900, 32_769), (18_000, 18_432), (13_091, 117_949))],
)
@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_compiled_backends_take_the_first_of_equal_scores(backend: str, count: int, among: int) -> None:
    """In one launch, two or five, and bfloat16 has many that are equal. One row has a single value, one has infinities.
    RocketKV reads the first tokens of a page by it."""
    scores = random(1, 2, 3, among + 2).bfloat16()[..., 1:-1]
    scores[1, 1] = -3.0
    scores[1, 2] = torch.where(scores[1, 2].abs() < 1, scores[1, 2], scores[1, 2] * float("inf"))
    scores = (scores.float() if backend == "cpu" else scores).to(device_of(backend))
    scores[0, 1].mul_(0)  # zeros of both signs are equal
    wanted = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    with use_backend(backend):
        if reason := ops.top_k.refusal(backend, scores, count):
            pytest.skip(reason)
        got = ops.top_k(scores, count)
    assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("backend", ops.put_rows.targets)
def test_rows_of_any_dtype_are_moved_as_they_are(dtype: torch.dtype, count: int, backend: str) -> None:
    """Codes, masks, and pages so wide that a row is more than one tile."""
    for width in (3, 96, 2050):
        x = (100 * random(1, 1, 2, 42, width)).abs().to(device_of(backend), dtype)[:, :, 2:]
        rows = pick(2, 1, 2, 40, count).int().to(x.device)
        empty = torch.zeros_like(x)
        with use_backend(backend):
            got = ops.gather_rows(x, rows)
            ops.put_rows(empty, rows.long(), got)
        wanted = x.gather(2, rows.long().unsqueeze(-1).expand(-1, -1, -1, width))
        assert torch.equal(got, wanted)
        assert torch.equal(empty, torch.zeros_like(x).scatter(2, rows.long().unsqueeze(-1).expand_as(got), got))


def test_channels_are_rows_that_exist_even_if_queries_are_no_numbers() -> None:
    """A model that overflows shall end in numbers that mean nothing, not in an illegal address."""
    pytest.importorskip("triton")
    (q,) = converted([random(1, 1, 2, 3, 40)], torch.float32, device_of("triton"))
    q[0, 0, 1, 5:9] = float("nan")
    q[0, 1] = float("nan")
    with use_backend("triton"), guarded((q,), "triton"):
        channels, _, _ = ops.pick_channels(q, 30, 0.3, False, False)
    assert [len(set(row)) for row in channels[0].tolist()] == [30, 30]
    assert {5, 6, 7, 8} <= set(channels[0, 0].tolist())
    assert 0 <= int(channels.min()) <= int(channels.max()) < 40
