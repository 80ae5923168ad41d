"""Observations against the same figures in plain torch, from a tiny model's own keys, queries and eager attention."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.attention_statistics.observations import (
    AttentionMass,
    ChunkCosines,
    Figures,
    HeavyHitters,
    KeySpectrum,
    Observation,
)
from harness.commands.observe import OBSERVATIONS, main
from harness.engine.attach import observer
from harness.engine.hf import layer_specs
from tests.quick import mostly_slow
from tests.tiny import eager, prompt, tiny

TOKENS = 300
ARGS = ["model=random", "model.shape=tiny", "model.layers=2", "model.tokenizer_name=bytes", "task.lengths=[300]"]


def figures(observation: Observation) -> list[Figures]:
    model = tiny("llama")
    specs = layer_specs(model)
    inputs = observer(model, specs, prompt(TOKENS))(TOKENS)
    return [observation.of_layer(x, spec) for spec, x in zip(specs, inputs, strict=True)]


@cache
@torch.no_grad()
def plain() -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Of each layer: keys before and after the rotation and values, [G N D], and weights [H N N], by transformers."""
    model = eager("llama")
    before: list[Tensor] = []
    projections = [layer.self_attn.k_proj for layer in model.get_decoder().layers]
    for projection in projections:
        projection.register_forward_hook(lambda module, given, out: before.append(out))
    out = model(prompt(TOKENS), output_attentions=True, use_cache=True)
    cached = [(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers]
    unrotated = [keys[0].view(TOKENS, 2, -1).transpose(0, 1) for keys in before]
    return unrotated, [k for k, _ in cached], [v for _, v in cached], [weights[0] for weights in out.attentions]


def test_singular_values_are_those_of_all_heads_as_one_matrix() -> None:
    unrotated, rotated, values, _ = plain()
    for layer, *kinds in zip(figures(KeySpectrum(energy=0.9)), unrotated, rotated, values, strict=True):
        for name, rows in zip(("before", "after", "values"), kinds, strict=True):
            spectrum = torch.linalg.svdvals(torch.cat(list(rows.double()), 1))
            kept = [rank - 1 for rank in layer["ranks"]]
            assert layer[name] == pytest.approx((spectrum / spectrum[0])[kept].tolist(), abs=2e-5)
            held = spectrum.square().cumsum(0) / spectrum.square().sum()
            rank = layer[f"rank_{name}"]
            assert held[rank - 1] >= 0.9 > held[rank - 2]
            u, s, v = torch.linalg.svd(torch.cat(list(rows.double()), 1), full_matrices=False)
            kept = round(0.15625 * len(s))
            lost = (u[:, kept:] * s[kept:]) @ v[kept:]
            assert layer[f"error_{name}"] == pytest.approx((lost.norm() / s.norm()).item(), abs=2e-5)


def test_cosines_are_those_of_each_chunk() -> None:
    unrotated, rotated, _, _ = plain()
    for layer, before, after in zip(figures(ChunkCosines(chunk=7, below=0.3)), unrotated, rotated, strict=True):
        for suffix, keys in (("", after), ("_before", before)):
            least = []
            for head in keys:
                for chunk in head[: TOKENS // 7 * 7].split(7):
                    mean = chunk.mean(0)
                    least.append(min(float(key @ mean / key.norm() / mean.norm()) for key in chunk))
            assert layer[f"least{suffix}"] == pytest.approx(torch.tensor(least).median().item(), abs=1e-4)
            assert layer[f"outliers{suffix}"] == pytest.approx(sum(one < 0.3 for one in least) / len(least), abs=1e-4)
            assert sum(layer[f"histogram{suffix}"]) == pytest.approx(1, abs=1e-3)


def test_mass_is_that_of_the_models_own_weights() -> None:
    *_, weights = plain()
    for layer, exact in zip(figures(AttentionMass(queries=20)), weights, strict=True):
        falling = exact[:, -20:].sort(-1, descending=True).values
        assert layer["top_0.1"] == pytest.approx(falling[..., : TOKENS // 10].sum(-1).mean().item(), abs=1e-4)
        assert layer["top_0.001"] == pytest.approx(falling[..., 0].mean().item(), abs=1e-4)  # one token at least
        assert layer["first"] == pytest.approx(exact[:, -20:, 0].mean().item(), abs=1e-4)
        assert (layer["ranks"][0], layer["ranks"][-1]) == (1, TOKENS)


def test_sparsity_and_heavy_hitters_are_those_of_the_models_own_weights() -> None:
    *_, weights = plain()
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    for layer, exact in zip(figures(HeavyHitters(zero=0.05)), weights, strict=True):
        small = exact < 0.05 * exact.amax(-1, keepdim=True)
        assert layer["sparsity"] == pytest.approx(small[:, seen].float().mean().item(), abs=1e-4)
        received = exact.sum(1).sort(-1, descending=True).values
        share = (received[:, : TOKENS // 5].sum(-1) / received.sum(-1)).mean()
        assert layer["top_0.2"] == pytest.approx(share.item(), abs=1e-4)


@pytest.mark.parametrize("what", mostly_slow(OBSERVATIONS, "chunk_cosines"))
def test_the_command_writes_figures_and_a_picture(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([what, *ARGS, f"results.root={tmp_path}"]) == 0
    [folder] = (tmp_path / "observations").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["what"], result["prompt"]["tokens"], len(result["layers"])) == (what, 300, 2)
    assert result["provenance"]["machine"]
    assert {file.name for file in folder.iterdir()} == {"result.json", "plot.png", "plot.pdf"}
    assert str(folder) in capsys.readouterr().out
    assert main([what, *ARGS, f"results.root={tmp_path}"]) == 0
    assert len(list((tmp_path / "observations").iterdir())) == 1


WRONG = {
    "observation": (["key_spectrumm"], "did you mean key_spectrum?"),
    "option": (["chunk_cosines", "chunkk=4"], "There is no setting chunkk"),
    "value": (["chunk_cosines", "chunk=big"], "chunk=big should be a whole number"),
    "a run's setting": (["chunk_cosines", "budget=0.2"], "budget=0.2 changes nothing for chunk_cosines"),
    "a method": (["chunk_cosines", "method=h2o"], "method=h2o changes nothing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_user_can_get_wrong(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = WRONG[case]
    assert main(words) == 2
    assert message in capsys.readouterr().err
