"""What a served turn records, the totals of a run of `python -m harness.serve`, and the table that
compares runs.

Hit rates count all turns, also first ones, which have no history to be found (`returning` is the
share of turns that have one). Prefill throughput counts whole prompts, reused tokens included, as
CachedAttention does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import pandas as pd

from harness.cachedattention.facts import hit_rates
from harness.cachedattention.simulation.costs import Prices
from harness.terminal.tables import Column, counts, number, share, text_table
from methods.tiers.tier import DISK, HOST, TIERS

GPUS = 1  # this harness runs on one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The record of one served turn of a conversation: its tokens, its times, and what was reused
    of its history. Seconds run on the clock of the serving loop, those of `token_s` from the
    arrival of the question. The seconds of loading the history, and those of handing the prompt's
    rows to the store before the first token, are wall time."""

    session: str
    turn: int  # from 1
    arrived_s: float  # from the loop's start
    queue_s: float  # until there was a slot
    load_s: float  # that the turn has waited for its history, or for a fresh cache
    hidden_s: float  # in which the history was on its way while the turn computed
    token_s: list[float]  # each token
    save_ahead_s: float = 0.0  # before the first token: handing over the prompt's rows
    save_s: float  # after the last token, until the history was handed over
    save_hidden_s: float = 0.0  # in which its rows left the device while nobody waited for that
    tier: str | None  # where the history was found; null: nowhere
    # why it is gone, where it was stored and computing it again gave something else
    lost_to: str | None = None
    reused_tokens: int  # of the prompt, history included
    new_tokens: int  # those that were computed
    tokens: list[int]  # the answer's
    stop: str

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def prefill_s(self) -> float:
        """Return the seconds from the moment when the turn got its slot to its first token, the
        loading of its history included."""
        return self.ttft_s - self.queue_s

    @property
    def prompt_tokens(self) -> int:
        return self.reused_tokens + self.new_tokens


def figures(answers: Sequence[Answer], elapsed_s: float, idle_s: float) -> dict[str, Any]:
    """Return the totals of a run from the records of its turns: seconds, tokens, and shares from 0
    to 1. `elapsed_s`: seconds of the whole run; `idle_s`: those without any turn. The device is
    kept for the run, so all the others count as busy."""
    means = ["load_s", "hidden_s", "save_ahead_s", "save_s", "save_hidden_s"]
    names = (
        "session",
        "turn",
        "lost_to",
        "reused_tokens",
        "prompt_tokens",
        "ttft_s",
        "queue_s",
        "prefill_s",
    )
    turns = pd.DataFrame(
        [{name: getattr(answer, name) for name in (*names, *means)} for answer in answers]
    )
    prompts, prefill_s = turns["prompt_tokens"].sum(), turns["prefill_s"].sum()
    # the method's seal falls between the first and the second token, so steps count from the second
    steps = [
        later - earlier for answer in answers for earlier, later in pairwise(answer.token_s[1:])
    ]
    return {
        "sessions": turns["session"].nunique(),
        "turns": len(answers),
        "returning": (turns["turn"] > 1).mean(),
        **hit_rates([answer.tier for answer in answers]),
        "lost_turns": int(turns["lost_to"].notna().sum()),
        "reused_tokens": turns["reused_tokens"].sum() / prompts,
        **_spread("ttft", turns["ttft_s"]),
        **_spread("queue", turns["queue_s"]),
        **turns[means].mean(),
        "prefill_tok_s": prompts / prefill_s if prefill_s else None,
        "tpot_p50_s": median(steps) if steps else None,
        "answer_tokens": sum(len(answer.tokens) for answer in answers),
        "elapsed_s": elapsed_s,
        "busy_s": elapsed_s - idle_s,
        "turns_per_s": len(answers) / elapsed_s if elapsed_s else None,
    }


def cost(busy_s: float, prices: Prices, reserved: Mapping[str, int]) -> dict[str, float]:
    """Return what a run costs in dollars (`cost_usd`), and the storage's share of that: one device
    that is busy for `busy_s` seconds, and the bytes `reserved` in each tier for as long."""
    device, storage = prices.usd(busy_s / 3600, GPUS, reserved.get(HOST, 0), reserved.get(DISK, 0))
    return {
        "cost_usd": device + storage,
        "storage_share": storage / (device + storage) if busy_s else 0.0,
    }


def _spread(name: str, values: pd.Series) -> dict[str, float]:
    quantiles = {f"{name}_p{percent}_s": values.quantile(percent / 100) for percent in (50, 90, 99)}
    return {f"{name}_s": values.mean(), **quantiles}


def table(named: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the terminal's table of served runs, one line each. `named`: for each run the values
    of the keys that vary, apart from the rate; `rows`: the totals of the runs. Rows that an earlier
    version wrote may lack some of these."""
    first = [Column(key, "", [run[key] for run in named], left=True) for key in named[0]]
    shares = {
        "hit_rate": "hits",
        **{f"hit_rate_{tier}": f"{tier}\nhits" for tier in TIERS},
        "reused_tokens": "reused",
    }
    seconds = {"ttft_p50_s": "TTFT\np50", "ttft_p90_s": "TTFT\np90", "ttft_p99_s": "TTFT\np99", "queue_s": "queue",
               "load_s": "load", "save_s": "save"}  # fmt: skip

    def each(key: str) -> list[Any]:
        """Return a figure of each row; None for 0, which leaves the cell empty."""
        return [row.get(key) or None for row in rows]

    columns = [
        number("rate", "1/s", [row["rate"] for row in rows]),
        *(number(head, "s", each(key)) for key, head in seconds.items()),
        *(share(head, each(key)) for key, head in shares.items()),
        number("prefill", "tok/s", [row["prefill_tok_s"] for row in rows]),
        number("busy", "s", [row["busy_s"] for row in rows]),
        Column("cost", "$", [f"{row['cost_usd']:.2g}" for row in rows]),
        number("turns", "", [row["turns"] for row in rows]),
        counts("lost", each("lost_turns")),
    ]
    return text_table([*first, *columns])
