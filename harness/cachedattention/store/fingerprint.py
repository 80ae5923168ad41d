"""What must be the same before stored keys and values may be used again: the fingerprint of a whole
store, and the lineage of each session.

A lineage is a hash of what happened to a conversation before its rows were computed: tokens were
dropped, rows were lost and computed again, or the model rotated them for a longer text. Rows of one
lineage are never found under another, though their tokens are the same. EXACT is the lineage of
rows that were computed from their own text only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from harness.results.files import digest

LENGTH = 32  # hexadecimal digits of a hash
EXACT = ""  # rows that were computed in sight of their text alone


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Describe the conditions under which keys and values were computed and stored; a store hands
    them out only under the same ones. `model`, `weights`: whose they are. `tokenizer`: a hash of
    it. `rotary`: the rotary settings, and whether keys are stored before the rotation. `codec`: how
    they are encoded. `method`: the method with its settings, and a digest of what it has prepared,
    since what a method lets a token attend to shapes the rows of all later tokens."""

    model: str
    weights: str
    tokenizer: str
    rotary: str
    dtype: str
    codec: str = "plain"
    method: str = "full"

    @property
    def digest(self) -> str:
        return _short(asdict(self))


def cut_lineage(lineage: str, tokens: Sequence[int], dropped: int, sinks: int = 0) -> str:
    """Return the lineage of the rows that stay when a history is cut. (A lineage is a hash that
    tells rows of the same tokens apart.) Before the cut, `tokens` had rows of the lineage
    `lineage`; after the first `sinks` of these tokens, `dropped` tokens leave. The rows that stay
    were computed with attention to those that leave, so they must never pass for rows of the
    shorter text."""
    return _short({"before": [lineage, list(tokens)], "dropped": dropped, "sinks": sinks})


def recomputed_lineage(lineage: str, tokens: Sequence[int]) -> str:
    """Return the lineage of a history that was lost and is computed again. (A lineage is a hash
    that tells rows of the same tokens apart.) The lost rows were those of `tokens` and had the
    lineage `lineage`. A method that evicts chose turn by turn then, and chooses once over the whole
    text now, so the new rows differ, and so do all that follow them."""
    return _short({"before": [lineage, list(tokens)], "lost": True})


def rotated_lineage(lineage: str, stage: int) -> str:
    """Return the lineage (a hash that tells rows of the same tokens apart) of rows that were
    rotated for a long text, given the `lineage` that they would have in a short one. Hidden states
    differ too, so such rows never serve a shorter text. `stage`: a number that is equal for all
    texts that the model rotates alike (`TextRotary.stage`); 0, that of all short texts, leaves the
    lineage as it is."""
    return lineage if not stage else _short({"before": lineage, "rotated for": stage})


def content_digest(value: object) -> str:
    """Return a hash of `value`, which may be nested in tuples, lists and mappings: of tensors bit
    by bit, of everything else by its `repr`."""
    return _short({"value": _described(value)})


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        data: Any = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()[:LENGTH]]
    if isinstance(value, Mapping):
        return [[repr(key), _described(one)] for key, one in value.items()]
    if isinstance(value, (tuple, list)):
        return [_described(one) for one in value]
    return repr(value)


def _short(plain: Mapping[str, Any]) -> str:
    return digest(plain)[:LENGTH]
