"""Lines of examples.jsonl: what they hold, those that an older harness wrote, and conversations as one reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.results.records import Record, RecordError
from tests.fake_records import record, talk, turn


def test_a_record_survives_its_file() -> None:
    original = record("ä\u2028", details={"em": 0.5}, context_tokens=7, prompt_ids=[1, 2], data={"depth": 0.25})
    assert Record.from_plain(json.loads(original.to_json()), "here") == original
    assert "\n" not in original.to_json()


def test_times_of_a_record() -> None:
    full = record(token_s=[1.0, 3.0, 3.5, 4.5])
    assert (full.ttft_s, full.tt2t_s, full.tpot_s, full.intervals_s) == (1.0, 3.0, 0.75, [0.5, 1.0])
    short = record(token_s=[1.0])
    assert (short.tt2t_s, short.tpot_s, short.intervals_s) == (None, None, [])
    assert record(token_s=[1.0, 2.0]).tpot_s is None


@pytest.mark.parametrize("change", [{"score": 1.5}, {"score": float("nan")}, {"tokens": [1], "token_s": [1.0, 2.0]}])
def test_a_record_refuses_what_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        record(**change)


def test_older_lines_have_more_and_fewer_keys() -> None:
    original = talk("a", turn(kv_disk_bytes=7), turn(union_prompt=7.0))
    plain = json.loads(original.to_json()) | {"sha256": "of the line", "grpah_s": 0.25}
    plain["turns"] = [one | {"grpah_s": 0.25} for one in plain["turns"]]
    assert Record.from_plain(plain, "line 1") == original
    for part in (plain, *plain["turns"]):
        part.pop("kv_disk_bytes", None)
        del part["union_prompt"]
    older = Record.from_plain(plain, "line 1")
    assert [older[f"kv_{tier}_bytes"] for tier in ("device", "host", "disk")] == [1000, 0, 0]
    assert older.replies[0]["kv_disk_bytes"] == 0
    assert older.share("union_prompt") is None
    del plain["kv_device_bytes"]
    with pytest.raises(RecordError, match=r"line 3.*kv_device_bytes"):
        Record.from_plain(plain, "line 3")


def test_a_conversation_adds_up_what_turns_took_and_ends_as_the_last_one_does() -> None:
    first = turn(sealed=False, seal_s=None, kv_device_bytes=100, token_s=[1.0, 1.5], stop="length", score=0.5)
    last = turn(sealed=True, seal_s=0.2, kv_device_bytes=170, token_s=[0.5, 0.75], attended_prompt=None, fallback="why")
    one = talk("a", first, last)
    assert one.token_s == [1.0, 1.5, 2.0, 2.25]
    assert (one["seal_s"], one["question_s"], one.prompt_tokens) == (0.2, None, 20)
    assert (one["kv_device_bytes"], one.stop, one["sealed"], one["fallback"]) == (170, "eos", True, "why")
    assert (one.score, one["attended_prompt"]) == (0.75, 100.0)
