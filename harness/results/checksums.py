"""What a stored line says of itself: the run that it belongs to, and a checksum over all that it holds.

Records copied from another folder and numbers changed by hand are found on reading. Not a signature: it guards against
mistakes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from harness.results.records import RecordError

RUN, CHECKSUM = "run", "sha256"


def seal(plain: Mapping[str, Any], run: str) -> dict[str, Any]:
    """`plain` with the identity of its run and the checksum of both."""
    bound = {**plain, RUN: run}
    return bound | {CHECKSUM: _checksum(bound)}


def unseal(line: Mapping[str, Any], run: str, where: str, *, required: bool = True) -> dict[str, Any]:
    """What was sealed. Raises `RecordError`, which begins with `where`, for a line of another run or a changed one;
    for one without a seal where that is `required`: runs from before there were seals have none."""
    plain = dict(line)
    checksum = plain.pop(CHECKSUM, None)
    owner = plain.get(RUN)
    if checksum is None and owner is None and not required:
        return plain
    name = f"{where}: example {plain.get('id')!r}"
    if checksum is None or owner is None:
        raise RecordError(f"{name} lacks its run or its checksum; {ADVICE}")
    if checksum != _checksum(plain):
        raise RecordError(f"{name} was changed after it was written; {ADVICE}")
    if owner != run:
        raise RecordError(f"{name} belongs to another run ({str(owner)[:8]}, this is {run[:8]}); {ADVICE}")
    del plain[RUN]
    return plain


ADVICE = "restore the line, or delete it to have the example run again"


def _checksum(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
