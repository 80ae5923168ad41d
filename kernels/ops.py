"""The operations, each with its backends in order of preference. Shapes and formulas: in the torch backend's file."""

from __future__ import annotations

from kernels.dispatch import Op

prefill_attention = Op(
    "prefill_attention",
    triton="kernels.gpu.prefill:prefill_attention",
    cpu="kernels.cpu.prefill:prefill_attention",
    sdpa="kernels.sdpa:prefill_attention",
    torch="kernels.reference:prefill_attention",
)
segment_attention = Op(
    "segment_attention",
    triton="kernels.gpu.decode:segment_attention",
    cpu="kernels.cpu.decode:segment_attention",
    torch="kernels.reference:segment_attention",
)
segment_attention_with_lse = Op(
    "segment_attention_with_lse",
    triton="kernels.gpu.decode:segment_attention_with_lse",
    cpu="kernels.cpu.decode:segment_attention_with_lse",
    torch="kernels.reference:segment_attention_with_lse",
)
merge_attention = Op(
    "merge_attention", triton="kernels.gpu.decode:merge_attention", torch="kernels.reference:merge_attention"
)
gather_rows = Op("gather_rows", cpu="kernels.cpu.copy:gather_rows", torch="kernels.reference:gather_rows")
put_rows = Op("put_rows", cpu="kernels.cpu.copy:put_rows", torch="kernels.reference:put_rows")
row_scores = Op(
    "row_scores",
    triton="kernels.gpu.scores:row_scores",
    cpu="kernels.cpu.scores:row_scores",
    torch="kernels.reference:row_scores",
)
channel_scores = Op(
    "channel_scores",
    triton="kernels.gpu.channels:channel_scores",
    cpu="kernels.cpu.channels:channel_scores",
    torch="kernels.reference:channel_scores",
)
channel_sums = Op(
    "channel_sums",
    triton="kernels.gpu.channels:channel_sums",
    cpu="kernels.cpu.channels:channel_sums",
    torch="kernels.reference:channel_sums",
)
group_weights = Op(
    "group_weights",
    triton="kernels.gpu.choose:group_weights",
    cpu="kernels.cpu.choose:group_weights",
    torch="kernels.reference:group_weights",
)
group_margins = Op("group_margins", cpu="kernels.cpu.choose:group_margins", torch="kernels.reference:group_margins")
log_sum_exp = Op(
    "log_sum_exp",
    triton="kernels.gpu.choose:log_sum_exp",
    cpu="kernels.cpu.choose:log_sum_exp",
    torch="kernels.reference:log_sum_exp",
)
top_k = Op("top_k", cpu="kernels.cpu.choose:top_k", torch="kernels.reference:top_k")
kmeans = Op(
    "kmeans", triton="kernels.gpu.kmeans:kmeans", cpu="kernels.cpu.kmeans:kmeans", torch="kernels.kmeans:kmeans"
)
column_sums = Op(
    "column_sums",
    triton="kernels.gpu.prefill:column_sums",
    cpu="kernels.cpu.prefill:column_sums",
    torch="kernels.column_sums:column_sums",
)
prefill_attention_with_column_sums = Op(
    "prefill_attention_with_column_sums",
    triton="kernels.gpu.prefill:prefill_attention_with_column_sums",
    cpu="kernels.cpu.prefill:prefill_attention_with_column_sums",
    torch="kernels.column_sums:prefill_attention_with_column_sums",
)
pq_scores = Op(
    "pq_scores", triton="kernels.gpu.pq:pq_scores", cpu="kernels.cpu.pq:pq_scores", torch="kernels.reference:pq_scores"
)
pq_weights = Op(
    "pq_weights",
    triton="kernels.gpu.pq:pq_weights",
    cpu="kernels.cpu.pq:pq_weights",
    torch="kernels.reference:pq_weights",
)
rebuild_keys = Op(
    "rebuild_keys",
    triton="kernels.gpu.rebuild:rebuild_keys",
    cpu="kernels.cpu.rebuild:rebuild_keys",
    torch="kernels.reference:rebuild_keys",
)
attention_inputs = Op(
    "attention_inputs", cpu="kernels.cpu.block:attention_inputs", torch="kernels.block:attention_inputs"
)
block_output = Op("block_output", cpu="kernels.cpu.block:block_output", torch="kernels.block:block_output")
token_logits = Op("token_logits", cpu="kernels.cpu.block:token_logits", torch="kernels.block:token_logits")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Op))


def forget_used() -> None:
    for op in ALL:
        op.used.clear()


def used_backends() -> dict[str, list[str]]:
    """Which backend ran for which operation since `forget_used`: goes into the record of a run."""
    return {op.name: sorted(op.used) for op in ALL if op.used}
