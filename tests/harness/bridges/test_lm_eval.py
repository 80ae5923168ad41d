"""Our engine as a model of lm-evaluation-harness, beside that project's own `hf` and our own loop."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import Engine, RunningBatch, attached
from harness.config.settings import SettingsError
from harness.engine.cache import KVCache
from harness.engine.hf import routed
from harness.engine.saved_state import Snapshot
from harness.prompts.stops import StopRule
from methods.full import Full
from tests.forks import Forked, module
from tests.tiny import BORDER, by_length, prompt, tiny

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kv-harness[lm-eval]'")
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model, model_registry

from harness.bridges.lm_eval.model import KVHarnessLM
from harness.bridges.lm_eval.texts import read_context, scored_question, scored_window
from harness.commands.lm_eval import MODEL

TEXT = "A fact stands in a long text, and the text goes on. " * 3
SHARED = dict.fromkeys(("model.shape",), "tiny") | {"model": "random", "model.layers": 2}


@cache
def ours(method: str = "full", **more: Any) -> KVHarnessLM:
    return KVHarnessLM(**SHARED, method=method, **more)


def hf(**keywords: Any) -> Any:
    """lm-eval's own model."""
    for name in ("accelerate", "peft"):
        pytest.importorskip(name, reason=f"lm-eval's own hf model needs {name}")
    from lm_eval.models.huggingface import HFLM

    return HFLM(**keywords)


@cache
def theirs() -> Any:
    """On the same weights."""
    loaded = ours().loaded
    loaded.tokenizer.pad_token = loaded.tokenizer.pad_token or loaded.tokenizer.eos_token
    return hf(pretrained=loaded.model, tokenizer=loaded.tokenizer, max_length=200, batch_size=2)


