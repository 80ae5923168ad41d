"""A whole run in a second: a tiny random model with a token per byte, needles in Python's own help text."""

from __future__ import annotations

from typing import Any

import yaml

from evals.niah import Niah
from harness.catalogue import CONF
from harness.models.random import Random
from methods.pqcache import PQCache
from methods.streaming import Streaming

MODEL = Random(shape="tiny", layers=2, seed=0, tokenizer_name="bytes")
PQ = PQCache(
    m=2,
    b=4,
    iterations=3,
    tolerance=1e-4,
    seed=1,
    sinks=4,
    recent_ratio=0.5,
    cache_tokens=0,
    cache_block=128,
    cache_offered=4,
)
STREAMING = Streaming(sinks=4, positions="cache")
# the same on a command line
MODEL_ARGS = ["model=random", "model.shape=tiny", "model.layers=2", "model.tokenizer_name=bytes"]
TASK_ARGS = ["task.lengths=[400]", "task.depths=4", "task.max_new_tokens=6", "progress=false"]


def niah(**changes: Any) -> Niah:
    """conf/task/niah.yaml, small."""
    values = yaml.safe_load((CONF / "task" / "niah.yaml").read_text())
    del values["_target_"]
    short = {"lengths": [400], "depths": 4, "max_new_tokens": 6, "template": "{context}\n\n{question}"}
    return Niah(**values | short | changes)
