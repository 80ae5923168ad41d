"""What must be the same before stored keys and values may be read again."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from harness.results.files import canonical


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """`model`, `weights`: whose rows they are. `tokenizer`: a hash of it. `rotary`: its settings, and whether keys lie
    before the rotation. `codec`: how rows are encoded. `method`: what else shapes them, for what a method lets a token
    see is in the rows of those behind it."""

    model: str
    weights: str
    tokenizer: str
    rotary: str
    dtype: str
    codec: str = "plain"
    method: str = "full"

    @property
    def digest(self) -> str:
        return hashlib.sha256(canonical(asdict(self)).encode()).hexdigest()[:32]
