"""Costs that several methods share. Each method adds its own terms, in its own file; a test measures them."""

from __future__ import annotations

from methods.base import Case, Cost, Plan

FP32, INT64 = 4, 8  # bytes of an element


def dense(case: Case) -> Cost:
    """Everything on the device, nothing moves."""
    return Cost(case.capacity * case.row_bytes)


def evict(case: Case, kept: int, copies: int = 1) -> Cost:
    """`kept` of the prompt, in `copies` per KV head; room for the generated tokens beside."""
    return Cost((kept + case.reserve) * copies * case.row_bytes) if kept < case.sealed else dense(case)


def select(case: Case, plan: Plan, index_bytes: int) -> Cost:
    """All tokens, those between sinks and window where `placement` says; the index on the device."""
    middle = case.sealed - plan.sinks - plan.local
    cost = dense(case) + Cost(index_bytes)
    return cost + offload(case, middle * case.row_bytes, plan.top * case.row_bytes)


def offload(case: Case, stored: int, moved: int) -> Cost:
    """What `placement=host` changes: `stored` bytes change sides, and `moved` of them come back each step."""
    return Cost(-stored, stored, moved) if case.placement == "host" else Cost(0)


def rope_table(case: Case) -> Cost:
    """cos and sin of every position; one table for all layers, counted with the first."""
    return Cost(2 * case.capacity * case.spec.head_dim * case.element_bytes if case.spec.index == 0 else 0)
