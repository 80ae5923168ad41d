"""The cache object that a model is handed: it counts tokens and knows the phase; the layers own the storage.

Our own engine says its phases, and its cache is a `KVCache`. A loop that knows none, such as `model.generate`, is given
a `LoopCache` (engine/loop/cache.py), which tells them by the number of tokens in a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from harness.engine.rotation import TextRotary
from harness.engine.watch import Watch
from kernels.step_inputs import StepInputs
from methods.base import AttnInput, CacheState, KVLayer, NextRow
from methods.base.counters import StepCounters
from methods.layers.returned import RowNumbers
from methods.tiers.traffic import Traffic

State = Callable[[int], Mapping[str, Tensor]]  # of a layer, once it is there


class UnsupportedError(NotImplementedError):
    """A model or call that this engine would compute wrongly; the message names what and why."""


class RoomError(ValueError):
    """More sequences or tokens than a cache was made for; the message says what to make it with."""


class KVCache(Cache):
    """What the model takes as `past_key_values`. Call `seal` after the prompt, and `open_turn` before a further one."""

    layers: list[KVLayer]  # type: ignore[assignment]
    step_inputs: StepInputs | None = None  # of a step that other sequences may take as well (kernels/step_inputs.py)
    free = 0  # slots of such a step that nobody has
    closes_early = False  # a layer closes as soon as it is complete
    rotary: TextRotary | None = None  # what rotates the text by its length; None where all texts are rotated alike
    prompt_tokens = 0  # of the whole text up to the answer, where `rotary` must know it
    recomputes_rows = False  # each row is computed anew by itself where its text outgrows its rotation
    recomputed = 0  # how often the text was computed anew because it outgrew its rotation

    def __init__(self, layers: Sequence[KVLayer], state: CacheState) -> None:
        """`state`: what the layers were started with."""
        self.layers = list(layers)
        self.state = state
        self.sealed = False
        self.num_tokens = 0
        self._further = False  # a turn has been sealed, here or where the contents come from
        self._sealed_tokens = 0  # of the prompts of all turns and the answers between them
        self.watch: Watch | None = None
        self._awaited: dict[int, State] = {}  # layers whose states are still to come
        self._closed: set[int] = set()  # layers that have sealed ahead of the others
        self.closed_s = 0.0  # seconds that these took
        self._arriving = 0  # tokens of the forward that is under way
        self._hooked: int | None = None  # the layer whose attention call is being prepared
        self.stages: set[int] = set()  # of the rotations of what was fed (`TextRotary.stage`)
        self._text: list[Tensor] = []  # [B T] each: the text, as far as it is known

    def seal(self) -> None:
        """The prompt is complete: all layers seal that have not closed."""
        self.await_layers()
        for layer in range(len(self.layers)):
            if layer not in self._closed:
                self.close(layer)
        self._closed.clear()
        self.sealed, self._further, self._sealed_tokens = True, True, self.num_tokens

    def close(self, layer: int) -> None:
        """The prompt is complete in this layer, and nothing of it is to come: it seals, ahead of `seal`."""
        if not self._closed:
            self.state.checks.begin("further" if self._further else "first")
        self.layers[layer].seal()
        self._closed.add(layer)

    @property
    def has_closed(self) -> bool:
        """Whether all that `seal` has left to do is to begin the next phase."""
        return len(self._closed) == len(self.layers)

    def open_turn(self) -> None:
        """A further turn begins: the next forwards are prompt again, until `seal`."""
        self.sealed = False
        self._closed.clear()
        self.closed_s = 0.0

    def contents(self) -> list[dict[str, Tensor]]:
        """End the turn: what each layer needs for a further one (`KVLayer.state`). Views: copy what is to last."""
        self.await_layers()
        return [layer.state() for layer in self.layers]

    def whole_contents(self) -> list[dict[str, Tensor]]:
        """The same with all keys and values on the device, none of them elsewhere or in codes."""
        self.await_layers()
        for layer in self.layers:
            layer.reopen()
        return self.contents()

    def refill(self, contents: Sequence[Mapping[str, Tensor]]) -> None:
        """Of a fresh cache, of the same model and method: go on where `contents` was taken, with a further turn."""
        for layer, state in zip(self.layers, contents, strict=True):
            layer.restore(state)
        self.num_tokens = int(contents[0]["seen"])
        self._further = True
        self.open_turn()

    def refill_by_layer(self, tokens: int, state: State) -> None:
        """The same behind `tokens` tokens, while the layers' states are on their way: `state` waits for that of one
        layer, and is asked just before the layer is used."""
        self._awaited = dict.fromkeys(range(len(self.layers)), state)
        self.num_tokens = tokens
        self._further = True
        self.open_turn()

    def await_layers(self) -> None:
        """Until all states are there."""
        for layer in list(self._awaited):
            self._await(layer)

    def _await(self, layer: int) -> None:
        self.layers[layer].restore(self._awaited.pop(layer)(layer))

    def begin(self) -> None:
        """Before each forward of the model."""
        self._arriving = 0

    def end(self) -> None:
        """After each forward of the model."""
        self.num_tokens += self._arriving

    def expect_text(self, ids: Tensor) -> None:
        """Say what the whole text is up to the answer, ids [B S]: it is rotated as one, however it comes."""
        self.prompt_tokens, self._text = ids.shape[1], [ids]

    def take_text(self, other: KVCache) -> None:
        """Expect the text that another cache was told."""
        self.prompt_tokens, self._text = other.prompt_tokens, list(other._text)

    def note_text(self, ids: Tensor, *, prompt: bool = False) -> None:
        """Remember what is fed next, ids [B T], unless it is part of the text that was said. `prompt`: no answer."""
        if self.known_text == self.num_tokens:
            self._text.append(ids)
        if prompt:
            self.prompt_tokens = max(self.prompt_tokens, self.num_tokens + ids.shape[1])

    @property
    def known_text(self) -> int:
        """How many tokens of the text are known."""
        return sum(part.shape[1] for part in self._text)

    def expect_columns(self, columns: int) -> None:
        """Say that a loop will have fed that many columns, padding included, once the prompt is complete."""
        self.prompt_tokens = max(self.prompt_tokens, columns)

    def text(self, ids: Tensor) -> Tensor:
        """The whole text, with the tokens ids [B T] that are fed next. -> [B S]"""
        if self.known_text < self.num_tokens:
            raise UnsupportedError(
                f"The text outgrows {self.num_tokens} tokens, at which this model computes all of it anew, and the "
                "cache was not told the text: call cache.expect_text(ids) with the ids of all tokens so far."
            )
        return torch.cat([torch.cat(self._text, 1)[:, : self.num_tokens], ids.to(self._text[0].device)], 1)

    @property
    def sealed_tokens(self) -> int:
        """How many tokens it held when it was sealed last."""
        return self._sealed_tokens

    def text_lengths(self, arriving: int) -> list[int]:
        """How long the texts are to which the next tokens belong: one number for all rows, or one for each."""
        return [self.note_length(self.num_tokens + arriving)]

    def note_length(self, tokens: int) -> int:
        """Note that the next forward ends with that many tokens. -> how long their text is"""
        length = max(self.prompt_tokens, tokens)
        if self.rotary is not None:
            self.stages.add(self.rotary.stage(length))
        self.counters.text_tokens = length
        return length

    def fits(self, tokens: int) -> bool:
        """Whether all that is held is rotated as a text of `tokens` tokens is."""
        return self.rotary is None or self.stages <= {self.rotary.stage(tokens)}

    @property
    def outgrows(self) -> bool:
        """Whether the next token is the one with which `model.generate` computes the whole text anew."""
        border = None if self.rotary is None else self.rotary.drops_at
        return border is not None and self.num_tokens == border and self.prompt_tokens <= border

    @property
    def members(self) -> tuple[KVCache, ...]:
        """The caches that hold the sequences: this one."""
        return (self,)

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Of the next `count` tokens. -> [1 count], for all rows"""
        return self.counters.positions(self.num_tokens, count, device).unsqueeze(0)

    @property
    def method_layers(self) -> list[KVLayer]:
        """Without the layers that slide, which are the model's own (methods/layers/hybrid.py); all where all slide."""
        return [layer for layer in self.layers if layer.spec.window is None] or self.layers

    @property
    def fallback(self) -> str | None:
        """Return what a layer did at the last seal in place of its method's rule, and why; None where none did."""
        return next((layer.fallback for layer in self.method_layers if layer.fallback), None)

    @property
    def capacity(self) -> int:
        """Tokens of all turns, prompts and answers, at most."""
        return self.state.request.capacity

    @property
    def traffic(self) -> Traffic:
        """Whoever asks waits for what the device alone knows of it."""
        return self.state.traffic.settle()

    @property
    def counters(self) -> StepCounters:
        return self.state.counters

    def count_replayed(self, steps: int) -> None:
        """So many steps were replayed without the model's forward."""
        self.num_tokens += steps
        self.counters.steps += steps
        for layer in self.layers:
            layer.count_replayed(steps)

    def next_row(self, layer: int) -> NextRow | None:
        """Where a layer stores the next token of each sequence, if whoever makes its k and v may write them."""
        return self.layers[layer].next_row() if self.sealed else None

    def note_step(self, fed: Tensor, logits: Tensor) -> None:
        """Let who watches know that a step took `fed` [B 1] and gave `logits` [B V]."""
        if self.watch is not None:
            text = self.counters.text_tokens
            self.watch.note(fed, logits, 0 if self.rotary is None else self.rotary.stage(text))

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        """Attention of one layer. -> [B H T D]"""
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
        out = self.layers[layer].decode(x)
        if self.state.checking:
            self._check_positions(self.layers[layer])
        if self.watch is not None:
            self.watch.decode(self.layers[layer], x, out)
        return out

    @staticmethod
    def refuse_prompt(tokens: int) -> None:
        """Raise `UnsupportedError` unless a sealed cache is given one token."""
        if tokens != 1:
            raise UnsupportedError(
                f"{tokens} tokens at once after the prompt was sealed: feed one at a time, or call "
                "cache.open_turn() if they begin a new turn."
            )

    def _check_positions(self, layer: KVLayer) -> None:
        """Of the prompt, as the layer says that its last step has read them."""
        spec, request = layer.spec, layer.request
        heads = {"read_positions": [spec.num_kv_heads], "selected_positions": [spec.num_kv_heads, spec.num_heads]}
        for name, counts in heads.items():
            if (positions := getattr(layer, name)()) is not None:
                wanted = RowNumbers(
                    batch=request.batch, heads=counts, tokens=self._sealed_tokens, device=request.device, gaps=True
                )
                wanted.check(positions, f"In layer {spec.index}, {type(layer).__name__}.{name} returned")

    def expect(self, sequences: int, tokens: int) -> None:
        """A forward begins. Raises `RoomError` where more arrives than the cache was made for."""
        self._check_room(sequences, tokens)
        self._arrive(tokens)

    def _arrive(self, tokens: int) -> None:
        """The first layer of a forward has been reached."""
        self._arriving = tokens

    def grow(self, more: int) -> None:
        """Make room for `more` tokens beyond the capacity; what is held moves."""
        for layer in self.layers:
            layer.grow(more)
        request = self.state.request
        self.state.request = replace(request, capacity=self.layers[0].request.capacity)

    def _check_room(self, sequences: int, tokens: int) -> None:
        """Raise `RoomError` where more arrives than the cache was made for."""
        held, needed = self.state.request.batch, self.num_tokens + tokens
        if sequences != held:
            raise RoomError(
                f"The cache is for batch={held} and {sequences} sequences arrive: make it with cache(..., batch="
                f"{sequences}); beams are refused, for KV methods cannot follow them: use num_beams=1."
            )
        if needed > self.capacity:
            raise RoomError(
                f"The cache is full: capacity={self.capacity} and {needed} tokens are needed, {self.num_tokens} before "
                f"and {tokens} that arrive; make it with cache(capacity={needed}) or more, the prompts and "
                "answers of all turns together."
            )

    # What transformers asks of a cache:

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

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.layers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UnsupportedError("Beam search reorders the cache, which KV methods cannot follow: use num_beams=1.")

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
