"""Times worked out by hand."""

from __future__ import annotations

import pytest

from harness.results.summary import decode_throughput, quantiles, total_throughput
from tests.fake_records import record


def test_quantiles_leave_nulls_out() -> None:
    assert quantiles([None, 1.0, 3.0, None]) == {"mean": 2.0, "p50": 2.0, "p90": pytest.approx(2.8)}
    assert quantiles([None]) == {"mean": None, "p50": None, "p90": None}


def test_decode_throughput_starts_at_the_second_token() -> None:
    """The 8 s before token 2 are prefill and seal, not decoding."""
    slow_seal = record(token_s=[1.0, 9.0, 9.5, 10.0])
    assert decode_throughput([slow_seal]) == pytest.approx(2 / 1.0)
    assert total_throughput([slow_seal]) == pytest.approx(4 / 10.0)
    assert decode_throughput([record(token_s=[1.0, 2.0])]) is None


def test_sequences_of_a_batch_share_the_seconds_of_their_steps() -> None:
    """Two run together, 0.5 s a step; the shorter one leaves, and the longer one has the last step for itself."""
    long = record("a", token_s=[1.0, 2.0, 2.5, 3.0], share_s=2.25, decode_share_s=0.75)
    short = record("b", token_s=[1.0, 2.0, 2.5], share_s=1.75, decode_share_s=0.25)
    alone = record("c", token_s=[1.25, 2.0, 4.0])  # as older lines are
    lines = [short, long, alone]
    assert decode_throughput(lines) == pytest.approx((1 + 2 + 1) / (0.25 + 0.75 + 2.0))
    assert total_throughput(lines) == pytest.approx((3 + 4 + 3) / (1.75 + 2.25 + 4.0))
