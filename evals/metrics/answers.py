"""Scores short answers: by token F1, class names, paragraph numbers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from evals.metrics.chinese import cut

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

    Names inside the right name do not count. But the official code drops them from the list that it
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
        raise ValueError(f"reference {reference!r} does not match {pattern!r}: the data set is not LongBench's")
    return found[1]


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(ASCII_PUNCTUATION)).split()


def _words_zh(text: str) -> list[str]:
    cleaned = (word.lower().translate(ASCII_PUNCTUATION).translate(CHINESE_PUNCTUATION) for word in cut(text))
    return [word for word in ("".join(word.split()) for word in cleaned) if word]


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return the F1 of two bags of words or characters."""
    same = (Counter(prediction) & Counter(reference)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)
