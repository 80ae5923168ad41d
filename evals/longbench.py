"""Asks LongBench v1 (arXiv:2308.14508): 21 data sets of long documents, with the official prompts,
cuts and scores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from evals import metrics
from evals.base import Example, MissingData, Score, Task, TaskEnv, TaskError
from evals.data import Row, Shape, Source, open_rows, require
from evals.metrics.answers import splitter

HUB_REPO = "THUDM/LongBench"
PLACES = {  # subset -> glob patterns below the data root
    "longbench": (
        "longbench/{}.jsonl",
        "LongBench/data/{}.jsonl",
        "LongBench/data.zip",
        "longbench/data.zip",
    ),
    "longbench_e": (
        "longbench/{}_e.jsonl",
        "LongBench/data/{}_e.jsonl",
        "LongBench/data.zip",
        "longbench/data.zip",
    ),
    "minilongbench": ("minilongbench/{}.jsonl",),
}
# for a BOS, and for what the two halves of a cut prompt may grow by when they are tokenised again
_SPARE_TOKENS = 16

# of the leaderboard
CATEGORIES = ("single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "synthetic", "code")


class DataSet(NamedTuple):
    """Describe one of LongBench's data sets: how it is asked and how it is scored."""

    category: str
    metric: str
    max_new_tokens: int
    num_rows: int  # rows of the complete file
    prompt: str
    plain: bool  # no chat template, whatever the model
    first_line: bool  # only the output's first line is scored


