"""Measures the perplexity of a text under a compressed cache: the model reads the first part of a
window and predicts the rest.

Only the text side is here. The harness feeds the continuation token by token, whatever the model
would have said (`Example.teacher_forced`), and hands `score` the mean negative log-likelihood of
its tokens in nats as the output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from evals.base import Example, Score, Task, TaskEnv, TaskError, TextTools
from evals.data import Content, Source, open_content, require, rows_of, text_of

_UNDECODED = "\ufffd"


@dataclass(frozen=True)
class WikiText2(Task):
    """Measure the perplexity of windows of WikiText-2's test split (arXiv:1609.07843), raw.

    The last `scored` of a window's `window` tokens are predicted. Windows lie end to end, so that
    statistics may count each as one; with a shorter `stride` they overlap, and those that begin
    within one window's length count as one. A rest that fills no window is left out. A score must
    lie between 0 and 1, and is exp(-nll); tables show perplexity."""

    version = "3"
    seeded = False
    metric = "perplexity"
    chance = None

    window: int = 2048
    scored: int = 512
    stride: int | None = None
    samples: int | None = None
    revision: str = "b08601e04326c79dfdd32d625aee71d232d685c3"

    def __post_init__(self) -> None:
        if not 1 <= self.scored < self.window:
            raise TaskError(
                f"scored={self.scored} must be at least 1 and below window={self.window}: part of a window"
            )
        if self.stride is not None and self.stride < self.scored:
            raise TaskError(
                f"stride={self.stride} scores tokens twice: set it to scored={self.scored} or more, or null"
            )
        self._refuse_below("leaves nothing: give {} or more, or null for the whole text", samples=1)

    def require(self, data_root: Path | None) -> None:
        require([self._source()], data_root)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        if env.window is not None and self.window > env.window:
            raise TaskError(
                f"window={self.window} exceeds the model's {env.window} tokens: choose a smaller window"
            )
        content = open_content(self._source(), env)
        self._opened.update(content.provenance)
        ids = env.text.encode(_text(content))
        if len(ids) < self.window:
            raise TaskError(
                f"the text has {len(ids)} tokens, fewer than window={self.window}: choose a smaller window"
            )
        starts = range(0, len(ids) - self.window + 1, self.stride or self.window)
        for start in starts[: self.samples]:
            first, middle, last = (
                _character_start(ids, at, env.text)
                for at in (start, start + self.window - self.scored, start + self.window)
            )
            context, window = (env.text.decode(ids[first:end]) for end in (middle, last))
            yield Example(
                id=f"wikitext2-{start}",
                group="wikitext2",
                context=context,
                # alone some tokenizers decode it without its first space
                references=(window[len(context) :],),
                max_new_tokens=self.scored,
                chat=False,
                teacher_forced=True,
                data={"start": start},
                unit=f"wikitext2-{start // self.window}",
            )

    def score(self, example: Example, output: str) -> Score:
        return likelihood(example, output)

    def averages(
        self, groups: Mapping[str, float], details: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return `mean` over windows, and the `perplexity` of all windows together, as papers state
        it."""
        return super().averages(groups) | perplexity(details)

    def _source(self) -> Source:
        return Source(
            name="wikitext2/test",
            local=(
                "ppl/wikitext2_test_raw.txt",
                "wikitext-2-raw/wiki.test.raw",
                "wikitext/wikitext-2-raw-v1/test-*.parquet",
            ),
            hub_repo="Salesforce/wikitext",
            hub_file="wikitext-2-raw-v1/test-00000-of-00001.parquet",
            hub_revision=self.revision,
        )


def likelihood(example: Example, output: str) -> Score:
    """Score the reference of an example, which was fed by force, by its likelihood per token."""
    try:
        nll = float(output)
    except ValueError:
        nll = math.nan
    if not 0 <= nll < math.inf:
        raise TaskError(
            f"{example.id}: output {output[:40]!r} is no mean negative log-likelihood: feed the reference by force"
        )
    return Score(math.exp(-nll), {"nll": nll})


def perplexity(details: Mapping[str, float] | None) -> dict[str, float]:
    """Return the perplexity of all references together, from the mean details of `likelihood`; nothing
    where no reference was fed by force."""
    return {"perplexity": math.exp(details["nll"])} if details and "nll" in details else {}


def _text(content: Content) -> str:
    """Return the text of WikiText-2 as its raw file has it. The hub has it as rows, one for each
    line, in which blank lines are empty."""
    if not content.origin.endswith(".parquet"):
        return text_of(content.data, f"wikitext2/test: {content.origin}")
    return "".join(
        row["text"] or " \n" for row in rows_of(content, "wikitext2/test", {"text": "text"}).rows
    )


def _character_start(ids: list[int], at: int, tools: TextTools) -> int:
    """Return the first index from `at` on at which `ids` can be cut without splitting a character
    between two tokens."""
    while 0 < at < len(ids) and _UNDECODED in tools.decode(ids[at - 1 : at]) + tools.decode(
        ids[at : at + 1]
    ):
        at += 1
    return at
