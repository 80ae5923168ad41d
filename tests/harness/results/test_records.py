"""Lines of examples.jsonl: those that an older harness wrote, and conversations as one reply."""

from __future__ import annotations

import json

import pytest

from harness.results.records import Record, RecordError
from tests.fake_records import record, talk, turn


def test_a_renamed_key_is_read_from_older_lines() -> None:
    plain = json.loads(record(capture_s=0.25).to_json())
    plain["graph_s"] = plain.pop("capture_s")
    assert Record.from_plain(plain, "line 1").capture_s == 0.25


def test_an_unknown_key_is_refused_with_its_line() -> None:
    plain = json.loads(record().to_json()) | {"grpah_s": 0.25}
    with pytest.raises(RecordError, match="line 1: unknown key 'grpah_s'"):
        Record.from_plain(plain, "line 1")


def test_a_conversation_adds_up_what_turns_took_and_ends_as_the_last_one_does() -> None:
    first = turn(sealed=False, seal_s=None, kv_device_bytes=100, token_s=[1.0, 1.5], stop="length", score=0.5)
    last = turn(sealed=True, seal_s=0.2, kv_device_bytes=170, token_s=[0.5, 0.75], attended_prompt=None, fallback="why")
    one = talk("a", first, last)
    assert one.token_s == [1.0, 1.5, 2.0, 2.25]
    assert (one.seal_s, one.question_s, one.prompt_tokens) == (0.2, None, 20)
    assert (one.kv_device_bytes, one.stop, one.sealed, one.fallback) == (170, "eos", True, "why")
    assert (one.score, one.attended_prompt) == (0.75, 100.0)
