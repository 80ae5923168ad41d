"""Times and rates over many records, as one definition for every method.

TPOT: time per token after the second (the seal lies between token 1 and 2); mean and quantiles pool the single
intervals of all sequences. Decode throughput: tokens after the second, of all sequences of a batch, over the time from
the batch's second token to its last. End-to-end throughput: all tokens over the time from the start of prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from harness.results.records import Record

Quantiles = dict[str, float | None]


def quantiles(values: Iterable[float | None]) -> Quantiles:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "p50": None, "p90": None}
    p50, p90 = np.quantile(known, [0.5, 0.9])
    return {"mean": float(np.mean(known)), "p50": float(p50), "p90": float(p90)}


def batches(records: Sequence[Record], size: int) -> Iterator[list[Record]]:
    """Sequences that ran together: neighbours in the file, at most `size`, with the same clock."""
    batch: list[Record] = []
    for record in records:
        if batch and (len(batch) == size or not _one_clock(batch[0], record)):
            yield batch
            batch = []
        batch.append(record)
    if batch:
        yield batch


def decode_throughput(records: Sequence[Record], size: int) -> float | None:
    """Tokens per second after each batch's second step; null where no sequence came to a third token."""
    tokens = seconds = 0.0
    for batch in batches(records, size):
        longest = max((record.token_s for record in batch), key=len)
        if len(longest) > 2:
            tokens += sum(max(0, len(record.token_s) - 2) for record in batch)
            seconds += longest[-1] - longest[1]
    return tokens / seconds if seconds else None


def total_throughput(records: Sequence[Record], size: int) -> float | None:
    """Tokens per second with prefill, seal and question inside."""
    tokens = sum(len(record.token_s) for record in records)
    seconds = sum(max(record.token_s[-1] for record in batch) for batch in batches(records, size))
    return tokens / seconds if seconds else None


def _one_clock(a: Record, b: Record) -> bool:
    return all(x == y for x, y in zip(a.token_s, b.token_s, strict=False))
