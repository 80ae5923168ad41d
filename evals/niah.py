"""Hides a needle in a haystack: one fact at a given depth of a long text, over lengths x depths
(Kamradt's protocol, 2023).

The haystack is cut to length in tokens, and the needle goes in after the last sentence end before
the depth. `niah_pqcache` and `niah_shadowkv` in conf/task are the same task in the words of those
papers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from evals import haystack as texts
from evals.base import Example, Score, Task, TaskEnv, TaskError
from evals.needles import NEEDLES

PUNCTUATION = (".", "!", "?")


@dataclass(frozen=True)
class Niah(Task):
    """Hide one needle at each length and depth. `depths` is their number, evenly from 0 to 100 %,
    or a list of percents; `rounds` says how often, each time with a new needle and text."""

    version = "1"
    metric = "needle found"
    averaged = ("leading_digits_share",)

    lengths: Sequence[int] = (512, 1024, 2048)
    depths: int | Sequence[float] = 5
    needle: str = "magic_city"
    rounds: int = 1
    haystack: str = "auto"
    system: str = ""
    template: str = (
        "{context}\n\n{question} Don't give information outside the document or repeat your findings. "
        "Keep your response short and direct."
    )
    prefix: str = ""
    buffer: int | None = None
    max_new_tokens: int = 24

    def __post_init__(self) -> None:
        if self.needle not in NEEDLES:
            raise TaskError(
                f"task.needle={self.needle!r} is unknown: choose one of {', '.join(NEEDLES)}."
            )
        if not self.lengths or min(self.lengths) < 1:
            raise TaskError(
                f"task.lengths={self.lengths} must name at least one length, in tokens."
            )
        for name in ("rounds", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise TaskError(f"task.{name}={getattr(self, name)} must be at least 1.")
        if any(part not in self.template for part in ("{context}", "{question}")):
            raise TaskError("task.template must hold {context} and {question}.")
        if not self.percents or not all(0 <= depth <= 100 for depth in self.percents):
            raise TaskError(
                f"task.depths={self.depths} must be a number of depths or percents from 0 to 100."
            )
        if not isinstance(self.depths, int) and (
            0 < max(self.depths) <= 1 or any(0 < depth < 1 for depth in self.depths)
        ):
            raise TaskError(
                f"task.depths={self.depths} may be shares or percents: give percents of 1 or more, such as 50 for the "
                "middle and 100 for the end, or 0 for the beginning."
            )

    @property
    def percents(self) -> list[float]:
        """Return the depths of the haystack at which a needle is hidden, in percent."""
        if isinstance(self.depths, int):
            return [round(100 * i / max(1, self.depths - 1), 1) for i in range(self.depths)]
        return list(self.depths)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        text = texts.load(self.haystack, env)
        tokens = filler(text, 2 * max(self.lengths), env)
        ends = _sentence_ends(tokens, env)
        for length, depth, turn in product(self.lengths, self.percents, range(self.rounds)):
            rng = random.Random(f"{env.seed}/{length}/{depth}/{turn}")
            planted = NEEDLES[self.needle].plant(rng)
            start = 0 if turn == 0 else ends[rng.randrange(max(1, len(ends) // 2))]
            before, _, after = self.template.partition("{context}")
            question = after.replace("{question}", planted.question)
            prefix = self.prefix.replace("{topic}", planted.topic)
            frame = self.buffer
            if frame is None:
                frame = env.text.count(before + question, prefix, system=self.system)
            needle = env.text.encode(planted.text)
            hide = partial(self._hide, env, tokens[start:], needle, length, depth)
            context, at = hide(frame)
            if self.buffer is None:  # pieces tokenised apart may join into a token more or less
                user = before + context + question
                over = env.text.count(user, prefix, system=self.system) - length
                if over > 0:
                    context, at = hide(frame + over)
            yield Example(
                id=f"{self.needle}/{length}/{depth:g}/{turn}",
                group=f"{self.needle}/{length}",
                context=before + context,
                question=question,
                prefix=prefix,
                system=self.system,
                references=planted.answers,
                max_new_tokens=self.max_new_tokens,
                data={
                    "length": length,
                    "depth": depth,
                    "needle": planted.text.strip(),
                    "needle_token": at,
                    "haystack": text.name,
                    "haystack_sha256": text.sha256,
                },
            )

    def _hide(
        self,
        env: TaskEnv,
        tokens: Sequence[int],
        needle: list[int],
        length: int,
        depth: float,
        frame: int,
    ) -> tuple[str, int]:
        """Return the haystack, cut from `tokens`, with its needle at `depth` percent, and the number
        of the token before which the needle went in. `length`: tokens of the whole prompt, of which
        `frame` are kept free for everything else. Raises `TaskError` where there is too little
        room."""
        room = length - frame - len(needle)
        if room < 16:
            raise TaskError(
                f"task.lengths={length} leaves {max(0, room)} tokens for the haystack beside the template and the "
                f"needle: use at least {length - room + 16}."
            )
        hay = list(tokens[:room])
        at = len(hay) if depth >= 100 else boundary(hay, int(len(hay) * depth / 100), env)
        return env.text.decode(hay[:at] + needle + hay[at:]), at

    def score(self, example: Example, output: str) -> Score:
        return NEEDLES[self.needle].score(example.references, output)

    def provenance(self) -> dict[str, Any]:
        return {"haystack": self.haystack, "splitter": "token ending in . ! or ?"}


def filler(text: texts.Haystack, least: int, env: TaskEnv) -> list[int]:
    """Return the token ids with which a text begins, `least` or more. A text that is too short is
    repeated."""
    tokens = env.text.encode(text.text[: 8 * least + 4096])
    while len(tokens) < least:
        tokens = tokens + tokens
    return tokens


def _is_end(token: int, env: TaskEnv) -> bool:
    return env.text.decode([token]).rstrip().endswith(PUNCTUATION)


def _sentence_ends(tokens: Sequence[int], env: TaskEnv) -> list[int]:
    """Return the positions after the tokens that end a sentence, or [0] if there are none."""
    kinds = {token: _is_end(token, env) for token in set(tokens)}
    return [i + 1 for i, token in enumerate(tokens) if kinds[token]] or [0]


def boundary(hay: Sequence[int], index: int, env: TaskEnv) -> int:
    """Return the last sentence end in the token ids `hay` at or before `index`, or 0 if there is
    none, as in the original."""
    while index > 0 and not _is_end(hay[index - 1], env):
        index -= 1
    return index
