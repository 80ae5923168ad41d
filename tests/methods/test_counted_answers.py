"""Methods whose budget is all rows, prompt and answer: what stays against plain loops, and that the budget holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from harness import Engine, attached
from harness.engine.saved_state import Snapshot
from harness.prompts.teacher import Forced
from kernels.dispatch import use_backend
from methods.abilities import APART, ability, refuse
from methods.abilities.bounded_answer import BoundedAnswer, CountedAnswer
from methods.abilities.evict_every import EvictEvery
from methods.abilities.keep_generated import KeepRandom, KeepScored
from methods.abilities.kept_codec import KeptCodec
from methods.abilities.mass import Mass
from methods.abilities.merge import Merge as CaM
from methods.abilities.merge import Merging
from methods.abilities.repeat import Repeat
from methods.adakv import AdaKV
from methods.base import Ability, AttnInput, Budget, Method
from methods.h2o import H2O
from methods.kivi import Kivi
from methods.layers import Layer
from methods.layers.returned import ReturnedError
from methods.rkv import RKV
from methods.snapkv import SnapKV
from methods.tiers.codecs import codec_of
from methods.tova import TOVA, TOVAKeep
from methods.triattention import TriAttention
from tests.batches import together
from tests.methods.synthetic import SHAPES, Sequences, attention
from tests.quick import mostly_slow
from tests.tape import Tape
from tests.tiny import prompt, tiny

Rows = list[list[list[int]]]  # text positions by sequence and KV head, ascending
PROMPT, STEPS, AGAIN = 41, 30, 12
RKV_SMALL = RKV(window=4, buffer=6, kernel=3)
METHODS: dict[str, Method] = {"tova": TOVA(), "rkv": RKV_SMALL}


def extra_rows(method: Method) -> int:
    counted = ability(method, CountedAnswer)
    assert counted is not None
    return counted.extra_rows


def tova(s: Sequences, rows: Rows, last: int, size: int) -> Rows:
    """What TOVA keeps after the token at position `last`: all heads the same."""
    kept = []
    for b, heads in enumerate(rows):
        weights = torch.zeros(len(heads[0]), dtype=torch.float64)
        for h in range(s.shape.heads):
            keys = s.k(0)[b, h // (s.shape.heads // s.shape.groups), heads[0]].double()
            weights += (keys @ s.q(0)[b, h, last].double() * s.shape.dim**-0.5).softmax(0)
        best = weights[:-1].topk(size - 1).indices.tolist()
        kept.append([sorted([*(heads[0][i] for i in best), last])] * len(heads))
    return kept


def rkv(s: Sequences, rows: Rows, last: int, size: int) -> Rows:
    """What R-KV keeps: every head the best of its own."""
    window, reach = RKV_SMALL.window, RKV_SMALL.kernel // 2
    kept: Rows = []
    for b, heads in enumerate(rows):
        kept.append([])
        for g, places in enumerate(heads):
            k, group = s.k(0)[b, g, places].double(), s.shape.heads // s.shape.groups
            others = len(places) - window
            weights = torch.zeros(others, dtype=torch.float64)
            for t in range(last - window + 1, last + 1):
                logits = torch.stack([k[:others] @ s.q(0)[b, g * group + i, t].double() for i in range(group)])
                weights += (logits.amax(0) * s.shape.dim**-0.5).softmax(0) / window
            pooled = torch.stack([weights[max(0, i - reach) : i + reach + 1].max() for i in range(others)])
            alike = torch.nn.functional.cosine_similarity(k[:, None], k[None], dim=-1)
            for i, row in enumerate(alike):
                row[i] = 0
                row[max((j for j in range(len(places)) if row[j] > 0.5), default=0)] = 0
            scores = 0.1 * pooled - 0.9 * alike.mean(0).softmax(0)[:others]
            best = scores.topk(size - window).indices.tolist()
            kept[b].append([places[i] for i in sorted([*best, *range(others, len(places))])])
    return kept


KEPT: dict[str, Callable[[Sequences, Rows, int, int], Rows]] = {"tova": tova, "rkv": rkv}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("budget", [24, 50], ids=["at the seal", "in the answer"])
def test_what_stays_is_what_a_plain_loop_keeps(name: str, shape: Any, budget: int) -> None:
    """In a first turn and in a further one, with the attention over it and all that is said of it. TOVA ranks a prompt
    once, so the seal leaves room for the next token's row."""
    s, method = Sequences(shape, PROMPT + STEPS + AGAIN + 5).sharpened(6), METHODS[name]
    s.raw_k[..., 10:30, :] = s.raw_k[..., 9:10, :]  # so many keys are alike, up to their rotation
    (layer,) = s.start(method, budget)
    most, at_seal = budget + extra_rows(method), budget - (name == "tova")
    stored: Rows = [[[] for _ in range(shape.groups)] for _ in range(shape.batch)]
    dropped, position, turns = 0, 0, ((PROMPT, STEPS), (AGAIN, 5))
    for length, steps in turns:
        end = position + length
        s.prefill([layer], position, end, chunk=7)
        layer.seal()
        stored = [[[*head, *range(position, end)] for head in heads] for heads in stored]
        if len(stored[0][0]) > budget:
            stored = KEPT[name](s, stored, end - 1, at_seal)
            assert layer.kept_positions().tolist() == stored  # type: ignore[attr-defined]
        for position in range(end, end + steps):
            if len(stored[0][0]) == most:
                stored, dropped = KEPT[name](s, stored, position - 1, min(budget, most - 1)), dropped + 1
            stored = [[[*head, position] for head in heads] for heads in stored]
            (out,) = s.decode([layer], position)
            wanted = attention(s.q(0)[:, :, position, None], s.k(0), s.v[0], stored, shape.dim**-0.5)
            assert_close(out, wanted)
            _check_what_is_said(layer, stored, end)
        position = end + steps
    assert dropped


