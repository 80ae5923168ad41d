"""Scores short answers by token F1, class names and paragraph numbers, and lines of code by edit similarity."""

from __future__ import annotations

import difflib
import logging
import re
import string
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

from rapidfuzz import fuzz

from evals.base import TaskError

CODE_SIM_BACKENDS = ("levenshtein", "difflib")

ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
CHINESE_PUNCTUATION = str.maketrans(
    "",
    "",
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏",
)


def qa_f1(prediction: str, reference: str) -> float:
    """Return the F1 of bags of words, without case, ASCII punctuation and articles.

    >>> qa_f1("New-York City", "the New York City")
    0.4
    """
    return f1(_words(prediction), _words(reference))


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Return the F1 of bags of words as jieba splits them, without case and punctuation."""
    return f1(_words_zh(prediction), _words_zh(reference))


def classification(prediction: str, reference: str, all_classes: Sequence[str]) -> float:
    """Return 1 / number of class names found in the prediction, or 0 if the right one is not among
    them.

    Names inside the right name do not count. But LongBench's code drops them from the list that it
    walks over, so that the neighbour of a dropped name stays; that is kept here.

    >>> classification("ABCD", "ABCD", ["A", "AB", "ABC", "ABCD"])
    0.5
    """
    named = [name for name in all_classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)  # removing while walking is the official quirk
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """Return the share of the numbers in the prediction that equal the reference.

    >>> count("17.0", "17")
    0.5
    """
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Return the share of the numbers in the prediction that equal N of the reference
    `Paragraph N`."""
    return count(prediction, _number(r"Paragraph (\d+)", reference))


def retrieval_zh(prediction: str, reference: str) -> float:
    """Return the share of the numbers in the prediction that equal N of the reference `段落N`."""
    return count(prediction, _number(r"段落(\d+)", reference))


def _number(pattern: str, reference: str) -> str:
    found = re.search(pattern, reference)
    if found is None:
        raise ValueError(
            f"reference {reference!r} does not match {pattern!r}: the data set is not LongBench's"
        )
    return found[1]


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(ASCII_PUNCTUATION)).split()


def _words_zh(text: str) -> list[str]:
    punctuation = ASCII_PUNCTUATION | CHINESE_PUNCTUATION
    cleaned = (word.lower().translate(punctuation) for word in cut(text))
    return [word for word in ("".join(word.split()) for word in cleaned) if word]


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return the F1 of two bags of words or characters."""
    same = (Counter(prediction) & Counter(reference)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def code_sim(prediction: str, reference: str, backend: str = "levenshtein") -> float:
    """Return how similar the prediction's first line of code is to the reference, from 0 to 1 in
    whole percents: fuzz.ratio of the first line without `` ` ``, `#` and `//`.

    fuzzywuzzy takes Levenshtein's ratio where python-Levenshtein is installed and difflib's where
    it is not; the two differ by 1.4 points on repobench-p. Papers on KV caches use Levenshtein's.

    >>> code_sim("```python\\nreturn x", "return x")
    1.0
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("[`#]|//", line)), "")
    if backend == "difflib":
        ratio = 100 * difflib.SequenceMatcher(None, line, reference).ratio()
    else:
        ratio = fuzz.ratio(line, reference)
    return round(ratio) / 100


def cut(text: str) -> list[str]:
    """Split text into words by jieba's default mode, as LongBench does."""
    return list(splitter().cut(text, cut_all=False))


def splitter() -> ModuleType:
    """Import jieba. Raises `TaskError`, which says how to install it, where it is missing."""
    try:
        import jieba
    except ModuleNotFoundError as error:
        raise TaskError(
            "LongBench's Chinese metrics need jieba: pip install 'jieba>=0.42' (extra zh)"
        ) from error
    # otherwise it reports on stderr that it builds its dictionary
    jieba.setLogLevel(logging.WARNING)
    module: ModuleType = jieba
    return module
