"""Runs work beside the model's own, on a stream of its own where there are streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside_the_model(on: torch.device, behind: torch.cuda.Event | None = None) -> Iterator[None]:
    """Run what is begun within behind the event `behind`; it is complete at the end of the block."""
    if on.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(on)
    with torch.cuda.stream(stream):
        if behind is not None:
            stream.wait_event(behind)
        yield
        stream.synchronize()


@cache
def _side(on: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(on)


@contextmanager
def forked(on: torch.device) -> Iterator[None]:
    """Run what is begun within behind all that the caller's stream was given, and beside what it is given from now on.
    A step that is captured has both as branches."""
    if on.type != "cuda":
        yield
        return
    side = _side(on)
    side.wait_stream(torch.cuda.current_stream(on))
    with torch.cuda.stream(side):
        yield


def join(on: torch.device) -> None:
    """Let the caller's stream go on behind all that was `forked`, without waiting on the host."""
    if on.type == "cuda":
        torch.cuda.current_stream(on).wait_stream(_side(on))


def reach(on: torch.device) -> None:
    """Wait until all that this thread's stream was given is done."""
    if on.type == "cuda":
        torch.cuda.current_stream(on).synchronize()


def reached(on: torch.device) -> torch.cuda.Event | None:
    """Return an event behind all that the caller's stream was given; None where there are no streams."""
    if on.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(on))
    return event
