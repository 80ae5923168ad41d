"""`model.generate` with our cache: its phases are told from the number of tokens in a forward, with no flag."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, pipeline
from transformers.generation.streamers import BaseStreamer

from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache, RoomError, UnsupportedError
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from harness.engine.hf import routed
from harness.engine.loop import PaddedCache
from harness.models.random import Random
from methods.abilities import ability
from methods.abilities.bounded_answer import CountedAnswer
from methods.abilities.repeat import Repeat
from methods.full import Full
from tests.methods.test_contract import attach, in_places, small, walked
from tests.quick import mostly_slow
from tests.tiny import eager, prompt, tiny
from tests.warned import all_warnings

NEW, CAPACITY = 6, 140
TURNS = (71, 23, 12)


def generate(model: PreTrainedModel, ids: Tensor, cache: Any, new: int = NEW, **more: Any) -> Tensor:
    """The whole text with `new` tokens more, by transformers' own loop. ids [B S] -> [B S+new]"""
    out: Tensor = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new,
        eos_token_id=-1,  # none, so that both loops may say any token
        do_sample=False,
        **more,
    )
    return out


def conversation(model: PreTrainedModel, cache: Any, **more: Any) -> list[list[list[int]]]:
    """Answers to several turns, each `generate` given all that was said before."""
    said, answers = torch.empty(1, 0, dtype=torch.long), []
    for seed, length in enumerate(TURNS):
        said = generate(model, torch.cat([said, prompt(length, seed=seed)], 1), cache, **more)
        answers.append(said[:, -NEW:].tolist())
    return answers


def by_engine(kv: Attachment, first: int = 0, skipped: int = 0) -> list[list[list[int]]]:
    """The same from our engine, which says its phases. The last token of an answer has not been fed: it comes first.

    `first`: seed of the first turn; `skipped`: tokens at the beginning of each turn."""
    engine, answers = Engine(kv), []
    cache = engine.cache(prompt(CAPACITY), 0)
    pending = torch.empty(1, 0, dtype=torch.long)
    for seed, length in enumerate(TURNS):
        cache.open_turn()
        ids = torch.cat([pending, prompt(length, seed=first + seed)[:, skipped:]], 1)
        made = engine.complete(cache, engine.prefill(cache, ids), ids[:, :0], began=0.0, max_new_tokens=NEW)
        pending = torch.tensor(made.tokens)[:, -1:]
        answers.append(made.tokens)
    return answers


@pytest.mark.tokens
@walked
def test_turns_are_those_of_our_engine_and_sparse(name: str) -> None:
    with attach(small(name), 0.4) as kv:
        cache = kv.cache(capacity=CAPACITY)
        assert conversation(kv.model, cache) == by_engine(kv)
    assert cache.sealed
    whole = sum(TURNS) + 2 * NEW
    generated = [layer.attended.generated for layer in cache.layers]
    assert max(generated) <= NEW - 1
    assert min(generated) == NEW - 1 or ability(kv.method, CountedAnswer)  # which may drop generated tokens
    if name == "kvpress" or ability(kv.method, Repeat):
        return  # it compresses the first prompt alone
    read = sum(layer.attended.prompt for layer in cache.layers)
    budgets = [layer.request.budget for layer in cache.layers]  # InfiniGen's is none in its first layer
    assert read <= sum(whole if budget is None else budget.tokens(whole, i) for i, budget in enumerate(budgets))
    assert not small(name).uses_budget or read < 0.65 * 3 * whole


def forwards(kv: Attachment, cache: KVCache, *lengths: int) -> list[bool]:
    """Whether the cache is sealed behind each forward of so many tokens."""
    states = []
    for length in lengths:
        with torch.inference_mode():
            kv.model(prompt(length), past_key_values=cache, use_cache=True)
        states.append(cache.sealed)
    return states


def test_what_a_forward_is() -> None:
    with attach(small("snapkv"), 0.4) as kv:
        cache = kv.cache(capacity=100)
        assert forwards(kv, cache, 30, 9, 1, 1, 2, 3, 1) == [False, False, True, True, False, False, True]
        assert forwards(kv, kv.cache(capacity=9), 1, 1) == [False, True]  # a prompt of one token
        cache = kv.cache(capacity=100)
        forwards(kv, cache, 30)
        cache.open_turn()  # a last chunk of one token
        assert forwards(kv, cache, 1, 1) == [False, True]
        cache = kv.cache(capacity=100)
        forwards(kv, cache, 60)
        cache.seal()
        assert cache.layers[0].attended.prompt == 24
        assert forwards(kv, cache, 1, 5, 1) == [True, False, True]
        cache = kv.start(KVCache, capacity=70)  # of our own engine, which says its phases
        Engine(kv, prefill_chunk=1).prefill(cache, prompt(60))
        assert not cache.sealed
        cache.seal()
        with pytest.raises(UnsupportedError):
            forwards(kv, cache, 2)


