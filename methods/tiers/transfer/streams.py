"""Runs work in parallel to the model, on a stream of its own if the device has streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside_the_model(on: torch.device, behind: torch.cuda.Event | None = None) -> Iterator[None]:
    """Run the work of this block after the event `behind`; it is complete at the end of the
    block."""
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
    """Run the work of this block after all present work of the caller's stream, and in parallel to
    its later work. A captured step has both as branches."""
    if on.type != "cuda":
        yield
        return
    side = _side(on)
    side.wait_stream(torch.cuda.current_stream(on))
    with torch.cuda.stream(side):
        yield


def join(on: torch.device) -> None:
    """Let the caller's stream continue after all that was `forked`, without waiting on the host."""
    if on.type == "cuda":
        torch.cuda.current_stream(on).wait_stream(_side(on))


def reach(on: torch.device) -> None:
    """Wait until all present work of this thread's stream is done."""
    if on.type == "cuda":
        torch.cuda.current_stream(on).synchronize()


def reached(on: torch.device) -> torch.cuda.Event | None:
    """Return an event after all present work of the caller's stream; None if the device has no
    streams."""
    if on.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(on))
    return event
