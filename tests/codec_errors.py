"""The error of each codec on keys with one large channel and on those of real models: `python -m tests.codec_errors`
prints the table of docs/kernels.md.

A real model reads the first 1024 tokens of the file LICENSE; the queries of the 32 tokens after them attend to their
keys and values, encoded. A GGUF file of another model may be given after --gguf."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from methods.tiers.codec import Codec
from methods.tiers.codecs import codec_of

CODECS = (
    "int8", "fp8", "int4", "int4+4", "nvfp4", "int4h", "tq4", "tq4q", "int4/int2", "tq3", "int2", "int2+4",
)  # fmt: skip
FACTORS = (1, 30, 3000)
TOKENS, QUERIES = 1024, 32


class Inputs(NamedTuple):
    q: Tensor  # [H T D]
    k: Tensor  # [G S D]
    v: Tensor  # [G S D]


class Errors(NamedTuple):
    """Root mean squares: of the logits' errors, less each query's mean, which a softmax does not see, in nats; of the
    errors of values and of the output, as shares of their own."""

    logits: float
    values: float
    output: float


def one_large(factor: float) -> list[Inputs]:
    """Normal keys of which one channel is `factor` times the others, and as much less of the queries: in products all
    channels count alike."""
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, n, 128, generator=drawn) for heads, n in ((4, QUERIES), (4, TOKENS), (4, TOKENS)))
    k[..., 5] *= factor
    q[..., 5] /= factor
    return [Inputs(q, k, v)]


def of_model(source: Any) -> list[Inputs]:
    """Return what the layers of a model attend with, after the rotation."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def recorded(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(Inputs(q[0, :, TOKENS:], k[0, :, :TOKENS], v[0, :, :TOKENS]))
        return sdpa_attention_forward(module, q, k, v, *rest, **more)

    AttentionInterface.register("recorded", recorded)
    loaded = source.load("fp32", "cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    model.set_attn_implementation("recorded")
    text = (Path(__file__).parents[1] / "LICENSE").read_text()
    with torch.inference_mode():
        model(tokenizer(text, return_tensors="pt").input_ids[:, : TOKENS + QUERIES])
    return seen


def errors(codec: Codec, layers: Sequence[Inputs]) -> Errors:
    """Return the errors of a codec, the mean over layers."""
    every = torch.tensor([_of_layer(codec, *layer) for layer in layers], dtype=torch.float64)
    return Errors(*every.mean(0).tolist())


def _of_layer(codec: Codec, q: Tensor, k: Tensor, v: Tensor) -> Errors:
    k_back, v_back = (x[0] for x in codec.decode_whole(codec.encode(k.unsqueeze(0), v.unsqueeze(0)), torch.float32))
    grouped = q.reshape(len(k), -1, q.shape[-1]) * q.shape[-1] ** -0.5
    logits, found = grouped @ k.mT, grouped @ k_back.mT
    off = found - logits
    out, out_found = logits.softmax(-1) @ v, found.softmax(-1) @ v_back
    return Errors(
        float((off - off.mean(-1, keepdim=True)).square().mean().sqrt()),
        float((v_back - v).norm() / v.norm()),
        float((out_found - out).norm() / out.norm()),
    )


def table(models: dict[str, list[Inputs]]) -> list[list[str]]:
    """Return the cells of each line."""
    synthetic = [one_large(factor) for factor in FACTORS]
    heads = ["codes", "bytes", *(f"channel x {factor}" for factor in FACTORS), *models]
    lines = [heads, [":--", *["--:"] * (len(heads) - 1)]]
    for name in CODECS:
        codec = codec_of(name)
        layout = codec.layout(128, torch.bfloat16)
        cells = [name, f"{layout.token_bytes + layout.block_bytes / codec.block:g}"]
        for layers in synthetic:
            found = errors(codec, layers)
            cells.append(f"{found.logits:.3f}, {found.output:.3f}")
        cells += [", ".join(f"{x:.3f}" for x in errors(codec, layers)) for layers in models.values()]
        lines.append(cells)
    return lines


if __name__ == "__main__":
    from harness.models.embedded import SmolLM2
    from harness.models.gguf import GGUF

    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", metavar="FILE", help="of a model that is measured besides SmolLM2-135M")
    options = parser.parse_args()
    sources: dict[str, Any] = {"SmolLM2-135M": SmolLM2()}
    if options.gguf:
        sources[Path(options.gguf).stem.partition("-instruct")[0]] = GGUF(file=options.gguf)
    for line in table({name: of_model(source) for name, source in sources.items()}):
        print(f"| {' | '.join(line)} |")
