"""Bounds the mean of bounded values from a sample, whatever their distribution (Gaffke's bound).

A sample stands for every mixture of its values and one more value at `top`, with shares drawn
evenly (Dirichlet); the bound is a quantile of the mixtures' means. For values of 0 and 1 it is
Clopper and Pearson's interval, and testing whether a mean difference of such values is 0 is
McNemar's exact test.

Gaffke 2005; Learned-Miller and Thomas 2019 (arXiv:1905.06208); weights as in Fay and Feuer 1997.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_STEP = 0.2  # width of a step of the quadrature
_NODES = 90  # steps of the quadrature at most, taken in two halves
_NOTHING = 1e-12  # share of the largest value below which a value counts as 0
_PRECISE, _STEPS = 1e-10, 100  # precision of an end; steps to it at most, where secants stall


def upper_p(values: Floats, weights: Floats, mean: float | Floats, top: float) -> Floats:
    """Return the one-sided p-value of the hypothesis that the mean of a distribution is `mean`,
    against the alternative that it is smaller, where no value can exceed `top` and nothing else is
    assumed (Gaffke's bound).

    values [.. N]: the sample; weights [N]: the share of each value in the mean, adding up to 1."""
    deviations = values - np.asarray(mean)[..., None]
    shapes = weights * _size(np.maximum(-deviations, 0), weights)[..., None]
    last = np.broadcast_to(top - np.asarray(mean), deviations.shape[:-1])[..., None]
    return tail(
        np.concatenate([deviations, last], -1), np.concatenate([shapes, np.ones_like(last)], -1)
    )


@lru_cache(maxsize=4096)
def upper_end(
    sample: tuple[float, ...],
    shares: tuple[float, ...],
    top: float,
    level: float,
    between: tuple[float, float],
) -> float:
    """Return the upper end of the mean's confidence interval: the mean in the range `between` at
    which `upper_p` falls to `level`, or the nearer end of the range if there is none. `shares`: of
    each value of the sample in the mean.

    The secant method, with the root kept between two ends, works on the scale of normal deviates,
    on which `upper_p` is almost a line: five steps suffice where its own scale takes fifteen.
    Results are cached, because one process shows the same rows in a table, on a page and to a
    tracker."""
    # here, because a bare GPU machine, whose tests import this module, has none
    from scipy import special

    values, weights = np.array(sample), np.array(shares)
    aim = special.ndtri(level)

    def excess(mean: float) -> float:
        return float(
            special.ndtri(np.clip(upper_p(values, weights, mean, top), 1e-300, 1 - 1e-16)) - aim
        )

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
    """Return the probability that a random sum is at least 0. The sum is that of `values` times
    independent gamma variables with these `shapes` (scale 1), over the last axis: values [.. N],
    shapes [N] or [.. N] -> [..].

    The probability is a contour integral over the sum's moment generating function (`_integral`),
    exact to about 7 digits."""
    # here, because a bare GPU machine, whose tests import this module, has none
    from scipy import special

    if values.ndim == shapes.ndim == 1:  # equal values share one gamma, of their shapes added up
        values, which = np.unique(values, return_inverse=True)
        shapes = np.bincount(which, shapes).astype(float)
    values = np.where(abs(values) < _NOTHING * abs(values).max(-1, keepdims=True), 0.0, values)
    # the smaller of the two tails is the one that is computed
    turned = (values * shapes).sum(-1) > 0
    values, shapes = np.broadcast_arrays(np.where(turned[..., None], -1, 1) * values, shapes)
    largest = np.max(np.where(shapes > 0, values, -np.inf), axis=-1)
    smallest = np.min(np.where(shapes > 0, values, np.inf), axis=-1)
    beyond = np.where((largest <= 0) & (smallest >= 0), 1.0, 0.0)
    mixed = (largest > 0) & (smallest < 0)
    counted = (shapes > 0) & (values != 0)
    # one gamma against another makes a beta variable
    if mixed.ndim == 0 and mixed and counted.sum() == 2:
        falls, rises = shapes[counted & (values < 0)], shapes[counted & (values > 0)]
        beyond = special.betaincc(rises, falls, smallest / (smallest - largest))[0]
    elif mixed.any():
        beyond[mixed] = _integral(values[mixed] / largest[mixed][:, None], shapes[mixed])
    return np.where(turned, 1 - beyond, beyond)


def _integral(values: Floats, shapes: Floats) -> Floats:
    """Return for each row of `values` [R N] the probability that `tail` returns, by numerical
    integration. The largest value of each row is 1.

    With M(s) the moment generating function of the random sum, it is 1 / (2*pi*i) times the
    integral of M(s) / s along a path in the complex plane. The path is a hyperbola through the
    saddle point (`_saddle`), close to the path on which the integrand falls fastest, so that few
    steps suffice."""
    saddle = _saddle(values, shapes)
    ratios = values / (1 - saddle[:, None] * values)
    scale = 1 / np.sqrt((shapes * ratios**2).sum(-1) + saddle**-2)
    bend = 2 / 3 * scale**3 * ((shapes * ratios**3).sum(-1) - saddle**-3)
    total = np.zeros(len(values))
    for block in np.split(_STEP * np.arange(_NODES), 2):
        along, across = np.cosh(block), np.sinh(block)
        # [R nodes]
        points = saddle[:, None] + scale[:, None] * (bend[:, None] * (along - 1) + 1j * across)
        logs = -(shapes[:, None] * np.log(1 - points[..., None] * values[:, None])).sum(
            -1
        ) - np.log(points)
        terms = np.exp(logs) * (along - 1j * bend[:, None] * across) * np.where(block == 0, 0.5, 1)
        total += terms.real.sum(-1)
        if (abs(terms[:, -1]) < 1e-14 * total).all():
            break
    return np.clip(total * scale * _STEP / np.pi, 0.0, 1.0)


def _saddle(values: Floats, shapes: Floats) -> Floats:
    """Return for each row of `values` [R N] the point between 0 and 1 at which `_integral` starts:
    where M(s) / s is smallest on the real axis, M being the moment generating function of the
    random sum in `tail`. The largest value of each row is 1, so M is infinite from s = 1 on.

    The point is found by Newton's method, with a halving of the bracket where a step leaves it."""
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
    """Return the effective number of examples in a weighted sample, [.. N] -> [..]. `push`: how far
    each value lies below the mean that is tested, 0 for those above it. With equal `weights` [N]
    the result is N."""
    largest = push.max(-1, keepdims=True)
    push = np.where(largest > 0, push / np.where(largest > 0, largest, 1.0), 1.0)
    return (push * weights).sum(-1) / (push * weights**2).sum(-1)
