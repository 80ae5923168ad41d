"""The likelihood of given texts: of the right answers after a prompt, and of the choices of a question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from harness.engine.batch.running_sequence import Generation
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.jobs.examples import PreparedExample
from harness.prompts.prompt import Tokenizer
from harness.prompts.teacher import answer_ids


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Feeds references to the caches of one engine, in plain steps, one cache at a time."""

    engine: Engine
    tokenizer: Tokenizer

    def references(self, item: PreparedExample) -> list[tuple[int, ...]]:
        """Return the tokens of each right answer to `item`, cut to as many as the model may answer. Of a text that is
        fed by force there is none, because the run itself measures that."""
        if item.forced:
            return []
        found = dict.fromkeys(filter(None, item.example.references))
        return [answer_ids(reference, item.prompt, self.tokenizer)[: item.new_tokens] for reference in found]

    def measure(self, cache: KVCache, question: Sequence[int], reference: Sequence[int]) -> float | None:
        """Return the mean cost of the tokens of `reference` whose probabilities decode steps gave, in nats; None where
        there is none.

        cache: sealed, and left with the tokens fed. question: what is fed before the answer (protocol=context); without
        one, the first token's probability is the prefill's, the same under every method, and does not count.
        """
        fed, costs = [*question, *reference], list[float]()
        for place, token in enumerate(fed[:-1]):
            logits = self.engine.decode(torch.tensor([[token]], device=self.engine.model.device), cache, None)
            if place + 1 >= len(question):
                costs.append(-logits[0].float().log_softmax(-1)[fed[place + 1]].item())
        return fmean(costs) if costs else None


def choices_output(choices: Sequence[Generation]) -> str:
    """Return what a task is handed as the output of a question with choices (`evals.base.read_choices`): of each its
    likelihood, and whether every token of it was the likeliest."""
    weighed = []
    for generation in choices:
        assert generation.nll is not None
        assert generation.likeliest is not None
        weighed.append((-generation.nll[0] * len(generation.tokens[0]), generation.likeliest[0]))
    return json.dumps(weighed)
