"""Chinese words, for the metrics whose names end in _zh."""

from __future__ import annotations

import logging
from types import ModuleType

from evals.base import TaskError


def cut(text: str) -> list[str]:
    """Words by jieba's default mode, as LongBench uses it."""
    return list(splitter().cut(text, cut_all=False))


def splitter() -> ModuleType:
    """The module jieba, or an error that says how to get it."""
    try:
        import jieba
    except ModuleNotFoundError as error:
        raise TaskError("LongBench's Chinese metrics need jieba: pip install 'jieba>=0.42' (extra zh)") from error
    jieba.setLogLevel(logging.WARNING)  # else it tells stderr that it builds its dictionary
    module: ModuleType = jieba
    return module
