"""Methods whose softmax has sink logits, on keys and values that are made up; tests/families.py has whole models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.base import CacheState, Method
from methods.lm_infinite import LMInfinite
from methods.sparq import SparQ
from tests.methods.synthetic import Sequences, Shape
from tests.methods.test_contract import small

BUDGET = 0.4
SINKS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0, 1.0])
SHAPE = Shape(6, 2, 64, batch=2)


def drive(method: Method, sinks: Tensor | None, text: Sequences) -> tuple[Tensor, Tensor]:
    """All but the last token are prompt. -> what its last query gave, what the last token gave"""
    request = text.request(BUDGET)
    (layer,) = method.start([replace(spec, sink_logits=sinks) for spec in text.specs], CacheState(request))
    prompt_out = layer.prefill(text.at(0, 0, text.length - 1))[:, :, -1:]
    layer.seal()
    return prompt_out, layer.decode(text.at(0, text.length - 1, text.length))


@pytest.mark.parametrize("method", [LMInfinite(n_init=2), replace(small("infllm"), repr_topk=4), small("h2o")])
@pytest.mark.parametrize("phase", [0, 1])
def test_a_sink_is_one_more_term_of_the_sum(method: Method, phase: int) -> None:
    """A token with the only value gives its own weight: exp(l) / (sum + exp(s))."""
    text = Sequences(SHAPE, 90)
    token = text.length - 2 + phase
    text.v.zero_()
    text.v[:, :, :, token] = 1
    logit = (text.q(0)[:, :, token] * text.k(0)[:, :, token].repeat_interleave(3, 1)).sum(-1) * text.specs[0].scale
    plain, given = (drive(method, sinks, text)[phase][:, :, 0, 0] for sinks in (None, SINKS))
    assert_close(1 / given - 1 / plain, (SINKS - logit).exp(), rtol=1e-4, atol=1e-4)


def test_sparqs_mean_value_leaves_the_sink_its_weight() -> None:
    """With all channels its softmax is exact, and values that are all one give the sum of the weights."""
    text = Sequences(SHAPE, 90)
    text.v.fill_(1)
    logits = text.q(0)[:, :, -1:] @ text.k(0).repeat_interleave(3, 1).mT * text.specs[0].scale
    _, out = drive(SparQ(r=SHAPE.dim), SINKS, text)
    assert_close(out, torch.sigmoid(logits.logsumexp(-1) - SINKS[:, None])[..., None].expand_as(out))


@pytest.mark.parametrize("select_per", ["query_head", "kv_head"])
def test_quests_heads_of_different_counts_leave_the_sink_its_weight(select_per: str) -> None:
    """Values that are all one give the sum of the weights: some heads have chosen the short last page, some not."""
    text = Sequences(SHAPE, 90)
    text.v.fill_(1)
    text.raw_k[:, :, :, 88] *= 10
    quest = replace(small("quest"), dense_layers=(), last_page=False, select_per=select_per)  # type: ignore[call-arg]
    (layer,) = quest.start([replace(spec, sink_logits=SINKS) for spec in text.specs], CacheState(text.request(BUDGET)))
    text.seal([layer], 0, 89)
    (out,) = text.decode([layer], 89)
    read = layer.selected_positions()
    own = read.repeat_interleave(SHAPE.heads // read.shape[1], 1)
    assert len((own >= 0).sum(-1).unique()) > 1
    q, k = text.q(0)[:, :, -1:], text.k(0).repeat_interleave(3, 1)
    logits = (q @ k.mT * text.specs[0].scale).squeeze(2)  # [B H 90]
    seen = torch.zeros(*logits.shape[:2], 91, dtype=torch.bool).scatter_(2, own % 91, True)[..., :90]
    seen[..., -1] = True  # the token itself
    lse = logits.masked_fill(~seen, float("-inf")).logsumexp(-1)
    assert_close(out, torch.sigmoid(lse - SINKS)[..., None, None].expand_as(out))
