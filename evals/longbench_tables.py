"""Lists LongBench v1's 21 data sets as published (arXiv:2308.14508, table 1). Their prompts are in
a JSON file in the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

CATEGORIES = ("single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "synthetic", "code")  # of the leaderboard


class DataSet(NamedTuple):
    """Describe one data set: how it is asked and how it is scored."""

    category: str
    metric: str
    max_new_tokens: int
    num_rows: int  # rows of the complete file
    prompt: str
    plain: bool  # no chat template, whatever the model
    first_line: bool  # only the output's first line is scored


_PROMPTS: dict[str, str] = json.loads(Path(__file__).with_name("longbench_prompts.json").read_text(encoding="utf-8"))
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
    name: DataSet(*fields, prompt=_PROMPTS[name], plain=name in _PLAIN, first_line=name in _FIRST_LINE)
    for name, fields in _TABLE.items()
}

ENGLISH = tuple(name for name, data_set in DATASETS.items() if data_set.category in CATEGORIES)
PRESETS = {
    "english": ENGLISH,  # with code: the 16 of most papers
    "pqcache14": tuple(name for name in ENGLISH if DATASETS[name].category != "code"),  # PQCache, tables 2 and 3
    "chinese": tuple(name for name in DATASETS if name not in ENGLISH),
    "all": tuple(DATASETS),
}
EVEN = tuple(name for name in ENGLISH if name not in ("narrativeqa", "musique", "qmsum"))  # the 13 of LongBench-E
