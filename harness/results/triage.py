"""`triage.jsonl`: of every wrong answer, its cause and where the needle went (docs/triage.md). One line per example."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.results import files
from harness.results.folder import bound
from harness.results.folder.names import TRIAGED
from harness.results.records import Record, RecordError

# cause -> (head of its column, what is said of such answers)
CAUSES: Mapping[str, tuple[str, str]] = {
    "not_in_prompt": ("cut\noff", "have no needle in the prompt: it was cut"),
    "format": ("format", "give the answer in a form that the scorer does not see"),
    "token_limit": ("token\nlimit", "are right with more tokens"),
    "model": ("model", "are no better under Full: the model fails"),
    "not_repeated": ("not\nrepeated", "are right when run again: rounding decides"),
    "approximation": ("inexact", "are right with exact attention over the tokens that were read"),
    "evicted": ("evicted", "are right with the needle kept: it was evicted"),
    "not_selected": ("not\nselected", "are right with the needle selected: the selector missed it"),
    "context": ("other\ntokens", "are wrong even with the needle: other tokens are missing"),
    "prefill": ("sparse\nprefill", "are wrong even with the whole prompt: lost in the sparse prefill"),
    "no_needle": ("no\nneedle", "have no answer in the prompt word for word, and were not followed"),
}
CauseLine = dict[str, Any]


def read(folder: Path, info: Mapping[str, Any], records: Sequence[Record]) -> list[CauseLine]:
    """As they were written; a line that a crash cut in half is left out. Raises `RecordError` for a damaged one, and
    for one about another answer than the record has. `info`: run.json."""
    known = {record.id: record for record in records}
    found = []
    for where, line, _ in bound.read_lines(folder, TRIAGED, info):
        record = known.get(str(line.get("id")))
        if record is None or line.get("answer") != record.answer_sha256:
            raise RecordError(f"{where}: example {line.get('id')!r} has another answer now; {bound.AGAIN}")
        found.append(line)
    return found


def followed(lines: Sequence[CauseLine]) -> list[CauseLine]:
    """Those whose needle was followed through at least one step."""
    return [line for line in lines if line.get("held") and line["held"][0]]


def append(folder: Path, line: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """On disk when this returns. The caller holds the folder's lock."""
    files.drop_half_line(folder / TRIAGED)
    plain = json.loads(json.dumps(line))  # as it will be read: the checksum is over that
    files.append_line(folder / TRIAGED, files.seal(plain, str(info["identity_sha256"])))


def bind(folder: Path, info: Mapping[str, Any]) -> None:
    """Has run.json vouch for the lines that are there. The caller holds the folder's lock."""
    bound.write_info(folder, bound.bind(folder, info, TRIAGED))


def wrong(records: Sequence[Record]) -> list[Record]:
    """What is to be explained: answers below the full score; fed texts have none."""
    return [record for record in records if record.score < 1 and record.stop != "forced"]


def summary(lines: Sequence[CauseLine], records: Sequence[Record]) -> dict[str, Any] | None:
    """What summary.json says: how many answers are wrong, how many of these were looked at, and the causes. `held`,
    `mass` and `full_mass`: means over layers and the tokens up to where the answer leaves Full's, over the examples
    that were followed. Null where there was no triage."""
    if not lines:
        return None
    causes = Counter(line["cause"] for line in lines)
    shares = {name: [x for line in lines if (x := until(line, name)) is not None] for name in SHARES}
    return {
        "wrong": len(wrong(records)),
        "examined": len(lines),
        "causes": dict(causes.most_common()),
        **{name: fmean(values) if values else None for name, values in shares.items()},
    }


SHARES = ("held", "mass", "full_mass")


def until(line: CauseLine, name: str) -> float | None:
    """Mean of `line[name]` over layers, and over the tokens up to the first that is not Full's."""
    rows = [row[: steps(line)] for row in line.get(name) or []]
    return fmean(fmean(row) for row in rows) if rows and rows[0] else None


def steps(line: CauseLine) -> int:
    """Columns up to the token with which the answer leaves Full's, at least one."""
    departs = line.get("departs")
    return max(1, departs - line["first"] + 1) if departs else len(line["held"][0])
