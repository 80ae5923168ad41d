"""Models with layers that keep a state: it is saved, restored, copied, joined, handed back and put back."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from harness import Engine, RunningBatch, attached
from harness.cachedattention.turns.caches import DevicePrefix
from harness.checks.contract import CHECKS
from harness.checks.trial import Trial
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.hf import layer_specs
from harness.engine.states import ModelStates, StateError
from harness.jobs.prefill import SharedPrefill
from harness.models.layer_kinds import layer_kinds
from harness.models.state_modules import state_modules
from methods.base import Method
from methods.full import Full
from tests.batches import together
from tests.harness.cachedattention.turns.test_caches import MB, Talk, plain, stored
from tests.methods.test_contract import small
from tests.tiny import LATENT, STATEFUL, fresh, prompt, saved, tiny

NEW, CHUNK, CAPACITY = 6, 7, 120
LENGTHS = (31, 22)
ROW = 2 * 2 * 16 * 4  # bytes of a token in one layer with keys and values
FAMILY = "qwen3_5_text"  # where one family stands for all
families = pytest.mark.parametrize("family", STATEFUL)
BORROWS = "gemma4_e2b"  # it has no states: layers borrow keys and values of others
UNEVEN = "mimo_v2_flash"  # nor has it: heads differ between kinds of layers, and values from keys
and_others = pytest.mark.parametrize("family", [*STATEFUL, BORROWS, UNEVEN, *LATENT])
either = pytest.mark.parametrize("family", [FAMILY, BORROWS, "deepseek_v3"])


def prompts() -> list[Tensor]:
    return [prompt(length, seed=length) for length in LENGTHS]


def by_loop(family: str, ids: Tensor, cache: Any = None, **more: Any) -> list[list[int]]:
    """The tokens of transformers' own loop; none ends the answer."""
    model: Any = tiny(family)
    model.generation_config.eos_token_id = None
    mask = more.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, do_sample=False, **more)
    return out[:, ids.shape[1] :].tolist()


@cache
def generated(family: str) -> list[list[int]]:
    """What `model.generate` answers to each prompt alone, without a method."""
    return [by_loop(family, ids)[0] for ids in prompts()]


def in_batch(engine: Engine, texts: Sequence[Tensor]) -> list[list[int]]:
    return [answer.tokens[0] for answer in together(engine, texts, NEW)]


