"""Says what is left of prompt and answer in a layer whose decode steps have dropped rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Dropped:
    """Hold what a layer must know of the rows that decode steps have dropped since its seal."""

    end: int = 0  # the position with which the answer begins
    # [B G K], where the generated tokens stood that were kept, if all of the prompt stayed
    later: Tensor | None = None
    # [B], prompt tokens that a head holds, if steps have dropped some
    prompt_left: Tensor | None = None

    def of_prompt(self, places: Tensor | None) -> Tensor | None:
        """Return the positions of prompt tokens among `places` [B heads S], those of the first
        stored tokens, ascending, with -1 where a head has fewer."""
        if places is None or self.prompt_left is None:
            return places
        places = places.sort(-1).values
        first = places[..., : int((places < self.end).sum(-1).max())]
        return first.where(first < self.end, -1)

    def of_answer(self, places: Tensor) -> Tensor:
        """Return the positions of generated tokens among `places` [B heads S], those of all stored
        tokens, ascending, with -1 where a head has fewer."""
        places = places.sort(-1).values
        last = places[..., places.shape[2] - int((places >= self.end).sum(-1).max()) :]
        return last.where(last >= self.end, -1)
