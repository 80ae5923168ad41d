"""The examples of a task as token ids, each checked by harness/prompts/prompt_lint.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from evals.base import Example, Task, TaskEnv
from harness.config import plugins
from harness.config.settings import Settings, SettingsError
from harness.models.base import ModelSource
from harness.models.embedded import cache_root
from harness.prompts.prompt import Prompt, Tokenizer, Tools, check_keywords, render, render_turn
from harness.prompts.prompt_lint import Finding, lint
from harness.prompts.teacher import choices_ids, forced_ids
from harness.prompts.thinking import MOST, SPACE, ThinkingTokenizer, Thought
from harness.results.files import canonical


@dataclass(frozen=True, slots=True)
class PreparedExample:
    """An example as token ids, ready to run. A conversation's later turns are in `further`."""

    example: Example
    prompt: Prompt
    new_tokens: int
    findings: tuple[Finding, ...]
    forced: tuple[int, ...] = ()  # what is fed in place of what the model would have said
    choices: tuple[tuple[int, ...], ...] = ()  # what is fed one by one, each behind the same prompt
    further: tuple[PreparedExample, ...] = ()  # user turns behind the first
    by_steps: bool = False  # the prompt's last token is read behind the seal: what follows is the method's
    most: int | None = None  # tokens that a cache holds, where what is more leaves it
    thought: Thought | None = None  # that precedes the answer; its tokens are among `new_tokens`

    @property
    def turns(self) -> tuple[PreparedExample, ...]:
        return (self, *self.further)

    @property
    def given(self) -> bool:
        """Return True if every answer is fed by force (`forced` or `choices`), so that the model
        chooses no token itself."""
        return bool(self.forced or self.choices)

    @property
    def parts(self) -> tuple[PreparedExample, ...]:
        """Return what the engine runs for this example, one after the other on one cache: for a
        question with choices one example per choice, whose tokens are fed by force; otherwise the
        example itself."""
        return tuple(
            replace(
                self,
                example=replace(self.example, id=f"{self.example.id}/choice {number}" if number else self.example.id),
                new_tokens=len(choice),
                forced=choice,
                choices=(),
                by_steps=True,
            )
            for number, choice in enumerate(self.choices)
        ) or (self,)

    @property
    def answer_tokens(self) -> int:
        """The most tokens of the answer, without a thought before it."""
        return self.new_tokens - (self.thought.room if self.thought else 0)

    @property
    def tokens(self) -> int:
        """The most tokens that this turn's prompt and answer have together."""
        return len(self.prompt.ids) + self.new_tokens

    @property
    def room(self) -> int:
        """The most tokens that a cache must hold for this example: prompts and answers of all
        turns, or `most`, the window of `overflow.window`, where older tokens leave the cache."""
        needed = sum(turn.tokens for turn in self.turns)
        return needed if self.most is None else min(needed, self.most)

    def sealed(self, protocol: str) -> list[int]:
        """Return, for each turn, the most tokens that the cache holds when the prompt ends and the
        method digests it (the seal). Under protocol=context this is one number, the context's
        tokens."""
        if protocol == "context":
            return [self.prompt.split]
        before = accumulate((turn.tokens for turn in self.turns), initial=0)
        whole = [fed + len(turn.prompt.ids) for fed, turn in zip(before, self.turns, strict=False)]
        return whole if self.most is None else [min(tokens, self.most) for tokens in whole]

    @property
    def sha256(self) -> str:
        """The hash of all tokens that are fed: prompts of all turns, texts fed by force, and an
        answer's first words."""
        ids = ",".join(map(str, self.prompt.ids))
        given = [self.forced] if self.forced else self.choices
        if self.thought is not None and self.thought.prefix:
            given = [self.thought.prefix]
        forced = "".join(f":{','.join(map(str, text))}" for text in given)
        later = "".join(f"/{turn.sha256}" for turn in self.further)
        return hashlib.sha256(f"{self.prompt.split}:{ids}{forced}{later}".encode()).hexdigest()

    @property
    def answers_sha256(self) -> str:
        """The hash of all that outputs are scored by and averaged over: right answers, groups,
        data."""
        turns = [[turn.group, turn.references, turn.data] for turn in self.example.turns]
        return hashlib.sha256(canonical({"unit": self.example.unit, "turns": turns}).encode()).hexdigest()


def blank(tokens: int, new_tokens: int) -> PreparedExample:
    """Return an example with these lengths and no content, for forecasts of memory."""
    example = Example(id="blank", group="blank", context="", references=(), max_new_tokens=new_tokens)
    return PreparedExample(example, Prompt((0,) * tokens, tokens, 0, 0, template=False, text=""), new_tokens, ())


def by_context(
    items: Iterable[PreparedExample], stage: Callable[[int], int] = lambda tokens: 0
) -> Iterator[list[PreparedExample]]:
    """Yield lists of examples with the same context, in the order in which the contexts first
    occur. An example without a question after its context is a list by itself.

    `stage` maps a prompt length to a number; prompts with different numbers are kept apart, because
    the model rotates them with different frequencies (as with long and short RoPE factors).
    """
    groups: dict[tuple[object, ...], list[PreparedExample]] = {}
    for item in items:
        ids, split = item.prompt.ids, item.prompt.split
        key = ids[:split] if split < len(ids) else (item.example.id,)  # without a question there is one prompt
        groups.setdefault((*key, stage(len(ids))), []).append(item)
    yield from groups.values()


