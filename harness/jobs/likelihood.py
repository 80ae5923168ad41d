"""Measures how likely given texts are: the right answers after a prompt, and the choices of a
question with several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Measures the likelihood of right answers: feeds their tokens, step by step, to a cache that
    holds the prompt."""

    engine: Engine
    tokenizer: Tokenizer

    def references(self, item: PreparedExample) -> list[tuple[int, ...]]:
        """Return the tokens of each right answer to `item`, cut to the number of tokens that the
        model may answer. The list is empty for an example whose text is fed by force: there the run
        itself measures the likelihood."""
        if item.forced:
            return []
        references = dict.fromkeys(filter(None, item.example.references))
        prompt = replace(item.prompt, text=item.thought.text) if item.thought else item.prompt
        return [
            answer_ids(reference, prompt, self.tokenizer)[: item.answer_tokens]
            for reference in references
        ]

    def measure(
        self, cache: KVCache, question: Sequence[int], reference: Sequence[int]
    ) -> float | None:
        """Return the mean negative log-likelihood, in nats per token, of the tokens of `reference`
        that decode steps predicted; None if there is none.

        `cache` must be sealed; it holds the fed tokens afterwards. `question`: tokens to feed
        before the answer (protocol=context). Without a question, the first answer token is
        predicted by the prefill; that prediction is the same under every method, so it is left out.
        """
        fed, costs = [*question, *reference], list[float]()
        for place, token in enumerate(fed[:-1]):
            logits = self.engine.decode(
                torch.tensor([[token]], device=self.engine.model.device), cache, None
            )
            if place + 1 >= len(question):
                costs.append(-logits[0].float().log_softmax(-1)[fed[place + 1]].item())
        return fmean(costs) if costs else None


def choices_output(choices: Sequence[Generation]) -> str:
    """Return JSON, which the task scores as the output of a question with choices
    (`evals.base.read_choices`): for each choice its log-likelihood, and whether each of its tokens
    was the most likely one."""
    weighed = []
    for generation in choices:
        assert generation.nll is not None
        assert generation.likeliest is not None
        weighed.append((-generation.nll[0] * len(generation.tokens[0]), generation.likeliest[0]))
    return json.dumps(weighed)
