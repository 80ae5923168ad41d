"""Makes conversations of several turns from the text that is to stand in them: decides which facts
are stated in which turn, what is asked, and how many turns fit."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from evals.base import Example, TaskEnv, Turn
from evals.multiturn.length_distribution import MOST_TURNS
from evals.multiturn.texts import Script
from evals.needles import CITIES, Planted, magic_number

REPLIES = ("own", "given", "forced")
GAP = "\n\n"  # separates turns where no chat template does
CLOSING_TOKENS = 4  # tokens that a template puts after an answer, at most


Fact = tuple[
    Planted, int
]  # what one turn asks for, and the number, from 0, of the turn that stated it


class Said(NamedTuple):
    """Hold one turn of a conversation that is being built, with the tokens that it takes."""

    user: tuple[str, str]  # the text, and the question about it
    references: tuple[str, ...]
    room: int  # tokens kept free for the answer
    reply: str | None  # what stands in the conversation instead of the answer
    tokens: tuple[int, int]  # tokens of the user's part in the prompt, and of the reply
    data: dict[str, Any]


@dataclass
class Builder:
    """Build conversations of at most `limit` tokens; the fields from `turns` to `max_new_tokens`
    are the task's. `lengths` collects the tokens of question and reply of each turn, conversation
    by conversation."""

    env: TaskEnv
    limit: int
    turns: int | None
    replies: str
    about: str
    template: str
    max_new_tokens: int
    lengths: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = self.env.text.count("")
        # some templates give the first turn a system text
        later = min(first, self.env.text.count("", system="x"))
        self._frames = first, later
        self._gap = "" if first else GAP
        # a system text counted above has room for that
        closing = CLOSING_TOKENS if 0 < first == later else 0
        self._between = self._count(self._gap) + closing  # tokens before a later turn

    def conversation(self, script: Script, seed: str) -> Example | None:
        """Build a conversation from the text that `script` supplies, with facts drawn from `seed`.
        Turns that do not fit are left out; where the task wants a number of turns, or not even the
        first fits, passages of text are shortened instead. Return None if fewer than `turns` turns
        fit, or none at all."""
        count = min(len(script), self.turns or MOST_TURNS)
        if count < (self.turns or 1):
            return None
        said = self._said(script, count, seed)
        while (fitting := bisect_right(totals := self._totals(said), self.limit)) < count:
            if not self.turns and fitting:
                count = fitting
            elif (shorter := script.shortened(totals[-1] - self.limit)) is not None:
                script = shorter
            else:
                return None
            said = self._said(script, count, seed)
        self.lengths.append([turn.tokens for turn in said])
        return self._example(script.name, said)

    def _totals(self, said: Sequence[Said]) -> list[int]:
        """Return, for each turn, the tokens of the conversation up to its end."""
        needs = list[int]()
        for place, turn in enumerate(said):
            need = turn.tokens[0] + turn.room + self._between * (place > 0)
            if turn.reply is not None:
                need += turn.tokens[1] + self._between
            needs.append(need)
        return list(accumulate(needs))

    def _said(self, script: Script, count: int, seed: str) -> list[Said]:
        script.begin()
        if self.replies == "forced":
            return [self._forced(script, turn) for turn in range(count)]
        facts, rng = list[Fact](), random.Random(seed)
        # no city twice, and for the first turns the same whatever the `count`
        cities = rng.sample(CITIES, MOST_TURNS)
        for turn in range(count):
            where = rng.randrange(turn + 1)
            planted = magic_number(cities[turn], rng.randrange(1_000_000, 10_000_000))
            facts.append((planted, 0 if self.about == "first" else where))
        return [self._asked(script, turn, facts) for turn in range(count)]

    def _forced(self, script: Script, turn: int) -> Said:
        """Make turn number `turn` of the text's own words on both sides: no fact is stated or
        asked."""
        frame = self._frames[turn > 0]
        text, reply = script.user(turn, (), frame), self._given(script, turn)
        tokens = frame + self._count(text), self._count(reply)
        return Said((text, ""), (reply,), tokens[1], None, tokens, {"turn": turn + 1})

    def _asked(self, script: Script, turn: int, facts: Sequence[Fact]) -> Said:
        """Make turn number `turn`, which states the facts that belong there and asks for one stated
        here or before. `facts`: the one that each turn asks for."""
        here = [_sentence(planted) for planted, stated_in in facts if stated_in == turn]
        (asked, stated_in), frame = facts[turn], self._frames[turn > 0]
        before, _, after = self.template.partition("{text}")
        after = after.replace("{question}", asked.question)
        spent = frame + self._count(before + " ".join(here) + after)
        text = before + script.user(turn, here, spent)
        own = self.replies == "own"
        reply = (
            None if own or turn + 1 == len(facts) else self._given(script, turn, _sentence(asked))
        )
        room = max(self.max_new_tokens, script.reply_tokens(turn)) if own else self.max_new_tokens
        tokens = frame + self._count(text + after), room if reply is None else self._count(reply)
        data = {"turn": turn + 1, "told_in": stated_in + 1, "turns_ago": turn - stated_in}
        return Said((text, after), asked.answers, room, reply, tokens, data)

    def _given(self, script: Script, turn: int, answer: str = "") -> str:
        """Return the reply that the text itself has for a turn, put after the right answer if there
        is one."""
        return " ".join(filter(None, (answer, script.reply(turn, self._count(answer)))))

    def _count(self, text: str) -> int:
        return len(self.env.text.encode(text))

    def _example(self, name: str, said: Sequence[Said]) -> Example:
        first = said[0]
        further = [
            Turn(
                question=self._gap + "".join(turn.user),
                references=turn.references,
                reply=None if before.reply is None else self._gap + before.reply,
                max_new_tokens=turn.room,
                data=turn.data,
            )
            for before, turn in pairwise(said)
        ]
        return Example(
            id=f"conversation-{name}",
            group="multiturn",
            context=first.user[0],
            question=first.user[1],
            references=first.references,
            max_new_tokens=first.room,
            teacher_forced=self.replies == "forced",
            data={"turns": len(said), **first.data},
            further=tuple(further),
        )


def _sentence(planted: Planted) -> str:
    return f"{planted.text.strip()}."
