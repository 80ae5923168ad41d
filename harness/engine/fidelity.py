"""Measures how close a method's steps come to exact attention, on the steps that produced the
answer.

Per layer and KV head, on every n-th step, with the method's own queries: `recall` (the share that
the method read of the k tokens with the largest weights, where k is the number of tokens it read),
`mass` (the share of the exact attention weight, on prompt and generated tokens, that was read),
`error` (relative, of the attention output). Compared with Full on the same text: `kl` of the
next-token distributions, and the first token that Full would not have chosen.

The reference keeps all K and V besides the method's own, which costs memory and time: times of such
a run mean little."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from harness.engine.cache import KVCache
from harness.engine.states import ModelStates
from kernels.sink_logits import softmax
from methods.base import AttnInput, CacheState, KVLayer, LayerSpec, Request
from methods.full import Full
from methods.layers import Layer
from methods.layers.window import start_layers
from methods.pools import KVStore

MEASURES = ("recall", "mass", "error")


def reference_layers(specs: Sequence[LayerSpec], state: CacheState) -> list[KVLayer]:
    """Return fresh layers with full attention, one for each layer of the model, which store a whole
    prompt. `Fidelity`, which measures how far a method's steps are from exact attention, takes the
    exact result from them; caches with the same prompt share them. `specs`: those of all layers of
    the model."""
    return start_layers(
        specs, state, lambda whole, cache: [Layer(spec, cache, Full()) for spec in whole]
    )


class Fidelity:
    """Measure, while a cache decodes, how far the attention of its method is from exact attention
    over all tokens. The cache hands every prompt chunk and decode step to it (`KVCache.watch`); it
    stores all keys and values itself for the comparison. Layers with a sliding window are exact
    under every method and are left out."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        request: Request,
        every: int,
        prompt: Sequence[KVLayer] | None = None,
    ) -> None:
        """`specs`: those of all layers of the model. `every`: only every n-th decode step is
        measured. `prompt`: layers with full attention that hold the prompt already
        (`reference_layers`), where caches share them; None to store it here."""
        self.every = every
        self.owns_prompt = prompt is None
        self.state = CacheState(request)
        self.prompt = list(prompt or reference_layers(specs, self.state))
        self.whole = [layer for layer in self.prompt if isinstance(layer, Layer)]
        own = [layer.spec for layer in self.whole]
        self.since = [KVStore(spec, self.state, request.capacity) for spec in own]
        self.sums = {
            name: torch.zeros(len(own), request.batch, specs[0].num_kv_heads) for name in MEASURES
        }
        self.measured = 0
        # of each step: the length of the text by which the model rotated it, the token [B 1] that
        # was fed, and the logits [B V]
        self.steps: list[tuple[int, Tensor, Tensor]] = []
        self.states: ModelStates | None = None  # of a hybrid model, after the prompt

    def prefill(self, layer: int, x: AttnInput) -> None:
        """Store the keys and values of a chunk of the prompt for the comparison, in layer number
        `layer`; do nothing if layers that hold the prompt were given. `x`: the attention input of
        the chunk."""
        if self.owns_prompt:
            self.prompt[layer].absorb(x)

    def decode(self, layer: KVLayer, x: AttnInput, out: Tensor) -> None:
        """Compare the output `out` [B H 1 D] of a layer's decode step with exact attention to its
        input `x`, if this step is one of those that are measured."""
        if layer.spec.window is not None:
            return
        index = layer.spec.index
        self.since[index].append(x.k, x.v)
        if (self.since[index].length - 1) % self.every:
            return
        self.measured += index == 0
        for name, value in self._measure(layer, x, out).items():
            self.sums[name][index] += value.cpu()

    def note(self, fed: Tensor, logits: Tensor, text: int = 0) -> None:
        """Keep the tokens `fed` [B 1] and the `logits` [B V] of a decode step, which `against_full`
        compares with Full's (exact attention). `text`: the length of the text by which the model
        rotated the tokens (`TextRotary.stage`)."""
        self.steps.append((text, fed, logits))

    def _measure(self, layer: KVLayer, x: AttnInput, out: Tensor) -> dict[str, Tensor]:
        """Return recall, mass and error of one step, each [B G]. They are computed for each head
        that selects tokens, by its own weights. Where query heads choose for themselves, they are
        means over those of a KV head."""
        spec = layer.spec
        prompt, since = self.whole[spec.index].store, self.since[spec.index]
        k, v = (torch.cat(parts, 2) for parts in ([prompt.k, since.k], [prompt.v, since.v]))
        q = x.q.view(*k.shape[:2], spec.group, -1)
        logits = q.float() @ k.float().mT * spec.scale
        weights = softmax(logits, spec.sink_logits)  # [B G g N]
        exact = (weights @ v.float()).flatten(2)
        difference = out.view(*k.shape[:2], -1).float() - exact
        error = difference.norm(dim=-1) / exact.norm(dim=-1)
        read, kept = layer.selected_positions(), layer.generated_positions()
        if read is None and kept is None:
            ones = torch.ones_like(error)
            return {"recall": ones, "mass": ones, "error": error}
        heads = next(x.shape[1] for x in (read, kept) if x is not None)
        # [B G|H N], mean of heads that share
        own = weights.view(len(weights), heads, -1, weights.shape[3]).mean(2)
        if spec.sink_logits is not None:  # the tokens' shares of what the sink leaves
            own = own / own.sum(-1, keepdim=True)
        before, after = own.split([prompt.length, since.length], -1)
        if kept is not None:
            of_each_head = kept.repeat_interleave(heads // kept.shape[1], 1)
            after = after * _marked((of_each_head - prompt.length).clamp(min=-1), after)
        recall, mass = _of_the_prompt(before, read)
        recall, mass = (
            of_heads.unflatten(1, (spec.num_kv_heads, -1)).mean(2)
            for of_heads in (recall, mass + after.sum(-1))
        )
        return {"recall": recall, "mass": mass, "error": error}

    def against_full(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Run the decoded tokens once more with Full, which is exact attention, and compare the
        logits with those that the method gave. Return KL(Full, method) in nats [B n] and the tokens
        that Full would choose [B n] after each of the n tokens fed."""
        sealed = self.whole[0].store.length
        layers = [layer if isinstance(layer, Layer) else copy(layer) for layer in self.prompt]
        cache = KVCache(layers, self.state)
        cache.num_tokens = sealed
        if self.states is not None:
            cache.states = self.states.copy()
        parts = list[Tensor]()
        try:
            for length, steps in groupby(self.steps, key=itemgetter(0)):
                ids = torch.cat([fed for _, fed, _ in steps], 1)
                cache.fed.prompt_tokens = length
                out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=ids.shape[1])
                parts.append(out.logits)
        finally:
            for layer in self.whole:
                layer.store.length = sealed  # others may share it
        full = torch.cat(parts, 1).float()
        ours = torch.stack([logits for *_, logits in self.steps], 1).float().log_softmax(-1)
        exact = full.log_softmax(-1)
        return (exact.exp() * (exact - ours)).sum(-1), full.argmax(-1)

    def report(
        self, model: nn.Module, place: int, tokens: Sequence[int], compare: bool
    ) -> dict[str, Any] | None:
        """Return the fidelity of sequence number `place` of the batch as it is written to the run's
        records: recall, mass and error (explained in this module) as means over the measured steps;
        None if no step was measured. `tokens`: its answer.

        `compare`: add the KL divergence from Full and the first token that Full would not have
        chosen, which makes sense only where Full's prompt equals the method's."""
        if not self.measured:
            return None
        record: dict[str, Any] = {"every": self.every, "steps": self.measured}
        for name, total in self.sums.items():
            heads = total[:, place] / self.measured  # [L G]
            record[name] = round(heads.mean().item(), 6)
            record[f"{name}_per_head"] = [
                [round(one, 4) for one in layer] for layer in heads.tolist()
            ]
        if compare:
            kl, choices = self.against_full(model)
            # a text that was computed again is watched from there on
            mine = list(tokens[-len(self.steps) - 1 :])[1:]
            # behind forwards of the question, whose outputs were no tokens
            own = slice(len(self.steps) - len(mine), None)
            theirs = choices[place, own].tolist()
            differ = (i for i, (a, b) in enumerate(zip(mine, theirs, strict=True), 1) if a != b)
            record["kl"] = round(kl[place, own].mean().item(), 6) if mine else None
            record["first_difference"] = next(differ, None)
        return record


def _of_the_prompt(weights: Tensor, read: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return, for each head, recall and mass of the prompt tokens that a step read. Recall: of the
    k tokens with the largest weights, where k is the number of tokens read, the share that was
    read. Mass: the sum of the weights of the tokens read.

    weights [B G|H N]: exact attention weights of the prompt's tokens; read [B G|H K]: positions of
    the tokens read, -1 for none, or None if all were read. -> [B G|H] each"""
    if read is None:
        return torch.ones_like(weights[..., 0]), weights.sum(-1)
    is_read = _marked(read, weights)
    count = (read >= 0).sum(-1, keepdim=True)
    best = weights.topk(read.shape[-1], -1).indices  # Oracle's, in order: each head's first `count`
    counted = torch.arange(read.shape[-1], device=read.device) < count
    found = is_read.gather(-1, best) * counted
    return found.sum(-1) / count.squeeze(-1), (weights * is_read).sum(-1)


def _marked(places: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the shape of `like` [B heads N] with 1 at the indices `places` [B heads K]
    of its last axis and 0 elsewhere. An index of -1 marks nothing."""
    # one after the last, for the padding of uneven reads
    spare = like.new_zeros(*like.shape[:2], like.shape[2] + 1)
    return spare.scatter_(-1, places % spare.shape[2], 1.0)[..., :-1]