@pytest.mark.parametrize("how", ["assistant", "lookup", "crop"])
def test_assisted_generation_is_refused_by_name(how: str) -> None:
    model, ids = tiny("llama"), prompt(20)
    with attached(model, Full()) as kv, pytest.raises(UnsupportedError, match="assistant"):
        cache = kv.cache(capacity=60)
        if how == "crop":  # what transformers before 5.2x calls first
            cache.crop(1)
        more = {"assistant_model": tiny("mistral")} if how == "assistant" else {"prompt_lookup_num_tokens": 2}
        generate(model, ids, cache, **more)


@pytest.mark.tokens
@pytest.mark.parametrize("chunk", [9, 24])
def test_a_prefill_in_chunks_is_one_turn(chunk: int) -> None:
    with attach(small("snapkv"), 0.4) as kv:
        caches = [kv.cache(capacity=CAPACITY) for _ in range(2)]
        wanted = conversation(kv.model, caches[0])
        assert conversation(kv.model, caches[1], prefill_chunk_size=chunk) == wanted


# Loops that make no cache of ours: `generate`, `pipeline`, `model(ids)`, in batches that are padded or not.

LENGTHS = (71, 40, 55)
ROWS = [prompt(length, seed=seed) for seed, length in enumerate(LENGTHS, 3)]
WIDTH = max(LENGTHS)


def left(rows: list[Tensor]) -> Tensor:
    """Rows of different lengths as one batch, padded with 0 on the left."""
    return torch.cat([pad(row, (WIDTH - row.shape[1], 0)) for row in rows])


PADDED, MASK = left(ROWS), left([torch.ones_like(row) for row in ROWS])


@contextmanager
def greedy(kv: Attachment, new: int = 12) -> Iterator[Any]:
    """The model with a generation config that takes the likeliest token, whatever it is."""
    model: Any = kv.model
    before = model.generation_config
    model.generation_config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    try:
        yield model
    finally:
        model.generation_config = before


def alone(kv: Attachment, rows: list[Tensor], new: int = 12) -> list[list[int]]:
    """What our own loop answers to each row by itself."""
    return [Engine(kv).generate(row, max_new_tokens=new).tokens[0] for row in rows]


@pytest.mark.tokens
@walked
def test_generate_needs_no_cache_and_pads_as_it_likes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a room that grows several times on the way."""
    for module in ("loop", "attach"):
        monkeypatch.setattr(f"harness.engine.{module}.STEP", 5)
    with attach(small(name), 0.4) as kv, greedy(kv) as model:
        wanted = alone(kv, ROWS)
        assert model.generate(ROWS[0])[0, WIDTH:].tolist() == wanted[0]
        if ability(kv.method, Repeat):
            return  # it refuses rows that are padded
        batch = model.generate(PADDED, attention_mask=MASK, return_dict_in_generate=True)
        assert batch.sequences[:, WIDTH:].tolist() == wanted
    assert isinstance(batch.past_key_values, PaddedCache)
    assert batch.past_key_values.capacity == WIDTH + 15


@pytest.mark.tokens
def test_eager_models_and_generate_behind_the_block() -> None:
    model = eager("llama")
    before = [model.generate(ROWS[0], max_new_tokens=4).tolist(), model.config._attn_implementation]  # type: ignore[operator]
    with attached(model, small("snapkv"), budget=0.4) as kv, greedy(kv):
        assert kv.model.generate(ROWS[0])[0, WIDTH:].tolist() == alone(kv, ROWS[:1])[0]  # type: ignore[operator]
    assert [model.generate(ROWS[0], max_new_tokens=4).tolist(), model.config._attn_implementation] == before  # type: ignore[operator]


def by_hand(model: Any, cache: Any, **first: Any) -> list[int]:
    """Twelve tokens by a loop of one's own; `cache`: what it hands to each forward, None for what came back."""
    out = model(ROWS[0], past_key_values=cache, **first)
    tokens = [int(out.logits[0, -1].argmax())]
    while len(tokens) < 12:
        out = model(torch.tensor([tokens[-1:]]), past_key_values=cache or out.past_key_values)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens


@pytest.mark.tokens
def test_a_loop_of_ones_own() -> None:
    with attach(small("snapkv"), 0.4) as kv:
        (wanted,) = alone(kv, ROWS[:1])
        assert by_hand(kv.model, None) == wanted
        assert by_hand(kv.model, DynamicCache(config=kv.model.config)) == wanted  # which it goes on with, as it may
        assert not kv.model(ROWS[0], torch.ones_like(ROWS[0])).logits.requires_grad
        assert torch.is_grad_enabled()
        masked = torch.ones_like(ROWS[0])
        masked[:, :9] = 0
        assert by_hand(kv.model, None, attention_mask=masked) == alone(kv, [ROWS[0][:, 9:]])[0]


