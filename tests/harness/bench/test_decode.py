"""The benchmark of decoding: real and synthetic prompts, every method, nothing that a bare machine lacks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.bench import __main__ as bench
from harness.bench import decode
from harness.bench.common import methods
from harness.bench.common.synthetic import LayerShape
from harness.engine.attach import Attachment
from harness.engine.attach_options import AttachOptions
from harness.engine.hf import layer_specs, routed
from methods.base import CacheState
from methods.full import Full
from methods.layers import Layer
from tests.fast import MODEL, PQ
from tests.tiny import prompt, tiny

ROOT = Path(__file__).parents[3]
SMALL = ["--shape", "tiny", "--layers", "2", "--budget", "100", "--dtype", "fp32", "--rounds", "2", "--new", "4"]


def ran(folder: Path, *words: str) -> dict[str, Any]:
    assert bench.main([*words, "--out", str(folder)]) == 0
    made: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return made


def test_every_method_decodes_beside_full(tmp_path: Path) -> None:
    made = ran(tmp_path, "decode", *SMALL, "--tokens", "300", "--placement", "host")
    dense = [name for name in methods.names() if methods.load(name).dense_prefill]
    assert [row["method"] for row in made["rows"]] == dense
    assert made["synthetic"]
    assert "prompt KV synthetic" in made["title"]
    rows = {row["method"]: row for row in made["rows"]}
    for name, row in rows.items():
        assert row["tpot_s"][0] > 0
        assert row["of_limit"] > 0
        assert row["ttft_s"] is row["tt2t_s"] is None
        assert (row["speedup"] is None) == (name == "full")
        assert (row["host_bytes"] > 0) == (row["moved_bytes_per_step"] > 0)
    assert rows["full"]["attended_prompt"] == 300
    assert rows["pqcache"]["attended_prompt"] == 100
    moved = 2 * 2 * (100 - 32 - 34) * 2 * 16 * 4  # layers, K and V, tokens chosen, KV heads, head size
    assert rows["pqcache"]["moved_bytes_per_step"] == moved
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_batches_decode_together_up_to_the_largest_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real prompts; Full's sequences run in turn where they fit besides."""
    loaded = MODEL.load("fp32", "cpu")
    weights = sum(x.nbytes for x in loaded.model.parameters())
    monkeypatch.setattr("harness.bench.common.arguments.source", lambda shape, layers: MODEL)
    monkeypatch.setattr("harness.bench.decode.free_here", lambda device: (4 * weights, None))
    monkeypatch.setattr("harness.jobs.memory.CONSTANT", 0)  # more than all of so small a model
    words = "--dtype fp32 --rounds 2 --new 4 --tokens 300 --budget 64 --methods full snapkv --batch".split()
    rows = ran(tmp_path, "decode", *words, "1", "3", "max")["rows"]
    assert [(row["method"], row["batch"]) for row in rows[:3]] == [("full", 1), ("snapkv", 1), ("full", 3)]
    for row in rows:
        assert 0 < row["ttft_s"] < row["tt2t_s"]
        assert row["rate"] == pytest.approx(row["batch"] / row["tpot_s"][0])
        assert row["one_by_one"] is None
    assert [row["device_bytes"] / rows[0]["device_bytes"] for row in rows[::2]] == [1, 3, rows[4]["batch"]]
    full, snapkv = rows[4:]
    assert 3 < full["batch"] < snapkv["batch"]
    assert full["speedup"] is snapkv["speedup"] is None
    assert rows[3]["speedup"][0] > 0
    assert (tmp_path / "plot.png").stat().st_size > 1000
    failed = ran(tmp_path, "decode", *words, "999", "1")["rows"][0]
    assert f"holds {full['batch']} sequences" in failed["error"]


def options(**changes: Any) -> argparse.Namespace:
    plain = {"new": 5, "rounds": 2, "synthetic": False, "tokens": [100], "methods": [], "budget": 40}
    return argparse.Namespace(**plain | {"placement": "device", "calibration": prompt(64)} | changes)


