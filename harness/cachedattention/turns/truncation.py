"""A history that no longer fits the window loses its oldest tokens and stays valid (CachedAttention, section 3.4).

What stays of a cache goes on at positions 0 to H-1. A method that evicts has shortened its history already: the rows
it kept move together, as the paper lets a list of dropped tokens do, and only what is more than H leaves. What stays
was computed in sight of what went, so it is not what a recomputation of the shorter text gives. Nor has it the text's
first tokens, at which heads look that need nothing else (StreamingLLM, arXiv 2309.17453), unless `sinks` keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.cachedattention.turns.positions import Rotation
from methods.base import KVLayer
from methods.layers import ends

LayerState = Mapping[str, Tensor]  # of one layer, as `KVLayer.state` gives it


def truncated(
    contents: Sequence[LayerState],
    layers: Sequence[KVLayer],
    rotations: Sequence[Rotation],
    keep: int,
    *,
    sinks: int = 0,
    naive: bool = False,
) -> list[dict[str, Tensor]]:
    """`contents` of a cache with `keep` tokens of every head at most, for `refill` of a fresh one: the last ones, or
    the first `sinks` and the last.

    `layers`: of a cache of the same method, for what its policies hold. `naive`: keys stay rotated to where they stood
    (the paper's NKVT), though what follows goes on behind H-1.
    """
    if not 0 <= sinks < keep:
        raise ValueError(f"keep={keep} with sinks={sinks} leaves no recent history: keep more, or start a fresh cache")
    length = min(keep, max(rows for state in contents for rows in _rows(state)))
    if length == int(contents[0]["seen"]):
        return [dict(state) for state in contents]
    parts = zip(contents, layers, rotations, strict=True)
    return [_shorter(state, layer, None if naive else rotation, length, sinks) for state, layer, rotation in parts]


def _shorter(
    state: LayerState, layer: KVLayer, rotation: Rotation | None, length: int, sinks: int
) -> dict[str, Tensor]:
    names, counts = _names(state), _counts(_rows(state), length)
    found: dict[str, Tensor] = {}
    for (key, value), source, rows in zip(names, _sources(state), counts, strict=True):
        first = 0 if "k" in state else min(sinks, rows)  # what slides has no first tokens
        keys, values = (ends(state[name], first, rows - first, -2) for name in (key, value))
        if rotation is not None:
            target = torch.arange(length - rows, length, device=keys.device)
            keys = rotation.move(keys, ends(source, first, rows - first), target)
        found |= {key: keys, value: values}
    if "k0" in found and min(counts) < length:
        heads = found["k0"].shape[:-2] if len(counts) == 1 else state["positions"].shape[:2]
        found["positions"] = _positions(counts, heads, length, found["k0"].device)
    first = min(sinks, counts[0])
    return found | layer.truncate(state, first, counts[0] - first) | {"seen": torch.tensor(length)}


def _names(state: LayerState) -> list[tuple[str, str]]:
    """Of keys and values: of a layer that slides, of all heads together, or of every head."""
    if "k" in state:
        return [("k", "v")]
    heads = sum(name[:1] == "k" and name[1:].isdigit() for name in state)
    return [(f"k{head}", f"v{head}") for head in range(heads)]


def _rows(state: LayerState) -> list[int]:
    return [state[key].shape[-2] for key, _ in _names(state)]


def _counts(rows: Sequence[int], length: int) -> list[int]:
    """How many stay. Heads with numbers of their own have a whole number on average (methods/pools/per_head.py)."""
    counts = [min(count, length) for count in rows]
    for _ in range(sum(counts) % len(counts)):
        counts[counts.index(max(counts))] -= 1
    return counts


def _sources(state: LayerState) -> list[Tensor]:
    """Where the keys of each of `_names` are rotated to. -> [T], or [B heads T]"""
    rows, seen = _rows(state), int(state["seen"])
    stated = [*(x for name, x in state.items() if name.endswith(".rotated")), state.get("positions")]
    places = stated[0]
    if places is None:
        return [torch.arange(seen - rows[0], seen)]
    if len(rows) == 1:
        return [places]
    return [one[one.shape[0] - count :] for one, count in zip(places.flatten(0, 1), rows, strict=True)]


def _positions(counts: Sequence[int], heads: Sequence[int], length: int, device: torch.device) -> Tensor:
    """The new ones of tokens that are fewer than `length`. -> [B heads S], -1 in front of shorter ones"""
    most = max(counts)
    rows = [pad(torch.arange(length - count, length, device=device), (most - count, 0), value=-1) for count in counts]
    together = torch.stack(rows)
    return together.expand(*heads, -1) if len(counts) == 1 else together.unflatten(0, tuple(heads))