def room(items: Sequence[PreparedExample]) -> int:
    """Return the tokens that a cache must hold so that each of `items` can be asked on it in turn:
    those of the longest."""
    return max(item.room for item in items)


class LintError(ValueError):
    """A prompt is not what the user believes, so that its results would mislead (cut off, empty,
    ...)."""


def _task_env(settings: Settings, tokenizer: Tokenizer, window: int) -> TaskEnv:
    tools = Tools(tokenizer, settings.chat, settings.template_kwargs or {})  # type: ignore[arg-type]
    root = settings.data.folder()
    return TaskEnv(text=tools, seed=settings.seed, data_root=root, cache_dir=cache_root() / "tasks", window=window)


def prepare(task: Task, source: ModelSource, settings: Settings) -> list[PreparedExample]:
    """Return all examples of `task`, with the prompts that the model of `source` gets. Raise
    `LintError` for the first prompt with an error."""
    info, tokenizer = source.describe(), _asked(source.tokenizer(), settings)
    check_keywords(tokenizer, settings.template_kwargs or {})
    with plugins.naming("task", plugins.describe(task)):
        examples = task.examples(_task_env(settings, tokenizer, info.limit))
        return itemised(examples, tokenizer, settings, info.limit)


def _asked(tokenizer: Tokenizer, settings: Settings) -> Tokenizer:
    """Return the tokenizer with a chat template that has the model think or not, as
    `settings.thinking` says. Raise `SettingsError` if the model is to think and cannot."""
    asked: Any = ThinkingTokenizer(tokenizer, settings.template_kwargs or {}, on=settings.thinks)
    if settings.thinks and asked.thinking is None:
        raise SettingsError(
            f"thinking={settings.thinking} needs a model that thinks, and this one's chat template knows no thoughts: "
            "set thinking=off, or choose a reasoning model."
        )
    given: Tokenizer = asked
    return given


def itemised(
    examples: Iterable[Example], tokenizer: Tokenizer, settings: Settings, window: int
) -> list[PreparedExample]:
    """Return `examples` as prompts of a model whose context window has `window` tokens."""
    items = []
    for example in examples:
        items.append(_item(example, tokenizer, settings, window))
        _refuse(items[-1])
    if not items:
        raise SettingsError("The task has no examples: see its parameters with `python -m harness.list`.")
    _refuse_twins(items)
    return items


def _item(example: Example, tokenizer: Tokenizer, settings: Settings, window: int) -> PreparedExample:
    """Turn an example into token ids, turn by turn, and check each turn's prompt. What earlier
    turns take of the model's window is not there for later ones, unless `overflow.window` drops old
    tokens."""
    made: list[PreparedExample] = []
    most, keywords = settings.overflow.window, settings.template_kwargs or {}
    thinks = settings.thinks and example.chat
    if thinks:
        _refuse_thoughts(example, settings)
    for turn in example.turns:
        asked = replace(turn, prefix="") if thinks else turn  # the answer's first words follow its thought
        to_prompt = render_turn if made else render
        prompt = to_prompt(asked, tokenizer, chat=settings.chat, keywords=keywords)  # type: ignore[arg-type]
        limit = settings.generation.max_new_tokens
        forced = forced_ids(turn, prompt, tokenizer)[:limit]
        choices = choices_ids(turn, prompt, tokenizer)
        new_tokens = max(map(len, choices), default=0) or len(forced) or limit or turn.max_new_tokens
        thought = _thought(prompt, tokenizer, settings, turn.prefix, window - new_tokens) if thinks else None
        new_tokens += thought.room if thought else 0
        before = 0 if most else sum(one.room for one in made)
        findings = list(lint(turn, prompt, tokenizer, window, new_tokens, before, keywords))
        item = PreparedExample(turn, prompt, new_tokens, tuple(findings), forced, choices, by_steps=bool(choices))
        made.append(replace(item, thought=thought))
    found = dict.fromkeys(finding for one in made for finding in one.findings)
    return replace(made[0], example=example, findings=tuple(found), further=tuple(made[1:]), most=most)


def _refuse_thoughts(example: Example, settings: Settings) -> None:
    """Raise `SettingsError` for an example whose answer no thought can precede."""
    why = ""
    if example.teacher_forced or example.choices:
        why = "feeds its answers"
    elif example.further:
        why = "has several turns, and a chat template drops the thoughts of earlier ones, which a cache keeps"
    if why:
        raise SettingsError(f"thinking={settings.thinking} does not suit this task, which {why}: set thinking=off.")


def _thought(prompt: Prompt, tokenizer: Tokenizer, settings: Settings, prefix: str, room: int) -> Thought:
    """Return the thought before the answer to `prompt`. `prefix`: the first words of the answer;
    `room`: the tokens that the model's window leaves for prompt and thought."""
    asked: Any = tokenizer
    thought = Thought.after(prompt, tokenizer, asked.thinking, prefix)
    left = room - len(prompt.ids) - max(SPACE, len(thought.prefix))
    most = max(1, min(MOST, left)) if settings.thinking == "on" else int(settings.thinking)
    return replace(thought, most=most)


def _refuse(item: PreparedExample) -> None:
    """Raise `LintError` if the checks found an error in this prompt."""
    for finding in item.findings:
        if finding.level == "error":
            raise LintError(f"Example {item.example.id}: {finding.message}")


def _refuse_twins(items: Sequence[PreparedExample]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.example.id in seen:
            raise SettingsError(f"The task names two examples {item.example.id}: its lengths or depths repeat a value.")
        seen.add(item.example.id)
