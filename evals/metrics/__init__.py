"""Computes LongBench v1's metrics (arXiv:2308.14508, table 1), equal to the official functions to
the last digit.

All are pure functions of strings that return a number from 0 to 1.
"""

from evals.metrics.answers import (
    CODE_SIM_BACKENDS,
    classification,
    code_sim,
    count,
    qa_f1,
    qa_f1_zh,
    retrieval,
    retrieval_zh,
)
from evals.metrics.rouge import rouge_l, rouge_zh

__all__ = [
    "CODE_SIM_BACKENDS",
    "classification",
    "code_sim",
    "count",
    "qa_f1",
    "qa_f1_zh",
    "retrieval",
    "retrieval_zh",
    "rouge_l",
    "rouge_zh",
]
