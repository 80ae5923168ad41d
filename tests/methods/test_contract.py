"""What every method of conf/method/ must do, whatever it is: a new yaml is tested by being there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from harness.config.catalogue import CONF, Entry
from harness.config.plugins import build
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from methods.abilities import ability
from methods.abilities.bounded_answer import CountedAnswer
from methods.abilities.repeat import Repeat
from methods.base import AttnInput, Budget, Method
from methods.full import Full
from tests.own_methods import own_methods
from tests.quick import mostly_slow
from tests.tiny import prompt, tiny

NAMES = [entry.name for entry in own_methods()]
NAMES += ["kvpress"] * (find_spec("kvpress") is not None)  # one of its presses; tests/harness/bridges has the others
MOST = 24  # prompt tokens that every method's sinks and windows must fit into here
SMALL: dict[str, Any] = {  # parameters with these names, for prompts of 60 to 100 tokens
    "b": 3,
    "beta": 2.0,
    "block": 4,
    "buffer": 3,
    "calibration_tokens": 64,
    "chunk": 2,
    "dense_layers": [0],
    "exc_block": 8,
    "kernel": 3,
    "local_chunks": 2,
    "min_pages": 2,
    "n_init": 2,
    "page_size": 4,
    "r": 6,
    "repr_topk": 2,
    "sinks": 2,
    "window": 4,
}

methods = pytest.mark.parametrize("name", NAMES)


def _yaml(name: str) -> dict[str, Any]:
    return Entry(name, CONF / "method" / f"{name}.yaml").values()


# for tests that run the engine: those that together take every path there is
QUICK = ("adakv", "full", "h2o", "infinigen", "infllm", "kivi", "pqcache", "quest", "rkv", "shadowkv", "snapkv", "tova")
WALKED = mostly_slow(NAMES, *QUICK)
walked = pytest.mark.parametrize("name", WALKED)


def small(name: str) -> Method:
    """The method of a yaml, its windows made small."""
    values = _yaml(name)
    method: Method = build(values | {key: SMALL[key] for key in values.keys() & SMALL.keys()}, "method")
    assert method.smallest_budget <= MOST, f"add small values for {name}'s parameters to SMALL"
    return method


def in_places(*places: str) -> list[tuple[str, str]]:
    """Return every method with each of these places that it can keep rows in."""
    return [(name, place) for name in NAMES for place in places if place == "device" or small(name).offloads]


in_each_place = pytest.mark.parametrize(("name", "placement"), in_places("device", "host"))


def attach(method: Method, budget: float | None, architecture: str = "llama", placement: str = "device") -> Any:
    calibration = prompt(64, seed=9)
    return attached(tiny(architecture), method, budget=budget, placement=placement, calibration=calibration)  # type: ignore[arg-type]


class Step(NamedTuple):
    """One decode step, seen from outside."""

    logits: Tensor  # [B V], of the next token
    attended: list[tuple[float, float]]  # per layer
    read: list[Tensor | None]  # per layer


@torch.inference_mode()
def turn(kv: Attachment, cache: KVCache, ids: Tensor, steps: int = 5, chunk: int | None = None) -> list[Step]:
    """Prefill `ids`, seal, decode greedily. -> the steps; the token of the prefill is fed to the first"""
    if cache.sealed:
        cache.open_turn()
    for part in ids.split(chunk or ids.shape[1], 1):
        logits = kv.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    cache.seal()
    seen = []
    for _ in range(steps):
        best = logits.argmax(-1, keepdim=True)
        logits = kv.model(best, past_key_values=cache, use_cache=True).logits[:, -1]
        layers = cache.layers
        seen.append(Step(logits, [layer.attended for layer in layers], [layer.read_positions() for layer in layers]))
    return seen


def run(method: Method, ids: Tensor, budget: float | None, *, chunk: int | None = None, **how: str) -> list[Step]:
    with attach(method, budget, **how) as kv:
        return turn(kv, kv.cache(capacity=ids.shape[1] + 8, batch=len(ids)), ids, chunk=chunk)


@cache
def full_run(length: int, architecture: str = "llama") -> list[Step]:
    return run(Full(), prompt(length), None, architecture=architecture)


@cache
def full_run_of_a_part(length: int) -> list[Step]:
    return run(Full(), prompt(71)[:, :length], None)[:2]


@cache
def usual_run(method: Method, length: int) -> list[Step]:
    return run(method, prompt(length), 0.4)


@contextmanager
def fresh_memory_full_of_nan() -> Iterator[None]:
    """Torch does this for those who want the same results each time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert bool(torch.empty(3).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_same(steps: list[Step], wanted: list[Step]) -> None:
    """The logits of all steps, and with them the tokens; a token more or less read would show in the second digit."""
    for step, one in zip(steps, wanted, strict=True):
        assert_close(step.logits, one.logits, atol=1e-3, rtol=1e-3)


@pytest.mark.tokens
@methods
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3"])
def test_a_budget_that_covers_everything_gives_fulls_logits(name: str, architecture: str) -> None:
    ids = prompt(61)
    wanted = full_run(61, architecture)
    for budget in (1.0, 10_000) if architecture == "llama" else (1.0,):
        steps = run(small(name), ids, budget, architecture=architecture)
        assert_same(steps, wanted)
        assert steps[-1].attended == [(61, 5)] * 3


@pytest.mark.filterwarnings("ignore:.* fell back on 1 of 1 caches")
@methods
def test_no_length_is_refused_and_a_prompt_too_short_for_the_windows_is_read_whole(name: str) -> None:
    """Whatever share of it the budget is: a share that cannot hold the windows leaves nothing to choose."""
    method, ids, share = small(name), prompt(71), 0.2
    least = method.smallest_budget
    for length in sorted({1, 2, 5, 6, least, least + 1, 4 * least, 5 * least - 1, 5 * least, 71}):
        with attach(method, share) as kv:
            cache = kv.cache(capacity=79)
            steps = turn(kv, cache, ids[:, :length], steps=2)
        asked = Budget(share).tokens(length, 2)
        whole = not method.uses_budget or method.reads_all(length, asked)
        if whole:
            assert_same(steps, full_run_of_a_part(length))
        else:
            assert cache.layers[2].attended.prompt <= asked or name.startswith("pyramidkv")
        said = str(cache.layers[2].fallback)
        assert said.startswith("all is read: ") == (whole and method.uses_budget and asked < length)
        if method.uses_budget and name != "kvpress":
            assert whole == (asked == length or asked < least)


@pytest.mark.bf16
@methods
def test_half_precision_stays_half_precision(name: str) -> None:
    model = deepcopy(tiny("llama")).to(torch.bfloat16)
    with attached(model, small(name), budget=0.4, calibration=prompt(64, seed=9)) as kv:
        steps = turn(kv, kv.cache(capacity=79), prompt(71))
    assert all(step.logits.dtype == torch.bfloat16 and bool(step.logits.isfinite().all()) for step in steps)


@methods
@pytest.mark.parametrize(("length", "budget"), [(61, 0.4), (100, 33), (25, 24)])
def test_no_method_reads_more_of_the_prompt_than_its_budget(name: str, length: int, budget: float) -> None:
    """On average over the layers, for a method may give one more than another; and what it says it read, it read."""
    method = small(name)
    with attach(method, budget) as kv:
        cache = kv.cache(capacity=length + 8)
        steps = turn(kv, cache, prompt(length))
        asked = [
            layer.request.budget.tokens(length, i) if layer.request.budget else length
            for i, layer in enumerate(cache.layers)
        ]
    for count, step in enumerate(steps, 1):
        assert sum(read for read, _ in step.attended) <= sum(asked)
        if counted := ability(method, CountedAnswer):
            assert all(sum(read) <= rows + counted.extra_rows for read, rows in zip(step.attended, asked, strict=True))
        else:
            assert [later for _, later in step.attended] == [count] * 3
        for (read, _), positions in zip(step.attended, step.read, strict=True):
            _check_positions(method, positions, read, length)
    for (read, _), positions, layer in zip(steps[-1].attended, steps[-1].read, cache.layers, strict=True):
        found, excess = read if positions is None else int((positions >= 0).sum()) / 2, layer.union_excess()
        assert found - read == (0 if excess is None else excess.item())


def _check_positions(method: Method, positions: Tensor | None, read: float, length: int) -> None:
    if positions is None:
        assert read == length
        return
    assert positions.shape[:2] == (1, 2)
    heads = [[p for p in head if p >= 0] for head in positions[0].tolist()]  # -1 fills up a shorter union
    assert all(len(set(head)) == len(head) and 0 <= min(head) <= max(head) < length for head in heads)
    count = sum(map(len, heads)) / 2
    if getattr(method, "select_per", "kv_head") == "query_head":
        assert read <= count <= 4 * read  # what the group's heads read together
    else:
        assert count == read


@pytest.mark.tokens
@methods
def test_prefill_in_chunks_changes_nothing(name: str) -> None:
    method, ids = small(name), prompt(83)
    if not method.dense_prefill:
        pytest.skip("its prefill is sparse: what a chunk reads depends on the chunk")
    assert_same(run(method, ids, 0.4, chunk=19), usual_run(small(name), 83))


@pytest.mark.tokens
@methods
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_keys_and_values_elsewhere_change_nothing(name: str, placement: str) -> None:
    method, ids = small(name), prompt(83)
    if not method.offloads:
        with pytest.raises(ValueError, match="placement=device"), attach(method, 0.4, placement=placement):
            pass
        return
    assert_same(run(method, ids, 0.4, placement=placement), usual_run(small(name), 83))


@in_each_place
def test_memory_that_was_never_written_is_never_read(name: str, placement: str) -> None:
    method = small(name)
    ids = prompt(80, batch=2)
    wanted = run(method, ids, 0.5, placement=placement)
    with fresh_memory_full_of_nan():
        assert_same(run(method, ids, 0.5, placement=placement), wanted)


@pytest.mark.tokens
@methods
def test_sequences_of_a_batch_do_not_see_one_another(name: str) -> None:
    ids = torch.cat([prompt(71, seed=seed) for seed in range(3)])
    together = run(small(name), ids, 0.4)
    for i, row in enumerate(ids.split(1)):
        assert_same([step._replace(logits=step.logits[i : i + 1]) for step in together], run(small(name), row, 0.4))


@in_each_place
def test_a_further_turn_goes_on_within_the_budget(name: str, placement: str) -> None:
    method = small(name)
    if name == "kvpress" or ability(method, Repeat):
        pytest.skip("it compresses the first prompt alone; tests of its own say what follows")
    with attach(method, 0.4, placement=placement) as kv:
        cache = kv.cache(capacity=120)
        first = turn(kv, cache, prompt(61))
        second = turn(kv, cache, prompt(26, seed=1))
        third = turn(kv, cache, prompt(3, seed=2))
    sealed = [61, 61 + 5 + 26, 61 + 5 + 26 + 5 + 3]
    for steps, length in zip((first, second, third), sealed, strict=True):
        allowed = [
            layer.request.budget.tokens(length, i) if method.uses_budget else length
            for i, layer in enumerate(cache.layers)
        ]
        assert sum(read for read, _ in steps[-1].attended) <= sum(allowed)
        assert ability(method, CountedAnswer) or steps[-1].attended[0][1] == 5
        for positions, (read, _) in zip(steps[-1].read, steps[-1].attended, strict=True):
            _check_positions(method, positions, read, length)


@pytest.mark.tokens
@methods
def test_further_turns_over_everything_give_fulls_logits(name: str) -> None:
    assert_same(turns_over_everything(small(name)), turns_over_everything(Full()))


@cache
def turns_over_everything(method: Method) -> list[Step]:
    with attach(method, 1.0) as kv:
        turns = kv.cache(capacity=120)
        return [step for length in (61, 26, 3) for step in turn(kv, turns, prompt(length, seed=length))]


@pytest.mark.tokens
@methods
@pytest.mark.parametrize("room", mostly_slow([0, 30], 30), ids=["as_large", "larger"])
def test_a_turn_goes_on_in_another_cache(name: str, room: int) -> None:
    """What is stored of a cache between two turns is all that the next one needs."""
    method, wanted, made = small(name), [], []
    with attach(method, 0.4) as kv:
        for steps, moves in ((wanted, False), (made, True)):
            cache = kv.cache(capacity=120)
            for number, length in enumerate((61, 26, 3)):
                steps += turn(kv, cache, prompt(length, seed=number))
                if moves:
                    stored = [{key: x.clone() for key, x in state.items()} for state in cache.contents()]
                    cache = kv.cache(capacity=120 + room)
                    cache.refill(stored)
    assert_same(made, wanted)
    for mine, theirs in zip(made, wanted, strict=True):
        assert mine.attended == theirs.attended
        for ours, other in zip(mine.read, theirs.read, strict=True):
            assert (ours is None) == (other is None)
            assert ours is None or other is None or torch.equal(ours.sort(-1).values, other.sort(-1).values)


class SharedPrefill(KVCache):
    """The prompt's outputs come from Full's layers, the method only takes its tokens in."""

    full: list[Any]

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        if self.sealed:
            return super().attend(layer, x)
        self._arriving = x.k.shape[2]
        self.layers[layer].absorb(x)
        out: Tensor = self.full[layer].prefill(x)
        return out


@pytest.mark.tokens
@methods
@pytest.mark.parametrize("chunk", [None, 19])
def test_a_shared_prefill_changes_nothing(name: str, chunk: int | None) -> None:
    method, ids = small(name), prompt(71)
    if not method.dense_prefill:
        pytest.skip("the prompt's outputs are not Full's")
    with attach(method, 0.4) as kv:
        made = kv.cache(capacity=79)
        cache = SharedPrefill(made.layers, made.state)
        cache.full, cache.before_seal = Full().start(kv.specs, made.state), made.before_seal
        shared = turn(kv, cache, ids, chunk=chunk)
    assert_same(shared, usual_run(small(name), 71))


@methods
def test_a_budget_too_small_is_an_error_that_names_a_legal_one(name: str) -> None:
    method = small(name)
    least = method.smallest_budget
    if not method.uses_budget or least == 1:
        pytest.skip("any budget is enough")
    with pytest.raises(ValueError, match=f"at least {least}"):
        run(method, prompt(71), least - 1)
    method.check(Budget(least))
    run(method, prompt(71), least)
