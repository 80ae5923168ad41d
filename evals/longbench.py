"""Asks LongBench v1 (arXiv:2308.14508): 21 data sets of long documents, with the official prompts,
cuts and scores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from evals.base import (
    Example,
    MissingData,
    Score,
    Task,
    TaskEnv,
    TaskError,
    by_part,
    each_once,
    prompt_limit,
)
from evals.data import Row, Shape, Source, open_rows, require
from evals.metrics.answers import (
    CODE_SIM_BACKENDS,
    classification,
    code_sim,
    count,
    qa_f1,
    qa_f1_zh,
    retrieval,
    retrieval_zh,
    splitter,
)
from evals.metrics.rouge import rouge_l, rouge_zh

HUB_REPO = "THUDM/LongBench"
_ZIPS = ("LongBench/data.zip", "longbench/data.zip")
PLACES = {  # subset -> glob patterns below the data root
    "longbench": ("longbench/{}.jsonl", "LongBench/data/{}.jsonl", *_ZIPS),
    "longbench_e": ("longbench/{}_e.jsonl", "LongBench/data/{}_e.jsonl", *_ZIPS),
    "minilongbench": ("minilongbench/{}.jsonl",),
}

# of the leaderboard
CATEGORIES = ("single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "synthetic", "code")


class DataSet(NamedTuple):
    """Describe one of LongBench's data sets: how it is asked and how it is scored."""

    category: str
    metric: Callable[..., float]
    max_new_tokens: int
    prompt: str
    plain: bool  # no chat template, whatever the model
    first_line: bool  # only the output's first line is scored


_PROMPTS: dict[str, str] = json.loads(
    Path(__file__).with_name("longbench_prompts.json").read_text(encoding="utf-8")
)
_ROWS = {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}  # of the complete files; else 200
_PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
_TABLE: dict[str, tuple[str, Callable[..., float], int]] = {
    "narrativeqa": ("single_doc_qa", qa_f1, 128),
    "qasper": ("single_doc_qa", qa_f1, 128),
    "multifieldqa_en": ("single_doc_qa", qa_f1, 64),
    "hotpotqa": ("multi_doc_qa", qa_f1, 32),
    "2wikimqa": ("multi_doc_qa", qa_f1, 32),
    "musique": ("multi_doc_qa", qa_f1, 32),
    "gov_report": ("summarization", rouge_l, 512),
    "qmsum": ("summarization", rouge_l, 512),
    "multi_news": ("summarization", rouge_l, 512),
    "trec": ("few_shot", classification, 64),
    "triviaqa": ("few_shot", qa_f1, 32),
    "samsum": ("few_shot", rouge_l, 128),
    "passage_count": ("synthetic", count, 32),
    "passage_retrieval_en": ("synthetic", retrieval, 32),
    "lcc": ("code", code_sim, 64),
    "repobench-p": ("code", code_sim, 64),
    "multifieldqa_zh": ("chinese", qa_f1_zh, 64),
    "dureader": ("chinese", rouge_zh, 128),
    "vcsum": ("chinese", rouge_zh, 512),
    "lsht": ("chinese", classification, 64),
    "passage_retrieval_zh": ("chinese", retrieval_zh, 32),
}
DATASETS = {
    name: DataSet(
        *fields, prompt=_PROMPTS[name], plain=name in _PLAIN, first_line=name in _FIRST_LINE
    )
    for name, fields in _TABLE.items()
}

ENGLISH = tuple(name for name, data_set in DATASETS.items() if data_set.category in CATEGORIES)
PRESETS = {
    "english": ENGLISH,  # with code: the 16 of most papers
    # PQCache, tables 2 and 3
    "pqcache14": tuple(name for name in ENGLISH if DATASETS[name].category != "code"),
    "chinese": tuple(name for name in DATASETS if name not in ENGLISH),
    "all": tuple(DATASETS),
}
# the 13 of LongBench-E
EVEN = tuple(name for name in ENGLISH if name not in ("narrativeqa", "musique", "qmsum"))


