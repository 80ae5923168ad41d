"""How a chat template has a model think, and where a thought ends whose marks are plain text to the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from evals.base import Example
from harness import Engine, RunningBatch, attached
from harness.engine.sampling import Greedy
from harness.models.embedded import SmolLM2
from harness.prompts.prompt import Tokenizer, Tools, render, render_turn
from harness.prompts.stops import StopRule
from harness.prompts.thinking import HARMONY, KINDS, Marks, Thinking, ThinkingTokenizer, Thought, ThoughtfulAnswer
from methods.full import Full
from tests.tape import Tape
from tests.tiny import prompt, tiny

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\nEND{% endif %}"
BLOCK = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
SWITCHED = CHATML + OPENING.replace("END", BLOCK)
OPENED = CHATML + OPENING.replace("END", "<think>\n")
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
EITHER = CHATML + OPENING.replace("END", BLOCK.replace("{% endif %}", "{% else %}<think>\n{% endif %}"))
ONE_LINE = CHATML + OPENING.replace("END", BLOCK.replace("\n\n", ""))
MENTIONED = CHATML.replace("{{ m.content }}", "{{ m.content.split('[/THINK]')[-1] }}") + OPENING.replace("END", "")
SAID_TOO = ONE_LINE.replace("{{ m.content }}<|im_end|>\n", "{{ m.content }}{{ '' if enable_thinking else '/nothink' }}")
DEEP = OPENED.replace("<think>", "<thought>")  # EXAONE Deep
SEED = MENTIONED.replace("[/THINK]", "</seed:think>")  # Seed-OSS
GEMMA = SWITCHED.replace(BLOCK, "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}")  # Gemma 4
NEVER = CHATML + OPENING.replace("END", "<think>\n\n</think>\n\n")
HEAD = "<|im_start|>assistant\n"


def with_template(template: str) -> Any:
    tokenizer = SmolLM2().tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def prompt_end(tokenizer: Tokenizer) -> str:
    """What follows the user's text."""
    asked = Example(id="0", group="g", context="A fact.", question=" Which?", references=("a",), max_new_tokens=8)
    return render(asked, tokenizer, chat="template").text.rpartition("Which?")[2]


@pytest.mark.parametrize(
    ("template", "opened", "off", "on", "empty"),
    [
        (SWITCHED, False, f"{HEAD}<think>\n\n</think>\n\n", HEAD, "<think>\n\n</think>\n\n"),
        (OPENED, True, f"{HEAD}<think>\n\n</think>\n\n", f"{HEAD}<think>\n", "\n</think>\n\n"),
        (EITHER, True, f"{HEAD}<think>\n\n</think>\n\n", f"{HEAD}<think>\n", "\n</think>\n\n"),
        (OPENED.replace("<think>\n", "<think>"), True, f"{HEAD}<think></think>", f"{HEAD}<think>", "</think>"),
        (MENTIONED, False, HEAD, HEAD, "[THINK][/THINK]"),
        (SAID_TOO, False, f"/nothink{HEAD}<think></think>", HEAD, "<think></think>"),
        (CHANNELS, False, f"<|start|>assistant{HARMONY.end}", "<|start|>assistant", HARMONY.end),
        (DEEP, True, f"{HEAD}<thought>\n\n</thought>\n\n", f"{HEAD}<thought>\n", "\n</thought>\n\n"),
        (SEED, False, HEAD, HEAD, "<seed:think></seed:think>"),
        (GEMMA, False, f"{HEAD}<|channel>thought\n<channel|>", HEAD, "<|channel>thought\n<channel|>"),
    ],
    ids=["switched", "opened", "either", "in one line", "mentioned", "said too", "harmony", "deep", "seed", "gemma"],
)  # fmt: skip
def test_the_template_says_how_a_model_thinks(template: str, opened: bool, off: str, on: str, empty: str) -> None:
    tokenizer = with_template(template)
    thinking = Thinking.of(tokenizer)
    assert thinking
    assert (thinking.opened, thinking.empty) == (opened, empty)
    prints = {Tools(tokenizer, "template").fingerprint}
    for thinks, end in ((False, off), (True, on)):
        asked: Any = ThinkingTokenizer(tokenizer, on=thinks)
        assert prompt_end(asked).removeprefix("<|im_end|>\n").removeprefix("<|end|>") == end
        prints.add(Tools(asked, "template").fingerprint)
        later = Example(id="1", group="g", context="", question=" Why?", references=("a",), max_new_tokens=8)
        assert render_turn(later, asked, chat="template").text.endswith(end)
    assert len(prints) == 3


