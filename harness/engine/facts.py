"""The facts that the engine finds of every answer: entries of `Generation.facts`
(harness/engine/batch/running_sequence.py). Numbers of decode steps are in harness/results/measures.py."""

from __future__ import annotations

from harness.results.fact import Fact, entry, first, largest, last, total
from methods.tiers.tier import DEVICE, TIERS, bytes_key

SEALED = {
    "ended before the cache was sealed: the method did nothing there": lambda record: not record["sealed"],
    "have no TPOT: fewer than 3 tokens": lambda record: record.tpot_s is None,
}
RECOMPUTED = {
    "were computed anew because their text outgrew a length from which the model rotates all of it otherwise": (
        lambda record: bool(record["recomputed"])
    )
}
GENERATED = {
    # of the machine's time: own load, prefill, seal and save, and an equal part of its steps
    "share_s": Fact(unit="seconds", over_turns=total),
    "decode_share_s": Fact(unit="seconds", over_turns=total),  # the same of the steps after the second token
    "seal_s": Fact(unit="seconds", over_turns=total, required=True),
    "question_s": Fact(unit="seconds", over_turns=total, required=True),
    "sealed": Fact(unit="other", over_turns=any, required=True, warnings=SEALED),
    "fallback": Fact(unit="other", over_turns=first, required=True),  # what was done in place of the rule, and why
    "trace": Fact(unit="other", required=True),
    # how often its text was computed anew because it outgrew the model's rotation
    "recomputed": Fact(
        unit="other", older=0, over_turns=sum, section="answers", over_examples=entry(sum), warnings=RECOMPUTED
    ),
    "capture_s": Fact(unit="seconds", over_turns=total),  # capturing the decode step, within the second token's time
    # Triton's making kernels ready, within the other times; null where it makes none
    "compile_s": Fact(unit="seconds", over_turns=total),
    "along": Fact(unit="other"),  # costs along an answer of more than 64 steps, a number per stretch
}
# by tier, the bytes of its own cache; of the whole batch in lines without `share_s`
HELD = {
    bytes_key(tier): Fact(
        unit="bytes",
        older=0,
        required=tier == DEVICE,
        over_turns=last,
        section="held",
        over_examples=entry(largest),
    )
    for tier in TIERS
}
