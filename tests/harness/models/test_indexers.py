"""Trained sparse attention: under DSA a model with indexers gives the tokens that it gives by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness import Engine, attached
from harness.checks import costs
from harness.checks.contract import CHECKS, Check
from harness.checks.trial import DoesNotApply, Trial
from harness.config.settings import OverflowSettings
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.footprint import footprint
from harness.jobs import model_check
from harness.models.indexers import indexers, reading
from harness.results.run_folder import load
from methods.base import Budget
from methods.dsa import DSA
from methods.full import Full
from tests.batches import together
from tests.fast import run
from tests.harness.engine.test_states import padded
from tests.harness.jobs.test_questions import Balances
from tests.quick import mostly_slow
from tests.tiny import MLA, fresh, prompt, saved, tiny

TOP, NEW, LENGTHS = 24, 10, (61, 47, 19)  # the answer to the last outgrows the budget
FAMILIES = ("deepseek_v32", "glm_moe_dsa")
each_family = pytest.mark.parametrize("family", FAMILIES)
ROW, KEY = MLA["qk_rope_head_dim"] + MLA["kv_lora_rank"], 16  # numbers of a token in a layer


@cache
@torch.inference_mode(mode=False)
def model(family: str) -> PreTrainedModel:
    made = fresh(family, index_topk=TOP, pad_token_id=None)  # whose embedding is zero, so that all scores are equal
    made.generation_config.eos_token_id = None
    return made


def modules(family: str) -> list[Any]:
    return [layer.self_attn for layer in model(family).model.layers]


def prompts() -> list[Tensor]:
    return [prompt(length, seed=length) for length in LENGTHS]


def by_loop(family: str, ids: Tensor, **more: Any) -> list[list[int]]:
    mask = more.pop("attention_mask", torch.ones_like(ids))
    given: Any = model(family)
    out = given.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **more)
    return out[:, ids.shape[1] :].tolist()


@cache
def generated(family: str, top: int = TOP) -> list[list[int]]:
    """What the model itself answers to each prompt alone, if its indexers choose so many tokens."""
    with reading(modules(family), top):
        return [by_loop(family, ids)[0] for ids in prompts()]


def answers(kv: Any, **how: Any) -> list[list[int]]:
    return [answer.tokens[0] for answer in together(Engine(kv, **how), prompts(), NEW)]


@pytest.mark.tokens
@each_family
def test_dsa_gives_generates_tokens_in_every_way(family: str) -> None:
    """Whole, in chunks, in a batch of unequal prompts, padded on the left, and with latents elsewhere."""
    assert generated(family) != generated(family, 999)
    for place in ("device", "host", "disk"):
        with attached(model(family), DSA(), placement=place) as kv:  # type: ignore[arg-type]
            assert kv.budget == Budget(TOP)
            alone = [Engine(kv).generate(ids, max_new_tokens=NEW).tokens[0] for ids in prompts()]
            assert alone == answers(kv) == answers(kv, prefill_chunk=7) == generated(family)
            if place == "device":
                assert by_loop(family, **padded(prompts())) == generated(family)
            engine = Engine(kv)
            together(engine, prompts()[:2], NEW)  # the answer to the third may outgrow the budget
            assert (engine.one_by_one is None) == (place != "disk")
    assert all("forward" not in vars(own) for own in indexers(modules(family)))


@pytest.mark.tokens
@each_family
def test_half_the_budget_cuts_the_same_ranking(family: str) -> None:
    half, whole = generated(family, TOP // 2), generated(family)  # before its indexers read what DSA asks for
    with attached(model(family), DSA(), budget=TOP // 2) as kv:
        assert answers(kv) == answers(kv, prefill_chunk=7) == half != whole


@pytest.mark.tokens
@each_family
def test_other_methods_see_a_dense_model(family: str) -> None:
    with attached(model(family), Full()) as kv:
        assert answers(kv) == answers(kv, prefill_chunk=7) == generated(family, 999)


@pytest.mark.tokens
@each_family
@torch.inference_mode()
def test_a_second_turn_is_the_models_own(family: str) -> None:
    """Also one that goes on from stored contents, with latents on the host."""
    first, second = prompts()[:2]
    text = torch.cat([first, prompt(3), second], 1)
    with attached(model(family), DSA(), placement="host") as kv:
        stays = kv.start(KVCache, capacity=text.shape[1] + NEW)
        engine = Engine(kv, prefill_chunk=13)
        engine.prefill(stays, first, whole=True)
        stays.seal()
        for token in prompt(3).split(1, 1):
            engine.run(token, stays)
        moves = kv.start(KVCache, capacity=text.shape[1] + NEW)
        moves.refill([{name: x.clone() for name, x in held.items()} for held in stays.contents()])
        for held in (stays, moves):
            held.open_turn()
            tokens = [int(engine.prefill(held, second, whole=True).argmax())]
            held.seal()
            while len(tokens) < NEW:
                tokens.append(int(engine.run(torch.tensor([tokens[-1:]]), held).argmax()))
            assert tokens == by_loop(family, text)[0]


CONTRACT = [check for check in CHECKS if check.name not in ("chunks as whole", "shared prefill")]


@pytest.mark.tokens
@each_family
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.name)
def test_dsa_keeps_the_contract(family: str, check: Check) -> None:
    try:
        check.run(Trial(DSA(), tiny(family), 83))
    except DoesNotApply as reason:
        pytest.skip(str(reason))


@each_family
@pytest.mark.parametrize("placement", ["device", "host"])
def test_index_keys_count(family: str, placement: Any) -> None:
    """By formula, and in each layer that chooses for itself."""
    for budget in (Budget(0.3), Budget(TOP)):
        real, formula, _ = costs.measured(Trial(DSA(), tiny(family)), 200, budget, placement)
        assert real.held == formula.held
        assert real.moved_bytes_per_step <= formula.moved_bytes_per_step
    with attached(model(family), DSA()) as kv:
        held = kv.start(KVCache, capacity=70)
        Engine(kv).prefill(held, prompt(60), whole=True)
        held.seal()
    layers = [len(indexers([module])) for module in modules(family)]
    assert footprint(held.layers)["device"] == 70 * 4 * sum(ROW + KEY * own for own in layers)


@torch.inference_mode()
def test_a_step_tells_what_it_read_of_prompt_and_answer() -> None:
    """Together as many tokens as the budget, and of the prompt those whose positions are told."""
    with attached(model("glm_moe_dsa"), DSA()) as kv:
        made = Engine(kv).generate(prompts()[0], max_new_tokens=NEW)
        held = kv.start(KVCache, capacity=80)
        Engine(kv).prefill(held, prompts()[0], whole=True)
        held.seal()
        for step in range(6):
            Engine(kv).run(prompt(1, seed=step), held)
    assert made.measured["attended_total"] == TOP
    rows: list[Any] = [layer.read_positions() for layer in held.layers]
    for layer, read in zip(held.layers, rows, strict=True):
        prompt_tokens, answer = layer.attended
        assert prompt_tokens + answer == TOP
        assert (read >= 0).sum() == prompt_tokens
    assert torch.equal(rows[0], rows[1])  # the second layer follows the first
    assert not torch.equal(rows[0], rows[2])


def test_what_dsa_cannot_do_is_refused() -> None:
    for architecture in ("llama", "deepseek_v3"):
        with pytest.raises(ValueError, match="this model has none: choose another method"):
            attached(tiny(architecture), DSA(), budget=0.4).__enter__()
    for budget, why in (
        (Budget(TOP, dense_layers=(0,)), "dense_layers"),
        (Budget(TOP, generated=4), "chooses among all generated tokens"),
        (Budget(TOP, mass=0.9), "budget_mass"),
    ):
        with pytest.raises(ValueError, match=why), attached(model("glm_moe_dsa"), DSA(), budget=budget) as kv:
            kv.cache(capacity=9)


def test_an_indexer_that_ranks_otherwise_is_refused() -> None:
    other = fresh("deepseek_v32", index_topk=TOP)
    other.model.layers[1].self_attn.indexer.register_forward_hook(
        lambda *call: call[-1].flip(-1) if torch.is_tensor(call[-1]) else call[-1]
    )
    with pytest.raises(UnsupportedError, match="an indexer of its own"):
        attached(other, Full()).__enter__()


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "glm_moe_dsa"))
def test_a_command_takes_the_budget_that_the_model_was_trained_with(
    family: str, cli: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check against `generate` reads all tokens, and then half of them by the indexers."""
    monkeypatch.setattr(model_check, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(model_check, "_known", {})
    source = saved(fresh(family, vocab_size=264, index_topk=TOP), tmp_path / family)
    words = ["model=hf", f"model.name={source.name}", "chat=none", "task.depths=1", "task.lengths=[300]"]
    code, _, err = cli(*words, "-m", "method=dsa,quest", "baseline=off", "task.max_new_tokens=4")
    assert code == 0, err
    rows = [load(file.parent) for file in tmp_path.glob("runs/*/run.json")]
    assert sorted(row.config["budget"] for row in rows) == [0.2, TOP]
    [own] = (row for row in rows if row.config["budget"] == TOP)
    assert own.config["method"]["_target_"] == "methods.dsa.DSA"
    assert (tokens := own.records[0].prompt_tokens + 4) > 2 * TOP
    held = json.loads((own.folder / "summary.json").read_text())["memory"]["kv_device_bytes"]
    assert held == tokens * 4 * sum(ROW + KEY * len(indexers([module])) for module in modules(family))
    assert max(own.info["model_check"][key] for key in ("difference", "difference_of_choice")) < 1e-3
    said = [str(cli("method=dsa", *more)) for more in ([], [*words, "budget_mass=0.9"], [*words, "dry_run=true"])]
    assert "this model has none: choose another method" in said[0]
    assert ("DSA takes no budget_mass=0.9" in said[1], f"at most {TOP} of" in said[2]) == (True, True)


def test_conversations_keep_their_index_keys_or_compute_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a store between turns, and where a history loses its oldest tokens."""
    monkeypatch.setattr(model_check, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(model_check, "_known", {})
    source = saved(fresh("glm_moe_dsa", vocab_size=264, index_topk=TOP, pad_token_id=None), tmp_path / "model")

    def said(**changes: Any) -> list[list[list[int]]]:
        row = run(tmp_path / "runs", DSA(), Balances(talks=True), source, protocol="prompt", budget=None, **changes)
        return [[turn.tokens for turn in record.turns or ()] for record in row.records]

    assert said() == said(history="store", batch=2)
    assert said(overflow=OverflowSettings(window=380)) == said(overflow=OverflowSettings(window=380), batch=2)
    assert "computes what is left anew, as truncate_tokens does: DSA keeps an index" in capfd.readouterr().err
