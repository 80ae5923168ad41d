"""Defines the cache object that a model is given: it counts tokens and knows the phase; the layers
own the storage.

Our own engine sets the phase itself, and its cache is a `KVCache`. A loop that does not, such as
`model.generate`, gets a `LoopCache` (engine/loop.py), which infers the phase from the number
of tokens in a forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache

from harness.engine.copies import copied_into
from harness.engine.rotation import TextRotary
from harness.engine.states import ModelStates
from harness.models.devices import current
from kernels.step_inputs import StepInputs
from methods.base import AttnInput, CacheState, KVLayer, NextRow
from methods.base.state import StepCounters
from methods.layers.returned import check_rows, unwritten
from methods.tiers.traffic import Traffic

State = Callable[[int], Mapping[str, Tensor]]  # waits for the state of a layer and returns it
Run = Callable[[Tensor, Any], Tensor]  # hidden states [B T E] and the cache of states -> [B T E]


class UnsupportedError(NotImplementedError):
    """Report a model or call that is refused because this engine would compute it wrongly."""


class RoomError(ValueError):
    """Report that more sequences or tokens arrive than a cache was made for."""


class BeforeSeal(Protocol):
    """Define something that a cache calls when its first prompt is complete, before it is
    sealed."""

    def note(self, ids: Tensor) -> None:
        """Take note of token ids [B T] of the prompt, which are fed next."""

    def __call__(self, cache: KVCache) -> None:
        """Act on `cache`, whose prompt is complete; all its layers are still open."""


class FedText:
    """Hold the pieces of a text that are known, and how its tokens were rotated so far, for models
    that rotate a text by its length (rotation.py)."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []  # [B T] each
        self.prompt_tokens = 0  # length of the whole text up to the answer
        # stages of rotation of the tokens so far (`TextRotary.stage`)
        self.stages: set[int] = set()

    @property
    def known(self) -> int:
        """Return how many tokens of the text are known."""
        return sum(part.shape[1] for part in self.parts)

    def set(self, ids: Tensor) -> None:
        """Set the whole text up to the answer, ids [B S]: it is rotated as one text, in whatever pieces
        it is fed."""
        self.prompt_tokens, self.parts = ids.shape[1], [ids]

    def take(self, other: FedText) -> None:
        """Take over what another cache knows of the text up to the answer, because this cache
        replaces that one."""
        self.prompt_tokens, self.parts = other.prompt_tokens, list(other.parts)

    def followed_by(self, tokens: int, ids: Tensor) -> Tensor:
        """Return the first `tokens` tokens and then ids [B T], the whole text [B S]."""
        return torch.cat([torch.cat(self.parts, 1)[:, :tokens], ids.to(self.parts[0].device)], 1)


