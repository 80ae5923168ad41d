"""Finds the modules of a model that keep a state (linear attention, a state space or a short convolution),
and lets a caller say on which tokens each runs, and from which state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.models.layer_kinds import layer_kinds

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

# what modules call the cache that they are given
CACHES = ("cache_params", "past_key_values")
# hidden states [B T E], the cache that holds the state -> [B T E]
Run = Callable[["Tensor", Any], "Tensor"]


class StateModule(NamedTuple):
    """Name a module with a state: its layer's place in the model, and what it calls its cache."""

    layer: int
    module: nn.Module
    cache: str


# a module, its own forward, the hidden states and the cache that it was called with -> its output
Call = Callable[[StateModule, Run, "Tensor", Any], "Tensor"]


def state_modules(model: PreTrainedModel) -> list[StateModule]:
    """Return the modules with a state, in the order of their layers. There is none for a layer whose
    state is kept in another way than in the cache that one part of the layer is given."""
    layers: Any = getattr(model.get_decoder(), "layers", ())
    return [
        StateModule(index, module, name)
        for index in layer_kinds(model.config).stateful
        for module in layers[index].children()
        if not is_attention(module) and (name := _cache_of(module)) is not None
    ]


def is_attention(module: nn.Module) -> bool:
    """Return whether a module divides itself into heads as attention with keys and values does."""
    return hasattr(module, "num_key_value_groups")


@contextmanager
def called_by(modules: Sequence[StateModule], call: Call) -> Iterator[None]:
    """Let `call` stand in the place of each module's forward until the block is left. It is given the
    forward itself, to run it on some of the tokens and with a cache of its own choice."""
    with ExitStack() as undo:
        for found in modules:
            module, before = found.module, found.module.__dict__.get("forward")
            undo.callback(_put_back, module, before)
            module.forward = partial(_called, found, module.forward, call)
        yield


def _called(
    found: StateModule, forward: Callable[..., Tensor], call: Call, *args: Any, **kwargs: Any
) -> Tensor:
    named = "hidden_states" in kwargs
    hidden = kwargs.pop("hidden_states") if named else args[0]
    given = kwargs.pop(found.cache, None)

    def run(hidden: Tensor, cache: Any) -> Tensor:
        return forward(hidden, *args[not named :], **{found.cache: cache}, **kwargs)

    return call(found, run, hidden, given)


def _put_back(module: nn.Module, forward: Any) -> None:
    del module.forward
    if forward is not None:  # accelerate puts one there, too
        module.forward = forward


def _cache_of(module: nn.Module) -> str | None:
    names = signature(type(module).forward).parameters
    return next((name for name in CACHES if name in names), None)
