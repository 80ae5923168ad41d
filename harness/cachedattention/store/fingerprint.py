"""What must be the same before stored keys and values may be read again."""

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
    """The conditions under which stored rows were made. `model`, `weights`: whose rows they are. `tokenizer`: a hash of
    it. `rotary`: its settings, and whether keys lie before the rotation. `codec`: how rows are encoded. `method`: what
    else shapes them, also what it has prepared, since what a method lets a token see is in the rows of later tokens."""

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
    """Return the lineage of what stays of `tokens`, whose rows were of `lineage`: `dropped` of them left, after the
    first `sinks`. Rows that stay were computed in sight of those that left, so they never serve as rows of the same
    text."""
    return _short({"before": [lineage, list(tokens)], "dropped": dropped, "sinks": sinks})


def recomputed_lineage(lineage: str, tokens: Sequence[int]) -> str:
    """Return the lineage of what is computed in one piece where rows of `tokens`, of `lineage`, were lost, and of all
    that follows: a method that chooses had chosen otherwise, turn by turn."""
    return _short({"before": [lineage, list(tokens)], "lost": True})


def rotated_lineage(lineage: str, stage: int) -> str:
    """Return the lineage of rows of `lineage` in texts so long that the model rotates them otherwise. Hidden states are
    others too, so such rows never serve in shorter texts. `stage`: as `TextRotary` gives it; 0 for what all short texts
    have."""
    return lineage if not stage else _short({"before": lineage, "rotated for": stage})


def content_digest(value: object) -> str:
    """Return a hash of tensors bit by bit, in tuples, lists and mappings, and of what `repr` says of all else."""
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
