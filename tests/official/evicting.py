"""SnapKV, PyramidKV, Ada-KV, R-KV: which tokens stay, on the embedded model's keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from methods.adakv import AdaKV
from methods.pyramidkv import PyramidKV
from methods.rkv import RKV
from methods.snapkv import SnapKV
from tests.methods.recorded import Recorded
from tests.methods.synthetic import Sequences
from tests.official.clones import FLASH_ATTN, Repository, released
from tests.official.comparison import Comparison, Difference, numbered

FACTORY = Repository("Zefan-Cai/KVCache-Factory", "c97f9d706d63d1b56e980f8b81b2a924c21162b3")
FACTORY_FILE = "pyramidkv/pyramidkv_utils.py"
ADAKV = Repository("FFY0/AdaKV", "efe4e2eea0099bf497f0c175ac5440a915d89f83")
ADAKV_FILE = "adaptive_snapkv/monkeypatch/snapkv_utils.py"
RKV_CODE = Repository("Zefan-Cai/R-KV", "d15c9767e67c2bd9807128fecc35223fa2484a69")
PROMPT, BUDGETS = 640, (64, 128, 256)
Kept = list[Tensor]  # the positions that each head keeps


def kept_in(values: Tensor) -> Kept:
    """Return positions by head. values [1 H K D] are of tokens that hold their position in channel 0."""
    return [head[:, 0].long().sort().values for head in values[0]]


def pooled_votes(s: Sequences, layer: int, window: int, kernel: int, per_query_head: bool) -> Tensor:
    """Return what the prompt's last `window` queries give each token before them. -> [H M] or [G M]"""
    copies = s.shape.heads // s.shape.groups
    q, k = s.q(layer)[0, :, -window:], s.k(layer)[0].repeat_interleave(copies, 0)
    later = torch.ones(window, PROMPT, dtype=torch.bool).triu(1 + PROMPT - window)
    weights = (q @ k.mT * s.shape.dim**-0.5).masked_fill(later, float("-inf")).softmax(-1)
    votes = weights.sum(1)[:, :-window]
    if not per_query_head:
        votes = votes.unflatten(0, (s.shape.groups, -1)).mean(1)
    return max_pool1d(votes, kernel, stride=1, padding=kernel // 2)


def tied(theirs: Tensor, ours: Tensor, votes: Tensor, slack: float = 1e-5) -> int:
    """Return how many tokens that they keep and we do not have the vote of one that we keep and they do not: pooling
    spreads a vote over its neighbours, and either may be taken. All of one head."""
    mine, yours = ([*set(a.tolist()) - set(b.tolist())] for a, b in ((ours, theirs), (theirs, ours)))
    free = votes[mine].tolist()
    count = 0
    for vote in votes[yours].tolist():
        for other in free:
            if abs(other - vote) <= slack * vote:
                free.remove(other)
                count += 1
                break
    return count


class Count:
    """Counts, over heads, layers and budgets, the tokens that released code keeps, those that we keep as well, and
    those that it keeps for others of equal votes."""

    def __init__(self) -> None:
        self.same = self.of = self.ties = self.ours = 0
        self.largest = 0  # difference between the numbers of tokens that a head keeps

    def add(self, theirs: Kept, ours: Kept, votes: Tensor) -> None:
        for their, our, vote in zip(theirs, ours, votes, strict=True):
            self.of += len(their)
            self.ours += len(our)
            self.same += int(torch.isin(their, our).sum())
            self.ties += tied(their, our, vote)
            self.largest = max(self.largest, abs(len(their) - len(our)))

    def difference(self, otherwise: str = "") -> Difference:
        """Return tokens of equal votes as the same; `otherwise` is why there are others, if there are."""
        same, ties = self.same + self.ties, f"{self.ties} of them stand for others of equal votes" if self.ties else ""
        words = "nothing" if same == self.of == self.ours else otherwise
        return Difference(same, self.of, f"{words} ({ties})" if ties else words)


def ours_of(s: Sequences, method: SnapKV, budget: int) -> list[Kept]:
    """Return what our method keeps in each layer."""
    layers = s.start(method, budget)
    s.seal(layers, 0, PROMPT)
    return [[head[head >= 0].sort().values for head in layer.positions[0]] for layer in layers]


def snapkv(per_query_head: bool, clone: Path) -> Difference:
    """Released code repeats keys and values to the query heads unless kv_cache_granularity=kv_head."""
    count, s = Count(), Recorded(PROMPT, [0, 14, 29])
    method = SnapKV(window=8, select_per="query_head" if per_query_head else "kv_head")
    with released(clone, "pyramidkv.pyramidkv_utils", FLASH_ATTN) as module:
        for budget in BUDGETS:
            theirs = module.SnapKVCluster(method.window, budget, method.kernel, "maxpool")
            for layer, ours in enumerate(ours_of(s, method, budget)):
                _add(count, theirs, s, layer, method, ours)
    return count.difference()


def _add(count: Count, theirs: object, s: Sequences, layer: int, method: SnapKV, ours: Kept) -> None:
    per_query_head = method.select_per == "query_head"
    copies = s.shape.heads // s.shape.groups if per_query_head else 1
    k, v = (x.repeat_interleave(copies, 1) for x in (s.k(layer), numbered(s.v[layer])))
    _, values = theirs.update_kv(k, s.q(layer), v, None, copies)  # type: ignore[attr-defined]
    count.add(kept_in(values), ours, pooled_votes(s, layer, method.window, method.kernel, per_query_head))


def pyramidkv(rounding: str, clone: Path) -> Difference:
    count, s = Count(), Recorded(PROMPT, range(30))
    method = PyramidKV(select_per="query_head", rounding=rounding)  # type: ignore[arg-type]
    with released(clone, "pyramidkv.pyramidkv_utils", FLASH_ATTN) as module:
        for budget in BUDGETS:
            for layer, ours in enumerate(ours_of(s, method, budget)):
                theirs = module.PyramidKVCluster(
                    30, method.window, budget, method.kernel, "maxpool", method.beta, layer_idx=layer
                )
                _add(count, theirs, s, layer, method, ours)
    more = 100 * (count.of / count.ours - 1)
    return count.difference(
        f"it rounds the layers' amounts so that they add up to more than the budget: {more:.1f} % over these budgets, "
        f"up to {count.largest} tokens in a layer"
    )


def adakv(grouped: bool, clone: Path) -> Difference:
    count, s = Count(), Recorded(PROMPT, [0, 14, 29], repeated=not grouped)
    method, copies = AdaKV(), 3 if grouped else 1
    with released(clone, "adaptive_snapkv.monkeypatch.snapkv_utils", FLASH_ATTN) as module:
        for budget in BUDGETS:
            for layer, ours in enumerate(ours_of(s, method, budget)):
                theirs = module.AdaptiveSnapKVCluster(
                    method.window, method.kernel, "maxpool", budget, method.floor, 0, None, layer, 3,
                    gqa_support=grouped, num_key_value_groups=copies, gqa_func="mean",
                )  # fmt: skip
                _, values = theirs.update_kv(s.k(layer), s.q(layer), numbered(s.v[layer]))
                lengths: Sequence[int] = theirs.head_lens.tolist()
                kept = [part[:, 0].long().sort().values for part in values.split(lengths)]
                count.add(kept, ours, pooled_votes(s, layer, method.window, method.kernel, False))
    return count.difference(
        f"it rounds each head's share for itself, by up to {count.largest} token of a head; in sum it keeps {count.of} "
        f"where {count.ours} are the budget"
    )


def rkv(clone: Path) -> Difference:
    """Of a prompt that is longer than the budget, and then each time the buffer is full."""
    count, method, began = Count(), RKV(), 300
    s = Recorded(PROMPT, [0, 14, 29])
    package = {"__path__": [str(clone / "rkv" / "compression")]}
    with released(clone, "rkv.utils") as utils:
        package |= {name: getattr(utils, name) for name in ("cal_similarity", "compute_attention_scores")}
        with released(clone, "rkv.compression.r1_kv", {"rkv.compression": package}) as module:
            for budget in BUDGETS:
                theirs = module.R1KV(budget, method.window, method.kernel, method.mix_lambda)
                layers: Any = s.start(method, budget)
                s.prefill(layers, 0, began)
                for layer in layers:
                    _add_rows(count, theirs, layer, budget)
                    layer.seal()
                for position in range(began, PROMPT):
                    s.decode(layers, position)
                    for layer in layers:
                        if layer.store.length == budget + method.buffer:
                            _add_rows(count, theirs, layer, budget)
    return count.difference()


def _add_rows(count: Count, theirs: Any, layer: Any, budget: int) -> None:
    store, ours = layer.store, layer.keeps.keep(budget)[0]
    _, values = theirs.update_kv(store.k, layer.keeps.queries, numbered(store.v))
    count.add(kept_in(values), list(ours), torch.arange(store.length).float().expand(len(ours), -1))


COMPARISONS = [
    Comparison("rkv", RKV_CODE, "rkv/compression/r1_kv.py", "kept tokens of the same rows", rkv),
    Comparison("snapkv", FACTORY, FACTORY_FILE, "kept tokens", partial(snapkv, False), "window=8"),
    Comparison("snapkv", FACTORY, FACTORY_FILE, "kept tokens", partial(snapkv, True), "window=8 select_per=query_head"),
    Comparison("pyramidkv", FACTORY, FACTORY_FILE, "kept tokens", partial(pyramidkv, "exact"), "select_per=query_head"),
    Comparison(
        "pyramidkv",
        FACTORY,
        FACTORY_FILE,
        "kept tokens",
        partial(pyramidkv, "released"),
        "select_per=query_head rounding=released",
    ),
    Comparison("adakv", ADAKV, ADAKV_FILE, "kept tokens (gqa_support)", partial(adakv, True)),
    Comparison("adakv", ADAKV, ADAKV_FILE, "kept tokens (a KV head for each query head)", partial(adakv, False)),
]
