"""Supplies the text of conversations, turn by turn: real text cut to drawn lengths, or the
conversations of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from evals.base import TaskEnv, TaskError
from evals.data import Content, Row, Source, check, open_content, rows_of
from evals.haystack import Haystack, split_sentences
from evals.multiturn import length_distribution

LAYOUTS = "{id, conversations: [{from, value}]} as in ShareGPT, or {question_id, turns: [text]} as in MT-bench"
NAMES = dict.fromkeys(("id?", "question_id?"), "text or a whole number")
SKIPS = 3  # sentences passed over as too long for the rest of a passage


class Reader:
    """Splits a long text into sentences, and supplies them again and again from any place on."""

    def __init__(self, text: Haystack, env: TaskEnv) -> None:
        self._sentences, self._env = [one for one in split_sentences(text.text) if one.strip()], env

    def __len__(self) -> int:
        return len(self._sentences)

    def sentences(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield sentences, each with its number of tokens, from sentence number `start` on; after
        the last one it goes on with the first."""
        while True:
            sentence = self._sentences[start % len(self)]
            yield sentence, len(self._env.text.encode(sentence))
            start += 1


class Passages:
    """Supply the text of a conversation: consecutive passages of one long text, in whole sentences.
    After `begin`, its turns are read in order: first the user's, then the reply.

    `start`: number of the first sentence. `parts`: tokens of the question and of the answer of each
    turn. `opening`: the least tokens of the first question."""

    def __init__(
        self, name: str, reader: Reader, start: int, parts: Sequence[tuple[int, int]], opening: int
    ) -> None:
        self.name, self._reader, self._start = name, reader, start
        self._parts, self._opening = length_distribution.opened(parts, opening), opening

    def __len__(self) -> int:
        return len(self._parts)

    def begin(self) -> None:
        self._rest = self._reader.sentences(self._start)

    def user(self, turn: int, facts: Sequence[str], spent: int) -> str:
        """Return the user's passage in turn number `turn`, with `facts` between its sentences at
        even distances. `spent`: tokens of all else in the turn."""
        sentences = self._passage(self._parts[turn][0] - spent, least=not facts)
        for number, fact in reversed(list(enumerate(facts, 1))):
            sentences.insert(number * len(sentences) // (len(facts) + 1), fact)
        return " ".join(sentences)

    def reply(self, turn: int, spent: int = 0) -> str:
        return " ".join(self._passage(self._parts[turn][1] - spent, least=not spent))

    def reply_tokens(self, turn: int) -> int:
        return self._parts[turn][1]

    def shortened(self, tokens: int) -> Passages | None:
        share = max(0.0, 1 - tokens / sum(map(sum, self._parts)))
        # each falls, so this ends
        parts = [(max(1, int(share * a)), max(1, int(share * b))) for a, b in self._parts]
        shorter = Passages(self.name, self._reader, self._start, parts, self._opening)
        return None if shorter._parts == self._parts else shorter

    def _passage(self, tokens: int, least: bool) -> list[str]:
        """Return the next sentences of the text, as many as come nearest to `tokens` together,
        passing over a few that are too long. `least`: take at least one."""
        taken, skipped = list[str](), 0
        while skipped < SKIPS:
            sentence, count = next(self._rest)
            if (taken or not least) and count > 2 * tokens:
                skipped += 1
                continue
            taken.append(sentence)
            tokens -= count
        return taken


class Told:
    """Supply the text of a conversation that stands in a file, with the same methods as
    `Passages`."""

    def __init__(
        self, name: str, turns: Sequence[tuple[str, str | None]], env: TaskEnv, origin: str
    ) -> None:
        """Keep the `turns` of a conversation, each what the user says and the reply if there is
        one; `origin` names the file in errors."""
        self.name, self._turns, self._env, self._origin = name, turns, env, origin

    def begin(self) -> None:
        """Do nothing, since the conversation is complete already; conversations made of passages
        start to read here."""

    def __len__(self) -> int:
        return len(self._turns)

    def user(self, turn: int, facts: Sequence[str], spent: int) -> str:
        return "\n\n".join((self._turns[turn][0], *facts))

    def reply(self, turn: int, spent: int = 0) -> str:
        said = self._turns[turn][1]
        if said is None:
            raise TaskError(
                f"Conversation {self.name} of {self._origin} has no replies: set task.replies=own."
            )
        return said

    def reply_tokens(self, turn: int) -> int:
        return len(self._env.text.encode(self._turns[turn][1] or ""))

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


def opened(path: str, env: TaskEnv) -> Content:
    """Open a file of conversations, which lies at `path` itself or below the data root."""
    source, root = located(path, env.data_root)
    return open_content(source, replace(env, data_root=root))


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
        if turns := _turns(row):
            known = [row[name] for name in ("id", "question_id") if row.get(name) is not None]
            yield Told(str([*known, number][0]), turns, env, file)


def _turns(row: Row) -> list[tuple[str, str | None]]:
    """Return what the user says in each turn of a row's conversation, with the reply where there is
    one."""
    if "conversations" in row:
        return [
            said
            for said in length_distribution.exchanges(row["conversations"])
            if all(map(str.strip, said))
        ]
    return [(question.strip(), None) for question in row["turns"]]
