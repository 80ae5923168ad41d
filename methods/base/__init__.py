"""Defines the contract of a KV-cache method: what a plug-in imports. docs/method_contract.md gives
the reasons.

Letters in shapes: B batch, H query heads, G key/value heads, g = H/G, T new tokens, S stored
tokens, K chosen tokens, D head size, E model width. KV head i serves query heads i*g ... i*g+g-1.
"""

from __future__ import annotations

from methods.base.cost import Cost, CostError, LayerWorkload
from methods.base.layer import SELDOM, Attended, KVLayer, Reading, over_steps
from methods.base.method import (
    Ability,
    Grids,
    Method,
    Takes,
    paper_differs,
    refuse_other_than_method,
)
from methods.base.request import AttnInput, Index, Indexer, LayerSpec, NextRow, Request
from methods.base.state import CacheState, Checks
from methods.budget import Budget, BudgetError, PaperBudget, Plan, check_layers

__all__ = [
    "SELDOM",
    "Ability",
    "Attended",
    "AttnInput",
    "Budget",
    "BudgetError",
    "CacheState",
    "Checks",
    "Cost",
    "CostError",
    "Grids",
    "Index",
    "Indexer",
    "KVLayer",
    "LayerSpec",
    "LayerWorkload",
    "Method",
    "NextRow",
    "PaperBudget",
    "Plan",
    "Reading",
    "Request",
    "Takes",
    "check_layers",
    "over_steps",
    "paper_differs",
    "refuse_other_than_method",
]