def _check_what_is_said(layer: Any, stored: Rows, end: int) -> None:
    """Of a step that read the rows `stored`, after a turn whose prompt ended before position `end`."""
    assert layer.stored_positions().sort(-1).values.tolist() == stored
    heads = [head for sequence in stored for head in sequence]
    from_prompt = sum(place < end for head in heads for place in head) / len(heads)
    assert layer.attended == pytest.approx((from_prompt, len(heads[0]) - from_prompt))
    assert sum(torch.as_tensor(count).double().mean().item() for count in layer.readings(1)) == pytest.approx(
        len(heads[0])
    )
    for places, wanted in (
        (layer.read_positions(), [[place for place in head if place < end] for head in heads]),
        (layer.generated_positions(), [[place for place in head if place >= end] for head in heads]),
    ):
        if places is not None:
            assert [[place for place in head if place >= 0] for head in places.flatten(0, 1).tolist()] == wanted


@pytest.mark.parametrize("name", METHODS)
def test_hundreds_of_forced_tokens_hold_the_budget_at_every_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, forced, decode = METHODS[name], prompt(401, seed=5), Layer.decode
    most, counts = 40 + extra_rows(method), list[tuple[int, int, float]]()

    def counting(layer: Layer, x: AttnInput) -> Tensor:
        out = decode(layer, x)
        counts.append((layer.store.length, layer.store.k_rows.shape[2], sum(layer.attended)))
        return out

    monkeypatch.setattr(Layer, "decode", counting)
    with attached(tiny("llama"), method, budget=0.25) as kv:
        made = Engine(kv).generate(prompt(160), max_new_tokens=401, sampler=Forced(forced))
    assert made.tokens == forced.tolist()
    assert len(counts) == 3 * 400
    assert all(length <= most and room <= most and read == length for length, room, read in counts)
    assert max(length for length, *_ in counts) == most
    assert made.measured["attended_total"] == pytest.approx(sum(read for *_, read in counts) / len(counts))


