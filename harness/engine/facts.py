"""The facts that the engine finds of every answer: entries of `Generation.facts`
(harness/engine/batch/running_sequence.py). Numbers of decode steps are in harness/results/measures.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from harness.results.fact import Fact, entry, first, largest, last, total
from methods.tiers.tier import DEVICE, bytes_key

SEALED = {
    "ended before the cache was sealed: the method did nothing there": lambda record: (
        not record["sealed"]
    ),
    "have no TPOT: fewer than 3 tokens": lambda record: record.tpot_s is None,
}
RECOMPUTED = {
    "were computed anew because their text outgrew a length from which the model rotates all of it otherwise": (
        lambda record: bool(record["recomputed"])
    )
}
SECONDS = Fact(unit="seconds", over_turns=total)
OF_SEAL = replace(SECONDS, required=True)
TOLD = Fact(unit="other", required=True)
GENERATED = {
    # of the machine's time: own load, prefill, seal and save, and an equal part of its steps
    "share_s": SECONDS,
    "decode_share_s": SECONDS,  # the same of the steps after the second token
    "seal_s": OF_SEAL,
    "question_s": OF_SEAL,
    "sealed": replace(TOLD, over_turns=any, warnings=SEALED),
    # what the method did in place of its rule, and why
    "fallback": replace(TOLD, over_turns=first),
    "trace": TOLD,
    # how often its text was computed anew because it outgrew the model's rotation
    "recomputed": Fact(
        unit="other",
        older=0,
        over_turns=sum,
        section="answers",
        over_examples=entry(sum),
        warnings=RECOMPUTED,
    ),
    "capture_s": SECONDS,  # capturing the decode step, within the second token's time
    # Triton's making kernels ready, within the other times; null where it makes none
    "compile_s": SECONDS,
    # of layers with a state (linear attention, a state space), whatever the method and the text's length
    "state_bytes": Fact(
        unit="bytes",
        older=0,
        over_turns=last,
        section="held",
        over_examples=entry(largest),
        head="state",
        shown="states of layers without keys and values, on the device, in no budget",
        hides_zeros=True,
    ),
    # costs along an answer of more than 64 steps, a number per stretch
    "along": Fact(unit="other"),
}


def held(tiers: Iterable[str]) -> dict[str, Fact]:
    """Return the facts by tier of the bytes that an answer's own cache holds there; in lines without `share_s`, those
    of the whole batch."""
    largest_of_all = Fact(
        unit="bytes", older=0, over_turns=last, section="held", over_examples=entry(largest)
    )
    return {bytes_key(tier): replace(largest_of_all, required=tier == DEVICE) for tier in tiers}
