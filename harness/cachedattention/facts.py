"""The facts of a conversation's turn: where its history was found, and what loading and saving it took. `Conversation`
(harness/cachedattention/turns/conversation.py) finds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.results.fact import Fact, entry, first, mean, middle, total
from methods.tiers.tier import TIERS

STORED = "stored histories were lost, and computing them again changed what the method holds: answers may differ"
LOST = "stored histories were lost and computed again, so answers may differ"


def hit_rates(tiers: Sequence[str | None]) -> dict[str, float]:
    """Return the share of turns whose history was found, in any tier (`hit_rate`) and in each. `tiers`:
    where it was found, by turn."""
    found = Counter(filter(None, tiers))
    rates = {f"hit_rate_{tier}": found[tier] / len(tiers) for tier in TIERS}
    return {"hit_rate": found.total() / len(tiers), **rates}


def _tiers(values: Sequence[str | None]) -> dict[str, int]:
    """Return in how many of the turns the history was found in each tier."""
    return dict(sorted(Counter(filter(None, values)).items()))


def _nowhere(title: str, records: Sequence[Any], config: Mapping[str, Any]) -> Iterator[str]:
    later = [turn["hit_tier"] for record in records for turn in record.replies[1:]]
    if config.get("history") == "store" and later and not any(later):
        yield f"history=store ({title}): no turn found its history; give the store more room"


def _seconds(key: str) -> Fact:
    head = key.removesuffix("_s").replace("_", " ")
    return Fact(unit="seconds", over_turns=total, by_turn=entry(middle), head=head)


SECONDS = (
    "load_s",  # waited until the cache was there, within the first token's time
    "hidden_s",  # in which layers were on their way during the turn's own computing
    "save_ahead_s",  # handing over the prompt's rows, within the first token's time; null as save_s
    "save_s",  # after the last token; null where no turn follows
    "save_hidden_s",  # in which its rows left the device while nobody waited for that
)
HISTORY = {
    # where it was found; null on a miss
    "hit_tier": Fact(unit="tier", by_turn=entry(_tiers, "hits"), head="found in", note=_nowhere),
    # that were found; null where no history is kept or none was asked for
    "reused_tokens": Fact(unit="tokens", over_turns=total, by_turn=entry(mean), head="reused"),
    # of its history, that left the window before the turn; null where none can
    "dropped_tokens": Fact(unit="tokens", over_turns=total),
    # 1: a history that was stored is gone, and computing it again gave something else
    "lost_turns": Fact(
        unit="turns",
        over_turns=total,
        section="answers",
        over_examples=entry(total),
        by_turn=entry(total),
        head="lost",
        stamp=("X", STORED),
        alarm=LOST,
    ),
    # why it is gone, the first of a conversation's
    "lost_to": Fact(unit="other", over_turns=first),
    # that were computed, the history's too where it was not found
    "new_tokens": Fact(unit="tokens", over_turns=total, by_turn=entry(mean), head="computed"),
    **{key: _seconds(key) for key in SECONDS},
}
