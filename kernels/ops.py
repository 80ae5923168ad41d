"""Lists the operations, each with its backends in order of preference. The torch backend's file has
shapes and formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels.dispatch import REFERENCE, Op

_FOLDERS = {"triton": "kernels.gpu", "cpu": "kernels.cpu"}  # of a backend's modules; else kernels


def _op(name: str, torch: str = "reference", **others: str) -> Op:
    """Return an operation of the `others`, from the most preferred backend on, and of plain torch,
    which comes last. Each is given with its module."""
    modules = others | {REFERENCE: torch}
    return Op(name, **{one: f"{_FOLDERS.get(one, 'kernels')}.{modules[one]}" for one in modules})


prefill_attention = _op(
    "prefill_attention",
    # on Hopper faster than flash-attn for whole prompts, and the same kernel for later chunks
    fused="fused",
    flash="flash",
    triton="prefill",
    cpu="prefill",
    sdpa="sdpa",
)
# the first two have not been compared on a GPU; Triton's takes every call
_DECODE = {"triton": "decode", "flash": "flash", "cpu": "decode"}
segment_attention = _op("segment_attention", **_DECODE)
segment_attention_with_lse = _op("segment_attention_with_lse", **_DECODE)
attention_with_mean = _op("attention_with_mean", "mean_value", triton="mean_value")
coded_attention = _op("coded_attention", "coded", triton="coded", cpu="coded")
decode_rows = _op("decode_rows", "coded", triton="coded", cpu="coded")
encode_codes = _op("encode_codes", "quantise", triton="encode")
merge_attention = _op("merge_attention", triton="decode")
merge_attention_with_lse = _op("merge_attention_with_lse", triton="decode")
gather_rows = _op("gather_rows", triton="copy", cpu="copy")
gather_tiers = _op("gather_tiers", triton="copy", cpu="copy")
put_rows = _op("put_rows", triton="copy", cpu="copy")
row_scores = _op("row_scores", triton="scores", cpu="scores")
row_scores_with_lse = _op("row_scores_with_lse", triton="scores", cpu="scores")
pick_overwritten = _op("pick_overwritten", "overwritten", triton="overwritten")
row_weights = _op("row_weights", triton="scores")
live_scores = _op("live_scores", triton="scores")
add_received = _op("add_received", triton="scores")
page_scores = _op("page_scores", "pages", triton="scores", cpu="scores")
token_rows = _op("token_rows", "pages", triton="pages")
channel_weights = _op("channel_weights", triton="channels", cpu="channels")
pick_channels = _op("pick_channels", "picked", triton="picked")
partial_products = _op("partial_products", "partial", triton="partial")
channel_sums = _op("channel_sums", triton="channels", cpu="channels")
group_weights = _op("group_weights", triton="choose", cpu="choose")
group_margins = _op("group_margins", triton="choose", cpu="choose")
estimated_logits = _op("estimated_logits", "top_p", triton="top_p", cpu="top_p")
carrying = _op("carrying", "top_p", triton="top_p", cpu="top_p")
log_sum_exps = _op("log_sum_exps", "top_p", triton="top_p")
count_read = _op("count_read", "top_p", triton="top_p")
uniform_draws = _op("uniform_draws", "sampled", triton="sampled")
sampled_weights = _op("sampled_weights", "sampled", triton="sampled")
top_k = _op("top_k", triton="top_k", cpu="choose")
first_places = _op("first_places", cpu="choose")
kmeans = _op("kmeans", "kmeans", triton="kmeans", cpu="kmeans")
column_sums = _op("column_sums", "windowed", triton="prefill", cpu="prefill")
prefill_attention_with_column_sums = _op(
    "prefill_attention_with_column_sums", "windowed", triton="prefill", cpu="prefill"
)
windowed_attention = _op(
    "windowed_attention", "windowed", fused="fused", triton="prefill", cpu="prefill"
)
windowed_sums = _op("windowed_sums", "windowed", triton="prefill")
pq_weights = _op("pq_weights", triton="pq", cpu="pq")
pq_best = _op("pq_best", triton="pq")
rebuild_keys = _op("rebuild_keys", triton="rebuild", cpu="rebuild")
last_alike = _op("last_alike", triton="alike", cpu="alike")
attention_inputs = _op("attention_inputs", "block", triton="block", cpu="block")
attention_inputs_stored = _op("attention_inputs_stored", "block", triton="block")
rotate = _op("rotate", "rope", triton="rope")
rotate_to = _op("rotate_to", "rope", triton="rope")
block_output = _op("block_output", "block", triton="block", cpu="block")
block_output_apart = _op("block_output_apart", "block", triton="block")
token_logits = _op("token_logits", "block", triton="block", cpu="block")
likeliest_tokens = _op("likeliest_tokens", triton="likeliest")

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
