"""The words by which a model is asked to repeat its prompt."""

from __future__ import annotations

import torch

from harness.config.settings import Settings
from harness.jobs.examples import prepare
from harness.prompts.repeating import repeat_prompts
from methods.base import Piece
from methods.kvzip import KVzip
from tests.fast import MODEL, niah


def test_a_repetition_reads_as_a_talk() -> None:
    """The template's beginning stays out of it, and the second piece is named by the end of the first."""
    decode, asked = MODEL.tokenizer().decode, repeat_prompts(MODEL.tokenizer(), chat="template")
    ids = prepare(niah(), MODEL, Settings(device="cpu"))[0].prompt.ids
    head = len(asked.head)
    fed = list(KVzip(chunk=100).repetitions(torch.tensor([ids]), asked))
    assert fed[0][1] == Piece(head, head, head + 100)
    first, second = (decode(tokens[0].tolist()) for tokens, _ in fed[:2])
    answer = "<|im_end|>\n<|im_start|>assistant\n"
    assert first == "\n\nRepeat the previous context exactly." + answer + decode(ids[head : head + 100])
    asked_for = "\n\nRepeat the part of the previous context exactly, starting with "
    assert second == asked_for + decode(ids[head + 92 : head + 100]) + answer + decode(ids[head + 100 : head + 200])
    assert sum(piece.end - piece.first for _, piece in fed) == len(ids) - head


def test_without_a_template_the_authors_other_words_open_the_answer() -> None:
    asked = repeat_prompts(MODEL.tokenizer(), chat="none")
    assert MODEL.tokenizer().decode(asked.answer) == "\n\nAnswer: "
    assert asked.head == ()
