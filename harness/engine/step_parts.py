"""Names the parts of a decode step and the operations that belong to each."""

from __future__ import annotations

# fmt: off
PHASES = {
    "select": (
        "row_scores", "row_weights", "channel_weights", "channel_sums", "pq_weights", "pq_best",
        "group_weights", "group_margins", "top_k", "column_sums", "kmeans", "windowed_sums", "page_scores",
        "token_rows", "pick_channels", "live_scores", "partial_products", "add_received", "pick_overwritten",
        "last_alike", "estimated_logits", "carrying", "row_scores_with_lse", "first_places",
        "log_sum_exps", "count_read", "uniform_draws", "sampled_weights",
    ),
    "fetch": ("gather_rows", "gather_tiers", "put_rows", "rebuild_keys", "rotate", "rotate_to", "decode_rows"),
    "attend": (
        "segment_attention", "segment_attention_with_lse", "attention_with_mean", "merge_attention",
        "merge_attention_with_lse", "coded_attention",
        "prefill_attention", "prefill_attention_with_column_sums", "windowed_attention",
    ),
}
# fmt: on
# rest: the method's time outside operations; model: all outside the method
PARTS = (*PHASES, "rest", "model")


def phase_of(operation: str) -> str:
    """Return the phase of a decode step to which an operation belongs ("select", "fetch" or
    "attend"), or "rest" if no phase names it."""
    return next((phase for phase, names in PHASES.items() if operation in names), "rest")