@pytest.mark.tokens
@pytest.mark.parametrize("name", [*METHODS, "cam"])
def test_a_cache_goes_back_to_its_seal_with_all_rows(name: str) -> None:
    """Between two answers to questions on one context, although each has dropped rows of it."""
    answers, abilities = [], (CaM("cam"),) * (name == "cam")
    with attached(tiny("llama"), METHODS.get(name, TOVA()), budget=0.4, abilities=abilities) as kv:
        engine, ids = Engine(kv), prompt(83)
        cache = engine.cache(ids, 60)
        logits = engine.prefill(cache, ids, whole=True)
        cache.seal()
        sealed = Snapshot(cache)
        for seed in (1, 2, 1):
            question = prompt(5, seed=seed)
            made = engine.complete(cache, logits, question, began=perf_counter(), max_new_tokens=40)
            answers.append(made.tokens)
            sealed.restore()
    assert answers[0] == answers[2] != answers[1]


class MergeKeep(TOVAKeep):
    """What goes is merged into the first token: its value is then half the mean of all."""

    method: Merge

    def keep(self, size: int) -> Tensor:
        rows, v = super().keep(size), self.store.v
        merged = (v[:, :, :1] + v.mean(2, keepdim=True)) / 2
        if self.method.how == "write":
            self.layer.write(rows[..., :1] * 0, v=merged.double())
            return rows
        if self.method.how == "copy":
            self.store.v_rows = self.store.v_rows.clone()
        self.store.v[:, :, :1] = merged
        return rows


@dataclass(frozen=True, kw_only=True)
class Merge(TOVA):
    policies = (MergeKeep,)

    how: str = "write"


@pytest.mark.tokens
def test_a_cache_goes_back_to_values_that_were_merged_since() -> None:
    """To its seal, and to a step after which values are merged into those of earlier merges."""
    answers = {}
    for how in ("copy", "write"):
        with attached(tiny("llama"), Merge(how=how), budget=0.4) as kv:
            engine, cache = Engine(kv), kv.cache(capacity=120)
            logits = engine.prefill(cache, prompt(83), whole=True)
            cache.seal()
            tried, saved = [], Snapshot(cache)
            for _ in range(3):
                for seed in (1, 2, 1):
                    made = engine.complete(cache, logits, prompt(5, seed=seed), began=0.0, max_new_tokens=20)
                    tried.append(made.tokens)
                    saved.restore()
                assert tried[-3] == tried[-1] != tried[-2]
                for token in prompt(4, seed=3)[0]:
                    engine.decode(token.view(1, 1), cache, None)
                saved = Snapshot(cache)
            answers[how] = tried
    assert answers["copy"] == answers["write"]


@pytest.mark.parametrize("budget", [0.4, 100], ids=["first generation", "first that drops"])
def test_values_that_a_step_changes_in_place_end_the_run(budget: float) -> None:
    said = pytest.raises(ReturnedError, match=r"In layer 0 of Merge, a step changed stored values.*layer\.write")
    with attached(tiny("llama"), Merge(how="in place"), budget=budget) as kv, said:
        for new in (4, 40):
            Engine(kv).generate(prompt(83), max_new_tokens=new)


@pytest.mark.tokens
@pytest.mark.parametrize(("method", "abilities"), [(Merge(), ()), (TOVA(), (CaM("cam"),))], ids=["own", "cam"])
def test_sequences_in_slots_get_what_each_gets_alone(method: Method, abilities: Any) -> None:
    """Each drops rows at steps of its own; where all of it fits, steps are shared."""
    asked, counts = [prompt(length, seed=length) for length in (33, 90, 61, 83)], (6, 30, 14, 23)
    with attached(tiny("llama"), method, budget=46, abilities=abilities) as kv:
        engine = Engine(kv)
        alone = [engine.generate(ids, max_new_tokens=new).tokens for ids, new in zip(asked, counts, strict=True)]
        assert [answer.tokens for answer in together(engine, asked, counts)] == alone


