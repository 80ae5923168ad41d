"""No benchmark measures what the machine can do."""

from __future__ import annotations

import pytest

from harness.bench.common.limits import Limits

LIMITS: Limits = {"read_gb_s": 10.0, "matmul_gflop_s": {"fp32": 100.0, "bf16": 100.0}}


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.bench.common.limits.measured", lambda device: LIMITS)
