"""Decides when an answer ends: at an EOS id or a stop string, found token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from harness.prompts.prompt import Tokenizer, decode, tokenize

Reason = Literal["eos", "stop_string", "length", "thought"]
# tokens decoded beyond the longest stop string, for pieces of a character and a dropped leading space
MARGIN = 4


class StopRule:
    """Decide after each new token whether the answer ends: called with all new tokens, it returns
    the reason or None. The first `min_new_tokens` tokens can neither stop the answer nor be cut.
    `skip`: characters at the beginning of the first token that belong to a thought before the answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Iterable[int],
        stop_strings: Sequence[str],
        min_new_tokens: int,
    ) -> None:
        if not all(stop_strings):
            raise ValueError("A stop string is empty, which would stop at once: leave it out.")
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.stop_strings = tuple(stop_strings)
        self.min_new_tokens = min_new_tokens
        # a token has at least one byte, so this many tokens contain the string and what came with its last token
        self._tail = max((len(stop.encode()) for stop in stop_strings), default=0) + MARGIN

    @property
    def ends(self) -> list[int]:
        """Return the tokens that end an answer by themselves: EOS, and the last token of each stop
        string."""
        return sorted(
            self.eos_ids | {tokenize(self.tokenizer, stop).ids[-1] for stop in self.stop_strings}
        )

    def __call__(self, tokens: list[int], skip: int = 0) -> Reason | None:
        if len(tokens) <= self.min_new_tokens:
            return None
        if tokens[-1] in self.eos_ids:
            return "eos"
        start = max(0, len(tokens) - self._tail)
        if self.stop_strings and self._find_stop(tokens, start, skip)[1] is not None:
            return "stop_string"
        return None

    def text(self, tokens: Sequence[int], skip: int = 0) -> str:
        """Return the answer without special tokens, cut before EOS or a stop string."""
        ends = (i for i in range(self.min_new_tokens, len(tokens)) if tokens[i] in self.eos_ids)
        text, stop = self._find_stop(tokens[: next(ends, len(tokens))], 0, skip)
        return text[:stop]

    def facts(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return what a record holds of this answer besides its text, by key; nothing here."""
        return {}

    def answers(self, tokens: Sequence[int]) -> bool:
        """Return False if `tokens` hold no answer that could be scored."""
        return True

    def _find_stop(self, tokens: Sequence[int], start: int, skip: int) -> tuple[str, int | None]:
        """Return the text from token `start` on, and the position in it where the first stop string
        begins."""
        skip = 0 if start else skip
        text = decode(self.tokenizer, tokens[start:])[skip:]
        least = self.min_new_tokens
        spared = len(decode(self.tokenizer, tokens[start:least])[skip:]) if least > start else 0
        positions = [text.find(stop, max(0, spared - len(stop) + 1)) for stop in self.stop_strings]
        return text, min((position for position in positions if position >= 0), default=None)
