"""The embedded model over real text, turns of 128 new tokens: the same wherever a conversation was in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from evals.base import Example, Score, Task, TaskEnv, Turn
from harness.cachedattention.turns.caches import CachesBetweenTurns
from harness.config.settings import GenerationSettings, Results, Settings, StoreSettings
from harness.engine.attach import attached
from harness.jobs.evaluate import evaluate
from harness.models.embedded import SmolLM2
from harness.results.run_folder import StoredRun
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from tests.harness.cachedattention.turns.test_histories import MB, Talk, plain, stored

NEW, CHARS = 128, ((900, 200, 600), (300, 1500, 100))  # characters of each turn, by conversation

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class WikiTalks(Task):
    """Conversations whose user turns are pieces of an article."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "none"
    file: str = ""

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        text, start = Path(self.file).read_text(), 0
        for number, lengths in enumerate(CHARS):
            pieces = []
            for length in lengths:
                pieces.append(text[start : start + length])
                start += length
            later = tuple(Turn(question=piece, references=("",)) for piece in pieces[1:])
            first = Example(id=str(number), group="talks", context=pieces[0], references=("",), max_new_tokens=NEW)
            yield replace(first, further=later)

    def score(self, example: Example, output: str) -> Score:
        return Score(0.0)


def talked(root: Path, data: Path, method: Method, **changes: Any) -> StoredRun:
    settings = Settings(
        results=Results(root=str(root)),
        generation=GenerationSettings(force_length=True),
        baseline="off",
        warmup=0,
        dtype="fp32",
        device="cpu",
    )
    made = evaluate(
        method, WikiTalks(file=str(data / "ppl" / "wikitext2_test_raw.txt")), SmolLM2(), settings, **changes
    )
    assert all(len(turn.tokens) == NEW for record in made.records for turn in record.turns or ())
    return made


def tokens(made: StoredRun) -> dict[str, list[int]]:
    return {record.id: record.tokens for record in made.records}


TIERS = {
    "device": StoreSettings(device="1GB", host=0),
    "host": StoreSettings(),
    "disk": StoreSettings(host=0, disk="1GB"),
}


@pytest.mark.tokens
def test_full_says_what_it_says_over_the_whole_text(tmp_path: Path, shared_data: Path) -> None:
    """In batches of two conversations of unequal lengths, against one after the other, computed again."""
    wanted = talked(tmp_path, shared_data, Full(), history="recompute")
    for tier, store in TIERS.items():
        made = talked(tmp_path, shared_data, Full(), history="store", store=store, batch=2)
        assert tokens(made) == tokens(wanted)
        assert {turn.hit_tier for record in made.records for turn in (record.turns or [])[1:]} == {tier}


@pytest.mark.tokens
def test_h2o_goes_on_with_what_it_kept(tmp_path: Path, shared_data: Path) -> None:
    stayed = talked(tmp_path, shared_data, H2O(), history="device_prefix")
    made = talked(tmp_path, shared_data, H2O(), history="store", store=TIERS["disk"], batch=2)
    assert tokens(made) == tokens(stayed)


@pytest.mark.tokens
def test_another_process_goes_on(tmp_path: Path, shared_data: Path) -> None:
    source = SmolLM2()
    loaded = source.load("fp32", "cpu")
    text = (shared_data / "ppl" / "wikitext2_test_raw.txt").read_text()[:3000]
    ids = source.tokenizer()(text)["input_ids"]
    with torch.inference_mode(), attached(loaded.model, Full()) as kv, plain(kv, CachesBetweenTurns) as recompute:
        wanted, talk = (Talk(kv, recompute, 1500, NEW) for _ in range(2))
        for start in (0, 150, 200):
            turn = ids[start : start + 150]
            wanted.turn(turn)
            talk.caches = stored(kv, tmp_path, host=900 * MB, disk=900 * MB)
            talk.turn(turn)
            talk.caches.close()
    assert talk.said == wanted.said
    assert [found.tier for found in talk.found] == [None, "disk", "disk"]