@pytest.mark.parametrize("template", [CHATML + OPENING.replace("END", ""), NEVER, CHATML, "{{ broken", None])
def test_other_templates_stay_as_they_are(template: str) -> None:
    """One that always closes the thought leaves no choice."""
    tokenizer = with_template(template)
    for thinks in (False, True):
        asked: Any = ThinkingTokenizer(tokenizer, on=thinks)
        assert asked.thinking is None
        assert Tools(asked, "template").fingerprint == Tools(tokenizer, "template").fingerprint
        if template and "broken" not in template:
            assert prompt_end(asked) == prompt_end(tokenizer)


def answered(
    text: str, stops: list[str], marks: Marks = KINDS[0], *, opened: bool = False, prefix: str = "", **limits: Any
) -> tuple[str | None, str, str]:
    """Why an answer that goes on as `text` ends, what of it is thought, and what is its answer."""
    tokenizer: Any = SmolLM2().tokenizer()
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    fed = tuple(tokenizer(prefix, add_special_tokens=False).input_ids)

    def rule() -> ThoughtfulAnswer:
        thought = Thought(marks, opened, limits.get("most"), fed)
        return ThoughtfulAnswer(thought, StopRule(tokenizer, [tokenizer.eos_token_id], stops, 0), limits.get("answer"))

    following, why, count = rule(), None, 0
    while why is None and count < len(ids):
        count += 1
        why = following(ids[:count])
    thought = rule().thought_tokens(ids[:count])
    return why, tokenizer.decode(ids[:thought]), rule().text(ids[:count])


SAID = "<think>The Question: says 3 and 4.\n\nSo 7.</think>\nThe answer is 7.<|im_end|>"
THOUGHT, ANSWER = SAID.partition("The answer")[0], "The answer is 7."


@pytest.mark.parametrize("stops", [["Question:"], ["\n\n"], ["\n"], []])
def test_stop_strings_and_lengths_count_behind_the_thought(stops: list[str]) -> None:
    assert answered(SAID, stops) == ("eos", THOUGHT, ANSWER)
    assert answered(SAID.removeprefix("<think>"), stops, opened=True) == ("eos", THOUGHT[7:], ANSWER)
    assert answered(SAID, [*stops, " is"]) == ("stop_string", THOUGHT, "The answer")
    assert answered(SAID, stops, answer=2) == ("length", THOUGHT, "The answer")
    given = THOUGHT.rstrip()
    assert answered(SAID, stops, prefix="\nThe answer") == ("eos", given, " is 7.")
    assert answered(f"{given}\n\nThe answer\nis", ["\n"], prefix="\n\nThe answer") == ("stop_string", given, "")


def test_a_thought_ends_where_its_mark_ends() -> None:
    whole = "<|channel|>analysis<|message|>We think.<|end|><|start|>assistant<|channel|>final<|message|>"
    assert answered(f"{whole}It is 7.<|im_end|>", [], HARMONY) == ("eos", whole, "It is 7.")
    assert answered(f"{HARMONY.end}It is 7.", ["7"], HARMONY) == ("stop_string", HARMONY.end, "It is ")
    assert answered("[THINK]a</think>b[/THINK]c<|im_end|>", [], KINDS[1]) == ("eos", "[THINK]a</think>b[/THINK]", "c")
    for marks in KINDS:
        thought = f"{marks.opening}We think.\n{marks.end}"
        assert answered(f"{thought}It is 7.<|im_end|>", ["think"], marks) == ("eos", thought, "It is 7.")
    assert answered("\n<think>a</think><|im_end|>", []) == ("eos", "\n<think>a</think>", "")
    assert answered("The <think> is no thought</think> here", [" here"])[::2] == (
        "stop_string", "The <think> is no thought</think>",
    )  # fmt: skip
    for cut, why in ((THOUGHT[:30], None), (f"{THOUGHT[:30]}<|im_end|>", "eos")):
        assert answered(cut, ["Question:"]) == (why, cut, "")
    why, thought, answer = answered(SAID, [], most=6)
    assert (why, answer) == ("thought", "")
    assert SAID.startswith(thought)