def asked(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


CHOICES = asked(
    "loglikelihood",
    *((TEXT[start:], f" {word}") for start in (0, 17) for word in ("no", "a longer word", "text")),
    ("", "begins"),
    (TEXT * 2, " is cut on the left"),
)
UNTIL = ["long", "!"]
QUESTIONS = asked(
    "generate_until",
    *((TEXT[start:], {"until": UNTIL, "max_gen_toks": 12, "do_sample": False}) for start in (0, 30, 9)),
)


def test_full_scores_as_their_own_model() -> None:
    lm = ours(batch_size=3, max_length=200)
    for (own, same), (value, greedy) in zip(lm.loglikelihood(CHOICES), theirs().loglikelihood(CHOICES), strict=True):
        assert own == pytest.approx(value, abs=1e-4)
        assert same == greedy
    whole = asked("loglikelihood_rolling", (TEXT,), (TEXT * 3,), ("short",))
    assert lm.loglikelihood_rolling(whole) == pytest.approx(theirs().loglikelihood_rolling(whole), rel=1e-6)


@pytest.mark.tokens
def test_full_answers_as_their_own_model() -> None:
    assert ours(batch_size=2, max_length=200).generate_until(QUESTIONS) == theirs().generate_until(QUESTIONS)


@pytest.mark.tokens
def test_a_methods_answers_are_our_loops_on_long_prompts() -> None:
    lm, texts = ours("pqcache", budget=0.2, batch_size=2), (TEXT * 7, TEXT[9:] * 8)
    questions = asked("generate_until", *((text, {"until": UNTIL, "max_gen_toks": 9}) for text in texts))
    answers, engine = lm.generate_until(questions), Engine(lm.engine.attachment)
    with routed(lm.loaded.model):
        for text, answer in zip(texts, answers, strict=True):
            ids = torch.tensor([lm.tok_encode(text)])
            assert ids.shape[1] >= 1000
            generation = engine.generate(ids, max_new_tokens=9, stops=[StopRule(lm.tokenizer, (), UNTIL, 0)])
            assert answer == lm.tokenizer.decode(generation.tokens[0], skip_special_tokens=True).split("long")[0]


def by_hand(lm: KVHarnessLM, context: str, continuation: str) -> float:
    """One choice by itself: all but the last token sealed, the rest read by steps."""
    ids, scored = lm._encode_pair(context, continuation)
    engine, total = lm.engine, 0.0
    with routed(lm.loaded.model), torch.inference_mode():
        prompt = torch.tensor([ids])
        cache = engine.cache(prompt, len(scored))
        engine.prefill(cache, prompt[:, :-1])
        cache.seal()
        for before, token in zip([ids[-1], *scored], scored, strict=False):
            logits = engine.decode(torch.tensor([[before]]), cache, None)
            total += float(logits.log_softmax(-1)[0, token])
    return total


@pytest.mark.parametrize("method", ["pqcache", "h2o", "snapkv", "shadowkv"])
def test_a_likelihood_is_the_methods(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first token as well; choices share a prefill and see nothing of each other."""
    snapshots: list[Snapshot] = []
    monkeypatch.setattr(
        "harness.bridges.lm_eval.texts.Snapshot", lambda cache: snapshots.append(Snapshot(cache)) or snapshots[-1]
    )
    lm, choices = ours(method, budget=0.6, batch_size=2), CHOICES[:6]
    scores = [value for value, _ in lm.loglikelihood(choices)]
    assert len(snapshots) == 2
    assert scores == pytest.approx([by_hand(lm, *choice.args) for choice in choices], abs=1e-4)
    full = [value for value, _ in ours().loglikelihood(choices)]
    assert all(abs(value - other) > 1e-4 for value, other in zip(scores, full, strict=True))


@pytest.mark.parametrize(("architecture", "kind"), [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic")])
def test_scored_texts_are_rotated_as_one_forward_rotates_them(architecture: str, kind: str) -> None:
    """Where the rotation follows the length of the text: lm-eval's own model has context and continuation in one."""
    fresh = by_length(architecture, kind)

    def in_one_forward(text: Tensor, scored: int) -> float:
        logits = by_length(architecture, kind)(text[:, :-1]).logits[0, -scored:].log_softmax(-1)
        return float(logits.gather(-1, text[0, -scored:, None]).sum())

    context = prompt(BORDER - 4)
    told = {number: prompt(length, seed=number + 1) for number, length in enumerate((3, 12, 2))}
    with torch.no_grad(), attached(fresh, Full()) as kv:
        engine = Engine(kv)
        batch, scored = RunningBatch(engine), dict[int, float]()
        question = {i: one[0].tolist() for i, one in told.items()}
        for text in (
            scored_question(engine, context[0].tolist(), question, batch),
            scored_window(engine, 3, prompt(100)[0].tolist(), 90, 30, batch),
        ):
            for asked_for in text:
                while batch.sequences:
                    batch.step()
                scored[asked_for.number] = asked_for.log_likelihood()
        wanted = [in_one_forward(torch.cat([context, one], 1), one.shape[1]) for one in told.values()]
        assert list(scored.values()) == pytest.approx([*wanted, in_one_forward(prompt(100), 90)], abs=1e-3)


def test_a_rolling_likelihood_seals_a_share_of_each_window() -> None:
    whole = asked("loglikelihood_rolling", (TEXT * 2,))
    limited = ours("streaming", budget=0.6, max_length=200)
    (value,), (other,) = (lm.loglikelihood_rolling(whole) for lm in (limited, ours(max_length=200)))
    assert abs(value - other) > 1e-3
    all_of_it = ours("streaming", budget=1.0, max_length=200)
    assert all_of_it.loglikelihood_rolling(whole) == pytest.approx([other], abs=1e-3)


def test_drawn_answers_are_the_same_again() -> None:
    drawn = {"do_sample": True, "temperature": 1.5, "top_k": 50, "max_gen_toks": 8, "until": []}
    lm, questions = ours(), asked("generate_until", (TEXT, drawn), (TEXT, drawn))
    first = lm.generate_until(questions)
    assert first == lm.generate_until(questions)
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"batch_size": "auto:4"}, "batch_size=auto:4"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_length": "long"}, "max_length=long"),
        ({"rolling_context": 1}, "rolling_context=1"),
        ({"rolling_context": "half"}, "rolling_context='half'"),
        ({"method": "streaming", "budget": 0.6, "rolling_context": 0}, "rolling_context=0"),
        ({"method": "pqcache", "budget": "1MB"}, "budget=1000000B budget_rule=read stands for bytes"),
        ({"task": "niah"}, "task is not a key.* batch_size, max_length, .*enable_thinking"),
        ({"pretrained": "owner/name"}, "set model=hf and model.name"),
        ({"enable_thinking": "maybe"}, "enable_thinking=maybe is neither"),
        ({"model.rope": "{rope_type: yarn", " factor: 4}": ""}, "cut at its comma: give model_args as a mapping"),
        ({"method": "snapvk"}, "snapkv"),
        ({"device": "cuda:7"}, "device=cuda:7"),
        ({"config_dir": "/nowhere"}, "config_dir=/nowhere"),
    ],
)
def test_wrong_arguments_get_a_sentence(words: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError if "cuda" not in says else ValueError, match=says):
        KVHarnessLM(**SHARED | {"method": "full"} | words)


