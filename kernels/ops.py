"""Lists the operations, each with its backends in order of preference. The torch backend's file has
shapes and formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels.dispatch import Op

prefill_attention = Op(
    "prefill_attention",
    # on Hopper faster than flash-attn for whole prompts, and the same kernel for later chunks
    fused="kernels.fused",
    flash="kernels.flash",
    triton="kernels.gpu.prefill",
    cpu="kernels.cpu.prefill",
    sdpa="kernels.sdpa",
    torch="kernels.reference",
)
DECODE = {  # the first two have not been compared on a GPU; Triton's takes every call
    "triton": "kernels.gpu.decode",
    "flash": "kernels.flash",
    "cpu": "kernels.cpu.decode",
    "torch": "kernels.reference",
}
segment_attention = Op("segment_attention", **DECODE)
segment_attention_with_lse = Op("segment_attention_with_lse", **DECODE)
attention_with_mean = Op(
    "attention_with_mean", triton="kernels.gpu.mean_value", torch="kernels.mean_value"
)
coded_attention = Op(
    "coded_attention", triton="kernels.gpu.coded", cpu="kernels.cpu.coded", torch="kernels.coded"
)
decode_rows = Op(
    "decode_rows", triton="kernels.gpu.coded", cpu="kernels.cpu.coded", torch="kernels.coded"
)
encode_codes = Op("encode_codes", triton="kernels.gpu.encode", torch="kernels.quantise")
merge_attention = Op("merge_attention", triton="kernels.gpu.decode", torch="kernels.reference")
merge_attention_with_lse = Op(
    "merge_attention_with_lse", triton="kernels.gpu.decode", torch="kernels.reference"
)
gather_rows = Op(
    "gather_rows", triton="kernels.gpu.copy", cpu="kernels.cpu.copy", torch="kernels.reference"
)
gather_tiers = Op(
    "gather_tiers", triton="kernels.gpu.copy", cpu="kernels.cpu.copy", torch="kernels.reference"
)
put_rows = Op(
    "put_rows", triton="kernels.gpu.copy", cpu="kernels.cpu.copy", torch="kernels.reference"
)
row_scores = Op(
    "row_scores", triton="kernels.gpu.scores", cpu="kernels.cpu.scores", torch="kernels.reference"
)
row_scores_with_lse = Op(
    "row_scores_with_lse",
    triton="kernels.gpu.scores",
    cpu="kernels.cpu.scores",
    torch="kernels.reference",
)
pick_overwritten = Op(
    "pick_overwritten", triton="kernels.gpu.overwritten", torch="kernels.overwritten"
)
row_weights = Op("row_weights", triton="kernels.gpu.scores", torch="kernels.reference")
live_scores = Op("live_scores", triton="kernels.gpu.scores", torch="kernels.reference")
add_received = Op("add_received", triton="kernels.gpu.scores", torch="kernels.reference")
page_scores = Op(
    "page_scores", triton="kernels.gpu.scores", cpu="kernels.cpu.scores", torch="kernels.pages"
)
token_rows = Op("token_rows", triton="kernels.gpu.pages", torch="kernels.pages")
channel_weights = Op(
    "channel_weights",
    triton="kernels.gpu.channels",
    cpu="kernels.cpu.channels",
    torch="kernels.reference",
)
pick_channels = Op("pick_channels", triton="kernels.gpu.picked", torch="kernels.picked")
partial_products = Op("partial_products", triton="kernels.gpu.partial", torch="kernels.partial")
channel_sums = Op(
    "channel_sums",
    triton="kernels.gpu.channels",
    cpu="kernels.cpu.channels",
    torch="kernels.reference",
)
group_weights = Op(
    "group_weights",
    triton="kernels.gpu.choose",
    cpu="kernels.cpu.choose",
    torch="kernels.reference",
)
group_margins = Op(
    "group_margins",
    triton="kernels.gpu.choose",
    cpu="kernels.cpu.choose",
    torch="kernels.reference",
)
TOP_P = {"triton": "kernels.gpu.top_p", "cpu": "kernels.cpu.top_p", "torch": "kernels.top_p"}
estimated_logits = Op("estimated_logits", **TOP_P)
carrying = Op("carrying", **TOP_P)
log_sum_exps = Op("log_sum_exps", triton="kernels.gpu.top_p", torch="kernels.top_p")
count_read = Op("count_read", triton="kernels.gpu.top_p", torch="kernels.top_p")
uniform_draws = Op("uniform_draws", triton="kernels.gpu.sampled", torch="kernels.sampled")
sampled_weights = Op("sampled_weights", triton="kernels.gpu.sampled", torch="kernels.sampled")
top_k = Op("top_k", triton="kernels.gpu.top_k", cpu="kernels.cpu.choose", torch="kernels.reference")
first_places = Op("first_places", cpu="kernels.cpu.choose", torch="kernels.reference")
kmeans = Op("kmeans", triton="kernels.gpu.kmeans", cpu="kernels.cpu.kmeans", torch="kernels.kmeans")
column_sums = Op(
    "column_sums",
    triton="kernels.gpu.prefill",
    cpu="kernels.cpu.prefill",
    torch="kernels.windowed",
)
prefill_attention_with_column_sums = Op(
    "prefill_attention_with_column_sums",
    triton="kernels.gpu.prefill",
    cpu="kernels.cpu.prefill",
    torch="kernels.windowed",
)
windowed_attention = Op(
    "windowed_attention",
    fused="kernels.fused",
    triton="kernels.gpu.prefill",
    cpu="kernels.cpu.prefill",
    torch="kernels.windowed",
)
windowed_sums = Op("windowed_sums", triton="kernels.gpu.prefill", torch="kernels.windowed")
pq_weights = Op(
    "pq_weights", triton="kernels.gpu.pq", cpu="kernels.cpu.pq", torch="kernels.reference"
)
pq_best = Op("pq_best", triton="kernels.gpu.pq", torch="kernels.reference")
rebuild_keys = Op(
    "rebuild_keys",
    triton="kernels.gpu.rebuild",
    cpu="kernels.cpu.rebuild",
    torch="kernels.reference",
)
last_alike = Op(
    "last_alike", triton="kernels.gpu.alike", cpu="kernels.cpu.alike", torch="kernels.reference"
)
attention_inputs = Op(
    "attention_inputs", triton="kernels.gpu.block", cpu="kernels.cpu.block", torch="kernels.block"
)
attention_inputs_stored = Op(
    "attention_inputs_stored", triton="kernels.gpu.block", torch="kernels.block"
)
rotate = Op("rotate", triton="kernels.gpu.rope", torch="kernels.rope")
rotate_to = Op("rotate_to", triton="kernels.gpu.rope", torch="kernels.rope")
block_output = Op(
    "block_output", triton="kernels.gpu.block", cpu="kernels.cpu.block", torch="kernels.block"
)
block_output_apart = Op("block_output_apart", triton="kernels.gpu.block", torch="kernels.block")
token_logits = Op(
    "token_logits", triton="kernels.gpu.block", cpu="kernels.cpu.block", torch="kernels.block"
)
likeliest_tokens = Op("likeliest_tokens", triton="kernels.gpu.likeliest", torch="kernels.reference")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Op))


def prefer(orders: Mapping[str, Sequence[str]]) -> None:
    """Change in which order backends are tried, from now on in this process: those that `orders`
    names for an operation come first, then all others in the order of this file. Operations that it
    does not name get the order of this file."""
    for op in ALL:
        op.order = (
            *(first := orders.get(op.name, ())),
            *(name for name in op.targets if name not in first),
        )


def forget_used() -> None:
    """Forget which backends have run, so that `used_backends` starts anew."""
    for op in ALL:
        op.used.clear()


def used_backends() -> dict[str, list[str]]:
    """Return which backends have run for which operation since `forget_used`, for the record of a
    run."""
    return {op.name: sorted(op.used) for op in ALL if op.used}
