"""What a cache holds between two turns, cut for a store: rows of tokens, and what is no row.

Rows may be read in part and go on growing: keys and values of every token, in layers that keep all of them as the
model made them, keys before their rotation. All else is the rest: windows, what a method that evicts has kept (at its
positions), sums over queries, keys that a method rewrites. It serves where the text is the same to its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.history.block import Rows
from harness.history.positions import Rotation

Contents = Sequence[Mapping[str, Tensor]]  # by layer, as `KVCache.contents` gives them
ROWS = {"k0": "k", "v0": "v"}  # of all heads together -> their names in the store
SEEN = "seen"


class Cut:
    """Of the caches of one attachment. Caches hold one sequence."""

    def __init__(self, attachment: Attachment) -> None:
        dtype, budget = attachment.model.dtype, attachment.budget
        self.rotations = [Rotation(spec.rope, dtype) for spec in attachment.model_specs]
        drops = budget is not None and budget.generated is not None
        self.by_token = attachment.method.rows_stay and attachment.codec is None and not drops
        self._checked = 0  # tokens of the longest text whose rotations follow from positions

    def check(self, tokens: int) -> None:
        """Raises `RotationError` where keys of a text of so many tokens cannot be rotated again."""
        if self.by_token and tokens > self._checked:
            for rotation in self.rotations:
                rotation.check(tokens)
            self._checked = tokens

    def rows(self, contents: Contents, start: int) -> Rows:
        """Of the tokens from `start` on, by name [1 G T D]."""
        found = {}
        for layer, state in enumerate(contents):
            for name, stored in ROWS.items() if self._has_rows(state) else ():
                rows = state[name][:, :, start:]
                found[f"{layer}.{stored}"] = self._before(layer, rows, start) if stored == "k" else rows
        return found

    def rest(self, contents: Contents) -> Rows:
        """By layer and the name that it has there."""
        return {
            f"{layer}.{name}": x
            for layer, state in enumerate(contents)
            for name, x in state.items()
            if not (self._has_rows(state) and (name in ROWS or name == SEEN))
        }

    def refill(self, cache: KVCache, tokens: int, rows: Rows, rest: Rows) -> None:
        """The fresh `cache` goes on behind so many tokens."""
        device = cache.state.request.device
        contents: list[dict[str, Tensor]] = [{SEEN: torch.tensor(tokens)} for _ in cache.layers]
        for place, x in rest.items():
            number, _, name = place.partition(".")
            contents[int(number)][name] = x if name == SEEN else x.to(device)
        for layer, state in enumerate(contents):
            if f"{layer}.k" in rows:
                keys, values = (rows[f"{layer}.{stored}"].to(device) for stored in "kv")
                state |= {"k0": self.rotations[layer].on(keys, torch.arange(tokens, device=device)), "v0": values}
        cache.refill(contents)

    def _has_rows(self, state: Mapping[str, Tensor]) -> bool:
        return self.by_token and "k0" in state

    def _before(self, layer: int, keys: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + keys.shape[2], device=keys.device)
        return self.rotations[layer].off(keys, positions).to(keys.dtype)
