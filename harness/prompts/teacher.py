"""Feeds a given text through the method's decode steps (teacher forcing) and measures its
likelihood.

The likelihood of the first token comes from the prefill, that of every other token from a decode
step after the seal; thus it measures what the method keeps of the context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evals.base import Example
from harness.prompts.prompt import ExampleError, Prompt, Tokenizer, tokenize, tokens_after

TAIL = 400  # characters at the end of a prompt that decide how the text after it splits into tokens


class Forced:
    """Stand in for a sampler to feed given tokens: pick those of `tokens` [B N] one by one,
    whatever the logits say, and note the negative log-likelihood of each."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.costs: list[Tensor] = []  # [B] each, nats
        # [B], on the device once tokens were picked
        self._likeliest = torch.ones(len(tokens), dtype=torch.bool)

    def pick(self, logits: Tensor) -> Tensor:
        if self.tokens.device != logits.device:
            self.tokens, self._likeliest = (
                x.to(logits.device) for x in (self.tokens, self._likeliest)
            )
        ids = self.tokens[:, len(self.costs)]
        self.costs.append(-logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0])
        self._likeliest &= logits.argmax(-1) == ids
        return ids

    @property
    def likeliest(self) -> Tensor:
        """Return for each sequence [B] whether the model would have chosen every token so far."""
        return self._likeliest.cpu()

    def mean_nll(self) -> list[float]:
        """Return the mean negative log-likelihood of each sequence over the tokens fed so far, in
        nats."""
        return [
            sum(costs) / len(costs)
            for costs in zip(*(cost.tolist() for cost in self.costs), strict=True)
        ]


def forced_ids(example: Example, prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of the reference as they follow the prompt in one text; none if the example
    is not teacher-forced."""
    if not example.teacher_forced:
        return ()
    if len(example.references) != 1 or not example.references[0]:
        raise ExampleError(
            f"{example.id} is teacher-forced and has no text to feed: give it exactly one reference."
        )
    return _after(prompt, example.references[0], tokenizer)


def choices_ids(
    example: Example, prompt: Prompt, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each of the example's choices as they follow the prompt in one text."""
    if not all(example.choices):
        raise ExampleError(
            f"{example.id} has a choice without text, which has no likelihood: leave it out."
        )
    return tuple(_after(prompt, choice, tokenizer) for choice in example.choices)


def answer_ids(reference: str, prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of a right answer, `reference`, as a model would write it after `prompt`:
    after a space, unless the prompt ends in white space or the answer begins with it. The
    likelihood of right answers is measured on them."""
    end = prompt.text[-TAIL:]
    space = "" if end[-1:].isspace() or reference[:1].isspace() else " "
    return following(end, tokenize(tokenizer, end).ids, space + reference, tokenizer)


def _after(prompt: Prompt, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of `text` as they follow the whole prompt when both are tokenised as one
    text."""
    return following(prompt.text, prompt.ids[prompt.bos_added :], text, tokenizer)


def following(text: str, ids: Sequence[int], added: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of `added` as they follow `text`, whose tokens are `ids`, in one text. If a
    token would reach across the border, `added` is tokenised apart from it."""
    joined, ends = tokenize(tokenizer, text + added)
    start = next((i for i, end in enumerate(ends) if end > len(text)), len(joined))
    if joined[:start] == list(ids):
        return tuple(joined[start:])
    return tuple(tokens_after(tokenizer, added))