def test_wrong_requests_are_refused_and_short_and_long_ones_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lm = ours("snapkv", budget=0.2, batch_size=2, max_length=600)
    for wrong in ({"num_beams": 2, "max_gen_toks": 9}, {"max_gen_toks": 600}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            lm.generate_until(asked("generate_until", (TEXT, wrong)))
    texts = [TEXT[:length] for length in (1, 12, 150)] + [TEXT * 3, TEXT * 90]
    _, _, _, _, long = lm.generate_until(
        asked("generate_until", *((text, {"until": [], "max_gen_toks": 5}) for text in texts))
    )
    printed = capsys.readouterr().err
    assert "2 of 5 requests" in printed
    assert "max_length=600" in printed
    info = lm.get_model_info()
    assert (info["kv_requests"], sum(info["kv_fell_back"].values()), info["kv_cut_left"]) == (5, 2, 1)
    assert info["kv_device"] == "cpu"
    fits = lm.tokenizer.decode(lm.tok_encode(texts[-1])[-595:])
    assert lm.generate_until(asked("generate_until", (fits, {"until": [], "max_gen_toks": 5}))) == [long]
    assert lm.cut_left == 1


def own_task(folder: Path) -> Path:
    """A folder with a task of a user's: a multiple choice on the rows of a file, with shots."""
    row = '{"q": "What stands in text %d?", "choices": ["a fact", "nothing"], "label": 0}\n'
    rows = "".join(row % number for number in range(5))
    (folder / "rows.jsonl").write_text(rows)
    (folder / "own.yaml").write_text(
        "task: own\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\nfewshot_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}\n"
        'doc_to_text: "{{q}}"\ndoc_to_target: label\ndoc_to_choice: "{{choices}}"\nnum_fewshot: 2\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return folder


def test_tasks_with_few_shots_and_chat_templates(tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    lm = ours("pqcache", budget=0.9)
    lm.tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    manager = TaskManager(include_path=str(own_task(tmp_path)), include_defaults=False)
    try:
        results = simple_evaluate(lm, tasks=["own"], task_manager=manager, apply_chat_template=True, bootstrap_iters=0)
    finally:
        lm.tokenizer.chat_template = None
    asked_for = results["samples"]["own"][0]["arguments"][0][0]
    assert asked_for.count("<assistant>a fact<user>What") == 2
    assert results["results"]["own"]["acc,none"] in (0.0, 1.0)
    assert results["config"]["kv_budget"] == "0.9"


def test_the_same_command_goes_on_after_an_error_with_what_its_use_cache_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    contexts: list[Tensor] = []

    def fails(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
        contexts.append(ids)
        if len(contexts) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read_context(engine, cache, ids)

    def evaluated(**keywords: Any) -> Any:
        manager = TaskManager(include_path=str(own_task(tmp_path)), include_defaults=False)
        return simple_evaluate(ours(), tasks=["own"], task_manager=manager, bootstrap_iters=0, **keywords)["results"]

    whole = evaluated()
    monkeypatch.setattr("harness.bridges.lm_eval.texts.read_context", fails)
    with pytest.raises(torch.OutOfMemoryError):
        evaluated(use_cache=str(tmp_path / "kept"))
    assert evaluated(use_cache=str(tmp_path / "kept")) == whole
    assert len(contexts) == 3 + 5 - 2


def test_a_file_of_use_cache_gives_each_method_its_own_answers(tmp_path: Path) -> None:
    """lm-eval's keys are the texts of requests alone. Who asks anew gets what is there, counted in the results."""
    drawn = {"temperature": 2.0, "max_gen_toks": 6, "until": []}
    texts = [TEXT * 2, TEXT * 3]
    lists = {
        "generate_until": asked("generate_until", *((text, {"until": [], "max_gen_toks": 6}) for text in texts)),
        "loglikelihood": CHOICES[:3],
        "loglikelihood_rolling": asked("loglikelihood_rolling", (TEXT,)),
    }
    askers: list[dict[str, Any]] = [
        {"method": "full"},
        {"method": "streaming", "budget": 0.3},
        {"method": "streaming", "budget": 0.6},
        {"method": "streaming", "budget": 0.6, "method.sinks": 2},
        {"method": "streaming", "budget": 0.6, "rolling_context": 0.3},
        {"method": "full", "max_length": 100},
        {"method": "full", "model.seed": 1},
    ]
    for words in askers:
        own, lm, again = (KVHarnessLM(**SHARED | words) for _ in range(3))
        for answered in (lm, again):
            kept = CachingLM(answered, str(tmp_path / "kept.db"))
            for kind, requests in lists.items():
                assert getattr(kept, kind)(requests) == getattr(own, kind)(requests)
        assert (lm.requests, lm.from_file, again.requests, again.from_file) == (6, 0, 0, 6)
        assert lm.get_model_info()["kv_cautions"] == []
        [caution] = again.get_model_info()["kv_cautions"]
        assert caution.startswith("6 answers are from")
    lm, kept.lm.loaded = again, replace(again.loaded, revision="of weights that were changed")
    CachingLM(lm, str(tmp_path / "kept.db")).loglikelihood(CHOICES[:3])
    assert lm.requests == 3
    whole = own.generate_until(asked("generate_until", *((text, drawn) for text in texts)))
    assert own.generate_until(asked("generate_until", (texts[1], drawn))) == [whole[1]]
    with pytest.raises(SettingsError, match=r"--use_cache of lm-eval .* does not tell methods apart"):
        lm.set_cache_hook(SimpleNamespace(dbdict={}))


def test_prompts_that_lm_eval_keeps_are_those_of_the_template() -> None:
    lm = KVHarnessLM(**SHARED, method="full")
    names = {lm.tokenizer_name}
    for key, value in {"template_kwargs": {"a": 1}, "enable_thinking": False}.items():
        setattr(lm, key, value)
        names.add(lm.tokenizer_name)
    lm.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert len(names | {lm.tokenizer_name}) == 4
    lm.tokenizer.chat_template = None


@pytest.mark.slow  # it lists all its tasks, which takes many seconds
def test_their_command_knows_our_model(tmp_path: Path) -> None:
    arguments = ",".join(f"{key}={value}" for key, value in SHARED.items())
    ran = Forked(
        module, "harness", "lm-eval", "run", "--model", MODEL, "--model_args", f"{arguments},method=pqcache,budget=0.9",
        "--tasks", "own", "--include_path", str(own_task(tmp_path)), "--limit", "2",
    )  # fmt: skip
    assert ran.wait() == 0, ran.err
    assert "|own" in ran.out
    assert "|acc" in ran.out


def test_the_class_stands_where_coming_releases_look() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'{MODEL} = "{KVHarnessLM.__module__}:{KVHarnessLM.__name__}"' in text
    if MODEL not in model_registry:
        model_registry.register(MODEL, target=f"{KVHarnessLM.__module__}:{KVHarnessLM.__name__}")
    assert get_model(MODEL) is KVHarnessLM


START = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT_ITSELF = [{"Sequence": {"id": "A", "type_id": 0}}]
WITH_BOS = {
    "type": "TemplateProcessing",
    "single": [START, *TEXT_ITSELF],
    "pair": [START, *TEXT_ITSELF],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}


@pytest.mark.parametrize("add", [None, True, False])
@pytest.mark.parametrize(
    ("processor", "config", "template"),
    [
        (None, {}, ""),
        (WITH_BOS, {"add_bos_token": False}, ""),
        (WITH_BOS, {"add_bos_token": True}, ""),
        (WITH_BOS, {"add_bos_token": True}, "{{ bos_token }}"),
    ],
    ids=["no processor", "no", "yes", "by the template"],
)
def test_bos_stands_where_their_own_model_puts_it(
    processor: Any, config: dict[str, Any], template: str, add: bool | None, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<s>", "</s>", "Why", "is", "it", "so", "?", "[", "]", "u"))}
    backend = Tokenizer(models.WordLevel(words, unk_token="u"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny("llama").save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="u")
    tokenizer.chat_template = template + "{% for m in messages %}[ {{ m.content }} ]{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    for file, changes in (("tokenizer.json", {"post_processor": processor}), ("tokenizer_config.json", config)):
        (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | changes))
    keywords = {} if add is None else {"add_bos_token": add}
    wanted = hf(pretrained=str(tmp_path), device="cpu", dtype="float32", **keywords)
    lm = KVHarnessLM(**{"model": "hf", "model.name": str(tmp_path)}, method="full", **keywords)
    chat = lm.apply_chat_template([{"role": "user", "content": "Why ?"}])
    assert chat == wanted.apply_chat_template([{"role": "user", "content": "Why ?"}])
    for text in (chat, "Why is it", "<s> Why", ""):
        assert lm.tok_encode(text) == wanted.tok_encode(text)
        assert text == "" or lm.tok_encode(text) == wanted.tok_batch_encode([text])[0][0].tolist()
    for pair in (("Why is it", " so ?"), (chat, " so")):
        assert lm._encode_pair(*pair) == wanted._encode_pair(*pair)
    assert lm.tok_encode("Why is it").count(0) == (add if add is not None else processor is not None)
