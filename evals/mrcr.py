"""Asks OpenAI's MRCR (huggingface.co/datasets/openai/mrcr): in a long conversation the same piece of writing was asked
for 2, 4 or 8 times, and one of these answers is to be repeated word for word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from evals.base import SPARE_TOKENS, Example, Score, Task, TaskEnv, TaskError, by_part
from evals.data import Shape, Source, open_rows, require, value_of

HUB_REPO = "openai/mrcr"
NEEDLES = (2, 4, 8)
# of the dataset card's bins, in tokens
EDGES = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
_ROW: Shape = {
    "prompt": "text",
    "answer": "text",
    "random_string_to_prepend": "text that is not blank",
}
_MESSAGES: Shape = [{"role": "text", "content": "text"}, ...]
# of a token at most, in English prose: longer rows are left out without counting their tokens
_CHARACTERS = 8


@dataclass(frozen=True)
class Mrcr(Task):
    """Ask for one of several answers in a conversation, which stands in the chat template as it was held. The score
    is the dataset card's (`grade`). Rows that do not fit the model's window with an answer are left out, and groups
    are the card's bins; both by the tokens of the model's own tokenizer, where the card counts o200k's."""

    version = "1"
    seeded = False
    metric = "MRCR score"
    averaged = ("prepended_share",)

    needles: Sequence[int] = NEEDLES
    longest: int | None = None
    samples: int | None = None
    max_new_tokens: int = 2048
    revision: str = "f4c69fae7cf81f7ca26b9fee34b392a50f6b8a1d"

    def __post_init__(self) -> None:
        if not self.needles or set(self.needles) - set(NEEDLES):
            raise TaskError(
                f"task.needles={self.needles} must be a list of {', '.join(map(str, NEEDLES))}"
            )
        self._refuse_below(
            "leaves nothing: give {} or more", longest=1, samples=1, max_new_tokens=1
        )

    def require(self, data_root: Path | None) -> None:
        require(self._sources, data_root)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        groups = Counter[str]()
        for source in self._sources:
            opened, fitting = open_rows(source, env, _ROW), 0
            for index, row in enumerate(opened.rows):
                place = f"{source.name}: row {index + 1} of {opened.origin}"
                example = self._example(row, f"{source.name}-{index}", place, env)
                if example is None:
                    continue
                fitting += 1
                groups[example.group] += 1
                if self.samples is None or groups[example.group] <= self.samples:
                    yield example
            self._opened[source.name] = opened.provenance | {"fitting_rows": fitting}
        if not groups:
            raise TaskError(
                f"no row of MRCR fits {self._limit(env)} tokens with an answer of task.max_new_tokens="
                f"{self.max_new_tokens}: take a model with a longer window, or change task.longest or "
                "task.max_new_tokens"
            )

    def score(self, example: Example, output: str) -> Score:
        prepended = example.data["prepended"]
        share = float(output.startswith(prepended))
        return Score(grade(output, example.references[0], prepended), {"prepended_share": share})

    def averages_of(self, groups: Mapping[str, float]) -> dict[str, float]:
        """Return the mean over the bins of each number of needles."""
        return {name: fmean(values) for name, values in by_part(groups, 0).items()}

    @property
    def _sources(self) -> list[Source]:
        files = [f"{n}needle/{n}needle_{part}.parquet" for n in self.needles for part in (0, 1)]
        return [
            Source(
                name=Path(file).stem,
                local=(f"mrcr/{file}", f"openai/mrcr/{file}"),
                hub_repo=HUB_REPO,
                hub_file=file,
                hub_revision=self.revision,
            )
            for file in files
        ]

    def _limit(self, env: TaskEnv) -> int:
        """Return how many tokens prompt and answer may have together."""
        return min(filter(None, (self.longest, env.window)), default=EDGES[-1])

    def _example(
        self, row: Mapping[str, Any], example_id: str, place: str, env: TaskEnv
    ) -> Example | None:
        """Return the example of a row, or None if it is too long. `place` names the row in errors."""
        limit = self._limit(env)
        if len(row["prompt"]) > _CHARACTERS * limit:
            return None
        messages = value_of(row["prompt"], _MESSAGES, place)
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        if [message["role"] for message in messages] != [
            "user",
            *("assistant", "user") * (len(messages) // 2),
        ]:
            raise TaskError(
                f"{place} is no conversation that ends with the user's turn: fetch the file again"
            )
        *earlier, asked = (message["content"] for message in messages)
        tokens = env.text.count(asked, system=system, earlier=earlier)
        if tokens + self.max_new_tokens + SPARE_TOKENS > limit:
            return None
        needles, _, _ = example_id.partition("_")
        return Example(
            id=example_id,
            group=f"{needles}/{bin_of(tokens + len(env.text.encode(row['answer'])))}",
            context="",
            question=asked,
            system=system,
            earlier=tuple(earlier),
            references=(row["answer"],),
            max_new_tokens=self.max_new_tokens,
            data={"prepended": row["random_string_to_prepend"]},
        )


def grade(output: str, answer: str, prepended: str) -> float:
    """Return the likeness of an output to the answer (difflib's ratio, from 0 to 1), both without the string that
    was to be put in front, or 0 if the output does not begin with it.

    >>> grade("xY3 a poem", "xY3 a poem", "xY3"), grade(" xY3 a poem", "xY3 a poem", "xY3")
    (1.0, 0.0)
    """
    if not output.startswith(prepended):
        return 0.0
    return SequenceMatcher(
        None, output.removeprefix(prepended), answer.removeprefix(prepended)
    ).ratio()


def bin_of(tokens: int) -> str:
    """Return the bin of a prompt and answer with so many tokens together; what lies outside all bins is in the
    nearest.

    >>> bin_of(8192), bin_of(8193), bin_of(4000)
    ('4096-8192', '8192-16384', '4096-8192')
    """
    least, most = next((pair for pair in pairwise(EDGES) if tokens <= pair[1]), EDGES[-2:])
    return f"{least}-{most}"
