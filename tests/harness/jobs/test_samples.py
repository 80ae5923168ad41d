"""generation.samples: several answers to each question, each with a seed of its own, and statistics over questions."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from evals import stats
from harness.cachedattention.serving.plan import points
from harness.config.settings import GenerationSettings, Settings, SettingsError
from harness.jobs.job import Job
from harness.reports.compare import comparisons
from harness.reports.notes import notes
from harness.results.records import Record
from harness.results.run_folder import StoredRun
from methods.full import Full
from tests.fast import MODEL, PQ, run
from tests.talks import Talks

TALKS = Talks(conversations=5, max_new_tokens=8)  # two of one turn, two of two, one of three
DRAWN = GenerationSettings(temperature=1.5, top_p=0.9, samples=3)


def answers(stored: StoredRun) -> dict[str, list[list[int]]]:
    return {record.id: [reply.tokens for reply in record.replies] for record in stored.records}


def by_question(stored: StoredRun) -> dict[str, list[Record]]:
    questions = defaultdict[str, list[Record]](list)
    for record in stored.records:
        questions[record.independent].append(record)
    return questions


@pytest.mark.tokens
def test_a_sample_has_the_same_tokens_alone_in_a_batch_and_after_a_resume(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", PQ, TALKS, generation=DRAWN)
    assert len(answers(whole)) == 15
    assert answers(run(tmp_path / "batch", PQ, TALKS, generation=DRAWN, batch=4)) == answers(whole)
    (lines,) = (tmp_path / "batch").glob("*/examples.jsonl")
    kept = lines.read_text().splitlines(keepends=True)[:4]  # the first question, and a part of the second
    lines.write_text("".join(kept))
    assert answers(run(tmp_path / "batch", PQ, TALKS, generation=DRAWN, batch=4)) == answers(whole)
    assert lines.read_text().startswith("".join(kept))
    assert answers(run(tmp_path / "seed", PQ, TALKS, generation=DRAWN, seed=1)) != answers(whole)
    for question, records in by_question(whole).items():
        assert sorted(record.id for record in records) == [f"{question}/sample {number}" for number in (1, 2, 3)]
        for drawn in zip(*(record.replies for record in records), strict=True):  # turn by turn
            assert len({tuple(reply.tokens) for reply in drawn}) == 3


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_the_likeliest_token_is_drawn_where_no_other_may_be(tmp_path: Path, limit: dict[str, Any]) -> None:
    drawn = run(tmp_path / "drawn", PQ, TALKS, generation=GenerationSettings(temperature=1.5, **limit))
    assert answers(drawn) == answers(run(tmp_path / "greedy", PQ, TALKS))


def test_the_samples_of_a_question_count_as_one_in_intervals_and_tests(tmp_path: Path) -> None:
    stored = run(tmp_path, PQ, TALKS, generation=DRAWN, baseline="run")
    means = [fmean(record.score for record in records) for records in by_question(stored).values()]
    assert len(means) == 5
    score = stored.summary["score"]
    interval = stats.interval(means, ["talk"] * 5)
    assert interval is not None
    assert score["mean"] == pytest.approx(fmean(means))
    assert score["ci95"] == pytest.approx([interval.low, interval.high])
    assert stored.full_folder is not None
    (table,) = comparisons([stored])
    assert "pass@1: the mean over 3 answers drawn to each question" in "\n".join(notes(table))
    full = {record.id: record.score for record in run(tmp_path, Full(), TALKS, generation=DRAWN).records}
    theirs = [fmean(full[record.id] for record in records) for records in by_question(stored).values()]
    assert stored.summary["full"]["p"] == pytest.approx(stats.paired(means, theirs, ["talk"] * 5).p)


def test_one_sample_is_no_setting_and_several_need_a_temperature() -> None:
    hot = GenerationSettings(temperature=1.5)
    one, several = (Job.plan(PQ, TALKS, MODEL, Settings(generation=wanted)) for wanted in (hot, DRAWN))
    assert one.identity["generation"] == {"temperature": 1.5}
    assert several.identity["generation"] == {"temperature": 1.5, "top_p": 0.9, "samples": 3}
    with pytest.raises(SettingsError, match=r"generation\.samples=2 .* greedy .* generation\.temperature"):
        Settings(generation=GenerationSettings(samples=2))
    with pytest.raises(SettingsError, match=r"once: leave generation\.samples out"):
        points(["generation.samples=2"])
