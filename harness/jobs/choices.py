"""Several texts that were fed behind one prompt, as one answer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from harness.engine.batch.generation import Generation
from harness.jobs.planning.items import Item
from harness.jobs.questions import Failed, Transcript


def together(items: Iterable[Item], transcripts: Iterable[Transcript | Failed]) -> Iterator[Transcript | Failed]:
    """`transcripts` of the parts of `items`, as they end; a part that is a choice waits for the others of its item. An
    item fails with the first of its parts that does."""
    asked = {part.example.id: item for item in items for part in item.parts}
    answered, failed = defaultdict[str, list[Transcript]](list), set[str]()
    for transcript in transcripts:
        item = asked[transcript.item.example.id]
        if item.example.id in failed:
            continue
        if isinstance(transcript, Failed):
            failed.add(item.example.id)
            yield replace(transcript, item=item)
            continue
        if not item.choices:
            yield transcript
            continue
        parts = answered[item.example.id]
        parts.append(transcript)
        if len(parts) == len(item.choices):
            yield _joined(item, answered.pop(item.example.id))


def _joined(item: Item, parts: Sequence[Transcript]) -> Transcript:
    """The transcripts of `item.parts` as that of `item`. Times and counts are the first choice's, whose clock began
    with the prefill; shares of the machine's time are those of all."""
    first, *others = parts
    generations = [part.turns[0] for part in parts]
    for other in others:
        first.decode.add(other.decode)
    summed = {name: sum(getattr(made, name) for made in generations) for name in ("share_s", "decode_share_s")}
    return replace(first, item=item, turns=[replace(generations[0], **summed)], choices=generations)


def output(choices: Sequence[Generation]) -> str:
    """What a task is handed as the output (`evals.base.read_choices`)."""
    return json.dumps([_read(made) for made in choices])


def _read(made: Generation) -> tuple[float, bool]:
    assert made.nll is not None
    assert made.likeliest is not None
    return -made.nll[0] * len(made.tokens[0]), made.likeliest[0]
