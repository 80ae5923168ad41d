"""Fidelity against plain torch, at its limits, and on the production path."""

from __future__ import annotations

from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import Engine, attached
from harness.engine.batch.running_sequence import Generation
from harness.engine.fidelity import Fidelity
from methods.base import AttnInput, Budget, Method
from methods.full import Full
from methods.oracle import Oracle
from methods.quest import Quest
from methods.snapkv import SnapKV
from methods.streaming import Streaming
from tests.fast import PQ
from tests.methods.synthetic import Sequences, Shape
from tests.tiny import prompt, tiny

ORACLE = Oracle(sinks=0, recent_ratio=0.0)


def run(method: Method, budget: float, every: int = 1, length: int = 90, **more: object) -> Generation:
    with attached(tiny("llama"), method, budget=budget) as kv:
        return Engine(kv, fidelity=every).generate(prompt(length), max_new_tokens=8, **more)  # type: ignore[arg-type]


def found(made: Generation) -> dict[str, float]:
    assert made.fidelity[0] is not None
    return made.fidelity[0]


@pytest.mark.parametrize("method", [Full(), PQ, Streaming(sinks=2, positions="cache")])
def test_a_budget_over_everything_is_exact(method: Method) -> None:
    report = found(run(method, 1.0))
    assert (report["recall"], report["mass"]) == (1, 1)
    assert report["error"] < 1e-5
    assert report["kl"] < 1e-6
    assert report["first_difference"] is None


def test_oracle_recalls_itself_and_others_less() -> None:
    oracle, pq, streaming = (found(run(m, 0.2)) for m in (ORACLE, PQ, Streaming(sinks=2, positions="original")))
    assert oracle["recall"] == 1
    assert oracle["mass"] > pq["mass"] > streaming["mass"] > 0
    assert 1 > pq["recall"] > streaming["recall"]
    assert oracle["error"] < streaming["error"]


def test_kl_and_first_difference_are_those_of_fulls_logits() -> None:
    method = Streaming(sinks=2, positions="cache")
    made = run(method, 0.1)
    tokens = made.tokens[0]
    with torch.no_grad():
        text = torch.cat([prompt(90), torch.tensor([tokens[:-1]])], 1)
        full = tiny("llama")(text).logits[0, 90:]
    with attached(tiny("llama"), method, budget=0.1) as kv, torch.no_grad():
        cache = kv.cache(capacity=120)
        kv.model(prompt(90), past_key_values=cache)
        cache.seal()
        ours = torch.cat([kv.model(torch.tensor([[t]]), past_key_values=cache).logits[0] for t in tokens[:-1]])
    kl = torch.nn.functional.kl_div(ours.log_softmax(-1), full.log_softmax(-1), log_target=True, reduction="none")
    report = found(made)
    assert report["kl"] == pytest.approx(kl.sum(-1).mean().item(), rel=1e-3)
    differ = [i for i, (a, b) in enumerate(zip(tokens[1:], full.argmax(-1).tolist(), strict=True), 1) if a != b]
    assert report["first_difference"] == (differ[0] if differ else None)


@pytest.mark.tokens
def test_watching_changes_no_token_and_no_bytes() -> None:
    with attached(tiny("llama"), PQ, budget=0.2) as kv:
        plain = Engine(kv).generate(prompt(90, batch=2), max_new_tokens=8)
        watched = Engine(kv, fidelity=3).generate(prompt(90, batch=2), max_new_tokens=8)
    assert watched.tokens == plain.tokens
    assert watched.kv == plain.kv
    assert found(watched)["steps"] == 3  # of 7: the first, fourth and seventh


@pytest.mark.parametrize("select_per", ["query_head", "kv_head"])
@pytest.mark.parametrize("last_page", [True, False])
def test_a_head_is_credited_with_what_it_read_itself(
    select_per: Any, last_page: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = Quest(page_size=4, min_pages=1, dense_layers=(), select_per=select_per, last_page=last_page)
    seen: dict[str, list[list[float]]] = {"recall": [], "mass": []}  # per step and layer, of both KV heads
    decode = Fidelity.decode

    def noting(watch: Fidelity, layer: Any, x: AttnInput, out: Tensor) -> None:
        decode(watch, layer, x, out)
        index, heads = layer.spec.index, layer.reads.rows.shape[1]
        keys = torch.cat([watch.whole[index].store.k, watch.since[index].k], 2)[0].repeat_interleave(4, 0)  # [H N D]
        weights = ((keys @ x.q[0, :, 0, :, None]).squeeze(2) * layer.spec.scale).softmax(-1)  # [H N]
        own = weights.view(heads, 8 // heads, -1).mean(1)  # of those that share a choice
        recall, mass = [], []
        for rows, weight in zip(layer.reads.rows[0].tolist(), own, strict=True):
            read = [row for row in rows if row < 90]
            recall.append(len({*read} & {*weight[:90].topk(len(read)).indices.tolist()}) / len(read))
            mass.append(weight[read].sum().item() + weight[90:].sum().item())
        seen["recall"].append([fmean(half) for half in (recall[: heads // 2], recall[heads // 2 :])])
        seen["mass"].append([fmean(half) for half in (mass[: heads // 2], mass[heads // 2 :])])

    monkeypatch.setattr(Fidelity, "decode", noting)
    report = found(run(method, 0.3))
    for name, calls in seen.items():
        wanted = torch.tensor(calls).view(report["steps"], 3, 2).mean(0)
        assert torch.allclose(torch.tensor(report[f"{name}_per_head"]), wanted, atol=1e-4)
        assert report[name] == pytest.approx(wanted.mean().item(), abs=1e-4)


def test_a_head_that_reads_fewer_is_asked_for_as_many_as_it_reads() -> None:
    """Of the first head's four best tokens it reads the best and the fourth: one of two. The other reads its four."""
    text = Sequences(Shape(4, 2, 32), 41)
    watch = Fidelity(text.specs, text.request(0.5), 1)
    watch.prefill(0, text.at(0, 0, 40))
    q, k = text.q(0)[:, :, -1:], text.k(0).repeat_interleave(2, 1)
    weights = (q @ k.mT * text.specs[0].scale).softmax(-1).unflatten(1, (2, 2)).mean(2)[0, :, 0, :40]
    best = weights.argsort(-1, descending=True)[:, :4]
    read = torch.stack([torch.stack([best[0, 3], best[0, 0], *[torch.tensor(-1)] * 2]), best[1]])[None]
    layer: Any = SimpleNamespace(spec=text.specs[0], selected_positions=lambda: read, generated_positions=lambda: None)
    watch.decode(layer, text.at(0, 40, 41), torch.zeros(1, 4, 1, 32))
    report = watch.report(tiny("llama"), 0, [1], compare=False)
    assert report["recall_per_head"] == [[0.5, 1.0]]


@pytest.mark.parametrize("method", [ORACLE, SnapKV(window=4, kernel=3, select_per="query_head")])
def test_generated_tokens_that_were_dropped_hold_no_mass(method: Method) -> None:
    """All of the prompt is read, and what is missing of the weights is what dropped tokens would have had."""
    with attached(tiny("llama"), method, budget=Budget(1.0, generated=4)) as kv:
        report = found(Engine(kv, fidelity=23).generate(prompt(90), max_new_tokens=24))
        assert (report["steps"], report["mass"]) == (1, 1)  # nothing is dropped in the first step
        report = found(Engine(kv, fidelity=1).generate(prompt(90), max_new_tokens=24))
    assert report["recall"] == 1
    assert report["mass"] < 0.99