def padded(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Texts [1 S] as one batch that is padded on the left, with its mask."""
    most = max(text.shape[1] for text in texts)
    rows = [torch.nn.functional.pad(text, (most - text.shape[1], 0)) for text in texts]
    mask = [torch.arange(most) >= most - text.shape[1] for text in texts]
    return {"ids": torch.cat(rows), "attention_mask": torch.stack(mask).long()}


def filled(kv: Attachment, ids: Tensor, chunk: int | None = None) -> tuple[KVCache, Tensor]:
    """A sealed cache that holds ids, and the logits of the last."""
    made = kv.start(KVCache, capacity=CAPACITY)
    logits = Engine(kv, prefill_chunk=chunk).prefill(made, ids, whole=True)
    made.seal()
    return made, logits


@torch.inference_mode()
def fed(kv: Attachment, held: KVCache, ids: Tensor) -> Tensor:
    """The logits after each of ids, fed token by token."""
    return torch.cat([Engine(kv).run(token, held) for token in ids.split(1, 1)])


def same(one: ModelStates | None, other: ModelStates | None) -> None:
    assert one is not None
    assert other is not None
    assert one.tokens == other.tokens
    for name, state in one.state().items():
        assert (state - other.state()[name]).norm() < 1e-3 * state.norm(), name


# Answers


@pytest.mark.tokens
@and_others
def test_full_gives_generates_tokens_in_every_way(family: str) -> None:
    with attached(tiny(family), Full()) as kv:
        assert in_batch(Engine(kv), prompts()) == generated(family)
        assert in_batch(Engine(kv, prefill_chunk=CHUNK), prompts()) == generated(family)
        assert by_loop(family, **padded(prompts())) == generated(family)
    assert all("forward" not in vars(found.module) for found in state_modules(tiny(family)))
    assert by_loop(family, prompts()[0])[0] == generated(family)[0]


@pytest.mark.parametrize("family", ["nemotron_h", "jamba"])
def test_layers_that_do_not_rotate_turn_by_no_angle(family: str) -> None:
    """So that methods which rotate keys back and forth have them as they are."""
    spec = layer_specs(tiny(family))[-1]
    cos, sin = spec.rope(torch.tensor([0, 99]))
    assert spec.unknown == ()
    assert (cos.unique().tolist(), sin.unique().tolist()) == ([1], [0])
    with attached(tiny(family), small("shadowkv"), budget=1.0) as kv:
        assert in_batch(Engine(kv), prompts()) == generated(family)


@families
def test_only_layers_with_keys_and_values_take_bytes_of_tokens(family: str, tmp_path: Path) -> None:
    info = saved(tiny(family), tmp_path).describe()
    layers = len(layer_kinds(tiny(family).config).attending)
    assert info.kv_bytes("fp32", 100) == layers * 100 * ROW
    assert (info.num_layers, info.num_whole_layers) == (layers, layers)
    with attached(tiny(family), Full()) as kv:
        answer = Engine(kv).generate(prompts()[0], max_new_tokens=NEW)
    assert answer.kv["device"] == layers * (LENGTHS[0] + NEW) * ROW


def test_a_model_without_states_has_none() -> None:
    with attached(tiny("llama"), Full()) as kv:
        assert kv.start(KVCache, capacity=9).states is None
    assert state_modules(tiny("llama")) == []


# What would be wrong in silence if it were forgotten


@pytest.mark.tokens
@pytest.mark.parametrize(
    "name",
    [
        "saved and restored", "shared prefill", "likelihood on as off", "questions shared as separate",
        "batch as alone", "budget kept", "bytes as said",
    ],
)  # fmt: skip
@either
def test_a_method_keeps_its_contract(family: str, name: str) -> None:
    [check] = (check for check in CHECKS if check.name == name)
    whole = {"layer_types": 6 * ["full_attention"]}  # of a window the checks know nothing
    check.run(Trial(small("snapkv"), fresh(BORROWS, **whole) if family == BORROWS else tiny(family), 41))


@and_others
def test_a_turn_goes_on_from_stored_contents(family: str) -> None:
    first, second = prompts()
    with attached(tiny(family), Full()) as kv:
        stays, _ = filled(kv, first)
        fed(kv, stays, prompt(3))
        moves = kv.start(KVCache, capacity=CAPACITY)
        moves.refill([{name: x.clone() for name, x in held.items()} for held in stays.contents()])
        logits = []
        for held in (stays, moves):
            held.open_turn()
            logits.append(Engine(kv, prefill_chunk=CHUNK).prefill(held, second, whole=True))
            held.seal()
        assert_close(*logits, rtol=1e-3, atol=1e-3)
        if stays.states is not None:
            same(moves.states, stays.states)
        _, last = filled(kv, torch.cat([first, prompt(3), second], 1))
    assert_close(logits[0], last, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_methods_of_one_prefill_have_states_of_their_own() -> None:
    with attached(tiny(FAMILY), Full()) as kv:
        engine = Engine(kv)
        shared = SharedPrefill(engine, prompts()[0], NEW)
        first, second = (shared.cache(engine, lambda layer, x: layer.absorb(x)) for _ in range(2))
        shared.run(LENGTHS[0])
        logits = []
        for held in (first, second):
            held.seal()
            logits.append(fed(kv, held, prompt(3)))
    assert_close(*logits)


def test_contents_without_states_are_refused() -> None:
    with attached(tiny(FAMILY), Full()) as kv:
        contents = filled(kv, prompts()[0])[0].contents()
        bare = [{name: x for name, x in held.items() if "states" not in name} for held in contents]
        with pytest.raises(StateError, match="left out"):
            kv.start(KVCache, capacity=CAPACITY).refill(bare)


def test_states_of_other_tokens_than_the_cache_holds_are_refused() -> None:
    with attached(tiny(FAMILY), Full()) as kv:
        held, _ = filled(kv, prompts()[0])
        held.states = kv.start(KVCache, capacity=9).states
        with pytest.raises(StateError, match="stands for 0 tokens"):
            fed(kv, held, prompt(1))


@families
def test_a_repetition_of_the_prompt_leaves_its_states(family: str) -> None:
    """KVzip reads the prompt twice."""
    answers, states = [], []
    for method in (Full(), small("kvzip")):
        with attached(tiny(family), method, budget=0.5) as kv:
            engine = Engine(kv)
            held = engine.cache(prompts()[0], NEW)
            engine.prefill(held, prompts()[0], whole=True)
            held.seal()
            states.append(held.states)
            answers.append(held.num_tokens)
    same(*states)
    assert answers == 2 * [LENGTHS[0]]


@pytest.mark.tokens
@and_others
def test_turns_of_a_padded_batch_are_those_of_each_row_alone(family: str) -> None:
    """In the second turn padding stands between the last token of the answer and the new ones."""
    with attached(tiny(family), small("snapkv"), budget=0.5) as kv:
        alone = []
        for text, more in zip(prompts(), (5, 9), strict=True):
            made = kv.cache(capacity=CAPACITY)
            said = torch.cat([text, torch.tensor(by_loop(family, text, made))], 1)
            said = torch.cat([said, prompt(more)], 1)
            alone.append((said, by_loop(family, said, made)[0]))
        first = padded(prompts())
        model: Any = tiny(family)
        out = model.generate(
            first["ids"],
            attention_mask=first["attention_mask"],
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
        )
        later = padded([said[:, length + NEW :] for (said, _), length in zip(alone, LENGTHS, strict=True)])
        held, mask = out.sequences, first["attention_mask"]
        mask = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long), later["attention_mask"]], 1)
        ids = torch.cat([held, later["ids"]], 1)
        assert by_loop(family, ids, out.past_key_values, attention_mask=mask) == [answer for _, answer in alone]


@families
def test_a_joint_step_hands_states_back(family: str) -> None:
    """Also to a sequence that leaves while others go on."""
    with attached(tiny(family), Full()) as kv:
        engine = Engine(kv)
        batch, caches = RunningBatch(engine), []
        for ids, new in zip(prompts(), (3, NEW), strict=True):
            held = engine.cache(ids, NEW)
            logits = engine.prefill(held, ids, whole=True)
            batch.join(held, logits, ids[:, :0], began=0.0, max_new_tokens=new)
            caches.append(held)
        while batch.sequences:
            batch.step()
        for held, ids, tokens, new in zip(caches, prompts(), generated(family), (3, NEW), strict=True):
            alone, _ = filled(kv, ids)
            fed(kv, alone, torch.tensor([tokens[: new - 1]]))
            same(held.states, alone.states)


@torch.no_grad()
def test_a_copy_has_states_of_its_own() -> None:
    """It goes on outside of inference mode, in which it may have been made."""
    with attached(tiny(FAMILY), Full()) as kv:
        held = kv.cache(capacity=CAPACITY)
        kv.model(prompts()[0], past_key_values=held, use_cache=True)
        with torch.inference_mode():
            copied = deepcopy(held)
        assert held.states is not None
        before = {name: x.clone() for name, x in held.states.state().items()}
        logits = kv.model(prompt(1), past_key_values=copied, use_cache=True).logits
        assert_close(held.states.state(), before, rtol=0, atol=0)
        assert_close(kv.model(prompt(1), past_key_values=held, use_cache=True).logits, logits)


@either
def test_fidelity_begins_with_the_states_behind_the_prompt(family: str) -> None:
    """Full differs from itself in nothing."""
    with attached(tiny(family), Full()) as kv:
        answer = Engine(kv, fidelity=2).generate(prompts()[0], max_new_tokens=NEW)
    assert answer.fidelity is not None
    assert answer.fidelity[0] is not None
    assert (answer.fidelity[0]["kl"], answer.fidelity[0]["first_difference"]) == (pytest.approx(0, abs=1e-5), None)


def test_a_text_that_is_computed_anew_gets_new_states() -> None:
    with attached(tiny(FAMILY), Full()) as kv:
        held, _ = filled(kv, prompts()[0])
        held.fed.set(prompts()[0])
        other, _ = filled(kv, prompts()[0])
        logits = Engine(kv).recompute(prompt(1), held)
        assert_close(logits, fed(kv, other, prompt(1)), rtol=1e-3, atol=1e-3)
        same(held.states, other.states)


def test_a_step_that_fails_halfway_is_not_gone_on_from() -> None:
    def fail(*called: Any) -> None:
        raise MemoryError

    with attached(tiny(FAMILY), Full()) as kv:
        batch = RunningBatch(engine := Engine(kv))
        engine.generate(prompts()[0], max_new_tokens=2)  # the first is checked, and such sequences attend alone
        running = [engine.join(batch, ids, max_new_tokens=NEW) for ids in prompts()]
        batch.step()
        batch.step()
        with state_modules(tiny(FAMILY))[-1].module.register_forward_pre_hook(fail), pytest.raises(MemoryError):
            batch.step()
        batch.leave(running[0])
        with pytest.raises(StateError, match=f"stands for {LENGTHS[0] + 3} tokens"):
            fed(kv, running[0].cache, prompt(1))


def test_a_call_that_is_refused_leaves_the_states() -> None:
    with attached(tiny(FAMILY), Full()) as kv:
        held, _ = filled(kv, prompts()[0])
        with pytest.raises(UnsupportedError, match="at once"):
            Engine(kv).run(prompt(2), held)
        assert held.states is not None
        assert {*held.states.tokens.values()} == {LENGTHS[0]}


# Conversations in a store


@pytest.mark.tokens
@pytest.mark.parametrize("method", [Full(), small("snapkv")], ids=["full", "snapkv"])
@either
def test_a_stored_history_brings_its_states(family: str, method: Method) -> None:
    with attached(tiny(family), method, budget=0.4) as kv:
        with plain(kv, DevicePrefix) as histories:
            wanted = Talk(kv, histories).turns()
        talk = Talk(kv, stored(kv, host=9 * MB)).turns()
    assert talk.said == wanted.said
    assert [found.tier for found in talk.found] == [None, "host", "host", "host"]
    assert [found.reused for found in talk.found] == [found.reused for found in wanted.found]


@pytest.mark.parametrize("kept", ["device", "store"])
def test_a_history_that_loses_its_oldest_tokens_is_computed_anew(kept: str) -> None:
    with attached(tiny(FAMILY), Full()) as kv, plain(kv, DevicePrefix) as histories:
        caches = histories if kept == "device" else stored(kv, host=9 * MB)
        talk = Talk(kv, caches)
        talk.turn(prompts()[0][0].tolist())
        left = caches.shorten(talk.session, talk.fed, 20, CAPACITY)
        assert left == talk.fed[-20:]
        found = caches.resume(talk.session, left, CAPACITY)
        assert (found.reused, found.lost) == (0, None)
