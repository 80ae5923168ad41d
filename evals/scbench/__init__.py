"""Asks SCBench (arXiv:2412.10319): several questions on one long context, with the official prompts
and scores. They are turns of a conversation, or requests that share the context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from evals.base import Example, Score, Task, TaskEnv, TaskError, Turn, each_once, prompt_limit
from evals.data import Row, Source, open_rows, require
from evals.scbench import scoring
from evals.scbench.tables import (
    ABSENT,
    HUB_REPO,
    MAX_NEW_TOKENS,
    OPENING,
    PRESETS,
    PROMPTS,
    SKILLS,
    fields,
    shape,
)

MODES = ("multi_turn", "multi_request")
LISTS = ("scbench_vt", "scbench_choice_eng")  # whose answers are several texts
PLAIN_GAP = "\n\n"  # follows a given answer where there is no chat template


@dataclass(frozen=True)
class SCBench(Task):
    """Ask the questions that each row has on its one context, as the turns of a conversation or as
    requests of their own (`mode`). With `golden` the right answers stand in the conversation, as
    officially, instead of the model's own."""

    version = "2"
    seeded = False
    metric = "SCBench score"
    # the scores of whole answers, where the official ones compare single characters
    averaged = ("many_shot_whole", "qa_chn_whole")

    tasks: str | Sequence[str] = "english"
    mode: str = "multi_turn"
    golden: bool = True
    samples: int | None = None
    turns: int = 5
    max_prompt_tokens: int | None = None
    revision: str = "f43226eed3a026f927a67c60739c228390d959c2"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise TaskError(
                f"task.mode={self.mode!r} is unknown: choose one of {', '.join(MODES)}."
            )
        if self.mode == "multi_request" and not self.golden:
            raise TaskError(
                "task.golden=false is of conversations: requests do not see one another's answers."
            )
        self._refuse_below("must be at least {}.", samples=1, turns=1, max_prompt_tokens=2)
        self.names()

    def names(self) -> tuple[str, ...]:
        """Return the names of the tasks that `tasks` selects: a preset, one name, or several."""
        wanted = each_once(self.tasks)
        wanted = PRESETS.get(wanted[0], wanted) if isinstance(self.tasks, str) else wanted
        if name := next((name for name in wanted if name in ABSENT), None):
            raise TaskError(
                f"task.tasks: {name} {ABSENT[name]}, which is not offered: choose others."
            )
        if not wanted or not set(wanted) <= set(MAX_NEW_TOKENS):
            raise TaskError(
                f"task.tasks={self.tasks!r}: choose {', '.join(PRESETS)}, or of {', '.join(MAX_NEW_TOKENS)}."
            )
        return wanted

    def require(self, data_root: Path | None) -> None:
        require(map(self._source, self.names()), data_root)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for name in self.names():
            opened = open_rows(self._source(name), env, shape(name))
            self._opened[name] = opened.provenance
            for index, row in enumerate(opened.rows[: self.samples]):
                try:
                    turns = [
                        _Asked.of(name, row, turn) for turn in row["multi_turns"][: self.turns]
                    ]
                except ValueError as error:
                    raise TaskError(
                        f"row {index + 1} of {opened.origin} is not SCBench's ({error}): fetch the file again"
                    ) from error
                made = self._conversation if self.mode == "multi_turn" else self._requests
                yield from made(f"{name}/{index}", name, turns, env)

    def score(self, example: Example, output: str) -> Score:
        name, answers = example.data["task"], example.references
        value = scoring.SCORERS[name](output, _answer(name, answers))
        if name == "scbench_many_shot":
            return Score(value, {"many_shot_whole": scoring.contains_any(output, answers)})
        if name == "scbench_qa_chn":
            return Score(value, {"qa_chn_whole": scoring.characters_f1(output, answers)})
        return Score(value)

    def averages_of(self, groups: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of each of the paper's skills whose tasks all ran."""
        return {
            skill: fmean(groups[task] for task in tasks)
            for skill, tasks in SKILLS.items()
            if groups.keys() >= set(tasks)
        }

    def _source(self, name: str) -> Source:
        return Source(
            name=f"scbench/{name}",
            local=(
                f"scbench/{name}.jsonl",
                f"SCBench/data/{name}.jsonl",
                f"scbench/{name}/test-*.parquet",
                f"SCBench/{name}/test-*.parquet",
            ),
            hub_repo=HUB_REPO,
            hub_file=f"data/{name}.jsonl",
            hub_revision=self.revision,
        )

    def _conversation(
        self, row_id: str, name: str, turns: Sequence[_Asked], env: TaskEnv
    ) -> Iterator[Example]:
        """Yield one row as a conversation. With a chat template, later turns of math_find begin
        with the question of the row's last turn, as in the official code."""
        plain = env.text.count("") == 0
        gap = PLAIN_GAP if plain and self.golden else ""
        template = PROMPTS[name].later_plain if plain else PROMPTS[name].later
        last = {"asked": turns[-1].fields["asked"]} if name == "scbench_mf" and not plain else {}
        further = tuple(
            Turn(
                question=gap + template.format_map({**turn.fields, **last}),
                references=turn.references,
                prefix="" if plain else OPENING.get(name, ""),
                reply=before.reply if self.golden else None,
            )
            for before, turn in pairwise(turns)
        )
        later = sum(
            env.text.count(turn.question, turn.prefix) + len(env.text.encode(turn.reply or ""))
            for turn in further
        )
        known = turns[0].fields
        head, tail = PROMPTS[name].first.split("{context}")
        yield Example(
            **_common(row_id, name, turns[0]),
            context=head.format_map(known) + known["context"],
            question=tail.format_map(known),
            further=further,
            max_prompt_tokens=self._limit(env, len(turns) * MAX_NEW_TOKENS[name] + later),
        )

    def _requests(
        self, row_id: str, name: str, turns: Sequence[_Asked], env: TaskEnv
    ) -> Iterator[Example]:
        """Yield one row as an example for each of its questions. Where they are too long, only the
        context is cut, so that all share the same."""
        questions = [PROMPTS[name].later.format_map(turn.fields) for turn in turns]
        longest = max(len(env.text.encode(question)) for question in questions)
        context = PROMPTS[name].context.format_map(turns[0].fields)
        context, cut = _cut(context, self._limit(env, MAX_NEW_TOKENS[name] + longest), env)
        for number, (turn, question) in enumerate(zip(turns, questions, strict=True)):
            common = _common(f"{row_id}/{number}", name, turn, cut_tokens=cut)
            yield Example(**common, context=context, question=question, unit=row_id)

    def _limit(self, env: TaskEnv, rest: int) -> int | None:
        """Return how many tokens the first prompt may have before the chat template is put around
        it, None for any number. `rest`: tokens of all that follows it."""
        says = f"The model's window of {env.window} tokens has no room for a context: lower task.turns."
        return prompt_limit(env, self.max_prompt_tokens, rest + env.text.count(""), says)


class _Asked(NamedTuple):
    """Hold one question of a row of SCBench's data: the values that fill the prompt templates, and
    the right answers."""

    fields: Mapping[str, str]
    references: tuple[str, ...]
    reply: str  # the answer as it stands in the conversation

    @classmethod
    def of(cls, name: str, row: Row, turn: Mapping[str, Any]) -> _Asked:
        known, answer = fields(name, row, turn), turn["answer"]
        letters = (known["letter"],) if name == "scbench_choice_eng" else ()
        several = answer if isinstance(answer, list) else [answer]
        if not any(str(one).strip() for one in several):
            raise ValueError("a question has no right answer")
        return cls(known, (*map(str, several), *letters), str(answer))


def _answer(name: str, references: Sequence[str]) -> Any:
    """Return the right answer in the type that the task's scorer takes: several texts where the
    file has a list, a number for math_find, else one text. `name`: the task."""
    if name in LISTS or len(references) > 1:
        return references
    if name == "scbench_mf":
        return float(references[0]) if "." in references[0] else int(references[0])
    return references[0]


def _common(example_id: str, name: str, turn: _Asked, **data: Any) -> dict[str, Any]:
    return {
        "id": example_id,
        "group": name,
        "references": turn.references,
        "max_new_tokens": MAX_NEW_TOKENS[name],
        "data": {"task": name, **data},
    }


def _cut(text: str, limit: int | None, env: TaskEnv) -> tuple[str, int]:
    """Cut the middle out of a text that has more than `limit` tokens: the first and the last
    `limit` / 2 stay, as one text. Return the text and how many tokens are gone."""
    ids = env.text.encode(text)
    if limit is None or len(ids) <= limit:
        return text, 0
    half = max(1, limit // 2)
    return env.text.decode(ids[:half] + ids[-half:]), len(ids) - 2 * half