@pytest.mark.parametrize("stops", [[], [">"], [">\\"], ["n"], ["</"]])
def test_a_token_may_hold_the_end_mark_and_the_answer(stops: list[str]) -> None:
    assert answered("n</think>\\boxed{4}<|im_end|>", stops, opened=True) == ("eos", "n</think", "\\boxed{4}")
    assert answered("<think></think>\\4", [*stops, "\\4"]) == ("stop_string", "<think></think", "")
    assert answered("[THINK]n[/THINK].4", stops, KINDS[1], answer=1) == ("length", "[THINK]n[/THINK", ".")
    assert answered("n</think>\\", stops, opened=True)[2] == "\\"


class Pieces:
    """Tokens that are given pieces of bytes, some of which end within a character."""

    pieces = (b"n</think", b">\n\xe4", b"\xb8\xad4", b" stop")

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return b"".join(self.pieces[token] for token in ids).decode(errors="replace")


def test_a_token_may_hold_the_end_mark_and_half_a_character() -> None:
    rule = ThoughtfulAnswer(Thought(KINDS[0], True), StopRule(Pieces(), (), [" stop", "\n"], 0))  # type: ignore[arg-type]
    assert [rule([0, 1, 2, 3][:count]) for count in range(1, 5)] == [None, None, None, "stop_string"]
    assert (rule.text([0, 1, 2, 3]), rule.thought_tokens([0, 1, 2, 3])) == ("中4", 1)


def test_the_first_words_follow_as_in_the_prompt() -> None:
    """With thinking on as with it off: the same tokens stand after the end mark."""
    asked = Example(
        id="0", group="g", context="A fact.", question=" Which?", prefix="It is", references=("a",), max_new_tokens=8
    )
    for template in (SWITCHED, OPENED, CHANNELS, ONE_LINE):
        off, on = (ThinkingTokenizer(with_template(template), on=thinks) for thinks in (False, True))
        whole = render(asked, off, chat="template")  # type: ignore[arg-type]
        bare = render(replace(asked, prefix=""), on, chat="template")  # type: ignore[arg-type]
        assert on.thinking
        thought = Thought.after(bare, on, on.thinking, "It is")  # type: ignore[arg-type]
        assert (*bare.ids, *thought.empty) == whole.ids
        assert whole.ids[-len(thought.prefix) :] == thought.prefix
        assert thought.text == whole.text


class Letters:
    """A letter for each token of the tiny models."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


@pytest.mark.tokens
@pytest.mark.parametrize("captured", [False, True])
def test_words_are_fed_into_a_running_answer(captured: bool) -> None:
    """It goes on as after a prompt that holds them, beside an answer that has no thought."""
    letters, fed, asked, other = Letters(), (5, 9, 7), prompt(61), prompt(74, seed=1)
    with attached(tiny("llama"), Full()) as kv:
        plain, engine = Engine(kv), Engine(kv, graphs=Tape() if captured else None)
        [first] = plain.generate(asked, max_new_tokens=9).tokens
        count = next(place for place in range(4, 9) if first[place] not in first[:place]) + 1
        whole = torch.cat([asked, torch.tensor([[*first[:count], *fed]])], 1)
        thought = Thought(Marks("", letters.decode(first[count - 1 : count])), True, prefix=fed)
        rule = ThoughtfulAnswer(thought, StopRule(letters, (), [], 0), 6)  # type: ignore[arg-type]
        batch = RunningBatch(engine)
        greedy = Greedy().pick
        slots = [
            engine.join(batch, asked, max_new_tokens=40, stops=[rule], sampler=rule.picking(greedy, greedy)),
            engine.join(batch, other, max_new_tokens=25),
        ]
        while batch.sequences:
            batch.run()
        assert slots[0].out.tokens == [[*first[:count], *fed, *plain.generate(whole, max_new_tokens=6).tokens[0]]]
        assert slots[0].out.stops == ["length"]
        assert slots[1].out.tokens == plain.generate(other, max_new_tokens=25).tokens
