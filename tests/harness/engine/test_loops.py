"""Loops that make no cache of ours: `generate`, `pipeline`, `model(ids)`, in batches that are padded or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, pipeline
from transformers.generation.streamers import BaseStreamer

from harness.engine.attach import Attachment, attached
from harness.engine.cache import RoomError, UnsupportedError
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from harness.engine.loop import PaddedCache
from harness.models.random import Random
from methods.abilities import ability
from methods.abilities.repeat import Repeat
from methods.full import Full
from tests.harness.engine.test_generate import NEW, TURNS, by_engine
from tests.methods.test_contract import NAMES, attach, small, walked
from tests.quick import mostly_slow
from tests.tiny import eager, prompt, tiny
from tests.warned import all_warnings

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
            answers.append(text[:1, -NEW:].tolist())
        assert answers == by_engine(kv)
    lengths = [member.num_tokens for member in cache.members]
    assert lengths == ([sum(TURNS) + 3 * NEW - 1 - short for short in (0, 3 * padding)] if padding else [123])


PLACED = [
    (name, place) for name in NAMES for place in ("device", "host", "disk") if place == "device" or small(name).offloads
]
IN_PLACES = mostly_slow(
    PLACED, ("kvzip", "device"), ("tova", "device"), ("infinigen", "host"), ("full_offloaded", "disk"), ("kivi", "disk")
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
        ({"prompt_lookup_num_tokens": 2}, "assistant"),
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
        wrong: list[dict[str, Any]] = [
            {"past_key_values": filled},
            {"attention_mask": torch.ones(1, 1, WIDTH, WIDTH)},
            {"attention_mask": MASK},
            {"attention_mask": hidden(0), "past_key_values": kv.cache(capacity=90)},
            {"past_key_values": padded, "attention_mask": MASK[:1]},
        ]
        for keywords in wrong:
            with pytest.raises((UnsupportedError, RoomError)):
                model(ROWS[0], **keywords)
        with pytest.raises(UnsupportedError, match="part of it"):
            model.model(ROWS[0])
        with pytest.raises(UnsupportedError, match="members"):
            padded.contents()
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
