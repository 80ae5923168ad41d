"""`backends=FILE` tries backends in another order, which is part of the run and stands beside its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.settings import Settings, SettingsError
from harness.config.values import orders
from kernels import ops
from tests.fast import PQ, niah, run


def written(folder: Path, text: str) -> str:
    (folder / "order.yaml").write_text(text)
    return str(folder / "order.yaml")


def test_a_file_is_a_line_that_names_no_path(tmp_path: Path) -> None:
    line = Settings(backends=written(tmp_path, "top_k: [torch]\nsegment_attention: [flash, triton]\n")).backends
    assert line == "segment_attention=flash,triton;top_k=torch"
    assert Settings(backends=line).backends == line
    assert orders(line) == {"segment_attention": ["flash", "triton"], "top_k": ["torch"]}
    assert Settings(backends=written(tmp_path, "segment_attention: [triton, flash]")).backends is None  # as it is
    for wrong in ("a: [", "- torch", "top_k: torch", "topk: [torch]", "top_k: [cuda]"):
        with pytest.raises(SettingsError, match="backends"):
            Settings(backends=written(tmp_path, wrong))


def test_a_run_computes_and_records_what_was_asked(tmp_path: Path) -> None:
    usual = run(tmp_path, PQ, niah())
    other = run(tmp_path, PQ, niah(), backends=written(tmp_path, "pq_weights: [torch]\ntop_k: [torch]"))
    assert other.folder != usual.folder
    assert other.config["backends"] == "pq_weights=torch;top_k=torch"
    assert (other.info["backends"]["pq_weights"], other.info["backends"]["top_k"]) == (["torch"], ["torch"])
    run(tmp_path / "again", PQ, niah())
    assert ops.top_k.order == tuple(ops.top_k.targets)
