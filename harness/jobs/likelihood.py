"""Measures how likely given texts are: the right answers after a prompt, and the choices of a
question with several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import zip_longest
from time import perf_counter

import torch

from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import After, Generation, RunningSequence
from harness.engine.engine import Engine
from harness.engine.saved_state import Snapshot
from harness.jobs.examples import PreparedExample
from harness.prompts.prompt import Tokenizer
from harness.prompts.teacher import Forced, answer_ids


@dataclass(frozen=True, slots=True, eq=False)
class Unmeasured:
    """Hold what is needed to measure how likely right answers are to a sequence, `slot`: a snapshot of its
    sealed cache, and the tokens of the right answers, `references`. `before`: tokens to feed first, of
    a question that is still unread (protocol=context), and of an empty thought."""

    slot: RunningSequence
    snapshot: Snapshot
    before: Sequence[int]
    references: Sequence[Sequence[int]]


def references(item: PreparedExample, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of each right answer to `item`, cut to the number of tokens that the model
    may answer. The list is empty for an example whose text is fed by force: there the run itself
    measures the likelihood."""
    if item.forced:
        return []
    prompt = replace(item.prompt, text=item.thought.text) if item.thought else item.prompt
    return [
        answer_ids(reference, prompt, tokenizer)[: item.answer_tokens]
        for reference in dict.fromkeys(filter(None, item.example.references))
    ]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Measures the likelihood of right answers: feeds their tokens, step by step, to caches that hold
    the prompts."""

    engine: Engine
    tokenizer: Tokenizer

    @torch.inference_mode()
    def measure(self, asked: Sequence[Unmeasured]) -> list[list[float | None]]:
        """Return for each sequence of `asked` the mean negative log-likelihoods of its right answers, in
        nats per token, over the tokens that decode steps predicted; None for an answer without such a
        token. The sequences step together, and their caches are put back afterwards.

        Without tokens before it, the first token of an answer is predicted by the prefill; that
        prediction is the same under every method, so it is left out.
        """
        engine = copy(self.engine)
        engine.graphs = None  # a capture would take longer than most answers
        costs = [list[float | None]() for _ in asked]
        for answers in zip_longest(*(one.references for one in asked)):
            batch, fed = RunningBatch(engine), list[RunningSequence | None]()
            for one, reference in zip(asked, answers, strict=True):
                fed.append(None if reference is None else _joined(batch, one, reference))
            while batch.sequences:
                batch.run()
            for one, own, slot in zip(asked, costs, fed, strict=True):
                one.snapshot.restore()
                own += [None] if slot is None or slot.out.nll is None else slot.out.nll
        return costs


def _joined(
    batch: RunningBatch, one: Unmeasured, reference: Sequence[int]
) -> RunningSequence | None:
    """Add a sequence to `batch` that is fed the right answer `reference`; return None if no decode step
    predicts a token of it."""
    tokens, first = torch.tensor([[*one.before, *reference]]), max(len(one.before), 1)
    given, predicted = tokens.tensor_split([first], 1)
    if not (count := predicted.shape[1]):
        return None
    one.snapshot.cache.watch = None  # comes back with the snapshot
    return batch.join(
        one.snapshot.cache,
        None,
        given,
        began=perf_counter(),
        max_new_tokens=count,
        stops=[After(count)],
        sampler=Forced(predicted),
    )


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
