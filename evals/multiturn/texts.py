"""Supplies the text of conversations, turn by turn: real text cut to drawn lengths, or the
conversations of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

from evals.base import TaskEnv, TaskError
from evals.data import Content, Source, check, rows_of
from evals.multiturn import length_distribution

LAYOUTS = "{id, conversations: [{from, value}]} as in ShareGPT, or {question_id, turns: [text]} as in MT-bench"
NAMES = dict.fromkeys(("id?", "question_id?"), "text or a whole number")
SKIPS = 3  # sentences passed over as too long for the rest of a passage


@dataclass
class Passages:
    """Supply the text of a conversation: consecutive passages of one long text, in whole sentences.
    After `begin`, its turns are read in order: first the user's, then the reply.

    `sentences`: the whole text, which is read again after its end. `start`: number of the first
    sentence. `parts`: tokens of the question and of the answer of each turn. `opening`: the least
    tokens of the first question."""

    name: str
    sentences: Sequence[str]
    env: TaskEnv
    start: int
    parts: Sequence[tuple[int, int]]
    opening: int

    def __post_init__(self) -> None:
        self.parts = length_distribution.opened(self.parts, self.opening)

    def __len__(self) -> int:
        return len(self.parts)

    def begin(self) -> None:
        self._rest = islice(cycle(self.sentences), self.start, None)

    def user(self, turn: int, facts: Sequence[str], spent: int) -> str:
        """Return the user's passage in turn number `turn`, with `facts` between its sentences at
        even distances. `spent`: tokens of all else in the turn."""
        sentences = self._passage(self.parts[turn][0] - spent, least=not facts)
        for number, fact in reversed(list(enumerate(facts, 1))):
            sentences.insert(number * len(sentences) // (len(facts) + 1), fact)
        return " ".join(sentences)

    def reply(self, turn: int, spent: int = 0) -> str:
        return " ".join(self._passage(self.parts[turn][1] - spent, least=not spent))

    def reply_tokens(self, turn: int) -> int:
        return self.parts[turn][1]

    def shortened(self, tokens: int) -> Passages | None:
        share = max(0.0, 1 - tokens / sum(map(sum, self.parts)))
        # each falls, so this ends
        parts = [(max(1, int(share * a)), max(1, int(share * b))) for a, b in self.parts]
        shorter = replace(self, parts=parts)
        return None if shorter.parts == self.parts else shorter

    def _passage(self, tokens: int, least: bool) -> list[str]:
        """Return the next sentences of the text, as many as come nearest to `tokens` together,
        passing over a few that are too long. `least`: take at least one."""
        taken, skipped = list[str](), 0
        while skipped < SKIPS:
            sentence = next(self._rest)
            count = len(self.env.text.encode(sentence))
            if (taken or not least) and count > 2 * tokens:
                skipped += 1
                continue
            taken.append(sentence)
            tokens -= count
        return taken


@dataclass
class Told:
    """Supply the text of a conversation that stands in a file, with the same methods as `Passages`.
    `turns`: what the user says in each turn, and the reply if there is one. `origin` names the file in
    errors."""

    name: str
    turns: Sequence[tuple[str, str | None]]
    env: TaskEnv
    origin: str

    def begin(self) -> None:
        """Do nothing, since the conversation is complete already; conversations made of passages
        start to read here."""

    def __len__(self) -> int:
        return len(self.turns)

    def user(self, turn: int, facts: Sequence[str], spent: int) -> str:
        return "\n\n".join((self.turns[turn][0], *facts))

    def reply(self, turn: int, spent: int = 0) -> str:
        said = self.turns[turn][1]
        if said is None:
            raise TaskError(
                f"Conversation {self.name} of {self.origin} has no replies: set task.replies=own."
            )
        return said

    def reply_tokens(self, turn: int) -> int:
        return len(self.env.text.encode(self.turns[turn][1] or ""))

    def shortened(self, tokens: int) -> None:
        """Return None: a file's conversation cannot be made shorter, since its words stay as they
        are."""


Script = Passages | Told  # what supplies the text of one conversation, turn by turn, after `begin`


def located(path: str, root: Path | None) -> tuple[Source, Path | None]:
    """Return a file of conversations as a source of data, and the folder to look for it in. `path`
    is absolute, or relative to the current folder or to the data root."""
    name, file = f"task.source={path}", Path(path).expanduser()
    if file.is_file():
        return Source(name=name, local=(file.name,)), file.resolve().parent
    if file.is_absolute():
        raise TaskError(f"{name} is not there: name a file of conversations")
    return Source(name=name, local=(path,)), root


def told(content: Content, env: TaskEnv) -> Iterator[Told]:
    """Yield the conversations of a file that have a question, in the file's order. Raise
    `TaskError` on a row of an unknown layout."""
    file = content.origin.removeprefix("local:")
    rows = rows_of(content, "task.source").rows
    for number, row in enumerate(rows, 1):
        if not {"conversations", "turns"} & row.keys():
            raise TaskError(
                f"task.source: row {number} of {file} lacks 'conversations' or 'turns': it should be {LAYOUTS}"
            )
        said = length_distribution.SHAREGPT if "conversations" in row else {"turns": ["text"]}
        check(row, said | NAMES, f"task.source: row {number} of {file}")
    for number, row in enumerate(rows, 1):
        turns: list[tuple[str, str | None]]
        if "conversations" in row:
            exchanges = length_distribution.exchanges(row["conversations"])
            turns = [said for said in exchanges if all(map(str.strip, said))]
        else:
            turns = [(question.strip(), None) for question in row["turns"]]
        if turns:
            known = [row[name] for name in ("id", "question_id") if row.get(name) is not None]
            yield Told(str([*known, number][0]), turns, env, file)
