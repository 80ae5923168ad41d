"""The benchmark of one layer: what it times is a step as the engine runs it, and what it says of it adds up."""

from __future__ import annotations

import argparse
import json
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.bench import __main__ as bench
from harness.bench import layer
from harness.bench.common import methods
from harness.bench.common.operations import bytes_read
from harness.bench.common.synthetic import LayerShape
from harness.bench.layer import LayerDecoding
from harness.engine.step_parts import PHASES
from kernels import ops
from kernels.dispatch import watched
from methods.abilities import ability
from methods.abilities.bounded_answer import CountedAnswer
from tests.harness.bench.conftest import LIMITS

SHAPE = LayerShape(heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--budget", "128", "--dtype", "fp32", "--rounds", "2"]
TOKENS, TOKEN_BYTES = 600, 2 * 2 * 64 * 4  # keys and values of 2 heads in fp32


def options(*more: str) -> argparse.Namespace:
    return layer.parser().parse_args([*SMALL, *more])


def test_one_command_writes_table_figures_and_picture(tmp_path: Path) -> None:
    chosen = ["full", "pqcache", "quest:page_size=8"]
    arguments = ["layer", *SMALL, "--tokens", "300", str(TOKENS), "--methods", *chosen, "--out", str(tmp_path)]
    assert bench.main(arguments) == 0
    made = json.loads((tmp_path / "result.json").read_text())
    assert made["synthetic"]
    assert made["limits"] == LIMITS
    assert [(row["tokens"], row["method"]) for row in made["rows"]] == [(n, m) for n in (300, TOKENS) for m in chosen]
    for row in made["rows"]:
        for key in ("step_s", "full_s", "speedup"):
            middle, low, high = row[key]
            assert 0 < low <= middle <= high
            assert isfinite(high)
        assert row["full_s"][1] / row["step_s"][2] <= row["speedup"][0] <= row["full_s"][2] / row["step_s"][1]
        assert set(row["parts_s"]) == {*PHASES, "rest"}
        assert row["parts_s"]["attend"] > 0
        assert (row["parts_s"]["select"] > 0) == (row["method"] != "full")
        assert row["gb_s"] == pytest.approx(row["read_bytes"] / row["step_s"][0] / 1e9)
        assert row["fallback"] is None
        assert f"methods.{row['method'].partition(':')[0]}" in row["code"]
        assert any(module.startswith("kernels.") for module in row["code"])
        assert None not in row["code"].values()
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {TOKENS} | {name} |" in table for name in chosen)
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize("name", [name for name in methods.names() if methods.load(name).uses_budget])
def test_a_method_reads_its_budget_and_less_than_full(name: str) -> None:
    row = _row(name)
    if counted := ability(methods.load(name), CountedAnswer):
        assert row["attended"] <= 128 + counted.extra_rows
    else:
        assert 0 < row["attended"] - 128 <= 16, "generated tokens come on top"
    assert row["read_bytes"] < TOKENS * TOKEN_BYTES


def _rows(*words: str) -> list[dict[str, Any]]:
    found: list[Any] = []
    report: Any = SimpleNamespace(add=lambda row, line: found.append(row), skips=lambda what: False)
    layer.run(options(*words, "--tokens", str(TOKENS)), report)
    return found


def _row(name: str, *words: str) -> dict[str, Any]:
    (row,) = _rows("--methods", name, *words)
    return row


def test_a_codec_and_a_mass_reach_the_methods_that_take_them() -> None:
    refused, coded, chosen = _rows("--codec", "tq4", "--methods", "full", "coded", "quest")
    assert refused == {"label": "full", "error": "Full has nothing that a codec is meant for: use it without one."}
    assert coded["read_bytes"] < 0.4 * TOKENS * TOKEN_BYTES
    assert chosen["attended"] == _row("quest")["attended"]
    refused, quest = _rows("--budget-mass", "0.3", "--methods", "snapkv", "quest")
    assert refused["error"].startswith("SnapKV takes no budget_mass=0.3, for it has no second stage")
    assert quest["attended"] < 0.8 * _row("quest")["attended"]


def test_full_reads_every_token_once() -> None:
    row = _row("full")
    assert row["read_bytes"] == (row["attended"] - (layer.TRACED - 1) / 2) * TOKEN_BYTES  # in its middle step


def test_every_operation_of_a_step_has_a_phase_and_its_bytes() -> None:
    """Whatever method runs it: the names of all that ran are known."""
    seen = {}

    def note(name: str, arguments: tuple[Any, ...], call: Any) -> Any:
        seen[name] = bytes_read(name, arguments)
        return call()

    for name in methods.names():
        decoding = LayerDecoding(methods.load(name), SHAPE, TOKENS, options())
        decoding.advance()
        with watched(note):
            decoding.step()
    phased = {name for names in PHASES.values() for name in names}
    assert set(seen) <= phased <= {op.name for op in ops.ALL}
    assert all(count > 0 for count in seen.values())
