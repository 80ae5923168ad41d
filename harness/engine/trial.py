"""Tries a loaded model whose class is not in ARCHITECTURES, before a method is attached to it.

A few tokens say which of its layers rotate queries and keys, and whether what methods are told of
that and of its queries is right. What is not right is called unknown: methods that need it are
refused, and others run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from inspect import unwrap
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from harness.engine.cache import UnsupportedError
from harness.engine.pairing import Pairing
from harness.engine.rotation import grid, own_rotary, unturned
from harness.engine.states import fresh_states
from harness.models.base import WINDOW
from harness.models.indexers import indexers, ranks_otherwise
from harness.models.layer_kinds import layer_kinds
from harness.models.probe import REFUSED, Call, Heads, ProbeError, as_pair, probe
from harness.models.state_modules import Run, StateModule
from kernels.rope import rotate, unrotate
from methods.base.request import QUERIES, ROTATION

FAR = 1024  # the last position that is tried where the config names no longest text
CLOSE = 0.02  # of the length of a vector: what is further away is not the same, in any dtype


class LayerTrial(NamedTuple):
    """Say what was found of one layer."""

    heads: Heads
    rotates: bool
    unknown: tuple[str, ...] = ()  # as in `LayerSpec`


class Projection(Protocol):
    """Compute what methods are told of the queries of a layer (`LayerSpec`)."""

    finish: Callable[[Tensor, Tensor], Tensor] | None

    def __call__(self, hidden: Tensor) -> Tensor: ...


def trial(
    model: Any,
    pairings: Sequence[Pairing | None],
    project: Callable[[Any, int, Pairing], Projection],
) -> list[LayerTrial]:
    """Return what a model of transformers does in each layer with attention. `pairings`: how these
    seem to rotate, None where that is not known; `project`: makes what methods would compute queries
    with, of an attention module, its number of query heads and its pairing. Raise `UnsupportedError`
    if the engine would compute the model wrongly."""
    decoder, rotary = model.get_decoder(), own_rotary(model)
    places = (0, 7, (getattr(model.config, WINDOW, None) or FAR) - 1)
    if rotary is not None and _looks_ahead(deepcopy(rotary), places):
        raise UnsupportedError(
            f"{type(model).__name__} rotates a token by the length of its text in a way of its own, which is not "
            "supported: choose another model."
        )
    if rotary is not None:
        decoder.rotary_emb = deepcopy(rotary)  # which may note the longest position
    try:
        calls = probe(
            model, layer_kinds(model.config).windows, model.config.vocab_size // 2, places
        )
    except ProbeError as reason:
        raise unsupported(model, reason) from reason
    finally:
        if rotary is not None:
            decoder.rotary_emb = rotary
    for call in calls:
        if any(ranks_otherwise(own, as_pair(call.rotation)) for own in indexers([call.module])):
            raise unsupported(model, ProbeError(REFUSED["index_topk_blocks"]))
    return [
        _tried(call, pairing, project, torch.tensor(places))
        for call, pairing in zip(calls, pairings, strict=True)
    ]


def unsupported(model: Any, reason: ProbeError) -> UnsupportedError:
    """Return the error for a model that the engine would compute wrongly, for a `reason`."""
    return UnsupportedError(
        f"{type(model).__name__} {reason}, which is not supported: choose another model."
    )


@torch.no_grad()
def _looks_ahead(rotary: Any, places: Sequence[int]) -> bool:
    """Return True if a rotary module gives the second of `places` another rotation when it is asked
    for all places at once. What transformers' decorator of its forward does is left out, because
    the engine knows that (harness/engine/rotation.py)."""
    plain, device = unwrap(type(rotary).forward), next(rotary.buffers(), torch.empty(0)).device
    like = torch.empty(0, device=device)
    asked = grid(rotary, torch.tensor([places], device=device))
    for kind in getattr(rotary, "layer_types", None) or [None]:
        more = () if kind is None else (kind,)
        alone, among = (
            as_pair(plain(rotary, like, part, *more)) for part in (asked[..., 1:2], asked)
        )
        if not all(
            _alike(own, all_at_once[:, 1:2]) for own, all_at_once in zip(alone, among, strict=True)
        ):
            return True
    return False


@torch.no_grad()
def _tried(
    call: Call,
    pairing: Pairing | None,
    project: Callable[[Any, int, Pairing], Projection],
    places: Tensor,
) -> LayerTrial:
    """Return what one layer does with tokens at `places` [T]. All have the same states, so that its
    keys differ by their rotation alone."""
    rotates = not _alike(call.key, call.key[:, :, :1])
    if pairing is None:
        return LayerTrial(call.heads, rotates, (ROTATION, QUERIES))
    q, k = map(pairing.in_halves, (call.query, call.key))
    given = unturned(call.hidden, pairing.width) if call.rotation is None else call.rotation
    cos, sin = (pairing.angles.as_halves(part.to(k.device)) for part in given)
    unknown = []
    if rotates:
        before = unrotate(k, cos, sin)
        unknown += [ROTATION] * (not _alike(before, before[:, :, :1]))
    projection = project(call.module, call.heads.num_heads, pairing)
    try:
        ours = projection(call.hidden.to(k.device))
        ours = rotate(ours, cos, sin) if rotates else ours
        ours = projection.finish(ours, places.to(k.device)) if projection.finish else ours
        known = _alike(ours, q)
    except (AttributeError, RuntimeError):  # its projection is another module, or has another form
        known = False
    return LayerTrial(call.heads, rotates, (*unknown, *([] if known else [QUERIES])))


def by_token(found: StateModule, run: Run, hidden: Tensor, states: Any) -> Tensor:
    """Run a module on hidden states [B T E] one token at a time, if it goes on from a state."""
    if not states.has_previous_state(found.layer):
        return run(hidden, states)
    return torch.cat([run(token, states) for token in hidden.split(1, 1)], 1)


@torch.no_grad()
def goes_by_token(model: Any, found: StateModule) -> bool:
    """Return whether a module with a state goes on from it by one token at a time alone: some (Jamba's)
    forget the recurrent state where several tokens follow it, and give the same from any other."""
    place = next(found.module.parameters()).device
    hidden = torch.randn(1, 2, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = []
    for more in (0, 1):
        states: Any = fresh_states(model.config)
        for _ in range(2):
            output = found.module(hidden.to(place, model.dtype), **{found.cache: states})
            recurrent = [
                x for x in states.layers[found.layer].recurrent_states.values() if x is not None
            ]
            for state in recurrent:
                state.add_(more)
        outputs.append(output)
    return bool(recurrent) and torch.equal(*outputs)


def _alike(x: Tensor, other: Tensor) -> bool:
    return bool((x - other).float().norm() <= CLOSE * x.float().norm())
