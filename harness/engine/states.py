"""Holds the states of a hybrid model beside its keys and values: what its layers of linear attention,
state spaces and short convolutions remember of a text.

They are the model's own, whatever the method. Their size does not depend on the text's length, and a
step overwrites them: a state cannot be cut, and stands for exactly the tokens that were fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from harness.models.layer_kinds import layer_kinds

PREFIX = "states"  # with which the names of states begin among what a cache holds
KINDS = ("conv", "recurrent")


class StateError(RuntimeError):
    """Report states that do not stand for the tokens that the cache holds."""


class ModelStates(Cache):
    """Serve as the cache of those modules of a model that keep a state, for all sequences of one
    `KVCache`. What a family asks of its cache is answered by transformers' own code.

    `tokens`: how many tokens the state of each layer stands for."""

    def __init__(self, layers: int, stateful: Sequence[int], parts: int) -> None:
        """`layers`: of the model; `stateful`: those with a state, of so many `parts` each."""
        kept = set(stateful)
        super().__init__(
            [LinearAttentionLayer(parts) if i in kept else DynamicLayer() for i in range(layers)]
        )
        self.stateful, self.parts = tuple(stateful), parts
        self.tokens = dict.fromkeys(stateful, 0)

    def advance(
        self, layer: int, run: Callable[[Tensor, Any], Tensor], hidden: Tensor, before: int
    ) -> Tensor:
        """Return what `run` makes of hidden states [B T E] in one layer, whose state goes on by T
        tokens. `before`: how many tokens the cache holds. Raise `StateError` if the state stands
        for another number."""
        if self.tokens[layer] != before:
            raise StateError(
                f"The state of layer {layer} stands for {self.tokens[layer]} tokens and the cache holds {before}: a "
                "step has failed halfway, or what fills or resets the cache left its states out. Begin a new cache."
            )
        out = run(hidden, self)
        self.tokens[layer] += hidden.shape[1]
        return out

    @property
    def nbytes(self) -> int:
        """Return how many bytes the states take."""
        return sum(state.nbytes for state in self.state().values())

    def state(self) -> dict[str, Tensor]:
        """Return all states by name, [B ...] each. A step overwrites them: copy what should last."""
        return {
            f"{PREFIX}.{layer}.{kind}.{part}": state
            for layer in self.stateful
            for kind in KINDS
            for part, state in getattr(self.layers[layer], f"{kind}_states").items()
            if state is not None
        }

    def restore(self, state: Mapping[str, Tensor], tokens: int) -> None:
        """Take over copies of all states in `state`, by the names of the method `state`, which stand
        for `tokens` tokens. These states must be fresh. Raise `StateError` if layers are missing."""
        self.tokens, missing = dict.fromkeys(self.stateful, tokens), set(self.stateful)
        for name, held in state.items():
            prefix, _, place = name.partition(".")
            if prefix == PREFIX:
                layer, kind, part = place.split(".")
                getattr(self, f"update_{kind}_state")(held, int(layer), int(part))
                missing.discard(int(layer))
        if missing:
            raise StateError(f"The states of layers {sorted(missing)} were left out.")

    def copy(self) -> ModelStates:
        """Return states of their own with the same contents."""
        fresh = self._fresh(self.state(), 0)
        fresh.tokens = dict(self.tokens)
        return fresh

    @classmethod
    def joined(cls, members: Sequence[ModelStates], tokens: int) -> ModelStates:
        """Return copies of the states of several caches, one below the other, which a joint step
        takes on together. `tokens`: of the joint cache."""
        held = [member.state() for member in members]
        joint = {name: torch.cat([own[name] for own in held]) for name in held[0]}
        return members[0]._fresh(joint, tokens)

    def hand_back(self, member: ModelStates, first: int, held: int, joint: int) -> None:
        """Give a member of these joint states its own, from sequence `first` on. `held`, `joint`:
        how many tokens the member's cache and the joint one hold."""
        states = self.state()
        for name, own in member.state().items():
            own.copy_(states[name][first : first + len(own)])
        # a step that failed halfway has taken some layers further
        member.tokens = {layer: held + count - joint for layer, count in self.tokens.items()}

    def _fresh(self, state: Mapping[str, Tensor], tokens: int) -> ModelStates:
        fresh = ModelStates(len(self.layers), self.stateful, self.parts)
        fresh.restore(state, tokens)
        return fresh


def fresh_states(config: PreTrainedConfig) -> ModelStates | None:
    """Return states of a model that has read nothing, or None if none of its layers keeps any."""
    stateful = layer_kinds(config).stateful
    if not stateful:
        return None
    parts = getattr(config, "number_of_conv_states", 1)
    return ModelStates(config.num_hidden_layers, stateful, parts)
