"""Ordinary text for methods that calibrate themselves, and for benchmarks that need some."""

from __future__ import annotations

from evals.base import TaskEnv
from evals.haystack import load
from harness.prompts.prompt import Tokenizer, Tools

MOST = 4096  # tokens that a method may ask for


def calibration_text(tokenizer: Tokenizer, tokens: int = MOST) -> list[int]:
    """Token ids: the end of Python's help topics, so that it is not the beginning that haystacks are cut from."""
    tools = Tools(tokenizer, "none")
    text = load("pydoc", TaskEnv(text=tools, seed=0)).text
    return tools.encode(text[-8 * tokens :])[-tokens:]