@pytest.mark.tokens
@pytest.mark.parametrize("padding", [0, 5])
def test_further_turns_go_on_with_the_cache_that_came_back(padding: int) -> None:
    """Beside another row, whose turns are shorter."""
    text = mask = torch.empty(2, 0, dtype=torch.long)
    answers, cache = [], None
    with attach(small("pqcache"), 0.4) as kv, greedy(kv, NEW) as model:
        for seed, length in enumerate(TURNS):
            new = torch.cat([prompt(length, seed=seed), prompt(length, seed=seed + 50)])
            shown = torch.ones_like(new)
            shown[1, :padding] = 0
            text, mask = torch.cat([text, new], 1), torch.cat([mask, shown], 1)
            out = model.generate(text, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True)
            text, cache = out.sequences, out.past_key_values
            mask = pad(mask, (0, NEW), value=1)
            answers.append(text[:, -NEW:].tolist())
        wanted = zip(by_engine(kv), by_engine(kv, 50, padding), strict=True)
        assert answers == [one + other for one, other in wanted]
    lengths = [member.num_tokens for member in cache.members]
    assert lengths == ([sum(TURNS) + 3 * NEW - 1 - short for short in (0, 3 * padding)] if padding else [123])


IN_PLACES = mostly_slow(
    in_places("device", "host", "disk"),
    ("kvzip", "device"),
    ("tova", "device"),
    ("infinigen", "host"),
    ("full_offloaded", "disk"),
    ("kivi", "disk"),
)


@pytest.mark.tokens
@pytest.mark.parametrize("case", IN_PLACES, ids="-".join)
def test_copies_of_a_cache_go_on_each_by_itself(case: tuple[str, str]) -> None:
    """Of a prefix, as transformers' recipe has it, and of a conversation between two turns."""
    name, placement = case
    prefix = prompt(70)
    texts = [torch.cat([prefix, prompt(20, seed=seed)], 1) for seed in (1, 2)]
    with attach(small(name), 0.4, placement=placement) as kv, greedy(kv, NEW) as model:

        def answer(text: Tensor, cache: Any) -> Tensor:
            tokens: Tensor = model.generate(text, attention_mask=torch.ones_like(text), past_key_values=cache)
            return tokens

        wanted = [answer(text, model(prefix).past_key_values) for text in texts]
        cache = model(prefix).past_key_values
        copies = [deepcopy(cache) for _ in texts]
        del cache  # and with it the files of its rows
        answered = [answer(text, copied) for text, copied in zip(texts, copies, strict=True)]
        assert all(map(torch.equal, answered, wanted))
        held, own = (footprint(one.layers) for one in (copies[0], deepcopy(copies[0])))
        assert all(held[tier] == own[tier] for tier in ("host", "disk"))
        turns = [torch.cat([wanted[0], prompt(12, seed=seed)], 1) for seed in (3, 4)]
        kept = deepcopy(copies[0])
        asked = [answer(turn, deepcopy(kept)) for turn in turns]
        assert torch.equal(answer(turns[0], copies[0]), asked[0])
        assert torch.equal(answer(turns[1], kept), asked[1])


@pytest.mark.tokens
def test_a_copy_of_a_padded_batch_leaves_its_rows_alone() -> None:
    """In the middle of an answer, and in a model of which some layers slide."""
    with attach(small("pqcache"), 0.4, "gemma3_text") as kv, greedy(kv, NEW) as model:
        begun = model.generate(PADDED, attention_mask=MASK, return_dict_in_generate=True)
        text, mask = begun.sequences, pad(MASK, (0, NEW), value=1)
        ways = [torch.cat([text[:, :-1], torch.full((3, 1), token)], 1) for token in (7, 9)]
        copies = [deepcopy(begun.past_key_values) for _ in ways]
        several = [
            model.generate(way, attention_mask=mask, past_key_values=copied)
            for way, copied in zip(ways, copies, strict=True)
        ]
        assert torch.equal(
            model.generate(ways[1], attention_mask=mask, past_key_values=begun.past_key_values), several[1]
        )
        assert not torch.equal(several[0][:, -NEW:], several[1][:, -NEW:])


class Listener(BaseStreamer):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def put(self, value: Tensor) -> None:
        self.heard += value.flatten().tolist()

    def end(self) -> None:
        self.heard.append(-1)


