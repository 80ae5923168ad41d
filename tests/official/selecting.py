"""RocketKV and Quest: which prompt tokens a step reads, on the embedded model's keys."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from methods.base import KVLayer, Method
from methods.quest import Quest
from methods.rocketkv import RocketKV
from tests.methods.recorded import Recorded
from tests.methods.synthetic import Sequences
from tests.official.clones import FLASH_ATTN, Repository, TopK, released
from tests.official.comparison import Comparison, Difference, common, numbered
from tests.official.evicting import PROMPT, Count, kept_in, pooled_votes

ROCKETKV = Repository("NVlabs/RocketKV", "63637c8eb4b06b5eb83cd687723b0eeb19f48f65")
QUEST = Repository("mit-han-lab/Quest", "01c1623bf9395009520874e989e29f683203b357")
STEPS = 8
LAYERS = [0, 14, 29]
PAGE = 16  # of Quest
ROCKET_MODULE = "pipeline.inf_stream_llm.inf_llm.attention.rocket"
ROCKET_BUDGETS = (
    64,
    128,
    208,
    256,
)  # of the paper's kind; for others its two programs differ in the channels they read


def model(**more: Any) -> Recorded:
    return Recorded(PROMPT + STEPS, LAYERS, **more)


def sealed(s: Sequences, method: Method, budget: int, **more: Any) -> list[KVLayer]:
    layers = s.start(method, budget, **more)
    s.seal(layers, 0, PROMPT)
    return layers


def flat(x: Tensor) -> Tensor:
    """[1 H T D] -> [1 T H*D], as projections give it"""
    return x.transpose(1, 2).flatten(2)


def rocketkv_sizes(clone: Path) -> Difference:
    """What its faster program makes of a budget of the paper's kind t: tokens kept, tokens selected, page, channels."""
    same, of = 0, 0
    with released(clone / "gpt-fast", "rocket") as module:
        for prompt, paper, head_dim in product((650, 4096, 32768, 131072), (128, 256, 512, 1024, 4096), (64, 128)):
            if paper >= prompt:
                continue
            method, budget = RocketKV(), paper // 2
            kept = method.keeps(budget, prompt)
            capacity, _, size, r, selected = module.get_params_for_token_budget(paper, prompt, 0, head_dim)
            of += 1
            same += (capacity, selected, size, r) == (kept, budget, *method.pages(budget, kept, head_dim))
    return Difference(
        same, of, "nothing, but that it keeps room for generated tokens within what the first stage keeps"
    )


