"""Lines of examples.jsonl: those that an older harness wrote are read with today's names."""

from __future__ import annotations

import json

import pytest

from harness.results.records import Record, RecordError
from tests.fake_records import record


def test_a_renamed_key_is_read_from_older_lines() -> None:
    plain = json.loads(record(capture_s=0.25).to_json())
    plain["graph_s"] = plain.pop("capture_s")
    assert Record.from_plain(plain, "line 1").capture_s == 0.25


def test_an_unknown_key_is_refused_with_its_line() -> None:
    plain = json.loads(record().to_json()) | {"grpah_s": 0.25}
    with pytest.raises(RecordError, match="line 1: unknown key 'grpah_s'"):
        Record.from_plain(plain, "line 1")
