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


def test_keys_that_older_versions_wrote_are_ignored() -> None:
    original = talk("a", turn(), turn())
    plain = json.loads(original.to_json()) | {"sha256": "of the line", "grpah_s": 0.25}
    plain["turns"] = [one | {"grpah_s": 0.25} for one in plain["turns"]]
    assert Record.from_plain(plain, "line 1") == original


def test_a_conversation_adds_up_what_turns_took_and_ends_as_the_last_one_does() -> None:
    first = turn(sealed=False, seal_s=None, kv_device_bytes=100, token_s=[1.0, 1.5], stop="length", score=0.5)
    last = turn(sealed=True, seal_s=0.2, kv_device_bytes=170, token_s=[0.5, 0.75], attended_prompt=None, fallback="why")
    one = talk("a", first, last)
    assert one.token_s == [1.0, 1.5, 2.0, 2.25]
    assert (one.seal_s, one.question_s, one.prompt_tokens) == (0.2, None, 20)
    assert (one.kv["device"], one.stop, one.sealed, one.fallback) == (170, "eos", True, "why")
    assert (one.score, one.measured["attended_prompt"]) == (0.75, 100.0)


def test_bytes_are_a_key_per_tier_and_a_line_may_be_older_than_a_tier() -> None:
    plain = json.loads(talk("a", turn(kv_disk_bytes=7)).to_json())
    for part in (plain, *plain["turns"]):
        assert (part["kv_device_bytes"], part["kv_host_bytes"], part.pop("kv_disk_bytes")) == (1000, 0, 7)
    again = Record.from_plain(plain, "line 1")
    assert again.kv == again.replies[0].kv == {"device": 1000, "host": 0}
    with pytest.raises(RecordError, match="line 3: no 'kv_device_bytes'"):
        Record.from_plain({key: value for key, value in plain.items() if key != "kv_device_bytes"}, "line 3")
