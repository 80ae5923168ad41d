"""What a method of one's own returns is checked on the first example, and named after method, layer and what came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import Engine, attached
from harness.checks.trial import turn
from methods.abilities import ability
from methods.abilities.bounded_answer import BoundedAnswer, CountedAnswer
from methods.abilities.kept_codec import KeptCodec
from methods.adakv import AdaKV
from methods.base import Budget, CacheState, KVLayer, LayerSpec, Method, Plan
from methods.layers import Keep, Layer, Policy, PolicyMethod, Read, Select
from methods.layers.returned import ReturnedError, check_rows
from methods.snapkv import SnapKV
from methods.sparq import SparQ
from methods.tiers.codec import IntCodec
from tests.fast import niah, run
from tests.methods.synthetic import SHAPES, Sequences
from tests.methods.test_contract import NAMES, small
from tests.tiny import prompt, tiny

LENGTH, SIZE = 80, 16  # of the prompt, and what a budget of a fifth is
Wrong = Callable[[Tensor], Any]  # rows as they should be -> as they are


@dataclass(frozen=True, kw_only=True)
class Own(Method):
    """`policy` makes a layer's policy; what it returns is made `wrong` in layer 1 alone."""

    policy: Callable[[Wrong], Policy]
    wrong: Wrong
    of_turns: Sequence[int] = (1, 2, 3)  # in which it is

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        return [Layer(spec, cache, self, self.policy(self._wrong_in(spec.index))) for spec in specs]

    def _wrong_in(self, layer: int) -> Wrong:
        return self.wrong if layer == 1 else lambda rows: rows


class MyKeep(Keep):
    """The first tokens."""

    turns = 0

    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong

    def keep(self, size: int) -> Tensor:
        self.turns += 1
        rows = torch.arange(size).expand(self.request.batch, self.spec.num_kv_heads, -1)
        return self.wrong(rows.clone()) if self.turns in self.method.of_turns else rows  # type: ignore[attr-defined]


class MyPerHead(MyKeep):
    """Evicts by itself."""

    def evict(self, size: int) -> None:
        self.layer.retain_per_head(self.wrong(self.keep_all(size)))

    def keep_all(self, size: int) -> Any:
        return [torch.arange(size) for _ in range(self.request.batch * self.spec.num_kv_heads)]


class MyRetain(MyKeep):
    """Hands over whatever it likes."""

    def evict(self, size: int) -> None:
        self.layer.retain(self.keep(size))


class MyGenerated(Policy):
    """Says which generated tokens stay."""

    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong

    def keep_generated(self, count: int, size: int) -> Tensor:
        kept: Tensor = self.wrong(torch.arange(count - size, count).expand(1, self.layer.heads, -1).clone())
        return kept


class MySelect(Select):
    """No sinks, the last four tokens, and the first ones of what lies before."""

    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong

    def split(self, budget: int) -> Plan:
        return Plan(0, 4, budget - 4)

    def index(self, keys: Tensor) -> None:
        pass

    def select(self, q: Tensor, top: int) -> Tensor:
        chosen: Tensor = self.wrong(torch.arange(top).expand(len(q), self.spec.num_kv_heads, -1).clone())
        return chosen


