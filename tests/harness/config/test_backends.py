"""`backends=FILE` tries backends in another order, which is part of the run and stands beside its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.backends import orders
from harness.config.settings import Settings, SettingsError
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"backends=/nowhere.yaml cannot be read \(No such file or directory\): name a yaml file"),
        ("a: [", "cannot be read"),
        ("- torch", "should name operations, each with a list: `top_k: \\[torch\\]`"),
        ("top_k: torch", "should name operations, each with a list"),
        ("top_k: [torch, torch]", "should name operations, each with a list"),
        ("topk: [torch]", "there is no operation 'topk'; did you mean top_k?"),
        ("top_k: [cuda]", "top_k has no backend 'cuda': choose from triton, cpu, torch"),
    ],
)
def test_a_wrong_file_gets_a_sentence(text: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=says):
        Settings(backends="/nowhere.yaml" if text is None else written(tmp_path, text))


def test_a_run_computes_and_records_what_was_asked(tmp_path: Path) -> None:
    usual = run(tmp_path, PQ, niah())
    other = run(tmp_path, PQ, niah(), backends=written(tmp_path, "pq_weights: [torch]\ntop_k: [torch]"))
    assert other.folder != usual.folder
    assert other.config["backends"] == "pq_weights=torch;top_k=torch"
    assert (other.info["backends"]["pq_weights"], other.info["backends"]["top_k"]) == (["torch"], ["torch"])
    assert other.info["backends"]["kmeans"] == usual.info["backends"]["kmeans"]
    run(tmp_path / "again", PQ, niah())
    assert ops.top_k.order == tuple(ops.top_k.targets)
