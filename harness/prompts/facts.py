"""The facts of a thought before an answer, which `ThoughtfulAnswer.facts` finds (harness/prompts/thinking.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from harness.results.fact import Fact

TOKENS = "thought_tokens"
# how models begin to think before they answer
BEGINS = ("<think>", "[THINK]", "<thought>", "<seed:think>")


def unanswered(reply: Any) -> bool:
    """Return True if the model's thought did not end, so that there is no answer and the score is 0."""
    return bool(reply[TOKENS] == len(reply.tokens))


def _begins_with_thought(reply: Any) -> bool:
    return bool(reply.output.lstrip().startswith(BEGINS))


WARNINGS = {
    "did not end their thought, which counts as no answer and scores 0: allow more by thinking=N": unanswered,
    "have no thought, though thinking asks for one": lambda record: record[TOKENS] == 0,
    "begin with a thought although thinking=off, and are scored with it: set thinking=on": (
        lambda record: record[TOKENS] is None and _begins_with_thought(record)
    ),
    "begin with a second thought behind the first, and are scored with it": (
        lambda record: record[TOKENS] is not None and _begins_with_thought(record)
    ),
}


def _cautions(records: Sequence[Any], config: Mapping[str, Any]) -> Iterator[str]:
    if cut := sum(map(unanswered, records)):
        yield f"{cut} of {len(records)} thoughts did not end, so there is no answer"
    counts = _counts(records)
    if counts and not any(counts):
        yield f"0 of {len(counts)} answers thought, though thinking={config.get('thinking')}"


def _notes(title: str, records: Sequence[Any], _: Mapping[str, Any]) -> Iterator[str]:
    counts = _counts(records)
    thoughts = [count for count in counts if count]
    tokens = f", of {median(thoughts):.0f} tokens (median) to {max(thoughts)}" if thoughts else ""
    if counts:
        yield (
            f"thoughts ({title}): before {len(thoughts)} of {len(counts)} answers{tokens}; times and tokens per second "
            "include them"
        )


def _counts(records: Sequence[Any]) -> list[int]:
    return [record[TOKENS] for record in records if record[TOKENS] is not None]


# of `tokens`, the thought before the answer; null where none was asked for
THOUGHTS = {TOKENS: Fact(unit="tokens", warnings=WARNINGS, caution=_cautions, note=_notes)}
