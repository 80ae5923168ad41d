"""A whole run in a second: a tiny random model with a token per byte, needles in Python's own help text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evals.base import Task
from evals.niah import Niah
from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate
from harness.models.random import Random
from harness.results.run_folder import StoredRun
from methods.base import Method
from methods.pqcache import PQCache
from methods.streaming import Streaming

MODEL = Random(shape="tiny", layers=2, seed=0, tokenizer_name="bytes")
PQ = PQCache(b=4, iterations=3, seed=1, sinks=4)
STREAMING = Streaming()
# the same on a command line
MODEL_ARGS = ["model=random", "model.shape=tiny", "model.layers=2", "model.tokenizer_name=bytes"]
TASK_ARGS = ["task.lengths=[400]", "task.depths=4", "task.max_new_tokens=6"]


def run(root: Path, method: Method, task: Task, **changes: Any) -> StoredRun:
    """Below `root`, with neither Full nor a warm-up unless they are asked for."""
    settings = Settings(results=Results(root=str(root)), baseline="off", warmup=0)
    return evaluate(method, task, MODEL, settings, **changes)


def niah(**changes: Any) -> Niah:
    """The usual needle, small."""
    short = {"lengths": [400], "depths": 4, "max_new_tokens": 6, "template": "{context}\n\n{question}"}
    return Niah(**short | changes)
