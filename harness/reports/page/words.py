"""What the heads of columns mean, for whoever points at one or opens the notes; docs/glossary.md says more."""

from __future__ import annotations

from harness.results.measures import MEASURES
from methods.tiers.tier import TIERS

_MEANINGS = {
    "budget": "prompt tokens that a head may read per step, as asked: a share or a number",
    "vs full": "difference to Full on the same prompts, in points",
    "p": "paired test against Full, uncorrected; * holds after Holm's correction",
    "n": "examples",
    "stamps": "conditions to know before comparing, a letter each",
    "attended": "share of the prompt that a head read per step",
    "read per\nKV head\n(union)": "share of the prompt that a KV head read for all its query heads, each token once",
    "recall": "of the prompt tokens with the largest weights, as many as were read, the share that was",
    "mass": "share of the exact attention weight that lies on the tokens read",
    "KL": "divergence between the next-token distributions of Full and the method on the same text",
    "TTFT": "time to the first token, prefill included; median",
    "TTFT\nlater": "time to the first token of a further turn or question, from its own start; median",
    "TT2T": "time to the second token, seal included; median",
    "TPOT p50/90": "time per output token behind the second: median and 90th percentile",
    "decode": "tokens per second behind the second token",
    "read\nof Full's": "of what Full read on the same examples",
    "found in": "tier in which a turn found its history",
    "lost": "turns whose stored history was gone, where computing it again changed what the method holds",
    "reused": "tokens of its history that a turn found",
    "computed": "tokens that a turn prefilled, its own prompt among them",
    "load": "time that a turn waited for its history, within its TTFT",
    "hidden": "time in which layers of its history came while it computed",
    "save": "time in which a turn was stored behind its last token",
    "save hidden": "time in which its rows left the device while nobody waited",
}


def meaning(head: str) -> str | None:
    """What stands below a head; of bytes held it is in the table of tiers, of numbers of a step in that of measures."""
    held = {tier.head: tier.meaning for tier in TIERS.values()}
    measured = {measure.head: measure.shown for measure in MEASURES.values() if measure.head}
    return (_MEANINGS | held | measured).get(head)
