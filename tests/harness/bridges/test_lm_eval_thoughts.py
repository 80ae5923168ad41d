"""lm-eval's requests to models that think first: in its own loop, beside its `hf`, and as a task of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import Results, Settings, SettingsError
from harness.jobs.evaluate import evaluate
from harness.prompts.facts import unanswered
from methods.full import Full
from tests.harness.bridges.test_lm_eval import hf
from tests.scripted import END, FINAL, TURN, scripted

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kv-harness[lm-eval]'")
from lm_eval.api.instance import Instance

from harness.bridges.lm_eval.model import KVHarnessLM

KINDS = {"empty block": "</think>", "open block": "</think>", "harmony": FINAL}  # and the end marks that users give
ASKED = [{"role": "user", "content": "Where?"}]


def ours(folder: Path, **more: Any) -> KVHarnessLM:
    return KVHarnessLM(**{"model": "hf", "model.name": str(folder), "device": "cpu"}, method="full", **more)


def asked(lm: Any, until: list[str], count: int = 40) -> str:
    """The answer to a question in the model's chat template."""
    text, keywords = lm.apply_chat_template(ASKED), {"until": until, "max_gen_toks": count}
    [answer] = lm.generate_until([Instance("generate_until", {}, (text, keywords), 0)], disable_tqdm=True)
    return str(answer)


@pytest.mark.parametrize("kind", KINDS)
def test_thoughts_are_taken_out_as_by_their_own_model(kind: str, tmp_path: Path) -> None:
    source, end = scripted(tmp_path / "model", kind), KINDS[kind]
    end_id = source.tokenizer().convert_tokens_to_ids(end)
    ends = [end_id] if kind == "harmony" else [end, end_id]  # `hf` knows no text of a special token
    for given in ends:
        words: dict[str, Any] = {"enable_thinking": True, "think_end_token": given}
        theirs = hf(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32", **words)
        lm = ours(tmp_path / "model", **words)
        assert lm.apply_chat_template(ASKED) == theirs.apply_chat_template(ASKED)
        assert asked(lm, [" more"]) == asked(theirs, [" more"]) == "The key is 7 stop!"
    without = {"enable_thinking": None}  # the template's own way, where nothing is taken out
    theirs = hf(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32", **without)
    assert asked(ours(tmp_path / "model", **without), [" more"]) == asked(theirs, [" more"])


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_act_behind_the_thought(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripted(tmp_path / "model", kind)
    further = ours(tmp_path / "model", **{"model.window": 10**6})
    assert "model.window=1000000 goes beyond" in str(further.get_model_info()["kv_cautions"])
    lm = ours(tmp_path / "model", enable_thinking=True)  # the template shows the end mark
    with pytest.raises(SettingsError, match="only with --apply_chat_template"):
        lm.generate_until([Instance("generate_until", {}, ("Where?", {"until": [], "max_gen_toks": 4}), 0)])
    for until in ([" stop"], [" stop", "\n\n", "\n"]):
        assert asked(lm, until) == "The key is 7"
    assert lm.get_model_info()["kv_cut_thoughts"] == 0
    assert "thoughts" not in capsys.readouterr().err
    assert asked(lm, [], count=4) == ""  # thought and answer share them
    assert "1 of 1 thoughts did not end" in capsys.readouterr().err
    assert lm.get_model_info()["kv_cut_thoughts"] == 1
    off = ours(tmp_path / "model", enable_thinking=False)
    assert off.apply_chat_template(ASKED).endswith(("<think>\n\n</think>\n\n", FINAL))
    assert asked(off, [" stop"]) == "The key is 7"
    assert len({lm.tokenizer_name, off.tokenizer_name, ours(tmp_path / "model").tokenizer_name}) == 3
    with pytest.raises(SettingsError, match="enable_thinking=True suits no task"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("Where?", " 7"), 0)])


def test_marks_of_an_unknown_kind_are_given(tmp_path: Path) -> None:
    scripted(tmp_path / "model", "none", [[TURN, "so", " it", "</think>", "The"], [END]])
    with pytest.raises(SettingsError, match="give think_end_token"):
        ours(tmp_path / "model", enable_thinking=True)
    lm = ours(tmp_path / "model", enable_thinking=True, think_end_token=" it")
    assert asked(lm, ["so", " stop"]) == "</think>The key is 7"
    split = [TURN, "<think>", "so", "</th", "ink>The", " key"]  # the answer begins in the end mark's last token
    scripted(tmp_path / "shared", "none", [split])
    assert asked(ours(tmp_path / "shared", think_end_token="</think>"), [" stop", ">"]) == "The key is 7"
    at_once = ours(tmp_path / "model", think_end_token="</think>")  # its answers do not begin with <think>
    assert asked(at_once, [" stop"]) == "The key is 7"


@pytest.mark.parametrize(("thinking", "thoughts"), [("off", None), ("on", 7), ("4", 4)])
def test_a_task_of_theirs_takes_our_setting(thinking: str, thoughts: int | None, tmp_path: Path) -> None:
    from evals.lm_eval import LmEval

    (tmp_path / "rows.jsonl").write_text('{"q": "Where?", "a": "42"}\n{"q": "Which?", "a": "42"}\n')
    (tmp_path / "own.yaml").write_text(
        "task: thoughtful\ndataset_path: json\noutput_type: generate_until\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}, cache_dir: {tmp_path}/cache}}\n"
        'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\ngen_prefix: "Answer:"\n'
        'generation_kwargs: {until: [" stop"], max_gen_toks: 7, do_sample: false}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_punctuation: true}]\n"
        "filter_list: [{name: clean, filter: [{function: remove_whitespace}, {function: take_first}]}]\n"
    )
    task = LmEval(name="thoughtful", include_path=str(tmp_path), chat=True)
    settings = Settings(results=Results(root=str(tmp_path / "runs")), baseline="off", warmup=0, thinking=thinking)
    finished = evaluate(Full(), task, scripted(tmp_path / "model", "empty block"), settings)
    for record in finished.records:
        assert record["thought_tokens"] == thoughts
        assert (record.output, record.score) == (("", 0.0) if unanswered(record) else (" 42", 1.0))
