"""Defines the contract of a KV-cache method: what a plug-in imports. docs/method_contract.md gives
the reasons.

Letters in shapes: B batch, H query heads, G key/value heads, g = H/G, T new tokens, S stored
tokens, K chosen tokens, D head size, E model width. KV head i serves query heads i*g ... i*g+g-1.
"""

from __future__ import annotations

from methods.base.cost import Cost, CostError, LayerWorkload
from methods.base.layer import Attended, KVLayer
from methods.base.method import Grids, Method, refuse_other_than_method
from methods.base.request import AttnInput, LayerSpec, NextRow, Piece, RepeatPrompts, Request
from methods.base.state import CacheState, Checks
from methods.budget import Budget, BudgetError, PaperBudget, Plan, check_layers

__all__ = [
    "Attended",
    "AttnInput",
    "Budget",
    "BudgetError",
    "CacheState",
    "Checks",
    "Cost",
    "CostError",
    "Grids",
    "KVLayer",
    "LayerSpec",
    "LayerWorkload",
    "Method",
    "NextRow",
    "PaperBudget",
    "Piece",
    "Plan",
    "RepeatPrompts",
    "Request",
    "check_layers",
    "refuse_other_than_method",
]
