"""Searches a size with few calls of the tokenizer, and with the result that counting every prompt
would have."""

from __future__ import annotations

from collections.abc import Callable

from evals.ruler.templates import FilledTemplate

MARGIN = 0.005  # share of the limit that random keys may add to or take from a haystack's tokens
MARGIN_TOKENS = 200  # the least margin
DOUBT = 0.15  # share of the tokens between a prompt and the nearest one counted


class FitCheck:
    """Say whether prompts hold at most `limit` tokens, and count only those near it.

    Prompts far off are judged by the nearest one that was counted. Every prompt draws from the
    random stream, so a wrong guess would change all that follows. `guesses_hold` therefore checks
    afterwards that each guess rests on a counted prompt: one that is shorter and yet too long, or
    longer and yet short enough. Prompts of a search differ in the size of their haystack alone, so
    that settles it. Where it fails, the caller restores the stream and searches with `guess=False`.
    """

    def __init__(self, count: Callable[[FilledTemplate], int], limit: int, *, guess: bool = True) -> None:
        self._count = count
        self._limit = limit
        self._guess = guess
        self._margin = max(MARGIN, MARGIN_TOKENS / max(limit, 1))
        self._counted: list[tuple[int, int]] = []  # characters, tokens
        self._guessed: list[tuple[int, bool]] = []  # characters, whether it was held to fit

    def tokens(self, prompt: FilledTemplate) -> int:
        """Count a prompt's tokens, and remember them for later guesses."""
        tokens = self._count(prompt)
        self._counted.append((len(prompt.text), tokens))
        return tokens

    def fits(self, prompt: FilledTemplate) -> bool:
        """Return whether a prompt fits, by a guess if that is safe, or else by counting."""
        guess = self._verdict(len(prompt.text)) if self._guess and self._counted else None
        if guess is None:
            return self.tokens(prompt) <= self._limit
        self._guessed.append((len(prompt.text), guess))
        return guess

    def guesses_hold(self) -> bool:
        """Return whether counted prompts confirm every guess."""
        shortest_over = min((size for size, tokens in self._counted if tokens > self._limit), default=float("inf"))
        longest_fit = max((size for size, tokens in self._counted if tokens <= self._limit), default=0)
        spread = 1 + self._margin
        return all(
            size * spread <= longest_fit if fits else size >= shortest_over * spread for size, fits in self._guessed
        )

    def _verdict(self, size: int) -> bool | None:
        """Return what the nearest counted prompt implies, or None if that is in doubt."""
        near_size, near_tokens = min(self._counted, key=lambda known: abs(known[0] - size))
        expected = near_tokens * size / near_size
        doubt = self._margin * self._limit + DOUBT * abs(expected - near_tokens)
        return None if abs(expected - self._limit) <= doubt else expected < self._limit


def bisect_size(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """Return the last size that fitted in the official binary search, or None if none did."""
    best = None
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best