@pytest.mark.tokens
def test_pipelines_and_streamers() -> None:
    loaded, text = Random(shape="tiny", layers=2).load("fp32", "cpu"), "A fact stands in a long text. " * 8
    texts, listener = [text, text[40:]], Listener()
    loaded.tokenizer.pad_token = loaded.tokenizer.pad_token or loaded.tokenizer.eos_token
    loaded.tokenizer.padding_side = "left"
    with attached(loaded.model, small("snapkv"), budget=0.4) as kv, greedy(kv) as model:
        run = pipeline("text-generation", model=model, tokenizer=loaded.tokenizer)
        ids = [loaded.tokenizer(part, return_tensors="pt").input_ids for part in texts]
        wanted = alone(kv, ids)
        for size in (1, 2):
            answers = run(texts, return_tensors=True, batch_size=size)
            given = [answer[0]["generated_token_ids"][-12:] for answer in answers]
            assert [list(tokens) for tokens in given] == wanted
        model.generate(ids[0], streamer=listener)
    assert listener.heard == [*ids[0][0].tolist(), *wanted[0], -1]


def hidden(*places: int) -> Tensor:
    """Return a mask of the first row that hides some places."""
    mask = torch.ones_like(ROWS[0])
    mask[0, list(places)] = 0
    return mask


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"cache_implementation": "offloaded"}, "offloaded"),
        ({"num_beams": 2}, "Beam"),
        ({"attention_mask": hidden(70)}, "left"),
        ({"attention_mask": hidden(3, 4)}, "left"),
    ],
)
def test_what_our_caches_would_get_wrong_is_refused(more: dict[str, Any], says: str) -> None:
    with attach(small("snapkv"), 0.4) as kv, greedy(kv) as model, pytest.raises(UnsupportedError, match=says):
        model.generate(ROWS[0], **more)


def test_refused_by_a_forward() -> None:
    filled = DynamicCache(config=tiny("llama").config)
    tiny("llama")(ROWS[0], past_key_values=filled, use_cache=True)
    with attached(tiny("llama"), Full()) as kv:
        model: Any = kv.model
        padded = model(PADDED, attention_mask=MASK).past_key_values
        empty, full = kv.cache(capacity=90), kv.cache(capacity=WIDTH)
        model(ROWS[0], past_key_values=full)
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("DynamicCache", {"past_key_values": filled}),
            ("custom", {"attention_mask": torch.ones(1, 1, WIDTH, WIDTH)}),
            ("mask", {"attention_mask": MASK}),
            ("mask", {"attention_mask": hidden(0), "past_key_values": empty}),
            ("3 padded rows", {"past_key_values": padded, "attention_mask": MASK[:1]}),
            ("num_logits_to_keep", {"num_logits_to_keep": 1}),
            ("capacity=71", {"past_key_values": full}),
        ]
        for says, keywords in wrong:
            with pytest.raises((UnsupportedError, RoomError), match=says):
                model(ROWS[0], **keywords)
        for batch, says in ((1, "batch=1"), (2, "Beam")):
            with pytest.raises((UnsupportedError, ValueError), match=says):
                generate(model, ROWS[0], kv.cache(capacity=90, batch=batch), num_beams=2)
        with pytest.raises(UnsupportedError, match="attached"), routed(model):
            pass
        with pytest.raises(UnsupportedError, match="part of it"):
            model.model(ROWS[0])
        with pytest.raises(UnsupportedError, match="members"):
            padded.contents()
    with pytest.raises(UnsupportedError, match="not"):
        model(ROWS[0], past_key_values=empty)
    with attached(tiny("llama"), Full(), capacity=75) as kv, greedy(kv) as model:
        with pytest.raises(RoomError, match="capacity=75"):
            model.generate(ROWS[0])
        assert model.generate(ROWS[1]).shape == (1, 52)


def test_what_a_budget_did_not_limit_is_told_of_once() -> None:
    """Prompts that are read whole, alone and beside a long one in a batch, and scores of prompts alone."""
    ids, mask = prompt(71), torch.ones(2, 71, dtype=torch.int64)
    mask[1, :61] = 0
    with all_warnings() as warnings, attach(small("snapkv"), 0.2) as kv:
        for length in (10, 71, 1):
            kv.model.generate(ids[:, :length], max_new_tokens=3, do_sample=False)
        kv.model.generate(torch.cat([ids, ids]), attention_mask=mask, max_new_tokens=3, do_sample=False)
    [message] = [str(warning.message) for warning in warnings]
    assert "2 of 5 caches" in message
    with all_warnings() as warnings, attach(small("snapkv"), 0.4) as kv:
        for row in ROWS:
            kv.model(row)
    [message] = [str(warning.message) for warning in warnings]
    assert "never sealed" in message
    with all_warnings() as warnings:
        for method, budget in ((Full(), None), (small("snapkv"), 1.0)):  # nothing to leave out
            with attach(method, budget) as kv:
                kv.model(ROWS[0])
    assert not warnings