def rocketkv_keeps(clone: Path) -> Difference:
    count, s = Count(), Recorded(PROMPT, LAYERS)
    for paper in ROCKET_BUDGETS:
        method = RocketKV()
        layers = sealed(s, method, paper // 2)
        for layer, ours in enumerate(layers):
            with released(clone, ROCKET_MODULE, FLASH_ATTN) as module:
                _, (_, values) = _rocket(module, paper, s, layer, 0, PROMPT, None)
            votes = pooled_votes(s, layer, method.window, method.kernel, per_query_head=False)
            count.add(kept_in(values), [*ours.positions[0]], votes)
    return count.difference()


def rocketkv_reads(clone: Path) -> Difference:
    """What each step reads of the same kept tokens."""
    s, same, of = model(), 0, 0
    for paper in ROCKET_BUDGETS:
        layers = sealed(s, RocketKV(), paper // 2)
        for layer, ours in enumerate(layers):
            rows = ours.positions.unsqueeze(-1).expand(-1, -1, -1, s.shape.dim)
            cache = tuple(x[:, :, :PROMPT].gather(2, rows) for x in (s.k(layer), numbered(s.v[layer])))
            for position in range(PROMPT, PROMPT + STEPS):
                ours.decode(s.at(layer, position, position + 1))
                with released(clone, ROCKET_MODULE, FLASH_ATTN) as module, TopK() as top:
                    _, cache = _rocket(module, paper, s, layer, position, position + 1, cache)
                chosen = cache[1][..., 0].long().gather(2, top.chosen[-1][:, :, 0, 0])
                prompt = chosen < PROMPT
                of += int(prompt.sum())
                same += common(chosen.masked_fill(~prompt, -2), ours.read_positions())
    words = (
        f"{100 * (1 - same / of):.1f} % of the prompt tokens read: generated tokens share pages, weights and places "
        "with the prompt there, and are always read here"
    )
    return Difference(same, of, words)


def _rocket(module: Any, paper: int, s: Sequences, layer: int, start: int, end: int, cache: Any) -> Any:
    """Run its attention for tokens start..end-1. -> its output and its cache of keys and values, [1 G K D] each"""
    method, budget = RocketKV(), paper // 2
    kept = method.keeps(budget, PROMPT)
    forward = module.rocket_forward(True, budget, kept / paper, kept, method.window, method.kernel)
    q, k, v = (x[:, :, start:end] for x in (s.q(layer), s.k(layer), numbered(s.v[layer])))
    attention = SimpleNamespace(layer_idx=0, config=SimpleNamespace(num_hidden_layers=9))
    return forward(
        attention, flat(q), flat(k), lambda q, k, **_: (q, k), True, cache,
        lambda x: x, lambda x: x, lambda _: flat(v), lambda x: x, s.shape.dim, s.shape.heads, s.shape.groups,
    )  # fmt: skip


def quest(last_page: bool, clone: Path) -> Difference:
    """Steps of its evaluation code, which chooses for each query head among the pages of all tokens."""
    s, same, of, taken = model(), 0, 0, 0
    for budget in (64, 128, 256):
        for layer, ours in enumerate(sealed(s, Quest(dense_layers=(), last_page=last_page), budget)):
            for position in range(PROMPT, PROMPT + STEPS):
                ours.decode(s.at(layer, position, position + 1))
                with released(clone, "evaluation.quest_attention") as module, TopK() as top:
                    _quest(module, s, layer, position, budget)
                pages = top.chosen[-1][:, :, 0]
                prompt = pages < PROMPT // PAGE
                of, taken = of + int(prompt.sum()), taken + int((~prompt).sum())
                same += common(pages.masked_fill(~prompt, -2), ours.selected_positions()[..., ::PAGE] // PAGE)
    words = (
        f"pages of generated tokens compete there, and take {100 * taken / (of + taken):.0f} % of the places in these "
        "steps; here generated tokens are always read"
    )
    if last_page:
        words += ". The prompt's last page competes there, and has a place here, as it has in the CUDA code"
    return Difference(same, of, words)


def _quest(module: Any, s: Sequences, layer: int, position: int, budget: int) -> None:
    """Run its attention for the token at `position`."""
    q, k, v = (x[:, :, : position + 1] for x in (s.q(layer), s.k(layer), s.v[layer]))
    attention = SimpleNamespace(
        layer_id=2, q_proj=lambda _: flat(q[:, :, -1:]), k_proj=lambda _: flat(k[:, :, -1:]),
        v_proj=lambda _: flat(v[:, :, -1:]), rotary_emb=lambda *_: (None, None), o_proj=lambda x: x,
        num_heads=s.shape.heads, num_key_value_heads=s.shape.groups, head_dim=s.shape.dim,
        num_key_value_groups=s.shape.heads // s.shape.groups, hidden_size=s.shape.heads * s.shape.dim,
        chunk_size=PAGE, token_budget=budget,
    )  # fmt: skip
    module.apply_rotary_pos_emb = lambda q, k, *_: (q, k)
    past = (k[:, :, :position], v[:, :, :position])
    module.forward(attention, torch.empty(1, 1, 0), None, torch.tensor([[position]]), past, use_cache=True)


ROCKET_FILE = "pipeline/inf_stream_llm/inf_llm/attention/rocket.py"
QUEST_FILE = "evaluation/quest_attention.py"
COMPARISONS = [
    Comparison("rocketkv", ROCKETKV, "gpt-fast/rocket.py", "what a budget becomes", rocketkv_sizes),
    Comparison("rocketkv", ROCKETKV, ROCKET_FILE, "tokens that the first stage keeps", rocketkv_keeps),
    Comparison("rocketkv", ROCKETKV, ROCKET_FILE, "prompt tokens that the second stage reads", rocketkv_reads),
    Comparison("quest", QUEST, QUEST_FILE, "pages of the prompt", partial(quest, True)),
    Comparison("quest", QUEST, QUEST_FILE, "pages of the prompt", partial(quest, False), "last_page=false"),
]
