"""Numbers of docs/tasks.md: what the tables of LongBench and GSM8K say of the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tests.numbers.files import table


def held() -> list[str]:
    return [*_longbench(), *_gsm8k()]


def _longbench() -> Iterator[str]:
    full = table("tables/longbench")[0]
    sets = sum(column.startswith("score.groups.") and column.endswith(".mean") for column in full)
    yield f"on the {sets} sets on which"
    (cut,) = re.findall(r"(\d+) of (\d+) examples: \d+ to \d+ tokens were cut", full["warnings"])
    (lost,) = re.findall(r"(\d+) of \d+ examples: The reference answer was in the part that was cut", full["warnings"])
    yield f"{cut[0]} of {cut[1]} prompts were cut, and in {lost} rows the cut removed the text of the reference answer"


def _gsm8k() -> Iterator[str]:
    full, pqcache = table("tables/gsm8k")
    of = int(full["num_examples"])
    right, none = (round(of * float(one["score.mean"])) for one in (full, pqcache))
    assert none == 0
    yield f"Full solves {right} of {of} and PQCache none"
    said = [
        text for one in (full, pqcache) for text in json.loads(one["warnings"]) if "ran into the token limit" in text
    ]
    yield f"{sum(int(text.split()[0]) for text in said)} of the {2 * of} answers hit the token limit"
