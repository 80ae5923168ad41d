"""Asks questions among many documents, qa_1 (SQuAD 2.0) and qa_2 (HotpotQA) (RULER,
arXiv:2404.06654)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from evals.base import TaskEnv, TextTools
from evals.data import Content, Row, Source, no_answer, open_content, rows_of, too_few, value_of
from evals.ruler.fitting import Generator, TooShort
from evals.ruler.templates import DOCUMENT, NEW_TOKENS, TEMPLATES, FilledTemplate
from evals.ruler.vocabulary import Streams

SOURCES = {
    "qa_1": Source(
        name="SQuAD 2.0 dev (https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json)",
        local=(
            "squad/dev-v2.0.json",
            "squad/squad_v2_dev*.json",
            "dev-v2.0.json",
            "squad.json",
            "squad/squad_v2/validation-*.parquet",
        ),
        hub_repo="rajpurkar/squad_v2",  # has the same questions in the same order, one a row
        hub_file="squad_v2/validation-00000-of-00001.parquet",
        hub_revision="3ffb306f725f7d2ce8394bc1873b24868140c412",
    ),
    "qa_2": Source(
        name="HotpotQA dev distractor",
        local=(
            "hotpotqa/hotpot_dev_distractor*.json",
            "hotpot_dev_distractor*.json",
            "hotpotqa.json",
        ),
        # the copy that RULER names, since the original's host is gone
        hub_repo="namlh2004/hotpotqa",
        hub_file="hotpot_dev_distractor_v1.json",
        hub_revision="7e54db4656209750ff487f6fdf8e39a66dba136b",
    ),
}
TRIED = 40  # documents that the finer generator tries to add


class Question(NamedTuple):
    """Hold a question with the numbers of its documents: `gold` contain the answer, `own` are
    always shown, `related` come next."""

    query: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    own: tuple[int, ...]
    related: tuple[int, ...] = ()


class Corpus(NamedTuple):
    """Hold the questions of a data set, in file order, and its distinct documents, sorted. `origin`
    and `sha256` say which file they are from."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]
    origin: str
    sha256: str


_ENTRY = {"question": "text", "is_impossible": "true or false", "answers": [{"text": "text"}]}
SQUAD = {"data": [{"paragraphs": [{"context": "text", "qas": [_ENTRY]}]}]}
# a row on the hub
SQUAD_ROW = {"title": "text", "context": "text", "question": "text", "answers": {"text": ["text"]}}
HOTPOTQA_ROW = {
    "question": "text",
    "answer": "text that is not blank",
    "context": [("text", ["text"]), ...],  # title and sentences
    "supporting_facts": [("text", "a whole number")],
}


# the paragraphs of an article, each with its questions
Article = list[tuple[str, list[dict[str, Any]]]]


def load(task: str, env: TaskEnv) -> Corpus:
    """Load the data of `qa_1` or `qa_2`, from the data root or from the hub."""
    content = open_content(SOURCES[task], env)
    read = _read_squad if task == "qa_1" else _read_hotpotqa
    questions, documents = read(content, SOURCES[task].name)
    return Corpus(tuple(questions), tuple(documents), content.origin, content.sha256)


def _articles(rows: Sequence[Row]) -> list[Article]:
    """Arrange the rows that the hub has of SQuAD, one per question, by articles and paragraphs as
    in the original file."""
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for number, row in enumerate(rows, 1):
        texts = [{"text": text} for text in row["answers"]["text"]]
        entry = {
            "question": row["question"],
            "is_impossible": not texts,
            "answers": texts,
            "place": f"row {number}",
        }
        articles.setdefault(row["title"], {}).setdefault(row["context"], []).append(entry)
    return [list(paragraphs.items()) for paragraphs in articles.values()]


def _read_squad(content: Content, name: str) -> tuple[list[Question], list[str]]:
    """Return the answerable questions of SQuAD and all documents, which are its paragraphs. The
    other paragraphs of the question's article are its related documents."""
    if content.origin.endswith(".parquet"):
        articles = _articles(rows_of(content, name, SQUAD_ROW).rows)
    else:
        data = value_of(content.data, SQUAD, f"{name}: {content.origin}")["data"]
        articles = [[(one["context"], one["qas"]) for one in each["paragraphs"]] for each in data]
    documents = sorted({context for article in articles for context, _ in article})
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    for article in articles:
        numbers = [number[context] for context, _ in article]
        for (_, entries), own in zip(article, numbers, strict=True):
            related = tuple(other for other in numbers if other != own)
            for entry in entries:
                answers = tuple(answer["text"] for answer in entry["answers"])
                if not entry["is_impossible"] and not any(map(str.strip, answers)):
                    place = entry.get("place", f"the question {entry['question'][:60]!r}")
                    raise no_answer(f"{name}: {place} of {content.origin}")
                if not entry["is_impossible"]:
                    questions.append(Question(entry["question"], answers, (own,), (own,), related))
    return questions, documents


