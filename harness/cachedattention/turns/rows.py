"""What a cache holds between two turns, cut for a store: rows of tokens, and what is no row.

Rows may be read in part and go on growing: keys and values of every token, in layers that keep all of them as the
model made them, keys before their rotation. All else is the rest: windows, what a method that evicts has kept (at its
positions), sums over queries, keys that a method rewrites. It serves where the text is the same to its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.cachedattention.store.history_load import LayerRows, Prepare
from harness.cachedattention.store.history_store import has_rows
from harness.cachedattention.store.upload import MakeStored
from harness.cachedattention.turns.truncation import Rotation
from harness.engine.attach import Attachment
from methods.layers.storage import FIRST
from methods.tiers.block import FAR, K, SplitRows, Tensors, V, stays_away

CacheContents = Sequence[Mapping[str, Tensor]]  # by layer, as `KVCache.contents` gives them
NEAR = {K: "k0", V: "v0"}  # of all heads together, in a state
SEEN = "seen"


class StoredForm:
    """Of the caches of one attachment. Caches hold one sequence."""

    def __init__(self, attachment: Attachment) -> None:
        dtype, budget = attachment.model.dtype, attachment.budget
        self.rotations = [Rotation(spec.rope, dtype) for spec in attachment.model_specs]
        self.by_token = has_rows(attachment.method, attachment.codec, budget.generated if budget else None)
        self.rows_alone = self.by_token and all(spec.window is None for spec in attachment.model_specs)  # no rest
        self.shareable = self.by_token and not attachment.method.uses_budget  # sparse reads shape the rows of answers
        # computing a text again, in one prefill, gives what was stored of it; in fewer bits to their rounding alone
        self.repeatable = self.shareable and dtype in (torch.float32, torch.float64)
        self._kinds = _alike(self.rotations)

    def check(self, tokens: int) -> None:
        """Raises `RotationError` where a text of so many tokens cannot be cut to a shorter one."""
        for rotation in self.rotations:
            rotation.check(tokens)

    def rows(self, contents: CacheContents, start: int, end: int) -> dict[str, SplitRows]:
        """Of the tokens from `start` to `end`, by name [1 G T D]: views of where they lie, keys as they are rotated."""
        return {
            f"{layer}.{kind}": _in_order(state, kind).cut(start, end)
            for layer, state in enumerate(contents)
            for kind in (K, V)
            if self._has_rows(state)
        }

    def unrotated(self, start: int, end: int, rows: Mapping[str, SplitRows], text: int) -> MakeStored:
        """Makes `rows` of a layer into those that are stored, keys before their rotation, each where it lies. `text`:
        how long the text is that they are rotated for. Any thread may do it."""
        places = {part.device for x in rows.values() for part in x.parts}
        fixed = {place: self._fixed(torch.arange(start, end, device=place), text) for place in places}

        def stored(number: int, rows: Mapping[str, SplitRows]) -> Mapping[str, SplitRows]:
            def off(part: Tensor, before: int) -> Tensor:
                positions = torch.arange(start + before, start + before + part.shape[-2], device=part.device)
                return fixed[part.device][self._kinds[number]].off(part, positions).to(part.dtype)

            keys = f"{number}.{K}"
            return {**rows, keys: rows[keys].each(off)}

        return stored

    def rest(self, contents: CacheContents) -> Tensors:
        """By layer and the name that it has there."""
        return {
            f"{layer}.{name}": x
            for layer, state in enumerate(contents)
            for name, x in state.items()
            if not (self._has_rows(state) and (name in (*NEAR.values(), SEEN) or stays_away(name)))
        }

    def states(self, tokens: int, device: torch.device, text: int) -> Prepare:
        """Makes what is stored of a layer, of `tokens` tokens at most, into its state for `KVCache.refill_by_layer` in
        a text of `text` tokens. Any thread may do it."""
        fixed = self._fixed(torch.arange(tokens, device=device), text) if self.by_token else {}

        def state(number: int, layer: LayerRows) -> LayerRows:
            rows, rest = ({name.partition(".")[2]: x for name, x in part.items()} for part in layer)
            made = {name: x if name == SEEN or stays_away(name) else x.to(device) for name, x in rest.items()}
            if rows:
                keys, values = (rows[kind].to(device) for kind in (K, V))
                positions = torch.arange(keys.shape[2], device=device)
                made |= {NEAR[K]: fixed[self._kinds[number]].on(keys, positions), NEAR[V]: values}
                made[SEEN] = torch.tensor(keys.shape[2])
            return made, {}

        return state

    def _has_rows(self, state: Mapping[str, Tensor]) -> bool:
        return self.by_token and NEAR[K] in state

    def _fixed(self, positions: Tensor, text: int) -> dict[int, Rotation]:
        """Return the fixed rotations, keyed by kind."""
        return {kind: self.rotations[kind].fixed(positions, text) for kind in set(self._kinds)}


def _in_order(state: Mapping[str, Tensor], kind: str) -> SplitRows:
    """A layer's rows in the order of their tokens, wherever they lie."""
    near, away = state[NEAR[kind]], state.get(f"{FAR}.{kind}")
    if away is None:
        return SplitRows(near)
    first = int(state[FIRST])
    return SplitRows(near[:, :, :first], away, near[:, :, first:])


def _alike(rotations: Sequence[Rotation]) -> list[int]:
    """For each layer the first one that rotates as it does: most models know one or two rotations."""
    angles = [torch.cat(rotation.angles(torch.tensor([1])), 1) for rotation in rotations]
    return [next(first for first, other in enumerate(angles) if other.equal(own)) for own in angles]
