"""What a sample says of the mean of bounded values: Gaffke's bound, assuming nothing of how they are distributed.

A sample stands for every mixture of its values and one more at `top`, in shares drawn evenly (Dirichlet); the bound
is a quantile of the mixtures' means. Of values of 0 and 1 it is Clopper and Pearson's, and testing that a mean
difference of such values is 0 is McNemar's exact test.

Gaffke 2005; Learned-Miller and Thomas 2019 (arXiv:1905.06208); weights as of Fay and Feuer 1997.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

_STEP = 0.2  # of the quadrature
_NODES = 90  # at most, half of them at a time
_NOTHING = 1e-12  # of the largest value
_PRECISE, _STEPS = 1e-10, 100  # of an end; steps at most, for values on which secants stall


def upper_p(values: Floats, weights: Floats, mean: float | Floats, top: float) -> Floats:
    """One-sided p of "the mean is `mean`" against a smaller one. values [.. N] up to `top`, weights [N] add up to 1."""
    deviations = values - np.asarray(mean)[..., None]
    shapes = weights * _size(np.maximum(-deviations, 0), weights)[..., None]
    last = np.broadcast_to(top - np.asarray(mean), deviations.shape[:-1])[..., None]
    return tail(np.concatenate([deviations, last], -1), np.concatenate([shapes, np.ones_like(last)], -1))


def upper_end(values: Floats, weights: Floats, top: float, level: float, between: tuple[float, float]) -> float:
    """Where in this range of means `upper_p` falls to `level`; the nearer end where it does so beyond.

    The secant method with the root held between two ends, on the scale of normal deviates: `upper_p` is almost a line
    there, and five steps find what takes fifteen on its own scale. A process that shows the same rows again, in a
    table, on a page, to a tracker, finds them once.
    """
    return _upper_end(values.tobytes(), weights.tobytes(), top, level, between)


@lru_cache(maxsize=4096)
def _upper_end(
    value_bytes: bytes, weight_bytes: bytes, top: float, level: float, between: tuple[float, float]
) -> float:
    values, weights = np.frombuffer(value_bytes), np.frombuffer(weight_bytes)
    aim = special.ndtri(level)

    def excess(mean: float) -> float:
        return float(special.ndtri(np.clip(upper_p(values, weights, mean, top), 1e-300, 1 - 1e-16)) - aim)

    low, high = between
    last, before = (low, excess(low)), (high, excess(high))
    if last[1] <= 0:
        return low
    if before[1] >= 0:
        return high
    error = float(np.sqrt(weights**2 @ (values - weights @ values) ** 2))
    trial = min(low + 2 * error, (low + high) / 2) if error else (low + high) / 2
    for _ in range(_STEPS):
        before, last = last, (trial, excess(trial))
        low, high = (trial, high) if last[1] > 0 else (low, trial)
        rise = last[1] - before[1]
        trial = last[0] - last[1] * (last[0] - before[0]) / rise if rise else low
        if not low < trial < high:
            trial = (low + high) / 2
        if abs(trial - last[0]) < _PRECISE:
            break
    return trial


def tail(values: Floats, shapes: Floats) -> Floats:
    """P(sum of values x gamma variables >= 0) over the last axis; the gammas are independent, of the given shapes.

    An integral of the moment generating function over a line through its saddle point, good to about 7 digits.
    """
    if values.ndim == shapes.ndim == 1:  # equal values are one, with a gamma of their shapes together
        values, which = np.unique(values, return_inverse=True)
        shapes = np.bincount(which, shapes).astype(float)
    values = np.where(abs(values) < _NOTHING * abs(values).max(-1, keepdims=True), 0.0, values)
    turned = (values * shapes).sum(-1) > 0  # the smaller of the two tails is worked out
    values, shapes = np.broadcast_arrays(np.where(turned[..., None], -1, 1) * values, shapes)
    largest = np.max(np.where(shapes > 0, values, -np.inf), axis=-1)
    smallest = np.min(np.where(shapes > 0, values, np.inf), axis=-1)
    beyond = np.where((largest <= 0) & (smallest >= 0), 1.0, 0.0)
    mixed = (largest > 0) & (smallest < 0)
    counted = (shapes > 0) & (values != 0)
    if mixed.ndim == 0 and mixed and counted.sum() == 2:  # one gamma against another: a beta variable
        falls, rises = shapes[counted & (values < 0)], shapes[counted & (values > 0)]
        beyond = special.betaincc(rises, falls, smallest / (smallest - largest))[0]
    elif mixed.any():
        beyond[mixed] = _integral(values[mixed] / largest[mixed][:, None], shapes[mixed])
    return np.where(turned, 1 - beyond, beyond)


def _integral(values: Floats, shapes: Floats) -> Floats:
    """`tail` of values [R N] whose largest is 1, along a hyperbola that leaves the saddle by steepest descent."""
    saddle = _saddle(values, shapes)
    ratios = values / (1 - saddle[:, None] * values)
    scale = 1 / np.sqrt((shapes * ratios**2).sum(-1) + saddle**-2)
    bend = 2 / 3 * scale**3 * ((shapes * ratios**3).sum(-1) - saddle**-3)
    total = np.zeros(len(values))
    for block in np.split(_STEP * np.arange(_NODES), 2):
        along, across = np.cosh(block), np.sinh(block)
        points = saddle[:, None] + scale[:, None] * (bend[:, None] * (along - 1) + 1j * across)  # [R nodes]
        logs = -(shapes[:, None] * np.log(1 - points[..., None] * values[:, None])).sum(-1) - np.log(points)
        terms = np.exp(logs) * (along - 1j * bend[:, None] * across) * np.where(block == 0, 0.5, 1)
        total += terms.real.sum(-1)
        if (abs(terms[:, -1]) < 1e-14 * total).all():
            break
    return np.clip(total * scale * _STEP / np.pi, 0.0, 1.0)


def _saddle(values: Floats, shapes: Floats) -> Floats:
    """Where the real integrand is smallest, between 0 and 1, the branch point of the largest value: Newton's method,
    and halving where it leaves what is known to lie around."""
    low, high = np.zeros(len(values)), np.ones(len(values))
    saddle = np.full(len(values), 0.5)
    for _ in range(60):
        ratios = values / (1 - saddle[:, None] * values)
        slope = (shapes * ratios).sum(-1) - 1 / saddle
        low, high = np.where(slope > 0, low, saddle), np.where(slope > 0, saddle, high)
        step = saddle - slope / ((shapes * ratios**2).sum(-1) + saddle**-2)
        before, saddle = saddle, np.where((low < step) & (step < high), step, (low + high) / 2)
        if (abs(saddle - before) < 1e-7 * saddle).all():
            break
    return saddle


def _size(push: Floats, weights: Floats) -> Floats:
    """Equal examples that those worth: all where weights are equal; of unequal ones, those that push the mean count."""
    largest = push.max(-1, keepdims=True)
    push = np.where(largest > 0, push / np.where(largest > 0, largest, 1.0), 1.0)
    return (push * weights).sum(-1) / (push * weights**2).sum(-1)