def _read_hotpotqa(content: Content, name: str) -> tuple[list[Question], list[str]]:
    """Return the questions of HotpotQA and all documents. A question has ten paragraphs of its own,
    two of which (gold) contain the answer."""
    data = rows_of(content, name, HOTPOTQA_ROW).rows
    paragraphs = [
        [(title, f"{title}\n{''.join(lines)}") for title, lines in entry["context"]]
        for entry in data
    ]
    documents = sorted({document for entry in paragraphs for _, document in entry})
    number = {document: i for i, document in enumerate(documents)}
    questions = []
    for entry, shown in zip(data, paragraphs, strict=True):
        titles = {title for title, _ in entry["supporting_facts"]}
        gold = tuple(number[document] for title, document in shown if title in titles)
        own = tuple(number[document] for _, document in shown)
        questions.append(Question(entry["question"], (entry["answer"],), gold, own))
    return questions, documents


class QuestionAnswering(Generator):
    """Make the prompts of RULER's qa_1 and qa_2: `size` documents, those of the question among
    them, in an order that is the same for all samples of a size.

    The finer generator starts from the gold documents, which contain the answer, adds others as
    long as one fits, and passes over questions whose gold documents do not fit."""

    new_tokens = NEW_TOKENS["qa"]

    def __init__(self, text: TextTools, streams: Streams, length: int, *, corpus: Corpus) -> None:
        super().__init__(text, streams, length, unit=10)
        self.corpus = corpus

    def minimum(self, index: int) -> int:
        return len(self.corpus.questions[index].own)

    def prompts(self, samples: int) -> list[FilledTemplate]:
        available = len(self.corpus.questions)
        if samples > available:
            raise too_few(self.corpus.origin, "questions", available, samples)
        return super().prompts(samples)

    def fine(self, samples: int) -> list[FilledTemplate]:
        filled = (self._filled(index) for index in range(len(self.corpus.questions)))
        prompts = list(islice((prompt for prompt in filled if prompt is not None), samples))
        if len(prompts) < samples:
            raise TooShort
        return prompts

    def probe(self, size: int, index: int) -> FilledTemplate:
        count = len(self.corpus.documents)
        if size < count:
            return self._ask(index, self._choose(size, self.corpus.questions[index]))
        return self._ask(index, [i % count for i in range(size)])

    def _ask(self, index: int, numbers: Sequence[int]) -> FilledTemplate:
        question = self.corpus.questions[index]
        shown = [self.corpus.documents[number] for number in numbers]
        self.streams.shuffle(shown)
        context = "\n\n".join(
            DOCUMENT.format(i=i, document=document) for i, document in enumerate(shown, start=1)
        )
        data = {"question": index, "documents": len(shown)}
        return TEMPLATES["qa"].fill(context, question.answers, data=data, query=question.query)

    def _choose(self, size: int, question: Question) -> list[int]:
        own, related = list(question.own), list(question.related)
        if size - len(own) <= len(related):
            return own + self.streams.python.sample(related, max(0, size - len(own)))
        near = {*own, *related}
        others = [number for number in range(len(self.corpus.documents)) if number not in near]
        return own + related + self.streams.python.sample(others, size - len(own) - len(related))

    def _filled(self, index: int) -> FilledTemplate | None:
        """Return a prompt with the gold documents of question number `index` and as many of `TRIED`
        others, in random order, as there is room for; None if the gold ones do not fit."""
        question = self.corpus.questions[index]
        chosen, best = list(question.gold), self.noted(self._ask(index, question.gold))
        if best is None:
            return None
        near, others = [*question.own, *question.related], range(len(self.corpus.documents))
        candidates = [
            *self.streams.python.sample(near, len(near)),
            *self.streams.python.choices(others, k=TRIED),
        ]
        new = dict.fromkeys(number for number in candidates if number not in question.gold)
        for number in islice(new, TRIED):
            longer = self.noted(self._ask(index, [*chosen, number]))
            if longer is not None:
                best = longer
                chosen.append(number)
        return best