class KVCache(Cache):
    """Serve as the model's `past_key_values`: one `KVLayer` of the method for each layer. Call
    `seal` after the prompt, and `open_turn` before a further turn."""

    layers: list[KVLayer]  # type: ignore[assignment]
    # of a step that other sequences can use (kernels/step_inputs.py)
    step_inputs: StepInputs | None = None
    free = 0  # free slots of such a step
    closes_early = False  # a layer closes as soon as the prompt is complete in it
    # rotates the text by its length; None if all texts are rotated alike
    rotary: TextRotary | None = None
    recomputed = 0  # how often the text was computed again because it outgrew its rotation
    # what an ability does with the first prompt when it is complete
    before_seal: BeforeSeal | None = None
    # of a hybrid model's layers without keys and values; None if it has no such layers
    states: ModelStates | None = None

    def __init__(self, layers: Sequence[KVLayer], state: CacheState) -> None:
        """`state`: what all layers share, such as the request and the counts of steps and traffic;
        the layers were started with it."""
        self.layers = list(layers)
        self.state = state
        self.sealed = False
        self.num_tokens = 0
        self._further = False  # a turn has been sealed, here or where the contents come from
        # tokens of all prompts and the answers between them when it was last sealed
        self.sealed_tokens = 0
        # the `Fidelity` that compares steps with exact attention, if there is one
        self.watch: Any = None
        self._awaited: dict[int, State] = {}  # layers whose states are still to come
        self._closed: set[int] = set()  # layers that have sealed ahead of the others
        self.closed_s = 0.0  # seconds that these took
        self._arriving = 0  # tokens of the forward that is under way
        self._hooked: int | None = None  # the layer whose attention call is being prepared
        self.fed = FedText()  # what is known of the text, where `rotary` needs it

    def seal(self) -> None:
        """End the prompt: seal all layers that have not closed yet. When a layer is sealed, its
        method chooses, indexes or moves what the prompt has left; from then on tokens come one at a
        time."""
        self.await_layers()
        if self.before_seal is not None:
            self.before_seal(self)
        self.before_seal = None
        for layer in range(len(self.layers)):
            if layer not in self._closed:
                self.close(layer)
        self._closed.clear()
        if self.watch is not None and self.states is not None:
            self.watch.states = self.states.copy()
        self.sealed, self._further, self.sealed_tokens = True, True, self.num_tokens

    def close(self, layer: int) -> None:
        """Seal one layer ahead of `seal`, because the prompt is complete in it: its method digests
        the prompt while others still compute theirs."""
        if not self._closed:
            self.state.checks.begin("further" if self._further else "first")
        with current(self.layers[layer].request.device):
            self.layers[layer].seal()
        self._closed.add(layer)

    @property
    def has_closed(self) -> bool:
        """Return whether all layers were sealed ahead of `seal` (`close`), so that `seal` only
        begins the next phase."""
        return len(self._closed) == len(self.layers)

    def open_turn(self) -> None:
        """Begin a further turn of the conversation: the next forwards are prompt again, until
        `seal`."""
        self.sealed = False
        self._closed.clear()
        self.closed_s = 0.0

    def contents(self) -> list[dict[str, Tensor]]:
        """End the turn and return what each layer of the cache needs to continue with a further
        one: its keys and values and its method's own tensors, by name (`KVLayer.state`). The first
        brings the model's states (`ModelStates.state`). The tensors are views: copy what should
        last."""
        self.await_layers()
        held = [layer.state() for layer in self.layers]
        if self.states is not None:
            held[0] |= self.states.state()
        return held

    def whole_contents(self) -> list[dict[str, Tensor]]:
        """End the turn and return what each layer needs to continue (`contents`), after all its
        keys and values have been brought back to the device and decompressed."""
        self.await_layers()
        for layer in self.layers:
            layer.reopen()
        return self.contents()

    def refill(self, contents: Sequence[Mapping[str, Tensor]]) -> None:
        """Fill this fresh cache with `contents`, taken from a cache of the same model and method,
        and begin a further turn there."""
        self.refill_by_layer(int(contents[0]["seen"]), contents.__getitem__)
        self.await_layers()

    def refill_by_layer(self, tokens: int, state: State) -> None:
        """Begin a further turn after `tokens` stored tokens while the layers' states are still
        arriving: `state(layer)` waits for the state of one layer, and is called just before the
        layer is used."""
        self._awaited = dict.fromkeys(range(len(self.layers)), state)
        self.num_tokens = tokens
        self._further, self.before_seal = True, None
        self.open_turn()

    def await_layers(self) -> None:
        """Wait until the states of all layers have arrived that `refill_by_layer` has promised."""
        for layer in list(self._awaited):
            self._await(layer)

    def _await(self, layer: int) -> None:
        held = self._awaited.pop(layer)(layer)
        if self.states is not None and not layer:
            self.states.restore(held, self.num_tokens)
        self.layers[layer].restore(held)

    def begin(self, ids: Tensor | None = None) -> None:
        """Prepare for a forward of the model before its first token arrives. `ids` [B T]: its
        tokens, if they are known."""
        self._arriving = 0
        if ids is not None and self.before_seal is not None:
            self.before_seal.note(ids)

    def end(self) -> None:
        """Count the tokens of a forward of the model that has ended, once its layers have done what
        they deferred."""
        self.state.run_deferred()
        self.num_tokens += self._arriving

    def note_text(self, ids: Tensor, *, prompt: bool = False) -> None:
        """Remember the token ids [B T] that are fed next, unless they belong to a text set by
        `FedText.set`. `prompt`: they belong to no answer."""
        if self.fed.known == self.num_tokens:
            self.fed.parts.append(ids)
        if prompt:
            self.fed.prompt_tokens = max(self.fed.prompt_tokens, self.num_tokens + ids.shape[1])

    def text_lengths(self, arriving: int) -> list[int]:
        """Return the lengths of the texts to which the next tokens belong, by which the model
        rotates them: one number for all rows, or one per row."""
        return [self.note_length(self.num_tokens + arriving)]

    def note_length(self, tokens: int) -> int:
        """Return the length of the text by which the next forward is rotated: that of the whole
        prompt, or the number of tokens so far, `tokens`, if they are more. It is noted for
        `fits`."""
        length = max(self.fed.prompt_tokens, tokens)
        if self.rotary is not None:
            self.fed.stages.add(self.rotary.stage(length))
        self.counters.text_tokens = length
        return length

    def fits(self, tokens: int) -> bool:
        """Return whether all that the cache holds is rotated as it would be in a text of `tokens`
        tokens."""
        return self.rotary is None or self.fed.stages <= {self.rotary.stage(tokens)}

    @property
    def outgrows(self) -> bool:
        """Return whether the next token makes the text too long for the rotation of the stored
        keys, so that `model.generate` computes the whole text again with it (LongRoPE in Phi-3)."""
        border = None if self.rotary is None else self.rotary.drops_at
        return border is not None and self.num_tokens == border and self.fed.prompt_tokens <= border

    @property
    def members(self) -> tuple[KVCache, ...]:
        """Return the caches of the sequences that step together; here that is only this one."""
        return (self,)

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions [1 count] of the next `count` tokens, the same for all rows."""
        return self.counters.positions(self.num_tokens, count, device).unsqueeze(0)

    @property
    def method_layers(self) -> list[KVLayer]:
        """Return the layers that the method serves: all but those with a sliding window, which the
        model handles itself (methods/layers/window.py). If all layers slide, return all."""
        return [layer for layer in self.layers if layer.spec.window is None] or self.layers

    @property
    def fallback(self) -> str | None:
        """Return what a layer did at the last seal instead of its method's rule, and why; None if
        every layer followed the rule."""
        return next((layer.fallback for layer in self.method_layers if layer.fallback), None)

    @property
    def capacity(self) -> int:
        """Return how many tokens, prompts and answers of all turns, the cache can hold."""
        return self.state.request.capacity

    @property
    def traffic(self) -> Traffic:
        """Return the bytes and seconds counted for rows that moved between device, host and disk;
        this waits for counts that are on the device."""
        return self.state.traffic.settle()

    @property
    def counters(self) -> StepCounters:
        return self.state.counters

    def count_replayed(self, steps: int) -> None:
        """Count `steps` decode steps that were replayed from a captured graph, without the model's
        forward."""
        self.num_tokens += steps
        self.counters.steps += steps
        for layer in self.layers:
            layer.count_replayed(steps)

    def prepare(self) -> None:
        """Let every layer do what must be done between two steps (`KVLayer.prepare`). It is called
        before steps that are captured, or taken together with other sequences."""
        for layer in self.layers:
            layer.prepare()

    def steps_alike(self) -> float:
        """Return how many such steps can be taken before `prepare` must be called again."""
        return min(layer.steps_alike() for layer in self.layers)

    def next_row(self, layer: int) -> NextRow | None:
        """Return where a layer stores the next token of each sequence, so that its k and v can be
        written there as they are computed. Return None if they must pass through `attend`."""
        return self.layers[layer].next_row() if self.sealed else None

    def note_step(self, fed: Tensor, logits: Tensor) -> None:
        """Pass a decode step that took the tokens `fed` [B 1] and gave `logits` [B V] to `watch`,
        which measures the distance from exact attention (`Fidelity`), if there is one."""
        if self.watch is not None:
            text = self.counters.text_tokens
            self.watch.note(fed, logits, 0 if self.rotary is None else self.rotary.stage(text))

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        """Compute attention of one layer. Return [B H T D]."""
        if not self._arriving:
            self.expect(x.k.shape[0], x.k.shape[2])
        if not self.sealed:
            if layer in self._closed:
                raise UnsupportedError(
                    "This prompt was said to be whole, and its layers have closed: call cache.open_turn() if what "
                    "comes begins a new turn, or prefill without whole=True."
                )
            if layer in self._awaited:  # a sealed cache waits for none
                self._await(layer)
            out = self.layers[layer].prefill(x)
            if self.watch is not None:
                self.watch.prefill(layer, x)
            return out
        self.refuse_prompt(self._arriving)
        if self.state.checking:
            with unwritten(self.layers[layer]):
                out = self.layers[layer].decode(x)
            self._check_positions(self.layers[layer])
        else:
            out = self.layers[layer].decode(x)
        if self.watch is not None:
            self.watch.decode(self.layers[layer], x, out)
        return out

    def lend(self, layer: int, x: AttnInput) -> Tensor:
        """Compute attention of a layer of the model that has no keys and values of its own, to those
        that layer `layer` has attended to in the same forward. `x.q` may be of its last tokens alone.
        Return [B H T D]."""
        start = self.num_tokens + self._arriving - x.q.shape[2]
        return self.layers[layer].lend(replace(x, start=start))

    def advance_state(self, layer: int, run: Run, hidden: Tensor) -> Tensor:
        """Return what `run` makes of hidden states [B T E] in a layer of the model with a state, by
        its place in the model. The state goes on by T tokens."""
        assert self.states is not None
        if not self._arriving:
            self.expect(*hidden.shape[:2])
        if self.sealed:
            self.refuse_prompt(self._arriving)
        if 0 in self._awaited:
            self._await(0)
        return self.states.advance(layer, run, hidden, self.num_tokens)

    @staticmethod
    def refuse_prompt(tokens: int) -> None:
        """Raise `UnsupportedError` if a forward brings a number of `tokens` other than one to a
        sealed cache, which takes only decode steps."""
        if tokens != 1:
            raise UnsupportedError(
                f"{tokens} tokens at once after the prompt was sealed: feed one at a time, or call "
                "cache.open_turn() if they begin a new turn."
            )

    def _check_positions(self, layer: KVLayer) -> None:
        """Raise an error unless the prompt positions are valid that a layer says its last step has
        read."""
        spec, request = layer.spec, layer.request
        heads = {
            "read_positions": [spec.num_kv_heads],
            "selected_positions": [spec.num_kv_heads, spec.num_heads],
        }
        for name, counts in heads.items():
            if (positions := getattr(layer, name)()) is not None:
                check_rows(
                    positions,
                    f"In layer {spec.index}, {type(layer).__name__}.{name} returned",
                    batch=request.batch,
                    heads=counts,
                    tokens=self.sealed_tokens,
                    device=request.device,
                    gaps=True,
                )

    def expect(self, sequences: int, tokens: int) -> None:
        """Begin a forward that brings `tokens` tokens. Raises `RoomError` if more arrives than the
        cache was made for."""
        self._check_room(sequences, tokens)
        self._arrive(tokens)

    def _arrive(self, tokens: int) -> None:
        """Note how many tokens the forward brings. It is called when the forward reaches its first
        layer."""
        self._arriving = tokens

    def grow(self, more: int) -> None:
        """Make room for `more` tokens beyond the capacity. All stored keys and values are moved."""
        for layer in self.layers:
            layer.grow(more)
        request = self.state.request
        self.state.request = replace(request, capacity=self.layers[0].request.capacity)

    def _check_room(self, sequences: int, tokens: int) -> None:
        """Raise `RoomError` if other `sequences` than the cache was made for arrive, or more
        `tokens` than it has room for."""
        held, needed = self.state.request.batch, self.num_tokens + tokens
        if sequences != held:
            raise RoomError(
                f"The cache is for batch={held} and {sequences} sequences arrive: make it with cache(..., batch="
                f"{sequences}); KV methods cannot follow beams, so use num_beams=1."
            )
        if needed > self.capacity:
            raise RoomError(
                f"The cache is full: capacity={self.capacity} and {needed} tokens are needed, {self.num_tokens} before "
                f"and {tokens} that arrive; make it with cache(capacity={needed}) or more, the prompts and "
                "answers of all turns together."
            )

    # The interface of transformers' caches:

    is_compileable = False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._hooked != layer_idx:
            raise UnsupportedError(
                "This KVCache was given to a model that is not attached: wrap the call in `with attached(model, ...)`."
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UnsupportedError(
            "Beam search reorders the cache, which KV methods cannot follow: use num_beams=1."
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedError(
            "Contrastive search tries several tokens on one cache, which KV methods cannot follow: search greedily, or "
            "draw."
        )

    def activate_past_recording(self) -> None:
        raise UnsupportedError(
            "Assisted generation takes tokens back, which KV methods cannot follow: decode without an assistant."
        )

    def crop(self, tokens_to_remove: int) -> None:
        self.activate_past_recording()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """Copy all keys and values, wherever they are, as `copy.deepcopy` is asked to for several
        continuations of one text."""
        self.await_layers()
        self.traffic.settle()
        fresh = object.__new__(type(self))
        copied_into(fresh, self, memo)
        return fresh
