"""Runs in an environment of its own that has kvpress: one JSON request per line in, one JSON answer per line out.

`python -c "$(cat kvpress_worker.py)" MODEL_FOLDER THREADS`. It imports nothing of this project. The text goes in as
token ids, so that kvpress sees the very prompt that we see: hence the pipeline's `_forward`, behind its tokenisation.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import cache
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging


@cache
def pipeline(folder: str) -> Any:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    return kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=AutoTokenizer.from_pretrained(folder))


def answer(folder: str, asked: dict[str, Any]) -> dict[str, Any]:
    """`context` is compressed by `press` at `ratio`; `rest`, at least one token, follows uncompressed."""
    pipe = pipeline(folder)
    pipe.model.generation_config.eos_token_id = asked["eos"]
    press = made(asked["press"])
    with suppress(AttributeError):  # one that takes no ratio
        press.compression_ratio = asked["ratio"]
    ids = {"context_ids": torch.tensor([asked["context"]]), "questions_ids": [torch.tensor([asked["rest"]])]}
    kept = DynamicCache()
    with torch.inference_mode():
        [text] = pipe._forward(ids, max_new_tokens=asked["new"], press=press, cache=kept)
    return {"text": text, "kept": positions(folder, tuple(asked["context"]), kept)}


def made(mapping: dict[str, Any]) -> Any:
    """Return the press that `mapping` names, with those in it."""
    inner = {name: made(value) if isinstance(value, dict) else value for name, value in mapping.items()}
    return getattr(kvpress, inner.pop("name"))(**inner)


def positions(folder: str, context: tuple[int, ...], kept: Any) -> list[list[list[int]]]:
    """Return where the kept tokens stood, by layer and KV head: looked up by their keys among all keys."""
    found = []
    for known, layer, decoder in zip(
        rows(folder, context), kept.layers, pipeline(folder).model.model.layers, strict=True
    ):
        masked = getattr(decoder.self_attn, "masked_key_indices", None)
        if masked is not None:  # all keys are there, and those that are masked are not read
            hidden = torch.zeros(layer.keys.shape[1:3], dtype=torch.bool)
            hidden[masked[1], masked[2]] = True
            found.append([(~head).nonzero()[:, 0].tolist() for head in hidden])
        else:
            heads = zip(known, layer.keys[0], strict=True)
            found.append([sorted(places[row.tobytes()] for row in keys.numpy()) for places, keys in heads])
    return found


@cache
def rows(folder: str, context: tuple[int, ...]) -> list[list[dict[bytes, int]]]:
    """Return the place of every key of an uncompressed prompt, by its bytes, for every layer and KV head."""
    whole: Any = DynamicCache()
    with torch.inference_mode():
        pipeline(folder).model.model(input_ids=torch.tensor([context]), past_key_values=whole)
    return [
        [{row.tobytes(): place for place, row in enumerate(head.numpy())} for head in layer.keys[0]]
        for layer in whole.layers
    ]


def main(folder: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    logging.disable_progress_bar()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not come between
    for line in sys.stdin:
        print(json.dumps(answer(folder, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
