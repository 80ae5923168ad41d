"""Asks a model to repeat its prompt, for methods that learn from the repetition what to keep (KVzip)."""

from __future__ import annotations

from harness.prompts.prompt import (
    NO_KEYWORDS,
    Chat,
    Keywords,
    Tokenizer,
    shell,
    start_tokens,
    tokenize,
    tokens_after,
)
from harness.prompts.thinking import ThinkingTokenizer
from methods.abilities.repeat import RepeatPrompts

WHOLE = "\n\nRepeat the previous context exactly."
PART = "\n\nRepeat the part of the previous context exactly, starting with "
PLAIN = "\n\nAnswer: "  # opens the answer where there is no chat template


def repeat_prompts(
    tokenizer: Tokenizer, *, chat: Chat, keywords: Keywords = NO_KEYWORDS
) -> RepeatPrompts:
    """Return the words of KVzip's released code as token ids of `tokenizer`. With chat=template they
    end a user's turn of its chat template, and the model answers without a thought."""
    asked: Tokenizer = ThinkingTokenizer(tokenizer, keywords, on=False)
    templated = chat == "template" and bool(tokenizer.chat_template)
    head, tail = shell(asked) if templated else ("", PLAIN)
    start, written = start_tokens(tokenizer), tokenize(tokenizer, head).ids
    whole_head = written if set(start) <= {*written} else [*start, *written]
    first, later, answer = (tokens_after(tokenizer, text) for text in (WHOLE, PART, tail))
    return RepeatPrompts(tuple(whole_head), tuple(first), tuple(later), tuple(answer))
