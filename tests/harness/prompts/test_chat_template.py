"""Chat templates as their authors write them: keywords reach them, and prompts have the tokenizer's own tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from harness.config.compose import built, composed
from harness.config.settings import Settings, SettingsError
from harness.jobs.job import Job
from harness.models.base import _end_of_turn
from harness.models.random import Random, byte_tokenizer
from harness.prompts.prompt import PromptError, Tools, check_keywords, render, render_turn
from harness.prompts.prompt_lint import lint
from harness.reports.rerun import command
from methods.full import Full
from tests.fast import MODEL_ARGS, TASK_ARGS, niah
from tests.harness.prompts.test_prompt import example

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
    prints = [Tools(tokenizer, "template", words).fingerprint for words in ({}, {"effort": "low"}, {"effort": "high"})]
    assert len({*prints}) == 3
    assert prints[0] == Tools(tokenizer, "template").fingerprint


def test_keywords_decide_the_end_of_a_turn_and_what_is_checked() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ end or '' }}{% endfor %}{{ open or '' }}"
    assert _end_of_turn(tokenizer) == set()
    assert _end_of_turn(tokenizer, {"end": "<|im_end|>"}) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    words = {"end": "<|im_end|>", "open": tokenizer.eos_token}
    prompt = render(example(), tokenizer, chat="template", keywords=words)
    assert [finding.code for finding in lint(example(), prompt, tokenizer, 8192, 8, keywords=words)] == ["eos"]


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
