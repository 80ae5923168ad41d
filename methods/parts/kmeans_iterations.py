"""Measures how many k-means iterations a machine can hide behind the prefill (PQCache, arXiv
2407.12820, section 3.3).

Once per model, at a few lengths s, it times a layer's share of a dense prefill, fitted as a
quadratic of s, and the clustering of a layer's keys in 3 and in 9 iterations, fitted as lines of s.
A prompt then gets the most iterations whose clustering takes no longer than one layer's prefill, 3
to 300. The CPU is timed wherever the model runs, because it clusters during a prefill; one fit thus
serves both placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from methods.base import AttnInput

LENGTHS = (512, 1024, 2048, 4096)  # tokens
FEW, MORE = 3, 9  # iterations
LEAST, MOST = 3, 300
# the fastest counts, since the first pays for allocations; calls that take seconds run once
REPEATS, ENOUGH_S = 3, 1.0
Made = TypeVar("Made")


class Fit(NamedTuple):
    """Hold polynomials fitted to timings of one layer, in seconds by the number s of tokens: a
    dense prefill (quadratic), a clustering in three iterations, and one further iteration (both
    linear). The highest power comes first. As plain numbers they can be the value of
    `method.iterations`."""

    prefill_2: float
    prefill_1: float
    prefill_0: float
    few_1: float  # three iterations
    few_0: float
    one_1: float  # a further iteration
    one_0: float

    def iterations(self, tokens: int) -> int:
        """Return how many k-means iterations over `tokens` tokens take no longer than one layer's
        prefill, at least 3 and at most 300."""
        prefill = (self.prefill_2 * tokens + self.prefill_1) * tokens + self.prefill_0
        spare = prefill - (self.few_1 * tokens + self.few_0)
        each = self.one_1 * tokens + self.one_0
        return max(LEAST, min(FEW + int(spare / max(each, 1e-12)), MOST))


def measure(
    layers: int,
    observe: Callable[[int], Iterator[AttnInput]],
    cluster: Callable[[Tensor, int], object],
) -> Fit:
    """Time prefill and clustering on this machine. `layers`: how many layers the model has.
    `observe(tokens)` runs text through it and yields each layer's input, as in `Method.prepare`;
    `cluster(keys, iterations)` clusters keys [1 G S D] on the CPU, in exactly that many
    iterations."""
    prefill, few, more = [], [], []
    for tokens in LENGTHS:
        whole, x = _fastest(partial(lambda s: next(observe(s)), tokens))
        prefill.append(whole / layers)
        keys = x.k.cpu()
        few.append(_fastest(partial(cluster, keys, FEW))[0])
        more.append(_fastest(partial(cluster, keys, MORE))[0])
    each = [max(b - a, 0.0) / (MORE - FEW) for a, b in zip(few, more, strict=True)]
    return Fit(
        *polynomial(LENGTHS, prefill, 2),
        *polynomial(LENGTHS, few, 1),
        *polynomial(LENGTHS, each, 1),
    )


def polynomial(lengths: Sequence[int], seconds: Sequence[float], degree: int) -> list[float]:
    """Fit a polynomial to `seconds` measured at `lengths` (numbers of tokens), by least squares of
    the seconds per token. Return its coefficients, none negative, highest power first, 4 digits
    each.

    The best such fit is an ordinary one with some powers left out."""
    s, t = (torch.tensor(x, dtype=torch.float64) for x in (lengths, seconds))
    terms = torch.stack([(s / s.max()) ** power / s for power in range(degree, -1, -1)], 1)
    kept = [torch.tensor(mask) for mask in product((False, True), repeat=degree + 1) if any(mask)]
    fits = [
        terms.new_zeros(degree + 1).masked_scatter(
            k, torch.linalg.lstsq(terms[:, k], t / s).solution
        )
        for k in kept
    ]
    best = min(
        (fit for fit in fits if (fit >= 0).all()),
        key=lambda fit: float((terms @ fit - t / s).norm()),
    )
    return [float(f"{c / float(s.max()) ** (degree - i):.4g}") for i, c in enumerate(best.tolist())]


def _fastest(call: Callable[[], Made]) -> tuple[float, Made]:
    """Call `call` up to three times. Return the seconds of the fastest call, until the device is
    done, and the result of the last."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < ENOUGH_S:
        _wait()
        began = perf_counter()
        result = call()
        _wait()
        times.append(perf_counter() - began)
    return min(times), result


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
