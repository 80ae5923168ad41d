"""Holds RULER's prompt templates (arXiv:2404.06654), split where the context ends, and the table of
its 13 tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

NIAH_NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DOCUMENT = "Document {i}:\n{document}"


@dataclass(frozen=True, slots=True)
class FilledTemplate:
    """Hold one prompt: a template with its fields filled in. `context` ends where the template's
    {context} does, `question` is the rest of the user turn, and `prefix` begins the answer."""

    context: str
    question: str
    prefix: str
    references: tuple[str, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[FilledTemplate, ...] = ()  # further questions on this context, which they leave out
    apart: bool = False  # as `Example.apart`
    # of the answer, at most; None: as many as RULER's scripts keep free
    new_tokens: int | None = None

    @property
    def questions(self) -> tuple[FilledTemplate, ...]:
        """Return a prompt for each question on this context, the first one included."""
        first = replace(self, more=())
        return first, *(
            replace(one, context=self.context, data={**self.data, **one.data}) for one in self.more
        )

    @property
    def user(self) -> str:
        return self.context + self.question

    @property
    def text(self) -> str:
        return self.context + self.question + self.prefix

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> FilledTemplate:
        """Rebuild a prompt from `asdict` of it, as JSON has that."""
        more = tuple(map(cls.from_row, row["more"]))
        return cls(**{**row, "references": tuple(row["references"]), "more": more})


class Template(NamedTuple):
    """Hold one of RULER's prompt templates: the user turn before and after its context as `head` and
    `tail`, and what goes after the assistant header as `prefix`, which starts with a space."""

    head: str
    tail: str
    prefix: str

    def singular(self) -> Template:
        """Return the template in the singular, for one value of one key: "A special magic number",
        not "Some special magic numbers". It edits the task's own text, before a chat template
        surrounds it."""
        parts = list(self)
        for old, new in {"Some": "A", "are all": "is", "are": "is", "answers": "answer"}.items():
            parts = [part.replace(old, new) for part in parts]
        return Template(*parts)

    def fill(
        self,
        context: str,
        references: tuple[str, ...],
        *,
        before: str = "",
        data: Mapping[str, Any] | None = None,
        **fields: str,
    ) -> FilledTemplate:
        """Fill the template with a context and the values of its other `fields`. `references`: the
        right answers; `before`: a worked example that goes in front, inside the user turn."""
        head, tail, prefix = (part.format(**fields) for part in self)
        return FilledTemplate(before + head + context, tail, prefix, references, data or {})

    def opens(self, text: str) -> bool:
        """Return whether `text` starts with this template, in singular or plural. If not, a chat
        template may stand in front of it."""
        starts = (self.head[:18], self.singular().head[:15])
        return text.lstrip().startswith(starts)

    def question_start(self, text: str) -> int:
        """Return the index at which the question begins in `text`, a user turn made from this
        template, or -1 if there is none."""
        marker = "\nWhat " if self.tail.startswith("\nWhat ") else self.tail.partition("{")[0]
        return text.rfind(marker)

    def prefix_start(self, text: str) -> int:
        """Return the index at which the answer prefix begins at the end of `text`, in its old
        spelling too, or -1 if `text` does not end with it."""
        start = text.rfind(self.prefix[:10])
        forms = (_prefix_pattern(template.prefix) for template in (self, self.singular()))
        return (
            start if start >= 0 and any(re.fullmatch(form, text[start:]) for form in forms) else -1
        )


def _prefix_pattern(prefix: str) -> str:
    """Return a regular expression for an answer prefix, in which each `{field}` stands for any
    text. The old generator writes `assgined`, and trailing spaces may be lost."""
    pattern = re.sub(r"\\\{\w+\\\}", ".+?", re.escape(prefix.rstrip()))
    return pattern.replace("assigned", "ass(?:igned|gined)") + r"\s*"


TEMPLATES = {
    "niah": Template(
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will "
        "quiz you about the {type_needle_v} afterwards.\n",
        "\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided text?",
        " The special magic {type_needle_v} for {query} mentioned in the provided text are",
    ),
    "vt": Template(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        "\nQuestion: Find all variables that are assigned the value {query} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned "
        "the value {query}, they are: ",
    ),
    "cwe": Template(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n",
        "\nQuestion: What are the 10 most common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
    ),
    "fwe": Template(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. ",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
    ),
    "qa": Template(
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nThe following are given documents.\n\n",
        "\n\nAnswer the question based on the given documents. Only "
        "give me the answer and do not output any other words.\n\nQuestion: {query}",
        " Answer:",
    ),
}

# Tokens kept free for the answer, which count towards the length.
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}

FAMILIES = {
    "niah_single_1": "niah",
    "niah_single_2": "niah",
    "niah_single_3": "niah",
    "niah_multikey_1": "niah",
    "niah_multikey_2": "niah",
    "niah_multikey_3": "niah",
    "niah_multivalue": "niah",
    "niah_multiquery": "niah",
    "vt": "vt",
    "cwe": "cwe",
    "fwe": "fwe",
    "qa_1": "qa",
    "qa_2": "qa",
}
