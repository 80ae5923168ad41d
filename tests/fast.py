"""A whole run in a second: a tiny random model with a token per byte, needles in Python's own help text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evals.base import Task
from evals.niah import Niah
from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate
from harness.models.base import ModelSource
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


def settings(root: Path, **changes: Any) -> Settings:
    """Of a run below `root`, with neither Full nor a warm-up unless they are asked for."""
    return Settings(**{"results": Results(root=str(root)), "baseline": "off", "warmup": 0} | changes)


def run(root: Path, method: Method, task: Task, model: ModelSource = MODEL, **changes: Any) -> StoredRun:
    return evaluate(method, task, model, settings(root, **changes))


def tokens(made: StoredRun) -> dict[str, list[int]]:
    """Of each example, by its id."""
    return {record.id: record.tokens for record in made.records}


def niah(**changes: Any) -> Niah:
    """The usual needle, small."""
    short = {"lengths": [400], "depths": 4, "max_new_tokens": 6, "template": "{context}\n\n{question}"}
    return Niah(**short | changes)
