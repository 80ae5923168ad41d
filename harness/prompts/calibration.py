"""Provides ordinary text for methods that calibrate themselves, and for benchmarks."""

from __future__ import annotations

from evals.base import TaskEnv
from evals.haystack import load
from harness.prompts.prompt import Tokenizer, Tools

MOST = 4096  # tokens that a method may ask for


def calibration_text(tokenizer: Tokenizer, tokens: int = MOST) -> list[int]:
    """Return token ids of ordinary text: the end of Python's help topics, because haystacks are cut
    from their beginning."""
    tools = Tools(tokenizer, "none")
    text = load("pydoc", TaskEnv(text=tools, seed=0)).text
    return tools.encode(text[-8 * tokens :])[-tokens:]