@pytest.mark.tokens
def test_a_real_prefill_is_the_model_s_own() -> None:
    model, ids = tiny("llama"), prompt(100)
    kv = Attachment(model, Full())
    with routed(model):
        decoding = decode.Decoding(kv, ids, options())
        assert decoding.timed_turn() > 0
    wanted = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)[0, 100:].tolist()
    assert decoding.first[0].tokens == [wanted]
    assert decoding.caches[0].num_tokens == 100 + 2 * 4


def test_a_synthetic_prompt_has_the_model_s_rotation_and_length() -> None:
    model = tiny("llama")
    kv = Attachment(model, PQ, AttachOptions(budget=40))
    with routed(model):
        decoding = decode.Decoding(kv, prompt(100), options(synthetic=True))
        assert not decoding.caches[0].state.checking, "a check of what the method returns is no part of a step"
    assert decoding.caches[0].num_tokens == 100 + 4
    assert decoding.first[0].measured["attended_prompt"] == 40
    spec = layer_specs(model)[0]
    shape = LayerShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu"))
    seen: list[Any] = []

    class Seen(Layer):
        def absorb(self, x: Any) -> None:
            seen.append(x)

    shape.fill([Seen(spec, CacheState(kv.request(capacity=100)), Full())], 100)
    assert torch.equal(seen[0].cos, spec.rope(torch.arange(100))[0])
    loaded = SimpleNamespace(window=200, model=model)
    lengths = [decode.prompt_ids([1] * 9, count, loaded, options(synthetic=True)).shape[1] for count in (100, 200, 300)]  # type: ignore[arg-type]
    assert lengths == [100, 200 - 5 * 3, 300], "a prompt and its answers lie within the window"


def test_the_floor_counts_each_weight_once() -> None:
    model = tiny("llama")
    kv = Attachment(model, Full())
    with routed(model):
        decoding = decode.Decoding(kv, prompt(50), options())
        decoding.timed_turn()
    table = model.get_input_embeddings().weight
    read = sum(x.nbytes for x in model.parameters()) - table.nbytes
    attended = decoding.last[0].measured["attended_total"]
    assert attended is not None
    rows = 3 * 2 * 2 * 16 * 4 * attended
    assert decode.floor_s(decoding, 2.0) == pytest.approx((read + rows) / 2e9)


def test_a_codec_writes_what_a_method_keeps_in_fewer_bits(tmp_path: Path) -> None:
    words = ["decode", *SMALL, "--tokens", "300", "--methods"]
    (plain,) = ran(tmp_path, *words, "coded")["rows"]
    refused, coded = ran(tmp_path, *words, "kivi", "coded", "--codec", "tq4", "--batch", "1")["rows"]
    assert "Kivi has nothing that a codec is meant for" in refused["error"]
    assert coded["device_bytes"] < plain["device_bytes"] / 3


def test_a_budget_that_does_not_fit_is_a_row_that_says_so(tmp_path: Path) -> None:
    small = [word if word != "100" else "8" for word in SMALL]
    made = ran(tmp_path, "decode", *small, "--tokens", "300", "--methods", "full", "pqcache")
    assert "BudgetError" in made["rows"][1]["error"]


@pytest.mark.parametrize(
    ("words", "said"), [(["--methods", "quset"], "did you mean quest?"), (["--tokens", "9000"], "window of 8192")]
)
def test_a_wrong_command_line_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["decode", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_profile_names_the_longest_kernels_of_a_step(tmp_path: Path) -> None:
    made = ran(tmp_path, "profile", *SMALL, "--tokens", "300", "--methods", "full", "kivi")
    assert [row["method"] for row in made["rows"]] == ["full", "kivi"]
    for row in made["rows"]:
        named = {kernel["kernel"]: kernel for kernel in row["kernels"]}
        assert row["layer_us"] == pytest.approx(sum(kernel["calls"] * kernel["each_us"] for kernel in named.values()))
        assert row["kernels"][-1]["kernel"] == "all others"
        assert sorted(row["kernels"][:-1], key=lambda kernel: -kernel["layer_us"]) == row["kernels"][:-1]
    assert "calls per layer" in (tmp_path / "table.md").read_text()
