"""Defines a method's card: what a reader must know before comparing it with another. `python -m harness.list` prints
it."""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    """Describes a method in literal text with keywords, since it is read without importing the method. `{name}` stands
    for the yaml's value of a parameter."""

    prefill: str  # dense or sparse
    rule: str  # evicts or selects, and by what
    unit: str  # what is chosen: token, chunk, page, block
    group_rule: str  # how the query heads of a group come to one choice
    dense_layers: str  # layers that read everything
    sinks: str  # first tokens that are always read
    window: str  # last tokens of the prompt that are always read
    on_device: str
    on_host: str  # with placement=host
    index_cost: str  # what choosing costs: bytes per token of K (2D of 16 bit each), work at the seal
    budget: str  # what counts towards the budget
    deviations: str  # differences from the paper and its released code
    later_turns: str = ""  # what a further turn finds changed from its own prompt; empty: nothing
