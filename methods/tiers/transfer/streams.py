"""Runs work beside the model's own, on a stream of its own where there are streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