RANKED = (EvictEvery(9),)
# between two of these steps, rows go or a block is quantised
PREPARING: dict[str, tuple[Method, Any, tuple[Ability, ...]]] = {
    "rkv": (RKV(window=4, buffer=9, kernel=3), 40, ()),
    "rkv in its buffer": (RKV(), 0.4, ()),
    "tova": (TOVA(), 40, ()),
    "tova in its budget": (TOVA(), 110, ()),
    "triattention": (TriAttention(buffer=9, calibration_tokens=64), 40, ()),
    "snapkv": (SnapKV(window=4), 40, RANKED),
    "adakv": (AdaKV(window=4), 40, RANKED),
    "h2o": (H2O(), 40, RANKED),
    "generated": (SnapKV(window=4), Budget(40, generated=66), (KeepScored(),)),
    "kivi": (Kivi(group=8, residual=16), None, ()),
}


@pytest.mark.tokens
@pytest.mark.parametrize("name", mostly_slow([*PREPARING], "rkv", "tova", "snapkv", "kivi"))
def test_steps_between_two_that_prepare_are_captured_and_shared(name: str) -> None:
    """Each sequence prepares at steps of its own. The first answer is checked, in steps that are captured alone."""
    (method, budget, abilities), new = PREPARING[name], 80 if name == "generated" else 30
    how: dict[str, Any] = {"abilities": abilities, "calibration": prompt(64, seed=9)}
    with attached(tiny("llama"), method, budget=budget, **how) as kv, use_backend("torch"):
        plain, engine = Engine(kv), Engine(kv, graphs=Tape())
        asked, counts = [prompt(length, seed=length) for length in (33, 83, 61, 30)], (6, new, 14, 23)
        wanted = [plain.generate(ids, max_new_tokens=n) for ids, n in zip(asked, counts, strict=True)]
        alone = [engine.generate(ids, max_new_tokens=n) for ids, n in zip(asked, counts, strict=True)]
        assert (engine.plain_steps, alone[1].capture_s is None) == (None, False)
        for made in (alone, together(plain, asked, counts), together(engine, asked, counts)):
            for one, other in zip(made, wanted, strict=True):
                assert (one.tokens, one.kv) == (other.tokens, other.kv)
                assert one.measured == pytest.approx(other.measured, nan_ok=True)
        assert (engine.plain_steps, engine.one_by_one, plain.one_by_one) == (None, None, None)


@pytest.mark.parametrize("name", ["rkv", "tova"])
def test_one_captured_step_serves_between_all_that_prepare(name: str) -> None:
    pytest.importorskip("kernels.cpu.decode")  # plain torch reads the memory of one sequence
    with attached(tiny("llama"), PREPARING[name][0], budget=40) as kv:
        engine, tape = Engine(kv), Tape()
        engine.generate(prompt(60), max_new_tokens=2)  # the first answer is checked
        engine.graphs, engine.forward.stores = tape, True  # type: ignore[union-attr]
        for seed in range(2):
            engine.generate(prompt(83, seed=seed), max_new_tokens=30)
    assert tape.captured == 1


def test_rows_that_were_written_over_others_are_handed_over_in_order() -> None:
    """And steps go on as if nothing had been."""
    logits: list[list[Tensor]] = []
    with attached(tiny("llama"), TOVA(), budget=40) as kv:
        for hands_over in (True, False):
            engine, cache = Engine(kv), kv.cache(capacity=200)
            engine.prefill(cache, prompt(83), whole=True)
            cache.seal()
            steps = [engine.run(token, cache) for token in prompt(22, seed=3).split(1, 1)]
            if hands_over:
                places = cache.contents()[0]["positions"]
                assert torch.equal(places, places.sort(-1).values)
                assert 83 <= places[0, 0, -1] == 104
            logits.append([*steps, *(engine.run(token, cache) for token in prompt(9, seed=4).split(1, 1))])
    assert_close(*logits)


def test_of_a_chunk_only_the_last_queries_are_copied() -> None:
    """A chunk of which no machine could hold a copy is a view of one row here."""
    s = Sequences(SHAPES[0], 16)
    layer: Any = s.start(TOVA(), 50)[0]
    s.prefill([layer], 0, 16, chunk=16)
    chunk: Any = SimpleNamespace(q=torch.ones(1, 4, 1, 64).expand(-1, -1, 10**12, -1))
    layer.policies[0].observe(chunk)
    assert torch.equal(layer.policies[0].queries, chunk.q[:, :, -1:])


