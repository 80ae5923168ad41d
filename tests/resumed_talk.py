"""The first turn of a conversation in a process of its own, for test_restart.py: what was
said goes to talk.json, its rows to a store on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness.cachedattention.turns import opening
from harness.cachedattention.turns.opening import opened_caches
from harness.config.settings import Settings, StoreSettings
from harness.engine.attach import attached
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from tests.fast import MODEL
from tests.harness.cachedattention.turns.test_caches import Talk
from tests.tiny import prompt

METHODS: dict[str, Method] = {"full": Full(), "h2o": H2O()}
Said = dict[str, Any]
NOTHING: Said = {"turns": 0, "fed": [], "said": []}


def further(before: Said, settings: Settings, name: str, turns: int = 1) -> Said:
    """`before` with so many turns behind it, under the method `name`; `tier` and `reused` are the last one's."""
    loaded = MODEL.load("fp32", "cpu")
    with attached(loaded.model, METHODS[name], budget=0.5) as kv, opened_caches(settings, kv, loaded, name) as kept:
        talk = Talk(kv, kept)
        talk.fed, talk.said = list(before["fed"]), list(before["said"])
        for number in range(before["turns"], before["turns"] + turns):
            talk.turn(prompt(60 - 20 * number, seed=number)[0].tolist())
        found = talk.found[-1]
        said = {"turns": before["turns"] + turns, "fed": talk.fed, "said": talk.said}
        return said | {"tier": found.tier, "reused": found.reused}


def on_disk(folder: Path) -> Settings:
    store = StoreSettings(host=0, disk="100MB", folder=str(folder / "store"))
    return Settings(history="store", store=store)


def main(folder: Path) -> None:
    opening.BLOCK_TOKENS = 8
    said = {name: further(NOTHING, on_disk(folder), name) for name in METHODS}
    (folder / "talk.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
