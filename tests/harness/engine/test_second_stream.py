"""Rows of host memory come on a second stream beside a GPU's model: when each method asks and waits for them, and that
no tensor is used by both streams unless an event orders them (tests/fake_cuda.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import Engine, attached
from kernels.dispatch import use_backend
from kernels.step_inputs import CaptureError
from methods.tiers import transfer
from methods.tiers.lanes import TransferLane
from methods.tiers.traffic import Traffic
from tests.fake_cuda import RaceError, StreamedGraph, TwoStreams, side_stream
from tests.harness.engine.test_overlap import OFFLOADING
from tests.methods.test_contract import small
from tests.methods.test_no_waiting import as_on_a_gpu
from tests.tape import Tape
from tests.tiny import prompt, tiny

METHODS: dict[str, Any] = {name: small(name) for name in OFFLOADING}
METHODS["blocks"] = replace(METHODS["pqcache"], cache_tokens=16, cache_block=4)
SHOWN = {
    "segment_attention": "attend", "segment_attention_with_lse": "attend", "block_output": "MLP", "top_k": "choose",
    "gather_rows": "hits", "rebuild_keys": "keys",
}  # fmt: skip
# what the streams are given in a step of three layers, +n where rows are asked for, -n where those are waited for; by
# method, and for captured steps where it differs
ORDER = {
    "full_offloaded": "+1 -0 attend MLP +2 -1 attend MLP +3 -2 attend MLP",
    "full_offloaded captured": "+0 +1 -0 attend MLP +2 -1 attend MLP -2 attend MLP",
    "infinigen": "choose +0 attend MLP choose +1 -0 attend MLP -1 attend MLP",
    "shadowkv": " ".join(f"choose hits +{n} keys -{n} attend MLP" for n in range(3)),
    "infllm": " ".join(f"choose +{n} attend -{n} attend MLP" for n in range(3)),
    "blocks": "choose +0 hits +1 -0 attend MLP choose +2 hits +3 -1 hits -2 attend MLP "
    "choose +4 hits +5 -3 hits -4 attend MLP -5 hits",
}
OTHERS = ["kivi", "pqcache", "quest", "rocketkv", "sparq"]  # nothing hides their rows, so they need no second stream


def in_thread(kind: Any, read: Any, into: Any, on: Any, lane: TransferLane) -> Any:
    assert "move" not in lane._name, "rows of host memory need no thread"
    return kind(read, into, on, lane)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoStreams]:
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr("methods.tiers.transfer.InThread", partial(in_thread, transfer.InThread))
    with side_stream() as both, use_backend("torch"):
        yield both


def last_step(streams: TwoStreams, name: str, captured: bool) -> str:
    """What the two streams were given in the last step that Python ran."""
    how: dict[str, Any] = {"placement": "host", "calibration": prompt(64, seed=9), "overlap": True}
    with attached(tiny("llama"), METHODS[name], budget=0.5, **how) as kv:
        Engine(kv, graphs=Tape() if captured else None).generate(prompt(80), max_new_tokens=5)
    ends = [place for place, noted in enumerate(streams.noted) if noted == ("op", "token_logits")]
    step = streams.noted[ends[-2] : ends[-1]]
    first = min((number for kind, number in step if kind != "op"), default=0)
    words = [SHOWN.get(what, "") if kind == "op" else f"{'+-'[kind == 'wait']}{what - first}" for kind, what in step]
    shown = [word for word in words if word]
    return " ".join(word for word, before in zip(shown, ["", *shown], strict=False) if word != before)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", [*(name for name in ORDER if " " not in name), *OTHERS])
def test_rows_are_asked_for_early_and_waited_for_late(name: str, captured: bool, streams: TwoStreams) -> None:
    given = last_step(streams, name, captured)
    if name in OTHERS:
        assert "+" not in given
    else:
        assert given == ORDER.get(f"{name} captured" if captured else name, ORDER[name])


CPU = torch.device("cpu")


def too_early(rows: Tensor) -> Tensor:
    """Read what comes before waiting for it."""
    with transfer.forked(CPU):
        moved = rows + 1
    return moved * 2


def overwritten(rows: Tensor) -> None:
    """Change what the second stream reads."""
    with transfer.forked(CPU):
        rows.sum()
    rows += 1


def given_away(rows: Tensor) -> Tensor:
    """Drop what the second stream reads, whose memory the next tensor may get."""
    chosen = rows * 2
    with transfer.forked(CPU):
        chosen.sum()
    del chosen
    return rows * 3


def of_the_next(rows: Tensor) -> Tensor:
    """Wait for other rows than those that are read."""
    with transfer.forked(CPU) as first:
        rows.sum()
    with transfer.forked(CPU):
        moved = rows + 1
    first()
    return moved * 2


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("mistake", [too_early, overwritten, given_away, of_the_next])
def test_a_race_is_found(mistake: Callable[[Tensor], Any], captured: bool, streams: TwoStreams) -> None:
    rows = torch.ones(3)
    with pytest.raises(RaceError), StreamedGraph().capturing() if captured else nullcontext():
        mistake(rows)


@pytest.mark.parametrize("reads", [torch.sum, torch.linalg.cholesky])  # the second cannot, after it has made a copy
def test_what_nobody_waits_for_is_read_before_its_memory_is_given_away(
    reads: Callable[[Tensor], Any], streams: TwoStreams
) -> None:
    """An error comes between asking and waiting, or while asking: what was read is dropped with the rows."""
    rows = torch.ones(3)
    chosen = [rows * 2]

    def read(numbers: list[Tensor], moved: Traffic) -> Tensor:
        result: Tensor = reads(numbers[0] + 1)
        return result

    with suppress(RuntimeError):
        transfer.Branch(partial(read, chosen), Traffic(), CPU)
    assert streams.noted[-2:] == [("fork", 0), ("wait", 0)]
    chosen.clear()
    assert (rows * 3).tolist() == [3, 3, 3]


def test_a_capture_is_joined_and_waits_for_nothing_from_outside(streams: TwoStreams) -> None:
    rows = torch.ones(3)
    with pytest.raises(CaptureError, match="joined"), StreamedGraph().capturing(), transfer.forked(CPU):
        rows.sum()
    with transfer.forked(CPU) as join:
        rows.sum()
    with pytest.raises(CaptureError, match="another capture"), StreamedGraph().capturing():
        join()