@pytest.mark.skipif(find_spec("kvpress") is None, reason="kvpress is not installed: `make setup` does it")
@pytest.mark.parametrize("shape", SHAPES)
def test_values_of_rows_that_go_are_merged_as_in_kvpress(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CaM with TOVA's scores, with draws that depend on the chances alone, so that they are the same."""
    from kvpress import CAMPress, TOVAPress

    def draws(chances: Tensor) -> Tensor:
        return (chances * 1000 % 1 < chances).float()

    monkeypatch.setattr(torch, "bernoulli", draws)
    monkeypatch.setattr(Merging, "draws", lambda state, chances: draws(chances))
    most, start, merged = 23, 9, 0
    s = Sequences(shape, start + 60)
    (layer,) = s.start(TOVA(), most + 1, abilities=(CaM("cam"),))
    s.seal([layer], 0, start)
    press: Any = CAMPress(base_press=TOVAPress(), compression_interval=1, target_size=most)
    press.layer_step_counts = {0: 1}
    k, v = s.k(0)[:, :, :start], s.v[0][:, :, :start]
    sums = k.new_zeros(*k.shape[:2], 0)
    for position in range(start, s.length):
        s.decode([layer], position)
        k, v = (torch.cat([held, x[:, :, position, None]], 2) for held, x in ((k, s.k(0)), (v, s.v[0])))
        assert_close(layer.store.v, v)  # type: ignore[attr-defined]
        grouped = s.q(0)[:, :, position].unflatten(1, (shape.groups, -1))
        weights = (grouped @ k.mT * shape.dim**-0.5).softmax(-1)  # [B G g S]
        sums = torch.nn.functional.pad(sums, (0, k.shape[2] - sums.shape[2])) + weights.mean(2)
        scores = torch.nn.functional.pad(weights[..., :-1].mean((1, 2)), (0, 1), value=9.0)
        press.base_press = SimpleNamespace(compression_ratio=0, score=lambda *_, scores=scores: scores[:, None])
        if k.shape[2] > most:
            before = v.clone()
            press._running_attn_sum = {0: sums}
            k, v = press.compress(SimpleNamespace(layer_idx=0), None, k, v, sums, {})
            sums, merged = press._running_attn_sum[0], merged + (not torch.isin(v, before).all())
    assert merged > 5


def test_only_methods_whose_rows_go_take_a_merge() -> None:
    refuse(TOVA(), (CaM("cam"),))
    for method in (SnapKV(), TriAttention()):
        with pytest.raises(ValueError, match=f"{type(method).__name__} takes no merge=cam"):
            refuse(method, (CaM("cam"),))


GIVEN = {
    Mass: Mass(0.9),
    BoundedAnswer: BoundedAnswer(8),
    KeepRandom: KeepRandom(1),
    EvictEvery: EvictEvery(8),
    KeptCodec: KeptCodec(codec_of("tq4")),
    CaM: CaM("cam"),
}


@pytest.mark.parametrize("own", [CountedAnswer(), Repeat(chunk=9), *GIVEN.values()], ids=lambda own: type(own).__name__)
@pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)
def test_abilities_that_do_not_go_together_are_refused_by_name(own: Ability, kind: type[Ability]) -> None:
    """Of a method that takes all that settings give, and has one ability of its own or from another setting."""
    by_itself = not isinstance(own, tuple(GIVEN))
    method = type("Able", (SnapKV,), {"abilities": (own,) * by_itself, "takes": dict.fromkeys(GIVEN)})()
    given = (GIVEN[kind],) if by_itself else tuple({type(own): own, kind: GIVEN[kind]}.values())
    pairs = ((type(one), type(other)) for one in (own, *given) for other in given)
    lacks = CaM in map(type, given) and not (by_itself and own.budgets)
    why = "no rows go while its answer grows" if lacks else next((APART[pair] for pair in pairs if pair in APART), None)
    with nullcontext() if why is None else pytest.raises(ValueError, match=f"^Able .*{why}"):
        refuse(method, given)
