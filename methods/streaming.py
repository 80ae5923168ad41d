"""StreamingLLM: keeps the first tokens and the most recent ones (arXiv 2309.17453).

The rule: of the prompt, the first `sinks` tokens and the last ones stay, as many as the budget
holds together. The kept keys are rotated as if they stood side by side, that is, by their places in
the cache.

How it is done: only distances matter to RoPE, so instead of rotating every kept key back by the
number of evicted tokens, the few sinks are rotated forward by it. The query and the generated
tokens keep their true positions, and the distances are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.rope import rotate_by
from methods.abilities.kept_codec import KeptCodec
from methods.base import Cost, LayerWorkload
from methods.base.request import ROTATION
from methods.layers import Keep, PolicyMethod
from methods.parts import costs


class StreamingKeep(Keep, capturable=True, of_each={}):
    """Keep the first tokens (sinks) and the most recent ones when the prompt is complete. With
    `positions` "cache", rotate the sinks' keys forward by the number of evicted tokens, so that
    they seem to stand right before the others."""

    method: Streaming
    turned = 0  # positions by which the sinks were rotated forward

    def keep(self, size: int) -> Tensor:
        return self.first_and_last(self.method.sinks, size)

    def close(self, evicted: int) -> None:
        if self.method.positions == "cache" and evicted:
            sinks = self.store.k[:, :, : self.method.sinks]
            sinks.copy_(rotate_by(sinks, evicted, self.spec.rope, self.cache.counters.text_tokens))
            self.turned += evicted

    def state(self) -> dict[str, Tensor]:
        """Return the positions by which the stored keys are rotated, which differ from the tokens'
        own once sinks were rotated forward; nothing if they do not."""
        if not self.turned:
            return {}
        rotated = self.layer.stored_positions().clone()
        rotated[..., : self.method.sinks] += self.turned
        return {"rotated": rotated}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if "rotated" in state:
            self.turned = int((state["rotated"] - self.layer.stored_positions()).max())

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Streaming(PolicyMethod):
    """Define StreamingLLM, which keeps the first tokens and the most recent ones, by its
    parameters. `sinks`: how many first tokens are kept. `positions`: `cache`, where the kept keys
    are rotated by their places in the cache (as in the paper), or `original`, by their true
    positions."""

    policies = (StreamingKeep,)
    takes = {KeptCodec: None}
    window_names = {"sinks": "sinks"}
    tunable = {"sinks": (1, 4, 16, 64), "positions": ("cache", "original")}
    sinks: int = 4
    positions: str = "cache"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(
                f"sinks={self.sinks} is negative: give the number of first tokens to keep, as 4."
            )
        if self.positions not in ("cache", "original"):
            raise ValueError(
                f"positions={self.positions!r} is unknown: choose cache (the paper) or original."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        return (ROTATION,) if self.positions == "cache" else ()

    @property
    def smallest_budget(self) -> int:
        return self.sinks + 1

    def cost(self, case: LayerWorkload) -> Cost:
        return costs.dense(case) if self.reads_whole(case) else costs.evict(case, case.budget)
