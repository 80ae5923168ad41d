"""A conversation that goes on in another process finds on disk what the first one stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.settings import Settings
from tests.resumed_talk import NOTHING, further, on_disk

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
@pytest.mark.tokens
def test_another_process_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.resumed_talk", str(tmp_path)], check=True, cwd=ROOT)
    first = json.loads((tmp_path / "talk.json").read_text())
    for name, history in (("full", "recompute"), ("h2o", "device_prefix")):  # H2O would choose again in a recomputation
        second = further(first[name], on_disk(tmp_path), name)
        assert (first[name]["tier"], second["tier"]) == (None, "disk")
        assert second["reused"] == len(first[name]["fed"])
        assert second["said"] == further(NOTHING, Settings(history=history), name, turns=2)["said"]
