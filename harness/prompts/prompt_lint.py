"""Finds what is wrong with a prompt before a model sees it; each finding is one sentence with its
remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from evals.base import Example
from harness.prompts.prompt import (
    ANSWER_PROBE,
    PROBE,
    Prompt,
    Tokenizer,
    in_template,
    shell,
)


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["error", "warning"]
    code: str
    message: str


def lint(
    example: Example,
    prompt: Prompt,
    tokenizer: Tokenizer,
    window: int,
    new_tokens: int,
    before: int = 0,
    thought: str = "",
    because: str = "",
) -> Iterator[Finding]:
    """Yield what is wrong with a prompt. Errors make the run meaningless; warnings are to be
    mentioned with the score. `new_tokens`: the most that the answer may have; `before`: tokens of
    earlier turns; `thought`, `because`: words on the new tokens and on the window, behind their
    numbers."""
    user, bos = example.context + example.question, tokenizer.bos_token_id
    if not prompt.ids or not user.strip():
        yield Finding("error", "empty", f"Example {example.id} has no text: check the task's data.")
    needed = before + len(prompt.ids) + new_tokens
    if needed > window:
        earlier = f"{before} tokens of earlier turns, " if before else ""
        remedy = (
            "use shorter prompts or answers (generation.max_new_tokens), a model with a longer window, leave such "
            "examples out (too_long=skip), or cut their contexts (too_long=middle or left)."
        )
        room = window - before - len(prompt.ids)
        if new_tokens >= window and room > 0 and not thought:  # no cut of the prompt can help
            fewer = f"allow fewer new tokens (generation.max_new_tokens=N, here up to {room})"
            remedy = f"{fewer}, or use a model with a longer window."
        yield Finding(
            "error",
            "window",
            f"{earlier}{len(prompt.ids)} prompt tokens and {new_tokens} new ones{thought} are {needed - window} more "
            f"than the model's window of {window}{because}: {remedy}",
        )
    bos_text = "" if bos is None else tokenizer.decode([bos])
    start = bos_text * (prompt.ids[: prompt.bos_added].count(bos)) + prompt.text
    if bos_text and re.search(rf"{re.escape(bos_text)}\s*{re.escape(bos_text)}", start):
        yield Finding(
            "error",
            "double_bos",
            f"The prompt has BOS twice in a row ({bos_text}): take one out of the text or template.",
        )
    text = "\n".join((example.system, *example.earlier, example.reply or "", user, example.prefix))
    special = [str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special]
    if names := sorted(name for name in special if name in text):
        yield Finding(
            "warning",
            "special_token",
            f"The text holds {', '.join(names)}, which the tokenizer reads as special: drop or respell the example.",
        )
    if prompt.template:
        yield from _opening(tokenizer, example.system)
    if getattr(getattr(tokenizer, "backend_tokenizer", None), "fix_mistral_regex", False):
        remedy = "a run elsewhere without fix_mistral_regex has other tokens"
        yield Finding(
            "warning",
            "regex",
            f"The tokenizer's regular expression was wrong and is corrected: {remedy}.",
        )
    if prompt.cut_tokens:
        remedy = "use a larger max_prompt_tokens, or say so beside the score"
        place = "middle"
        if prompt.cut is not None:
            remedy = f"say so beside the score (too_long={prompt.cut.side})"
            place = "beginning" if prompt.cut.side == "left" else place
        cut = f"{prompt.cut_tokens} tokens were cut from the {place}: {remedy}."
        yield Finding("warning", "cut", cut)
        answers = [reference for reference in example.references if reference and reference in user]
        if answers and not any(reference in prompt.text for reference in answers):
            yield Finding(
                "warning",
                "answer_cut",
                f"The reference answer was in the part that was cut: {remedy}.",
            )


def _opening(tokenizer: Tokenizer, system: str) -> Iterator[Finding]:
    """Find a chat template that does not open the assistant's turn at the end of a prompt. What it
    writes after the user's text is compared with what it writes between a user's text and an answer
    that is given."""
    tail = shell(tokenizer, system).tail.rstrip()
    talk = [{"role": "system", "content": system}] * bool(system)
    talk += [{"role": "user", "content": PROBE}, {"role": "assistant", "content": ANSWER_PROBE}]
    try:
        after_user = in_template(tokenizer, talk).rpartition(PROBE)[2]
        usual = after_user.partition(ANSWER_PROBE)[0].rstrip()
    except Exception:
        # a template is a program and may raise anything; one that takes no answers shows nothing
        return
    if tokenizer.eos_token and tail.endswith(tokenizer.eos_token) and not usual.startswith(tail):
        yield Finding(
            "error",
            "eos",
            f"The chat template ends the prompt in {tokenizer.eos_token}: correct it, or set chat=none.",
        )
        return
    asked = in_template(tokenizer, talk[:-1]).rstrip()
    if usual != tail and usual.startswith(tail) and asked.endswith(PROBE + tail):
        yield Finding(
            "warning",
            "opening",
            f"The chat template does not open the assistant's turn, but puts {usual.removeprefix(tail).strip()!r} "
            "before answers: correct it, or set chat=none.",
        )
