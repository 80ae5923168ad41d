"""The harness: it knows the contracts of methods and tasks. Of the concrete ones it imports Full, which others are held
against, and the lengths of conversations (evals/multiturn).

    from harness import attached, evaluate

Nothing heavy is imported here, so that `python -m harness --help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness.terminal.early  # isort: skip  # noqa: F401 (first, since what follows takes a while)
from harness.config.clashes import settle_clashes

if TYPE_CHECKING:
    from harness.engine.attach import attached
    from harness.engine.batch.running import RunningBatch
    from harness.engine.engine import Engine
    from harness.jobs.evaluate import evaluate

__all__ = ["Engine", "RunningBatch", "attached", "evaluate"]
_HOMES = {
    "Engine": "harness.engine.engine",
    "RunningBatch": "harness.engine.batch.running",
    "attached": "harness.engine.attach",
    "evaluate": "harness.jobs.evaluate",
}

settle_clashes()
__path__.append(str(Path(__file__).parent / "commands"))  # for `python -m harness.report`


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