class MyPages(MySelect):
    """Pages of two tokens: what `select` returns is no token."""

    check_choice, select_pages = Read.check_choice, MySelect.select

    def select(self, q: Tensor, top: int) -> Tensor:
        return self.select_pages(q, top // 2)

    def rows_of(self, rows: Tensor, plan: Plan) -> Tensor:
        return (rows.unsqueeze(-1) * 2 + torch.arange(2)).flatten(2)


def at(index: int, value: int) -> Wrong:
    """One number of the last head is another."""

    def change(rows: Tensor) -> Tensor:
        rows[0, -1, index] = value
        return rows

    return change


def first_head(change: Wrong) -> Wrong:
    return lambda heads: [change(heads[0]), *heads[1:]]


WRONG: dict[str, tuple[Callable[[Wrong], Policy], Wrong, str]] = {  # its policy, what is wrong, what the error names
    "keep repeats": (MyKeep, at(5, 4), r"MyKeep\.keep.* twice for head 1"),
    "keep is unsorted": (MyKeep, at(5, 3), r"MyKeep\.keep.* before"),
    "keep beyond the end": (MyKeep, at(15, 80), r"MyKeep\.keep.* 80 for head 1"),
    "keep too few": (MyKeep, lambda rows: rows[..., 1:], r"MyKeep\.keep.*1, 2, 15\].*1, 8, 16\]"),
    "keep of other heads": (MyKeep, lambda rows: rows[:, :1], r"MyKeep\.keep.*\[1, 1, 16\]"),
    "keep in int32": (MyKeep, Tensor.int, "int32"),
    "keep elsewhere": (MyKeep, lambda rows: rows.to("meta"), "meta"),
    "keep as a list": (MyKeep, Tensor.tolist, "list"),
    "retain beyond the end": (MyRetain, at(15, 99), r"layer\.retain.* 99 for head 1"),
    "heads that repeat": (MyPerHead, first_head(lambda rows: rows // 2), "retain_per_head.* twice"),
    "a head too few": (MyPerHead, lambda heads: heads[1:], "retain_per_head.* 1 heads"),
    "uneven heads": (MyPerHead, first_head(lambda rows: rows[1:]), "retain_per_head.* 31 rows"),
    "select repeats": (MySelect, at(5, 4), r"MySelect\.select.* twice for head 1"),
    "select out of the middle": (MySelect, at(5, 76), r"MySelect\.select.* 76 for head 1"),
    "select too many": (MySelect, lambda rows: rows[..., [0, *range(12)]], r"MySelect\.select.*\[1, 2, 13\]"),
    "a page twice": (MyPages, at(1, 0), r"MyPages\.rows_of.* twice for head 1"),
    "a page that is not there": (MyPages, at(1, 40), r"MyPages\.rows_of.* 80 for head 1"),
    "pages in fp32": (MyPages, Tensor.double, "float64"),
    "generated beyond": (MyGenerated, at(-1, 8), r"MyGenerated\.keep_generated.* 8 for head 1"),
}


def generate(method: Method, budget: Budget | float, **how: Any) -> None:
    with attached(tiny("llama"), method, budget=budget, **how) as kv:
        Engine(kv).generate(prompt(LENGTH), max_new_tokens=12)


@pytest.mark.parametrize("name", WRONG)
def test_what_came_back_is_named(name: str) -> None:
    policy, wrong, named = WRONG[name]
    limited = policy is MyGenerated
    with pytest.raises(ReturnedError, match=f"^In layer 1 of Own, .*{named}"):
        generate(Own(policy=policy, wrong=wrong), Budget(1.0, generated=8) if limited else 0.2)


@pytest.mark.parametrize("policy", [MyKeep, MyPerHead, MySelect, MyPages, MyGenerated])
def test_what_is_right_runs(policy: Any) -> None:
    """The others of this file would fail with any return value otherwise."""
    generate(Own(policy=policy, wrong=lambda rows: rows), Budget(0.2, generated=8))


def places(method: Method) -> Iterator[tuple[str, IntCodec | None]]:
    for placement in ("device", "host") if method.offloads else ("device",):
        yield placement, None
    if not KeptCodec.refusal(method):
        yield placement, IntCodec(bits=4, group=8)


OTHERS = {  # that choose in another way than their yaml's
    "snapkv": [{"select_per": "query_head"}],
    "pyramidkv": [{"select_per": "query_head"}],
    "quest": [{"select_per": "kv_head"}, {"last_page": False}],
    "infinigen": [{"group_rank": "prob_sum"}, {"column_rule": "query"}],
    "infllm": [{"n_init": 0}],
    "rocketkv": [{"split": 1.0}, {"page_size": 1}],
    "pqcache": [{"cache_tokens": 8, "cache_block": 4}],
    "shadowkv": [{"hit_cache": False}],
    "streaming": [{"positions": "original"}],
}


@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_method_returns_what_it_should(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []  # of all checks, whose return value was looked at

    def noting(given: object, whose: str, **wanted: Any) -> None:
        looks.append(whose)
        check_rows(given, whose, **wanted)

    for module in ("methods.layers.storage", "harness.engine.cache"):
        monkeypatch.setattr(f"{module}.check_rows", noting)
    for change in ({}, *OTHERS.get(name, [])):
        method = replace(small(name), **change)  # type: ignore[arg-type]
        for number, (placement, codec) in enumerate(places(method)):
            generated = None if BoundedAnswer.refusal(method) or ability(method, CountedAnswer) or number else 5
            how = {"placement": placement, "codec": codec, "disk": tmp_path, "calibration": prompt(64, seed=9)}
            with attached(tiny("llama"), method, budget=Budget(0.4, generated=generated), **how) as kv:  # type: ignore[arg-type]
                looks.clear()
                cache = kv.cache(capacity=100, batch=2)
                for length in (62, 19) if number == 0 else (62,):
                    turn(kv, cache, prompt(length, batch=2, seed=length), steps=2 if number else 6)
                first = len(looks)
                turn(kv, kv.cache(capacity=100, batch=2), prompt(62, batch=2), steps=2)
                assert len(looks) == first  # only the first example pays
            if method.uses_budget:
                assert {int(whose.split()[2].rstrip(",")) for whose in looks} >= {1, 2}  # layers that are never dense


def test_a_write_that_would_be_lost_is_refused() -> None:
    refused: dict[str, Method] = {"capturable or of_each": SnapKV(), "rows_stay": SparQ(), "equally many": AdaKV()}
    for reason, method in refused.items():
        s = Sequences(SHAPES[1], 60)
        layer: Any = s.start(method, 45)[0]
        s.seal([layer], 0, 60)
        layer.cache.counters.running = reason.startswith("capturable")
        with pytest.raises(ValueError, match=f"^{type(method).__name__} cannot write keys and values: .*{reason}"):
            layer.write(torch.zeros(2, 2, 1).long(), k=torch.zeros(2, 2, 1, s.shape.dim))


class TwiceKeep(MyKeep):
    def __init__(self) -> None:
        super().__init__(at(5, 4))


@dataclass(frozen=True, kw_only=True)
class Twice(PolicyMethod):
    policies, of_turns = (TwiceKeep,), (1,)


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_run_says_it_and_records_nothing(tmp_path: Path, warmup: int) -> None:
    with pytest.raises(ReturnedError, match=r"^In layer 0 of Twice"):
        run(tmp_path, Twice(), niah(), budget=0.2, warmup=warmup)
    [folder] = tmp_path.iterdir()
    assert (folder / "examples.jsonl").read_text() == ""
