"""Chat templates as their authors write them: keywords reach them, and prompts have the tokenizer's own tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from harness.config.compose import built, composed
from harness.config.settings import Settings, SettingsError
from harness.jobs.job import Job
from harness.models.base import _end_of_turn
from harness.models.random import Random, byte_tokenizer
from harness.prompts.prompt import PromptError, Tools, check_keywords, render
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
