"""InfLLM: the blocks that it reads and what its attention gives, on the embedded model's keys."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from methods.infllm import InfLLM
from tests.official.clones import Repository, released, without_cuda
from tests.official.comparison import Comparison, Difference, off
from tests.official.evicting import PROMPT
from tests.official.selecting import STEPS, flat, model

INFLLM = Repository("thunlp/InfLLM", "12b70798f56e56ebb23c53c7018091a3f540a028")
THETA = 100000  # of the embedded model's rotation


def infllm(of_prompt: bool, clone: Path) -> Difference:
    """The prompt goes through its context manager at once, then token by token, with queries and keys before their
    rotation. Counts prompt tokens with the same output, or blocks that steps read."""
    s, method, same, of, largest = model(), InfLLM(), 0, 0, 0.0
    for budget in (192, 256):
        layers = s.start(method, budget)
        outs = s.prefill(layers, 0, PROMPT)
        for layer, (ours, out) in enumerate(zip(layers, outs, strict=True)):
            with released(clone, "inf_llm.attention.rope") as module, without_cuda():
                rope = module.RotaryEmbeddingESM(s.shape.dim, THETA)
            with released(clone, "inf_llm.attention.context_manager") as module, without_cuda():
                theirs = _manager(module, rope, method, budget)
                apart = off(flat(out), flat(_append(theirs, s, layer, 0, PROMPT)))
            if of_prompt:
                same, of, largest = same + int((apart < 1e-3).sum()), of + PROMPT, max(largest, float(apart.mean()))
                continue
            ours.seal()
            for position in range(PROMPT, PROMPT + STEPS):
                ours.decode(s.at(layer, position, position + 1))
                with without_cuda():
                    _append(theirs, s, layer, position, position + 1)
                read = ours.reads.rows[0, 0, :: method.block] // method.block
                of, same = of + len(theirs.chosen[0]), same + len({*theirs.chosen[0]} & {*read.tolist()})
    words = (
        f"keys at the window's border are read twice there, which moves an output by {100 * largest:.0f} % in the mean "
        "of a layer"
        if of_prompt
        else "generated tokens fill blocks there, and are always read here until a further turn; keys at the window's "
        "border are read twice there while a prompt is computed, so that other tokens represent some blocks"
    )
    return Difference(same, of, words)


def _manager(module: Any, rope: Any, method: InfLLM, budget: int) -> Any:
    """Return its context manager, which notes in `chosen` the blocks that it reads."""

    class Noting(module.ContextManager):
        def calc_block_topk(self, q: Tensor) -> list[list[int]]:
            self.chosen = super().calc_block_topk(q)
            return self.chosen

    window, blocks = method.spend(budget)
    return Noting(
        rope, method.n_init, window, method.block, blocks + 1, blocks, min(method.exc_block, window),
        repr_topk=method.repr_topk,
    )  # fmt: skip


def _append(theirs: Any, s: Any, layer: int, start: int, end: int) -> Tensor:
    at = slice(start, end)
    q, k, v = (x[:, :, at] for x in (s.project(layer, s.hidden[layer]), s.raw_k[layer], s.v[layer]))
    return theirs.append(*(x.contiguous() for x in (q, k, v, q, k, v)))


INFLLM_FILE = "inf_llm/attention/context_manager.py"
COMPARISONS = [
    Comparison("infllm", INFLLM, INFLLM_FILE, "prompt tokens with the same output", partial(infllm, True)),
    Comparison("infllm", INFLLM, INFLLM_FILE, "blocks that a step reads", partial(infllm, False)),
]
