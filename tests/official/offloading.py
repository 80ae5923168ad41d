"""ShadowKV, InfiniGen, PQCache, SparQ: which prompt tokens a step fetches, on the embedded model's keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels import ops
from kernels.rope import rotate
from methods.infinigen import InfiniGen
from methods.parts.partial_keys import skewing
from methods.pqcache import PQCache
from methods.shadowkv import ShadowKV
from methods.sparq import SparQ
from tests.methods.recorded import Recorded
from tests.methods.synthetic import Sequences
from tests.official.clones import FLASH_ATTN, Repository, released, without_cuda
from tests.official.comparison import Comparison, Difference, common, numbered
from tests.official.evicting import PROMPT, tied
from tests.official.selecting import LAYERS, STEPS, flat, model, sealed

SHADOWKV = Repository("bytedance/ShadowKV", "a21f5a9ebd7956fe3510b0f29cf13c4fe07ca3b1")
INFINIGEN = Repository("snu-comparch/InfiniGen", "3754f52d131c30ab7a310e3c4cf356e8e3326ac3")
PQCACHE = Repository("HugoZHL/PQCache", "0b74e125207dc3f24da3bbaaf84e8a5f1d3b1828")
SHADOW_STUBS = {"models.tensor_op": {"batch_gather_gemm_rotary_pos_emb_cuda": None}, "kernels": {"shadowkv": None}}
PQ_PACKAGE = "vq_method.retrieval_based"
PQ_STUBS = FLASH_ATTN | {
    "kmeans_gpu": {"KMeans": None},
    "loguru": {"logger": None},
    "sklearn.cluster": {"KMeans": None, "MiniBatchKMeans": None},
    f"{PQ_PACKAGE}.sparq_official.methods.ann_attention": {"MistralAttentionWithANN": None, "Settings": None},
    f"{PQ_PACKAGE}.multi_core_compressor_v2": {"MultiCoreCompressor_v2": None},
    f"{PQ_PACKAGE}.cache_manager": {"init_gpu_cache_manager": None},
}
SPARQ_PACKAGE = f"{PQ_PACKAGE}.sparq_official"
ANY_CLASS = {"__getattr__": lambda name: type(name, (torch.nn.Module,), {"_attn": None})}
SPARQ_STUBS = {
    **{f"transformers.models.{name}.modeling_{name}": ANY_CLASS for name in ("gpt_neox", "llama", "mistral")},
    f"{SPARQ_PACKAGE}.utility": {},
    f"{SPARQ_PACKAGE}.models": {
        "llama_attention": SimpleNamespace(LlamaAttention=torch.nn.Module),
        "mistral_attention": SimpleNamespace(MistralAttention=torch.nn.Module),
    },
}


def shadowkv(clone: Path) -> Difference:
    """Last chunks, outliers and retrieved chunks of its cache for accuracy. It divides logits by the root of 128, so
    that queries are scaled to our head size."""
    s, same, of = model(), 0, 0
    config = SimpleNamespace(
        num_attention_heads=s.shape.heads, num_key_value_heads=s.shape.groups, num_hidden_layers=len(LAYERS),
        hidden_size=s.shape.heads * s.shape.dim,
    )  # fmt: skip
    for budget in (160, 256):
        layers, method = sealed(s, ShadowKV(), budget), ShadowKV()
        plan = method.plan(budget, PROMPT)
        with released(clone, "models.kv_cache", SHADOW_STUBS) as module, without_cuda():
            cache = module.ShadowKVCache(config, 1, PROMPT, "cpu", torch.float32, plan.top * 8, 8, 30)
            cache.outlier_chunk = plan.outliers
            for layer in range(len(LAYERS)):
                prompt = slice(0, PROMPT)
                cache.get_svd(s.raw_k[layer][:, :, prompt], layer)
                cache.prefill_kv_cache(numbered(s.v[layer])[:, :, prompt], layer, s.k(layer)[:, :, prompt])
        for position in range(PROMPT, PROMPT + STEPS):
            s.decode(layers, position)
            for layer, ours in enumerate(layers):
                q = s.q(layer)[:, :, position : position + 1] * (128 / s.shape.dim) ** 0.5
                values = cache.get_value_cache(layer, cache.get_retrieval_position_ids(layer, q))
                theirs = values[:, :, : cache.sparse_end, 0].long()
                of, same = of + theirs.numel(), same + common(theirs, ours.read_positions())
    return Difference(
        same, of, "nothing at a head size of 128: whatever the size is, it divides logits by the root of 128"
    )


def infinigen(clone: Path) -> Difference:
    """Its runtime for OPT, which has neither rotary positions nor grouped heads: keys and queries are rotated first,
    and stand once per query head."""
    s = Recorded(PROMPT + STEPS, [13, 14, 15], repeated=True)
    method = InfiniGen(column_rule="query", dense_layers=(0,))
    heads, dim = s.shape.heads, s.shape.dim
    skews = tuple(skewing(s.q(layer)[:, :, :PROMPT], heads) for layer in range(3))
    same, of, generated = 0, 0, 0
    for budget in (32, 256):
        layers = sealed(s, method, budget, prepared=skews)
        for position in range(PROMPT, PROMPT + STEPS):
            s.decode(layers, position)
            for layer in (1, 2):
                at = slice(position, position + 1)
                guessed = rotate(s.project(layer, s.hidden[layer - 1][:, at]), s.cos[:, at], s.sin[:, at])
                theirs = _infinigen(clone, s, layer, guessed * dim**-0.5, position, budget, method)
                prompt = theirs < PROMPT
                of, generated = of + int(prompt.sum()), generated + int((~prompt).sum())
                same += common(theirs.masked_fill(~prompt, -2), layers[layer].selected_positions())
    share = 100 * generated / (of + generated)
    words = (
        f"generated tokens, which raise the number that is fetched there, and are {share:.0f} "
        "% of it in these steps; here they are always read. The first step fetches the same"
    )
    return Difference(same, of, words)


def _infinigen(
    clone: Path, s: Recorded, layer: int, guessed: Tensor, position: int, most: int, method: InfiniGen
) -> Tensor:
    """Return which of the tokens before `position` are fetched for a guessed query [1 H 1 D]. -> [1 H n']"""
    heads, dim = s.shape.heads, s.shape.dim
    q, k = (x.transpose(1, 2) for x in (s.q(layer), s.k(layer)))  # [1 S H D]
    prompt = slice(0, PROMPT)
    identity = torch.eye(heads * dim, dtype=torch.float16)
    with released(clone, "speedup.infinigen.infinigen.skewing_controller") as skewing_code:
        wq, wk = skewing_code.skew(q[:, prompt], k[:, prompt], identity.clone(), identity.clone(), heads, dim)
    wq, wk = wq.float(), wk.float()
    keys = (k[0, :position].flatten(1) @ wk.T).view(position, heads, dim)
    with released(clone, "speedup.infinigen.infinigen.partial_weight_generation_controller") as partial_code:
        columns = partial_code.partial_weight_index_generation(
            q[:, prompt].flatten(2) @ wq.T, heads, dim, method.partial_ratio
        )
        partial_keys = partial_code.set_partial_cache(keys, columns, heads, dim)
        partial_weight = partial_code.set_partial_weight(wq, columns, heads, dim)
    with released(clone, "speedup.infinigen.infinigen.kv_selection_controller") as selection_code:
        chosen = selection_code.speculate_attention(
            flat(guessed), partial_weight, partial_keys, heads, method.alpha, most
        )
    return chosen[:, 0].T[None]


class _Pool:
    """Stands for its cache on the GPU and its k-means in other processes: both are of no interest here. The step's
    choice is noted in `chosen` [1 G K]; codes are those that it is given."""

    metric = "euc"

    def __init__(self, centroids: Tensor, codes: Tensor, read: int) -> None:
        self.centroids, self.codes, self.read = centroids, codes, read

    def refresh_pool(self) -> None:
        pass

    def compress(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        return self.centroids.numpy(), self.codes.numpy(), 0, None

    def wait_for_km_result(self, _: int) -> None:
        pass

    def init(self, key: Tensor, *_: Any) -> None:
        self.empty = key[:, :, : self.read]

    def fetch_and_concat_kv_w_cache(self, chosen: Tensor, _: int) -> tuple[Tensor, Tensor]:
        self.chosen = chosen[None]
        return self.empty.clone(), self.empty.clone()

    def add_new_token(self, *_: Any) -> None:
        pass


def _coded(ours: Any, s: Sequences, layer: int, local: int) -> tuple[Tensor, Tensor]:
    """Return our centroids [G*m C d'], and codes [tokens G m] of the prompt behind the sinks: those of the window,
    which have none here, are of the nearest centroids."""
    centroids, codes = ours.reads.centroids, ours.reads.codes[0].long()
    last = s.k(layer)[0, :, PROMPT - local : PROMPT].unflatten(-1, (centroids.shape[2], -1)).transpose(1, 2)
    nearest = torch.cdist(last, centroids[0]).argmin(-1).transpose(1, 2)  # [G local m]
    return centroids[0].flatten(0, 1), torch.cat([codes, nearest], 1).transpose(0, 1).contiguous()


def pqcache(clone: Path) -> Difference:
    """What it chooses by the same centroids and codes."""
    s, method, same, of, ties = model(), PQCache(), 0, 0, 0
    for ratio in (0.125, 0.25):
        half = int((PROMPT - method.sinks) * ratio / 2)
        budget = method.sinks + 2 * half
        for layer, ours in enumerate(sealed(s, method, budget)):
            with released(clone, "vq_method.retrieval_based.pq_search", PQ_STUBS) as module, without_cuda():
                pool = _Pool(*_coded(ours, s, layer, half), budget + 1)
                module.global_compressor, module.cache_managers = pool, [pool]
                module.layer_per_rank, module.H2DStream = 1, None
                theirs = module.PqBasedSearchCompressor(
                    ratio, 0.5, method.m, method.b, True, method.sinks,
                    layer_idx=0, num_layer_cnt=1, kv_head=s.shape.groups, dim=s.shape.dim, cur_device="cpu", max_iter=0,
                )  # fmt: skip
                q, k, v = (x.half() for x in (s.q(layer), s.k(layer), s.v[layer]))
                theirs.prefill_attn(q[:, :, :PROMPT], (k[:, :, :PROMPT], v[:, :, :PROMPT]))
            for position in range(PROMPT, PROMPT + STEPS):
                ours.decode(s.at(layer, position, position + 1))
                at, copies = slice(position, position + 1), s.shape.heads // s.shape.groups
                new = (x[:, :, at].repeat_interleave(copies, 1) for x in (k, v))
                theirs.decoding_attn(copies, q[:, :, at], *new)
                read = ours.reads
                weights = ops.pq_weights(s.q(layer)[:, :, at], read.centroids, read.codes, s.shape.dim**-0.5)[0]
                for chosen, rows, weight in zip(pool.chosen[0], read.rows[0], weights, strict=True):
                    chosen = chosen[chosen < len(weight)]  # the window moves on there, and what leaves it competes
                    of, ties = of + len(chosen), ties + tied(chosen, rows, weight)
                    same += int(torch.isin(chosen, rows).sum())
    words = "nothing" if same + ties == of else f"{of - same - ties} tokens, where it computes in fp16"
    more = "tokens that leave the window as it moves on compete there, here it stays where the prompt ended"
    return Difference(same + ties, of, f"{words} ({ties} of them stand for others with equal codes); {more}")


def sparq(clone: Path) -> Difference:
    """Graphcore's code, as PQCache's authors changed it for their comparison. Without the mean value, which bears on no
    choice."""
    s, same, of = model(), 0, 0
    method = SparQ(mean_value=False)
    for budget in (64, 128, 256):
        for layer, ours in enumerate(sealed(s, method, budget)):
            with released(clone, f"{SPARQ_PACKAGE}.methods.ann_attention", SPARQ_STUBS) as module:
                window = method.split(budget).local
                settings = module.Settings(budget, window, method.sinks, False, "sparse_q", rank=method.r)
                theirs = module.AnnAttention(settings, s.shape.groups, s.shape.dim, torch.zeros(1))
                theirs.debug_indices = []
            for position in range(PROMPT, PROMPT + STEPS):
                ours.decode(s.at(layer, position, position + 1))
                q, k, v = (x[:, :, : position + 1] for x in (s.q(layer), s.k(layer), s.v[layer]))
                past = (k[:, :, :-1], v[:, :, :-1], k[:, :, :-1].mT)
                theirs(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], torch.zeros(1, s.shape.heads, 1, position + 1), past)
                chosen = theirs.debug_indices[-1][:, :, 0, 0]
                prompt = chosen < PROMPT
                of += int(prompt.sum())
                same += common(chosen.masked_fill(~prompt, -2), ours.read_positions())
    words = (
        "the window moves on with generated tokens there, so that the prompt's last tokens compete; here it stays "
        "where the prompt ended, and generated tokens are read on top"
    )
    return Difference(same, of, words)


COMPARISONS = [
    Comparison("shadowkv", SHADOWKV, "models/kv_cache.py", "tokens that a step reads", shadowkv),
    Comparison(
        "infinigen", INFINIGEN, "speedup/infinigen/infinigen", "tokens that a step fetches", infinigen,
        "column_rule=query",
    ),
    Comparison(
        "pqcache", PQCACHE, "vq_method/retrieval_based/pq_search.py", "tokens that a step chooses by the same codes",
        pqcache,
    ),
    Comparison(
        "sparq", PQCACHE, "vq_method/retrieval_based/sparq_official/methods/ann_attention.py",
        "prompt tokens that a step reads", sparq,
    ),
]  # fmt: skip