@dataclass(frozen=True)
class LongBench(Task):
    """Ask LongBench's questions on long documents. An output is scored by the metric of its data
    set, as the best over the references."""

    version = "1"
    seeded = False
    metric = "LongBench score"
    averaged = tuple(f"code_sim_{backend}" for backend in CODE_SIM_BACKENDS)

    datasets: str | Sequence[str] = "english"
    subset: str = "longbench"
    samples: int | None = None
    max_prompt_tokens: int | None = None
    code_sim: str = "levenshtein"
    revision: str = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"

    def __post_init__(self) -> None:
        if self.subset not in PLACES:
            raise TaskError(f"subset={self.subset!r} is unknown: choose one of {', '.join(PLACES)}")
        if self.code_sim not in CODE_SIM_BACKENDS:
            raise TaskError(
                f"code_sim={self.code_sim!r} is unknown: choose one of {', '.join(CODE_SIM_BACKENDS)}"
            )
        self._refuse_below("leaves nothing: give {} or more, or null for all rows", samples=1)
        self._refuse_below("is too small: give {} or more, or null", max_prompt_tokens=2)
        self.names()

    def names(self) -> tuple[str, ...]:
        """Return the names of the data sets that `datasets` selects. A preset leaves out those that
        LongBench-E does not have."""
        offered = self._offered
        if isinstance(self.datasets, str) and self.datasets in PRESETS:
            return tuple(name for name in PRESETS[self.datasets] if name in offered)
        names = each_once(self.datasets)
        if not names or not set(names) <= set(offered):
            raise TaskError(
                f"datasets={self.datasets!r} is not what {self.subset} offers: "
                f"choose {', '.join(PRESETS)}, or a list of {', '.join(offered)}"
            )
        return names

    @property
    def _offered(self) -> tuple[str, ...]:
        return EVEN if self.subset == "longbench_e" else tuple(DATASETS)

    def require(self, data_root: Path | None) -> None:
        try:
            require(map(self._source, self.names()), data_root)
        except MissingData as error:
            for subset, patterns in PLACES.items():
                files = (pattern.format(name) for pattern in patterns for name in self.names())
                found = data_root and any((data_root / file).is_file() for file in files)
                if found and subset != self.subset:
                    raise TaskError(
                        f"The data root {data_root} holds {subset} and not all of {self.subset}: set "
                        f"task.subset={subset}, or name a data root with {self.subset}."
                    ) from error
            raise

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        if any(DATASETS[name].metric in (qa_f1_zh, rouge_zh) for name in self.names()):
            splitter()  # fail now rather than after hours of generation
        opened = {
            name: open_rows(self._source(name), env, self._shape(name)) for name in self.names()
        }
        for name, rows in opened.items():
            complete = (
                {"published_rows": _ROWS.get(name, 200)} if self.subset == "longbench" else {}
            )
            self._opened[name] = {**rows.provenance, **complete}
        ids: Counter[str] = Counter()
        for name, rows in opened.items():
            limit = self._limit(DATASETS[name], env)
            for index, row in enumerate(rows.rows[: self.samples]):
                row_id = f"{name}-{index}" if row.get("_id") is None else str(row["_id"])
                ids[row_id] += 1
                yield self._example(
                    name, row_id if ids[row_id] == 1 else f"{row_id}-{ids[row_id]}", row, limit
                )

    def score(self, example: Example, output: str) -> Score:
        data_set = DATASETS[example.data["dataset"]]
        if data_set.first_line:
            # newlines alone: an output that starts with " \n" is blank
            output = output.lstrip("\n").split("\n")[0]
        if data_set.metric is code_sim:
            by_backend = {
                f"code_sim_{backend}": max(
                    (code_sim(output, r, backend) for r in example.references), default=0
                )
                for backend in CODE_SIM_BACKENDS
            }
            return Score(by_backend[f"code_sim_{self.code_sim}"], by_backend)
        more = [example.data["all_classes"]] if data_set.metric is classification else []
        scores = (data_set.metric(output, one, *more) for one in example.references)
        return Score(max(scores, default=0.0))

    def averages_of(self, groups: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of each length class, preset and category, and `avg_leaderboard` over the
        six categories.

        An average over a fixed list of data sets appears only where all of them were run."""
        sets = {name: fmean(values) for name, values in by_part(groups, 0).items()}
        lists = {f"mean_{preset}": names for preset, names in PRESETS.items()}
        for category in CATEGORIES:
            lists[category] = tuple(
                name for name in self._offered if DATASETS[name].category == category
            )
        named = {f"mean_{name}": fmean(values) for name, values in by_part(groups, 1).items()}
        for name, members in lists.items():
            if sets.keys() >= set(members):
                named[name] = fmean(sets[member] for member in members)
        if sets.keys() >= set(ENGLISH):
            named["avg_leaderboard"] = fmean(named[category] for category in CATEGORIES)
        return named

    def _source(self, name: str) -> Source:
        return Source(
            name=f"{self.subset}/{name}",
            local=tuple(pattern.format(name) for pattern in PLACES[self.subset]),
            hub_repo=None if self.subset == "minilongbench" else HUB_REPO,
            hub_file="data.zip",
            hub_revision=self.revision,
            member=f"data/{name}{'_e' if self.subset == 'longbench_e' else ''}.jsonl",
        )

    def _limit(self, data_set: DataSet, env: TaskEnv) -> int | None:
        """Return how many tokens a prompt may have before the chat template is put around it, as in
        the official runner; a longer one is cut. None: any number."""
        rest = data_set.max_new_tokens + env.text.count("", chat=not data_set.plain)
        says = f"the model's window of {env.window} tokens is too small for LongBench: take another model"
        return prompt_limit(env, self.max_prompt_tokens, rest, says)

    def _shape(self, name: str) -> Shape:
        """Return the fields that each row of data set `name` must have, as a shape
        (`evals.data.misfit`)."""
        classes = "all_classes" if DATASETS[name].metric is classification else "all_classes?"
        length = "length" if self.subset == "longbench_e" else "length?"
        return {
            "context": "text",
            "input": "text",
            "answers": "a list of texts, not all blank",
            classes: ["text"],
            length: "a whole number",
            "_id?": "text or a whole number",
        }

    def _example(self, name: str, example_id: str, row: Row, limit: int | None) -> Example:
        data_set = DATASETS[name]
        head, tail = data_set.prompt.split("{context}")
        group = name
        if self.subset == "longbench_e":
            length = row["length"]
            group += "/0-4k" if length < 4000 else "/4-8k" if length < 8000 else "/8k+"
        return Example(
            id=example_id,
            group=group,
            context=head + row["context"],
            question=tail.replace("{input}", row["input"]),
            references=tuple(row["answers"]),
            max_new_tokens=data_set.max_new_tokens,
            min_new_tokens=1 if name == "samsum" else 0,
            chat=not data_set.plain,
            stop=("\n",) if name == "samsum" else (),
            max_prompt_tokens=limit,
            halves_apart=True,
            data={
                "dataset": name,
                "length": row.get("length"),
                "all_classes": row.get("all_classes"),
            },
        )
