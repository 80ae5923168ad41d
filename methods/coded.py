"""Coded: keeps and reads every token, the prompt in the bits of a codec.

The rule: at the seal the whole prompt is written as the setting `codec` says, and every step
attends to all of it, and to the generated tokens, which stay as they are. So it shows what a codec
alone costs, without a choice of tokens: TurboQuant (arXiv 2504.19874) with codec=tq4, integers
after a rotation with codec=int4h. KIVI, whose released code also writes generated tokens and leaves
a window exact, is a method of its own. Without a codec this is Full."""

from __future__ import annotations

from dataclasses import dataclass

from methods.abilities.kept_codec import KeptCodec, encode
from methods.base import Cost, LayerWorkload
from methods.layers import Layer, PolicyMethod
from methods.parts import costs


class CodedLayer(Layer, capturable=True):
    """Write the prompt in fewer bits once it is complete."""

    def seal(self) -> None:
        super().seal()
        if self.request.codec is not None:
            encode(self)
            self.prompt_rows = self.store.length


@dataclass(frozen=True, kw_only=True)
class Coded(PolicyMethod):
    """Define the method that keeps and reads all tokens, those of the prompt in the bits of the
    request's codec. It has no parameters."""

    layer = CodedLayer
    uses_budget = False
    takes = {KeptCodec: None}

    def cost(self, case: LayerWorkload) -> Cost:
        return costs.dense(case) + costs.sent_away(case, case.sealed, case.sealed)
