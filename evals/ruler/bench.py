"""Measures what making RULER prompts costs:
`python -m evals.ruler.bench --length 131072 --tokenizer tokenizer.json`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from evals.base import TaskEnv, TaskError
from evals.ruler import Ruler
from evals.ruler.templates import FAMILIES


class CountedText:
    """Count how often a tokenizer without chat template is asked; without a file it splits at white
    space."""

    def __init__(self, tokenizer: Path | None = None) -> None:
        self.fingerprint = str(tokenizer or "whitespace")
        self.calls = 0
        self.tokens = 0
        self._tokenizer = import_module("tokenizers").Tokenizer.from_file(str(tokenizer)) if tokenizer else None
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        start = len(self._words)
        self._words += text.split()
        return list(range(start, len(self._words)))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids)) if self._tokenizer else " ".join(self._words[i] for i in ids)

    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        text = system + user + prefix
        tokens = len(self.encode(text)) if self._tokenizer else len(text.split())
        self.calls += 1
        self.tokens += tokens
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--tasks", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="TASK")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; default: words between whitespace")
    parser.add_argument("--data-root", type=Path, help="folder with essays, SQuAD, HotpotQA")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    print(f"{'task':<16} {'calls':>5} {'tokens counted':>14} {'seconds':>8} {'longest':>8} {'shortest':>8}")
    for task in args.tasks:
        text = CountedText(args.tokenizer)
        env = TaskEnv(text=text, seed=args.seed, data_root=args.data_root)
        ruler = Ruler(tasks=[task], lengths=[args.length], samples=args.samples, haystack="auto", source=None)
        start = time.perf_counter()
        try:
            lengths = [example.data["tokens"] for example in ruler.examples(env)]
        except TaskError as error:
            print(f"{task:<16} {error}")
            continue
        seconds = time.perf_counter() - start
        print(f"{task:<16} {text.calls:>5} {text.tokens:>14} {seconds:>8.1f} {max(lengths):>8} {min(lengths):>8}")


if __name__ == "__main__":
    main()
