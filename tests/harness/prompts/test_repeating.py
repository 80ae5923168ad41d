"""The words by which a model is asked to repeat its prompt."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.config.settings import Settings, SettingsError
from harness.jobs.examples import prepare, prompts_of
from harness.jobs.resolve import resolve, resolve_for_examples
from harness.prompts.repeating import repeat_prompts
from methods.abilities.repeat import Piece, Repeat
from methods.kvzip import KVzip
from tests.fast import MODEL, niah
from tests.harness.prompts.test_prompt import tokenizer


def test_a_repetition_reads_as_a_talk() -> None:
    """The template's beginning stays out of it, and the second piece is named by the end of the first."""
    decode, asked = MODEL.tokenizer().decode, repeat_prompts(MODEL.tokenizer(), chat="template")
    ids = prepare(niah(), MODEL, Settings(device="cpu"))[0].prompt.ids
    head = len(asked.head)
    fed = list(Repeat(chunk=100).pieces(torch.tensor([ids]), asked))
    assert fed[0][1] == Piece(head, head, head + 100)
    first, second = (decode(tokens[0].tolist()) for tokens, _ in fed[:2])
    answer = "<|im_end|>\n<|im_start|>assistant\n"
    assert first == "\n\nRepeat the previous context exactly." + answer + decode(ids[head : head + 100])
    asked_for = "\n\nRepeat the part of the previous context exactly, starting with "
    assert second == asked_for + decode(ids[head + 92 : head + 100]) + answer + decode(ids[head + 100 : head + 200])
    assert sum(piece.end - piece.first for _, piece in fed) == len(ids) - head


TEMPLATE = (
    "{{ rule }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %} <think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "chat", "bos", "head", "answer"),
    [
        ("{{ bos_token }}" + TEMPLATE, "template", True, "<s>Be brief. user: ", "\nassistant: <think>\n\n</think>\n\n"),
        (TEMPLATE, "template", True, "<s>Be brief. user: ", "\nassistant: <think>\n\n</think>\n\n"),
        (TEMPLATE, "template", False, "Be brief. user: ", "\nassistant: <think>\n\n</think>\n\n"),
        (TEMPLATE, "none", True, "<s>", "\n\nAnswer: "),
        (None, "template", False, "", "\n\nAnswer: "),
    ],
)
def test_the_template_says_what_stays_and_how_an_answer_opens(
    template: str | None, chat: Any, bos: bool, head: str, answer: str
) -> None:
    """Its thoughts are off. Without one, the authors' other words open the answer."""
    words = tokenizer(template, bos=bos)
    asked = repeat_prompts(words, chat=chat, keywords={"rule": "Be brief. "})
    assert (words.decode(asked.head), words.decode(asked.answer)) == (head, answer)


@pytest.mark.parametrize(
    ("changes", "trained", "refused"),
    [({"chunk": 60}, 0, False), ({"chunk": 61}, 0, True), ({"chunk": 61}, 1, False), ({"budget": 1.0}, 0, False)],
)
def test_a_repetition_beyond_the_models_window_is_refused(changes: Any, trained: int, refused: bool) -> None:
    """A piece of 60 takes 100 tokens with the words that ask for it. A window that was asked for limits texts alone."""
    settings = Settings(device="cpu", budget=changes.get("budget", 0.2))
    prompts = prompts_of(niah(), MODEL, settings)
    longest = max(len(item.prompt.ids) for item in prompts.items)
    info = replace(MODEL.describe(), window=longest + 100, trained_window=longest + 100 + trained)
    resolved = resolve(settings, KVzip(chunk=changes.get("chunk", 2000)), info)
    words = f"{longest} tokens with the 101 .* window of {longest + 100}: set a smaller method.chunk"
    with pytest.raises(SettingsError, match=words) if refused else nullcontext():
        resolve_for_examples(resolved, niah(), prompts, info)
