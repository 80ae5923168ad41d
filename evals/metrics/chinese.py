"""Splits Chinese text into words, for the metrics whose names end in _zh."""

from __future__ import annotations

import logging
from types import ModuleType

from evals.base import TaskError


def cut(text: str) -> list[str]:
    """Split text into words by jieba's default mode, as LongBench does."""
    return list(splitter().cut(text, cut_all=False))


def splitter() -> ModuleType:
    """Import jieba. Raises `TaskError`, which says how to install it, where it is missing."""
    try:
        import jieba
    except ModuleNotFoundError as error:
        raise TaskError("LongBench's Chinese metrics need jieba: pip install 'jieba>=0.42' (extra zh)") from error
    jieba.setLogLevel(logging.WARNING)  # otherwise it reports on stderr that it builds its dictionary
    module: ModuleType = jieba
    return module
