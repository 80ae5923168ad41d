"""Compares a model that is not in ARCHITECTURES with transformers' own loop, `model.generate`.

harness/models/probe.py has found that the engine computes what the model's attention does. The
numbers are compared all the same, once for each revision, dtype and version: on the first tokens of
the first prompt, Full, with the prompt in chunks, is held against `generate`. How much of a
difference rounding explains is measured, because a mixture of experts in 16 bits may send a token
to other experts for one bit. A copy in fp32, where memory has room for one, shows what rounding in
16 bits would hide. A model with indexers reads all tokens for that, and then, under DSA, half as many
as there are. The result stays in the user's cache, so that later processes need not compute it
again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from harness.engine.attach import attached
from harness.engine.engine import Engine
from harness.engine.hf import attention_modules
from harness.jobs.machine import free_bytes
from harness.models.base import DTYPES, LoadedModel, ModelError, is_listed
from harness.models.indexers import indexers, reading
from harness.models.snapshots import cache_root
from harness.results.files import digest, read_json, write_json
from harness.results.identity import CORE_VERSION
from harness.results.records import StoreError
from harness.terminal.notices import say_once
from methods.base import Method
from methods.dsa import DSA
from methods.full import Full

PROMPT_TOKENS, NEW_TOKENS, CHUNK = 512, 8, 192
COPY = "a copy in fp32"
# By which logits may differ at least, as a share of their spread. In a copy, more tokens than in a model that was fp32
# all along may go to other experts: weights of 16 bits give ties.
ROUNDING = {"fp32": 1e-3, COPY: 0.01, "fp16": 0.03, "bf16": 0.1}
COPY_BYTES = 6  # per parameter: free memory that a copy in fp32, and its computation, may take
# and times as much as they differ between two ways in which transformers computes the model
SELF = 2

_known: dict[str, dict[str, Any]] = {}  # the outcomes of this process, by key


def check_against_generate(loaded: LoadedModel, prompt: Sequence[int]) -> dict[str, Any] | None:
    """Return how Full compares with `model.generate`, as run.json stores it; None for a model in
    ARCHITECTURES, which the tests compare. `prompt`: token ids, of which the first are used. Raise
    `ModelError` if the two do not compute the same."""
    if is_listed(loaded.model):
        return None
    kind = type(loaded.model).__name__
    dtype = next(key for key, full in DTYPES.items() if loaded.model.dtype == getattr(torch, full))
    versions = {name: version(name) for name in ("torch", "transformers")}
    own = {
        "class": kind,
        "model": loaded.name,
        "revision": loaded.revision,
        "dtype": dtype,
        "core": CORE_VERSION,
    }
    own |= versions | {
        "device": loaded.model.device.type,
        "rope": getattr(loaded.model.config, "rope_parameters", None),
    }
    key = digest(own)
    file = cache_root() / "checked" / f"{key[:32]}.json"
    if key not in _known:
        with suppress(OSError, StoreError):
            _known[key] = read_json(file)["outcome"]
    if key not in _known:
        outcome = _compared(loaded, prompt, dtype)
        if _has_room_for_fp32(loaded.model):
            exact = _compared(replace(loaded, model=deepcopy(loaded.model).float()), prompt, COPY)
            outcome["difference_in_fp32"] = exact["difference"]
        with suppress(OSError):  # if the cache cannot be written, every process compares them
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, own | {"outcome": outcome})
        say_once(
            f"{kind} is in no list of models: compared with generate on {outcome['tokens']} tokens, its logits differ "
            f"by {outcome['difference']:.1e} of their spread"
        )
        _known[key] = outcome
    return _known[key]


def _has_room_for_fp32(model: Any) -> bool:
    """Return True if a model computes in 16 bits, with plain weights on one device that has room for a
    copy of them in fp32."""
    weights = list(model.parameters())
    if (
        model.dtype == torch.float32
        or getattr(model, "is_quantized", False)
        or len({x.device for x in weights}) > 1
    ):
        return False
    free = free_bytes(str(model.device))
    return free is not None and COPY_BYTES * sum(weight.numel() for weight in weights) <= free


def _compared(loaded: LoadedModel, prompt: Sequence[int], dtype: str) -> dict[str, Any]:
    room, modules = loaded.window - NEW_TOKENS, attention_modules(loaded.model)
    ids = torch.tensor([prompt[: min(PROMPT_TOKENS, room)]], device=loaded.model.device)
    with reading(modules, loaded.window):
        outcome = _under(Full(), loaded, ids, dtype)
    if indexers(modules):
        with reading(modules, max(1, ids.shape[1] // 2)):
            outcome["difference_of_choice"] = _under(DSA(), loaded, ids, dtype)["difference"]
    return outcome


@torch.inference_mode()
def _under(method: Method, loaded: LoadedModel, ids: Tensor, dtype: str) -> dict[str, Any]:
    """Return how the engine under `method` compares with `generate` on ids [1 S]."""
    theirs, answer = _of_generate(loaded.model, ids)
    ours = _of_engine(method, loaded.model, ids, answer)
    spread = (theirs - theirs.mean(-1, keepdim=True)).norm()
    difference, noise = (
        float((other - theirs).norm() / spread)
        for other in (ours, _in_one_forward(loaded.model, ids, answer))
    )
    most = max(ROUNDING[dtype], SELF * noise)
    if difference <= most:
        return {
            "tokens": ids.shape[1],
            "new_tokens": len(theirs),
            "difference": difference,
            "rounding": noise,
        }
    chosen, best = ours.argmax(-1).tolist(), theirs.argmax(-1).tolist()
    others = [at for at, token in enumerate(chosen) if token != best[at]]
    at = (
        f"; token {others[0] + 1} is {chosen[others[0]]} here and {best[others[0]]} there"
        if others
        else ""
    )
    raise ModelError(
        f"{loaded.name} ({type(loaded.model).__name__}) is not computed here as model.generate computes it: on "
        f"{ids.shape[1]} tokens of the first prompt and {len(theirs)} new ones the logits differ by "
        f"{difference:.2g} of their spread, where rounding in {dtype} explains {most:.2g}{at}. Choose another model."
    )


def _of_generate(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [N V] and the N tokens that `generate` answers ids [1 S] with."""
    with warnings.catch_warnings():
        # of settings for drawn tokens in the model's generation config
        warnings.simplefilter("ignore")
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return torch.cat(output.logits).float(), output.sequences[0, ids.shape[1] :]


def _in_one_forward(model: Any, ids: Tensor, answer: Tensor) -> Tensor:
    """Return the logits [N V] of the same tokens from one forward of the model with its plainest
    attention, which differ from those of `generate` by rounding alone."""
    usual = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        whole = torch.cat([ids, answer[None, :-1]], 1)
        logits: Tensor = model(whole, use_cache=False, logits_to_keep=len(answer)).logits
    finally:
        model.set_attn_implementation(usual)
    return logits[0].float()


def _of_engine(method: Method, model: Any, ids: Tensor, answer: Tensor) -> Tensor:
    """Return the logits [N V] with which our engine, under `method`, would choose each of the N tokens
    of `answer` to ids [1 S]."""
    with attached(model, method) as kv:
        engine = Engine(kv, prefill_chunk=CHUNK)
        cache = engine.cache(ids, len(answer))
        logits = [engine.prefill(cache, ids, whole=True)]
        cache.seal()
        logits += [engine.decode(token.view(1, 1), cache, None) for token in answer[:-1]]
    return torch.cat(logits).float()
