"""Runs a model's forward as a few operations per layer around the KV method, instead of the
modules' own forwards.

transformers spends more of a decode step between its operations than in them, and reads a prompt's
activations a dozen times where two suffice. Weights and roundings are the same, and therefore the
tokens. A model that is not built as kernels/block.py describes runs its own forward, and the reason
is reported.

A prompt is computed layer by layer: all its chunks pass through one layer, then through the next. A
layer has thus seen the whole prompt before the next one begins, and can move what need not stay on
the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.hf import attention_modules, channel_pairings, rotates
from harness.engine.pairing import Angles
from harness.engine.rotation import TextRotary, rotation_table, text_rotary
from harness.models.base import ARCHITECTURES, trained_window
from kernels import ops
from kernels.block import DecoderBlock, Head, Linear
from kernels.step_inputs import note_kind
from methods.base import AttnInput

# states between layers, either summed or as the two parts of the sum
Stream = Tensor | tuple[Tensor, Tensor]


class ForwardError(NotImplementedError):
    """Report why this model cannot be run by blocks."""


def nothing(*_: int) -> None:
    """Do nothing: the default of callbacks."""


class BlockForward:
    """Run a model by blocks, with a few operations per decoder layer: `forward(ids, cache)` takes
    ids [B T] and returns the logits of the last token [B V]."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.decoder: Any = model.get_decoder()
        self.rotary = text_rotary(model)
        _check(model)
        neighbours = channel_pairings(model)[0].neighbours
        self.blocks = [_block(layer, neighbours) for layer in self.decoder.layers]
        self.rotate = [rotates(module) for module in attention_modules(model)]
        if self.decoder.embed_tokens.weight.is_cuda:
            # only now, because `_block` has refused quantised modules
            join_weights(self.decoder.layers)
            self.blocks = [_block(layer, neighbours) for layer in self.decoder.layers]
        # decode steps write k and v directly to the store
        self.stores = self.decoder.embed_tokens.weight.is_cuda
        norm = self.decoder.norm
        self.head = Head(
            norm.variance_epsilon, norm.weight.detach(), _linear(model.get_output_embeddings())
        )
        self.embedding = self.decoder.embed_tokens.weight.detach()
        self._places = [(weight, weight.data_ptr()) for weight in model.parameters()]
        # cos and sin [2 C R] of all positions of the model's window
        self._table: Tensor | None = None
        self._may_table = self.rotary is None  # until it is known whether there is a table

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor:
        return self.prefill([ids], cache)

    def prefill(
        self, chunks: Sequence[Tensor], cache: KVCache, complete: Callable[[int], None] = nothing
    ) -> Tensor:
        """Compute consecutive chunks [B T] of a prompt. Return the logits of the last token [B V].

        `complete(layer)` is called when the last chunk has passed that layer."""
        if not cache.sealed and any(weight.data_ptr() != place for weight, place in self._places):
            raise UnsupportedError(
                "Weights of the model were replaced, moved or converted after this engine was made: make a new Engine."
            )
        cache.begin(torch.cat(list(chunks), 1) if cache.before_seal is not None else None)
        if len(chunks) > 1:
            cache.expect(len(chunks[0]), sum(ids.shape[1] for ids in chunks))
        inputs = [embedding(ids, self.embedding) for ids in chunks]
        rotations = self._rotations(inputs, cache)
        # in a model with other layers, which turn by 0
        turning = rotations if not all(self.rotate) else []
        still = [(at, torch.ones_like(cos), torch.zeros_like(sin)) for at, cos, sin in turning]
        states = deque[Stream](inputs)  # the output of each layer is the input of the next
        del inputs
        for index in range(len(self.blocks)):
            for start, cos, sin in rotations if self.rotate[index] else still:
                states.append(self._layer(index, states.popleft(), cos, sin, cache, start))
            complete(index)
        cache.end()
        return ops.token_logits(_summed(states[-1]), self.head)[:, -1]

    def make_table(self) -> None:
        """Make the table of cos and sin of all positions, from which captured steps take theirs in
        one launch. Call it before the first step that is captured. Nothing is made where angles
        depend on the length of the text, or where the table would be too large: their steps compute
        their angles."""
        if self._may_table:
            self._may_table = False
            if window := trained_window(self.decoder.config):
                self._table = rotation_table(
                    self.decoder.rotary_emb, window, self.embedding[:1].unsqueeze(0)
                )

    def _rotations(
        self, states: Sequence[Tensor], cache: KVCache
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return, for each chunk, the position of its first token, and cos and sin of all its
        tokens."""
        sizes = [x.shape[1] for x in states]
        places = cache.positions(sum(sizes), states[0].device).split(sizes, dim=1)
        table = self._table if sizes == [1] and cache.counters.running else None
        # positions on the device, which the host cannot check, must lie within the table as long as the cache has room
        if table is not None and max(cache.capacity, cache.num_tokens + 1) <= table.shape[1]:
            note_kind("angles of a table")
            cos, sin = table.index_select(1, places[0].flatten()).unsqueeze(2)
            return [(cache.num_tokens, cos, sin)]
        starts = accumulate(sizes[:-1], initial=cache.num_tokens)
        chunks = zip(starts, states, places, strict=True)
        if self.rotary is None:
            return [(start, *self.decoder.rotary_emb(x, at)) for start, x, at in chunks]
        lengths = cache.text_lengths(sum(sizes))
        return [(start, *self.rotary.of_texts(x, at, lengths)) for start, x, at in chunks]

    def _layer(
        self, index: int, x: Stream, cos: Tensor, sin: Tensor, cache: KVCache, start: int
    ) -> Stream:
        """Compute decoder layer `index`, x [B T hidden] -> [B T hidden]. The last layer returns
        [B 1 hidden], as only the last token's logits are needed. `start`: position of the first of
        the T tokens."""
        block = self.blocks[index]
        next_row = cache.next_row(index) if self.stores and cos.shape[1] == 1 else None
        if next_row is not None:
            # k and v are written directly to where the cache stores them, and the next layer computes the sum of the
            # two parts that this one gives
            parts = x if isinstance(x, tuple) else (x, None)
            total, normed, q, k, v = ops.attention_inputs_stored(*parts, block, cos, sin, *next_row)
            attended = cache.attend(index, AttnInput(q, k, v, cos, sin, normed, start, stored=True))
            return ops.block_output_apart(total, attended, block)
        x = _summed(x)
        attended = self._attended(index, x, cos, sin, cache, start)
        if index == len(self.blocks) - 1:
            x, attended = x[:, -1:], attended[:, :, -1:]
        return ops.block_output(x, attended, block)

    def _attended(
        self, index: int, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, start: int
    ) -> Tensor:
        """Return attention [B H T D]. It is a function of its own so that only its result is alive
        while the MLP runs."""
        normed, q, k, v = ops.attention_inputs(x, self.blocks[index], cos, sin)
        return cache.attend(index, AttnInput(q, k, v, cos, sin, normed, start))


def _summed(x: Stream) -> Tensor:
    return x[0] + x[1] if isinstance(x, tuple) else x


def by_blocks(model: PreTrainedModel) -> tuple[BlockForward | None, str | None]:
    """Return the model's forward by blocks, or None and the reason why it runs its own."""
    try:
        return BlockForward(model), None
    except ForwardError as reason:
        return None, str(reason)


def _check(model: PreTrainedModel) -> None:
    unlike = ARCHITECTURES.get(type(model).__name__)
    if unlike is None:
        known = ", ".join(name for name, differs in ARCHITECTURES.items() if not differs)
        raise ForwardError(f"{type(model).__name__} is not one of {known} of transformers.")
    if unlike:
        raise ForwardError(f"{unlike}.")
    if channel_pairings(model)[0].angles is not Angles.TWICE:
        raise ForwardError("its cos and sin have another form than those of Llama.")
    if model.config.hidden_act != "silu":
        raise ForwardError(f"its MLP uses {model.config.hidden_act}, not silu.")
    routed = {*attention_modules(model), model}  # engine/hf.py's own hooks are there
    for path, module in model.named_modules():
        kind = type(module)
        if kind is TextRotary:  # which stands for the model's own
            continue
        if not kind.__module__.startswith(("transformers.", "torch.")):
            raise ForwardError(
                f"{path or 'it'} is a {kind.__name__}, which is not from transformers (an adapter? quantised weights?)."
            )
        if "forward" in vars(module):
            raise ForwardError(
                f"the forward of {path or 'the model'} was replaced, and would not be called."
            )
        if module not in routed and (module._forward_hooks or module._forward_pre_hooks):
            raise ForwardError(f"a hook is registered on {path}, which would not be called.")


def _block(layer: Any, neighbours: bool) -> DecoderBlock:
    """Return the weights of a decoder layer. `neighbours`: the model rotates neighbouring channels
    of a head together."""
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    if hasattr(attention, "qkv_proj"):  # Phi-3: one matrix for all three
        groups = attention.num_key_value_heads * attention.head_dim
        rows = attention.qkv_proj.weight.shape[0]
        q, k, v = _split(attention.qkv_proj, (rows - 2 * groups, groups, groups))
    else:
        q, k, v = map(_linear, (attention.q_proj, attention.k_proj, attention.v_proj))
    if hasattr(mlp, "gate_up_proj"):  # Phi-3 and GLM
        gate, up = _split(mlp.gate_up_proj, (mlp.gate_up_proj.weight.shape[0] // 2,) * 2)
    else:
        gate, up = map(_linear, (mlp.gate_proj, mlp.up_proj))
    return DecoderBlock(
        head_dim=attention.head_dim,
        eps=layer.input_layernorm.variance_epsilon,
        norm=layer.input_layernorm.weight.detach(),
        q=q,
        k=k,
        v=v,
        q_norm=None if q_norm is None else q_norm.weight.detach(),
        k_norm=None if k_norm is None else k_norm.weight.detach(),
        o=_linear(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate=gate,
        up=up,
        down=_linear(mlp.down_proj),
        neighbours=neighbours,
    )


def _linear(module: nn.Module) -> Linear:
    if type(module) is not nn.Linear:
        raise ForwardError(
            f"{type(module).__name__} stands where nn.Linear was expected (quantised?)."
        )
    # detached: the storage lives as long as the block, whose addresses a backend may keep
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _split(module: nn.Module, sizes: tuple[int, ...]) -> list[Linear]:
    whole = _linear(module)
    weights = whole.weight.split(sizes)
    biases = (None,) * len(sizes) if whole.bias is None else whole.bias.split(sizes)
    return list(map(Linear, weights, biases))


@torch.inference_mode(mode=False)  # inference tensors could not be used outside of inference mode
def join_weights(layers: Iterable[Any]) -> None:
    """Join the weights of products that share an input in memory, so that a GPU computes them as
    one: q, k and v of each decoder layer, and gate and up. Phi-3 has them joined already, and GLM
    the latter.

    The modules' parameters stay the same objects with the same values, as views of the joint
    tensor. They stay joined, because other engines of the model use them too; moving or converting
    the model separates them again. At most one layer's weights are in memory twice at a time."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        apart: list[list[nn.Module]] = []
        if hasattr(attention, "q_proj"):
            apart.append([attention.q_proj, attention.k_proj, attention.v_proj])
        if hasattr(mlp, "gate_proj"):
            apart.append([mlp.gate_proj, mlp.up_proj])
        moved = [
            _join([getattr(module, name) for module in modules])
            for modules in apart
            for name in ("weight", "bias")
        ]
        if any(moved) and torch.cuda.is_initialized():
            # torch keeps the old weights' memory, which is too small for the next joint ones
            torch.cuda.empty_cache()


def _join(parts: Sequence[nn.Parameter | None]) -> bool:
    """Join tensors if possible, and return whether they were moved. A parameter that is a view
    already stays where it is, because its memory would not be freed."""
    whole: list[Tensor] = [part.data for part in parts if part is not None]
    kinds = {(type(x), x.dtype, x.device, x.shape[1:]) for x in whole}
    if len(whole) < len(parts) or len(kinds) > 1 or type(whole[0]) is not Tensor:
        return False
    for x in whole:
        owns = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
        if not owns or x.is_inference():
            return False
    pieces = torch.cat(whole).split([len(x) for x in whole])
    for part, piece in zip(parts, pieces, strict=True):
        assert part is not None
        part.data = piece
    return True
