"""InfLLM against its formulas, written out one query and one key at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.rope import rotate
from methods.infllm import InfLLM, InfLLMRead
from methods.layers import Layer
from tests.methods.synthetic import SHAPES, Sequences, Shape

METHOD = InfLLM(n_init=3, block=8, local_ratio=0.5, repr_topk=2, exc_block=16)
PROMPT, STEPS = 99, 3
BUDGET = 55  # window 29 or more, 2 blocks
WINDOW, READS = 29, 2


class Reference:
    """The whole sequence, one sequence and layer at a time; blocks are filled while `grows`."""

    def __init__(self, text: Sequences, b: int) -> None:
        self.shape = text.shape
        self.group = text.shape.heads // text.shape.groups
        self.raw_q = text.project(0, text.hidden[0])[b]
        self.raw_k, self.v = text.raw_k[0][b], text.v[0][b]
        self.q, self.k = text.q(0)[b], text.k(0)[b]
        at = slice(WINDOW - 1, WINDOW)
        self.far_q = rotate(self.raw_q[None], text.cos[:, at], text.sin[:, at])[0]
        self.mass = torch.zeros(text.shape.heads, text.length)
        self.blocks: list[Tensor] = []  # representatives [H D]

    def run(self, first: int, count: int, reads: int) -> tuple[Tensor, list[int]]:
        """One execution block. -> outputs [H count D], blocks read"""
        chosen: list[int] = []
        if self.blocks:
            mean = self.far_q[:, first : first + count].mean(1)
            scores = torch.stack([(mean * r).sum() for r in self.blocks])
            chosen = scores.topk(min(reads, len(self.blocks))).indices.tolist()
        outs = [[self._attend(h, p, chosen) for p in range(first, first + count)] for h in range(self.shape.heads)]
        return torch.stack([torch.stack(row) for row in outs]), chosen

    def _attend(self, h: int, p: int, chosen: list[int]) -> Tensor:
        g, logits, tokens = h // self.group, [], []
        start = 3 + 8 * len(self.blocks) if self.blocks else 0
        for j in sorted({*(range(3) if self.blocks else ()), *range(start, p + 1)}):
            near = p - j < WINDOW
            logits.append(self.q[h, p] @ self.k[g, j] if near else self.far_q[h, p] @ self.raw_k[g, j])
            tokens.append((j, near))
        for j in (3 + 8 * n + i for n in chosen for i in range(8)):
            logits.append(self.far_q[h, p] @ self.raw_k[g, j])
            tokens.append((j, False))
        weights = (torch.stack(logits) * self.shape.dim**-0.5).softmax(0)
        for weight, (j, near) in zip(weights, tokens, strict=True):
            self.mass[h, j] += weight if near else 0.0
        return weights @ self.v[g, [j for j, _ in tokens]]

    def fill(self, seen: int) -> None:
        while seen - (3 + 8 * len(self.blocks)) >= WINDOW + 8:
            start = 3 + 8 * len(self.blocks)
            heads = []
            for h in range(self.shape.heads):
                best = self.mass[h, start : start + 8].topk(2).indices
                heads.append(self.raw_k[h // self.group, start + best].mean(0))
            self.blocks.append(torch.stack(heads))


def start(text: Sequences, budget: int | float = BUDGET, method: InfLLM = METHOD, **more: object) -> Layer:
    layer = text.start(method, budget, **more)[0]
    assert isinstance(layer.reads, InfLLMRead)
    return layer


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_every_step_are_the_formulas(shape: Shape) -> None:
    text = Sequences(shape, PROMPT + STEPS)
    layer = start(text)
    prompt_out = text.prefill([layer], 0, PROMPT)[0]
    layer.seal()
    assert layer.attended == (3 + 32 + 16, 0)  # 8 whole blocks and 32 tokens after them
    references = [Reference(text, b) for b in range(shape.batch)]
    for b, reference in enumerate(references):
        for first in range(0, PROMPT, 16):
            count = min(16, PROMPT - first)
            expected, _ = reference.run(first, count, READS)
            torch.testing.assert_close(prompt_out[b, :, first : first + count], expected, atol=1e-5, rtol=1e-4)
            reference.fill(first + count)
        assert len(reference.blocks) == 8
    for t in range(PROMPT, PROMPT + STEPS):
        out = layer.decode(text.at(0, t, t + 1))
        read = layer.read_positions()
        assert layer.attended == (51, t + 1 - PROMPT)
        for b, reference in enumerate(references):
            expected, chosen = reference.run(t, 1, READS)
            torch.testing.assert_close(out[b], expected, atol=1e-5, rtol=1e-4)
            tokens = sorted([0, 1, 2, *(3 + 8 * n + i for n in chosen for i in range(8)), *range(67, PROMPT)])
            assert read[b].sort().values.tolist() == [tokens] * shape.groups
