"""Ada-Pyramid: SnapKV's votes, Ada-KV's shares of the KV heads and PyramidKV's shares of the layers
(arXiv 2407.11550).

The rule: PyramidKV says how many tokens a layer keeps per head, on a line that falls from the first
layer to the last, and Ada-KV divides what all heads of the layer may keep among them by their
votes. Parameters are those of Ada-KV's released code with `--pyram`, whose whole numbers
`rounding=released` gives."""

from __future__ import annotations

from dataclasses import dataclass

from methods.adakv import AdaKeep, AdaKV
from methods.pyramidkv import PyramidKeep, PyramidKV


class AdaPyramidKeep(AdaKeep, PyramidKeep, capturable=True, of_each={"last": None}):
    """Evict as Ada-KV does, with as many tokens per layer as PyramidKV gives it."""

    method: AdaPyramid


@dataclass(frozen=True, kw_only=True)
class AdaPyramid(AdaKV, PyramidKV):
    """Define Ada-Pyramid, which shares one budget among layers and among KV heads, by the
    parameters of Ada-KV and of PyramidKV."""

    policies = (AdaPyramidKeep,)
    tunable = {**AdaKV.tunable, **PyramidKV.tunable}

    window: int = 32