_PROMPTS: dict[str, str] = json.loads(
    Path(__file__).with_name("longbench_prompts.json").read_text(encoding="utf-8")
)
_PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
_TABLE = {
    "narrativeqa": ("single_doc_qa", "qa_f1", 128, 200),
    "qasper": ("single_doc_qa", "qa_f1", 128, 200),
    "multifieldqa_en": ("single_doc_qa", "qa_f1", 64, 150),
    "hotpotqa": ("multi_doc_qa", "qa_f1", 32, 200),
    "2wikimqa": ("multi_doc_qa", "qa_f1", 32, 200),
    "musique": ("multi_doc_qa", "qa_f1", 32, 200),
    "gov_report": ("summarization", "rouge_l", 512, 200),
    "qmsum": ("summarization", "rouge_l", 512, 200),
    "multi_news": ("summarization", "rouge_l", 512, 200),
    "trec": ("few_shot", "classification", 64, 200),
    "triviaqa": ("few_shot", "qa_f1", 32, 200),
    "samsum": ("few_shot", "rouge_l", 128, 200),
    "passage_count": ("synthetic", "count", 32, 200),
    "passage_retrieval_en": ("synthetic", "retrieval", 32, 200),
    "lcc": ("code", "code_sim", 64, 500),
    "repobench-p": ("code", "code_sim", 64, 500),
    "multifieldqa_zh": ("chinese", "qa_f1_zh", 64, 200),
    "dureader": ("chinese", "rouge_zh", 128, 200),
    "vcsum": ("chinese", "rouge_zh", 512, 200),
    "lsht": ("chinese", "classification", 64, 200),
    "passage_retrieval_zh": ("chinese", "retrieval_zh", 32, 200),
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

    version: ClassVar[str] = "1"
    seeded: ClassVar[bool] = False
    metric: ClassVar[str] = "LongBench score"

    datasets: str | Sequence[str] = "english"
    subset: str = "longbench"
    samples: int | None = None
    max_prompt_tokens: int | None = None
    code_sim: str = "levenshtein"
    revision: str = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
    _opened: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.subset not in PLACES:
            raise TaskError(f"subset={self.subset!r} is unknown: choose one of {', '.join(PLACES)}")
        if self.code_sim not in metrics.CODE_SIM_BACKENDS:
            raise TaskError(
                f"code_sim={self.code_sim!r} is unknown: choose one of {', '.join(metrics.CODE_SIM_BACKENDS)}"
            )
        if self.samples is not None and self.samples < 1:
            raise TaskError(
                f"samples={self.samples} leaves nothing: give 1 or more, or null for all rows"
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 2:
            raise TaskError(
                f"max_prompt_tokens={self.max_prompt_tokens} is too small: give 2 or more, or null"
            )
        self.names()

    def names(self) -> tuple[str, ...]:
        """Return the names of the data sets that `datasets` selects. A preset leaves out those that
        LongBench-E does not have."""
        offered = self._offered
        if isinstance(self.datasets, str) and self.datasets in PRESETS:
            return tuple(name for name in PRESETS[self.datasets] if name in offered)
        names = (
            (self.datasets,)
            if isinstance(self.datasets, str)
            else tuple(dict.fromkeys(self.datasets))
        )
        wrong = [name for name in names if name not in offered]
        if wrong or not names:
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
            for subset in [name for name in PLACES if name != self.subset]:
                files = [
                    pattern.format(name) for pattern in PLACES[subset] for name in self.names()
                ]
                if data_root and any((data_root / file).is_file() for file in files):
                    raise TaskError(
                        f"The data root {data_root} holds {subset} and not all of {self.subset}: set "
                        f"task.subset={subset}, or name a data root with {self.subset}."
                    ) from error
            raise

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        if any(DATASETS[name].metric in ("qa_f1_zh", "rouge_zh") for name in self.names()):
            splitter()  # fail now rather than after hours of generation
        opened = {
            name: open_rows(self._source(name), env, self._shape(name)) for name in self.names()
        }
        for name, rows in opened.items():
            complete = (
                {"published_rows": DATASETS[name].num_rows} if self.subset == "longbench" else {}
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
        if data_set.metric == "code_sim":
            by_backend = {
                f"code_sim_{backend}": max(
                    (metrics.code_sim(output, r, backend) for r in example.references), default=0
                )
                for backend in metrics.CODE_SIM_BACKENDS
            }
            return Score(by_backend[f"code_sim_{self.code_sim}"], by_backend)
        if data_set.metric == "classification":
            classes = example.data["all_classes"]
            values = [metrics.classification(output, r, classes) for r in example.references]
        else:
            values = [getattr(metrics, data_set.metric)(output, r) for r in example.references]
        return Score(max(values, default=0.0))

    def averages(
        self, groups: Mapping[str, float], details: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return `mean` over data sets, as most papers do, and the mean of each category,
        `avg_leaderboard` over the six categories, and code_sim over rows by each of its two
        backends.

        An average over a fixed list of data sets appears only where all of them were run."""
        by_set: dict[str, list[float]] = {}
        by_bucket: dict[str, list[float]] = {}
        for group, value in groups.items():
            name, _, bucket = group.partition("/")
            by_set.setdefault(name, []).append(value)
            by_bucket.setdefault(bucket, []).append(value)
        sets = {name: fmean(values) for name, values in by_set.items()}
        named = super().averages(groups)
        named |= {f"mean_{bucket}": fmean(values) for bucket, values in by_bucket.items() if bucket}
        named |= {
            f"mean_{key}": fmean(map(sets.__getitem__, p))
            for key, p in PRESETS.items()
            if sets.keys() >= set(p)
        }
        for category in CATEGORIES:
            members = [name for name in self._offered if DATASETS[name].category == category]
            if sets.keys() >= set(members):
                named[category] = fmean(map(sets.__getitem__, members))
        if sets.keys() >= set(ENGLISH):
            named["avg_leaderboard"] = fmean(named[category] for category in CATEGORIES)
        return named | {
            name: value for name, value in (details or {}).items() if name.startswith("code_sim_")
        }

    def provenance(self) -> dict[str, Any]:
        return dict(self._opened)

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
        if self.max_prompt_tokens is not None or env.window is None:
            return self.max_prompt_tokens
        template = env.text.count("", chat=not data_set.plain)
        limit = env.window - data_set.max_new_tokens - template - _SPARE_TOKENS
        if limit < 2:
            raise TaskError(
                f"the model's window of {env.window} tokens is too small for LongBench: take another model"
            )
        return limit

    def _shape(self, name: str) -> Shape:
        """Return the fields that each row of data set `name` must have, as a shape
        (`evals.data.misfit`)."""
        classes = "all_classes" if DATASETS[name].metric == "classification" else "all_classes?"
        length = "length" if self.subset == "longbench_e" else "length?"
        known = {classes: ["text"], length: "a whole number", "_id?": "text or a whole number"}
        return {
            "context": "text",
            "input": "text",
            "answers": "a list of texts, not all blank",
        } | known

    def _example(self, name: str, example_id: str, row: Row, limit: int | None) -> Example:
        data_set = DATASETS[name]
        head, tail = data_set.prompt.split("{context}")
        return Example(
            id=example_id,
            group=f"{name}/{_bucket(row)}" if self.subset == "longbench_e" else name,
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


def _bucket(row: Row) -> str:
    """Return the length class of a row of LongBench-E: "0-4k", "4-8k" or "8k+"."""
    return "0-4k" if row["length"] < 4000 else "4-8k" if row["length"] < 8000 else "8k+"
