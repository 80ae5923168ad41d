"""Runs in an environment of its own that has kvpress: one JSON request per line in, one JSON answer per line out.

`python -c "$(cat kvpress_worker.py)" MODEL_FOLDER THREADS`. It imports nothing of this project. The text goes in as
token ids, so that kvpress sees the very prompt that we see: hence the pipeline's `_forward`, behind its tokenisation.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from time import perf_counter
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


@cache
def pipeline(folder: str, dtype: str, attention: str) -> Any:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention).eval()
    return kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=AutoTokenizer.from_pretrained(folder))


def answer(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """`context` is compressed; `rest`, at least one token, follows uncompressed."""
    pipe = pipeline(folder, asked["dtype"], asked["attention"])
    pipe.model.generation_config.eos_token_id = asked["eos"]
    press = getattr(kvpress, asked["press"])(**asked["options"]) if asked["press"] else None
    ids = {"context_ids": torch.tensor([asked["context"]]), "questions_ids": [torch.tensor([asked["rest"]])]}
    forwards: list[None] = []
    counting = pipe.model.register_forward_hook(lambda *_: forwards.append(None))  # one per token
    began = perf_counter()
    with torch.inference_mode():
        [text] = pipe._forward(ids, max_new_tokens=asked["new"], press=press)
    seconds = perf_counter() - began
    counting.remove()
    return {"text": text, "seconds": seconds, "tokens": len(forwards)}


def main(folder: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    logging.disable_progress_bar()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not come between
    for line in sys.stdin:
        print(json.dumps(answer(folder, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
