"""Finds what is wrong with a prompt before a model sees it; each finding is one sentence with its
remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from evals.base import Example
from harness.prompts.prompt import PROBE, Prompt, Tokenizer, before_answer, shell, wrap


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["error", "warning"]
    code: str
    message: str


def lint(
    example: Example, prompt: Prompt, tokenizer: Tokenizer, window: int, new_tokens: int, before: int = 0
) -> list[Finding]:
    """Return the findings for a prompt. Errors make the run meaningless; warnings are to be
    mentioned with the score. `before`: tokens of earlier turns."""
    return [
        *_empty(example, prompt),
        *_too_long(prompt, window, new_tokens, before),
        *_bos(prompt, tokenizer),
        *_special_tokens(example, tokenizer),
        *_prefix(example, prompt, tokenizer),
        *_opening(example, prompt, tokenizer),
        *_corrected(tokenizer),
        *_cut(example, prompt),
    ]


def _empty(example: Example, prompt: Prompt) -> Iterator[Finding]:
    if not prompt.ids or not (example.context + example.question).strip():
        yield Finding("error", "empty", f"Example {example.id} has no text: check the task's data.")


def _too_long(prompt: Prompt, window: int, new_tokens: int, before: int) -> Iterator[Finding]:
    needed = before + len(prompt.ids) + new_tokens
    if needed > window:
        earlier = f"{before} tokens of earlier turns, " if before else ""
        yield Finding(
            "error",
            "window",
            f"{earlier}{len(prompt.ids)} prompt tokens and {new_tokens} new ones are {needed - window} more than the "
            f"model's window of {window}: use shorter prompts, or a model with a longer window.",
        )


def _bos(prompt: Prompt, tokenizer: Tokenizer) -> Iterator[Finding]:
    bos = tokenizer.bos_token_id
    if bos is not None and prompt.ids[:2] == (bos, bos):
        yield Finding("error", "double_bos", "The prompt begins with BOS twice: take it out of the text or template.")


def _special_tokens(example: Example, tokenizer: Tokenizer) -> Iterator[Finding]:
    user = "\n".join((example.system, example.reply or "", example.context, example.question, example.prefix))
    names = sorted(str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special and t.content in user)
    if names:
        yield Finding(
            "warning",
            "special_token",
            f"The text holds {', '.join(names)}, which the tokenizer reads as special: drop or respell the example.",
        )


def _prefix(example: Example, prompt: Prompt, tokenizer: Tokenizer) -> Iterator[Finding]:
    tail = shell(tokenizer, example.system).tail if prompt.template else ""
    if not prompt.text.endswith(tail + example.prefix):
        yield Finding(
            "error",
            "prefix",
            "The answer's first words do not stand right after the assistant's header: put them in Example.prefix.",
        )


def _opening(example: Example, prompt: Prompt, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Compare the end of the prompt with what the template puts before an existing answer: some
    templates open the assistant's turn by ending the user's."""
    if not prompt.template:
        return
    eos, tail = tokenizer.eos_token, shell(tokenizer, example.system).tail.rstrip()
    usual = (before_answer(tokenizer, example.system) or tail).rstrip()
    if eos and tail.endswith(eos) and not usual.startswith(tail):
        yield Finding("error", "eos", f"The chat template ends the prompt in {eos}: correct it, or set chat=none.")
    elif usual != tail and usual.startswith(tail):
        asked, opened = (
            wrap(tokenizer, PROBE, example.system, template=True, opens_answer=opens) for opens in (False, True)
        )
        if asked == opened:
            yield Finding(
                "warning",
                "generation_prompt",
                "The chat template does not open the assistant's turn, although it puts "
                f"{usual.removeprefix(tail).strip()!r} before an answer: correct it, or set chat=none.",
            )


def _corrected(tokenizer: Tokenizer) -> Iterator[Finding]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if getattr(backend, "fix_mistral_regex", False):
        yield Finding(
            "warning",
            "tokenizer_regex",
            "The tokenizer's regular expression is wrong and was corrected, as transformers advises "
            "(fix_mistral_regex): a run elsewhere that left it as it is has other tokens.",
        )


def _cut(example: Example, prompt: Prompt) -> Iterator[Finding]:
    if not prompt.cut_tokens:
        return
    remedy = "use a larger max_prompt_tokens, or say so beside the score"
    yield Finding("warning", "cut", f"{prompt.cut_tokens} tokens were cut from the middle: {remedy}.")
    user = example.context + example.question
    before = [reference for reference in example.references if reference and reference in user]
    if before and not any(reference in prompt.text for reference in before):
        yield Finding("warning", "answer_cut", f"The reference answer was in the part that was cut: {remedy}.")
