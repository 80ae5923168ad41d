"""Tasks of lm-evaluation-harness as ours: its documents, filters and metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evals.base import Example, TaskEnv, TaskError
from evals.lm_eval import LmEval, _leaves
from tests.evals.counting import CountedText

ENV = TaskEnv(text=CountedText(), seed=42)


def test_without_it_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.lm_eval.find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"not installed: run `pip install 'kv-harness\[lm-eval\]'`"):
        LmEval().require(None)
    with pytest.raises(TaskError, match="not installed"):
        next(LmEval().examples(ENV))


ROWS = [
    {"q": "2 + 3?", "options": ["5", "6 apples", "7"], "right": 0, "a": "Two and three.\n#### 5"},
    {"q": "4 + 4?", "options": ["7", "8", "9"], "right": 1, "a": "Twice four.\n#### 8"},
    {"q": "1 + 1?", "options": ["2", "3", "4"], "right": 0, "a": "One more.\n#### 2"},
]
SUMS = """
task: sums
output_type: generate_until
doc_to_text: "Q: {{q}}\\nA:"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["Q:", ""], max_gen_toks: 7}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ["(?s).*#### "]}]
filter_list:
  - {name: last, filter: [{function: regex, group_select: -1, regex_pattern: "(-?[0-9]+)"}, {function: take_first}]}
  - {name: whole, filter: [{function: take_first}]}
"""
PICK = """
task: pick
output_type: multiple_choice
doc_to_text: "{{q}}\\nAnswer: "
doc_to_target: right
doc_to_choice: "{{options}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
DRAWN = SUMS.replace("task: sums", "task: drawn").replace("max_gen_toks: 7", "do_sample: true, temperature: 0.7")
BOTH = "group: both\ntask: [sums, pick]\n"
LISTED = SUMS.replace("task: sums", "task: listed").replace("{{a}}", "{{options[0]}}")
NAMED = SUMS.replace("task: sums", "task: named").replace('"Q: {{q}}\\nA:"', "q")
YAMLS = {"sums": SUMS, "pick": PICK, "drawn": DRAWN, "listed": LISTED, "named": NAMED, "both": BOTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A user's own yaml files over a local file."""
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kv-harness[lm-eval]'")
    root = tmp_path_factory.mktemp("lm_eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "HF_DATASETS_OFFLINE", "1")
        write(root, ROWS)
        yield str(root)
    _leaves.cache_clear()


def write(root: Path, rows: list[dict[str, Any]]) -> None:
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        "dataset_path: json\ntest_split: test\nfewshot_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {root}/rows.jsonl}}, cache_dir: {root}/cache}}\n"
    )
    for name, text in YAMLS.items():
        (root / f"{name}.yaml").write_text(text if name == "both" else text + data)


def examples(folder: str, name: str, **changes: Any) -> tuple[LmEval, list[Example]]:
    task = LmEval(name=name, include_path=folder, **changes)
    return task, list(task.examples(ENV))


def test_prompts_stops_and_references_are_the_tasks(folder: str) -> None:
    task, found = examples(folder, "sums", num_fewshot=1)
    assert [example.id for example in found] == ["sums-0", "sums-1", "sums-2"]
    for example, row in zip(found, ROWS, strict=True):
        assert example.question == f"Q: {row['q']}\nA:"
        assert example.context.startswith("Q: ")
        assert example.context.count("####") == 1
        assert (example.stop, example.max_new_tokens, example.references) == (("Q:",), 7, (row["a"],))
    assert [one.context for one in examples(folder, "sums", num_fewshot=1)[1]] == [one.context for one in found]
    (origin,) = task.provenance()["tasks"].values()
    assert (origin["version"], origin["data"], len(origin["revision"])) == ("Yaml", "json", 64)  # a hash of the file
    assert [one.id for one in examples(folder, "sums", samples=2)[1]] == ["sums-0", "sums-1"]
    assert not examples(folder, "sums")[1][0].question  # nothing stands before it


def test_filters_and_metrics_are_the_tasks(folder: str) -> None:
    task, found = examples(folder, "sums")
    right = task.score(found[0], "It is 4, no, 5")
    assert right.value == 1.0
    assert right.details == {"exact_match,last": 1.0, "exact_match,whole": 0.0}
    assert [task.score(found[0], output).value for output in ("5 or 6", "", "é\x00", "7" * 5000)] == [0.0] * 4
    whole = LmEval(name="sums", include_path=folder, score_by="exact_match,whole")
    assert (whole.score(found[0], "5").value, whole.score(found[0], "It is 5").value) == (1.0, 0.0)
    with pytest.raises(TaskError, match="score_by=acc is not a metric"):
        LmEval(name="sums", include_path=folder, score_by="acc").score(found[0], "5")
    assert task.averages({"sums": 0.5}, {"exact_match,last": 0.5}) == {"mean": 0.5, "exact_match,last": 0.5}


def with_rows(folder: str, tmp_path: Path, name: str, rows: str, text: str = "", kind: str = "json") -> LmEval:
    """The task over a file of other rows of this kind, and with another `text` of the yaml."""
    (tmp_path / "other.jsonl").write_text(rows)
    whole = (Path(folder) / f"{name}.yaml").read_text()
    whole = whole.replace(YAMLS[name], text or YAMLS[name]).replace(f"{folder}/rows.jsonl", f"{tmp_path}/other.jsonl")
    whole = whole.replace(f"{folder}/cache", f"{tmp_path}/cache").replace("path: json", f"path: {kind}")
    (tmp_path / f"{name}.yaml").write_text(whole)
    return LmEval(name=name, include_path=str(tmp_path))


def without(**missing: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in (ROWS[0], ROWS[1] | missing, ROWS[2]))


SHOWN = SUMS.replace("{{q}}", "{% if q %}{{q}}{% endif %}{{options[0]}}") + "num_fewshot: 1\n"
ROW = "NAME: row 2 of FOLDER/other.jsonl .*"
EMPTY = "^[^ ]*other.jsonl is empty: write rows into it, or name another file"
WRONG: list[tuple[str, str, str, dict[str, str]]] = [
    *(("pick", without(right=label), ROW + "has no right answer.* drop the row", {}) for label in (-1, 9)),
    *(("sums", without(a=empty), ROW + "has no right answer in 'a'.* drop the row", {}) for empty in (" ", None)),
    ("pick", without(right=None), ROW + "has no right answer in 'right'.* drop the row", {}),
    *(("listed", without(options=empty), ROW + "has no right answer in 'options'.* drop the row", {})
      for empty in ([], None, [""], [None])),
    *((name, without(q=empty), ROW + "leaves 'q' empty.* drop the row", {})
      for name in ("sums", "pick", "listed") for empty in (None, " ")),
    ("pick", without(options=None), ROW + "leaves 'options' empty.* drop the row", {}),
    ("pick", without(options=[None, "b"]), ROW + "a choice is null.* drop the row", {}),
    ("named", without(q=None), ROW + "leaves 'q' empty.* drop the row", {}),
    ("sums", json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1] | {"options": [None]}) + "\n",
     'row 1 of .*, or a row that is shown before it, would write a null as "None"', {"text": SHOWN}),
    ("sums", json.dumps(ROWS[0]) + '\n{"q": oops}\n', "other.jsonl .*row 2", {}),
    ("sums", '{"q": "1"}\n', "'a'", {}),
    *(("sums", rows, EMPTY, {}) for rows in ("", "\n\n", "[]")),
    *(("sums", rows, EMPTY, {"kind": kind}) for kind, rows in (("csv", ""), ("csv", "q,a\n"), ("parquet", ""))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "says", "more"), WRONG)
def test_rows_that_make_no_prompt_or_score_are_named(
    folder: str, tmp_path: Path, name: str, rows: str, says: str, more: dict[str, str]
) -> None:
    with pytest.raises(TaskError, match=says.replace("NAME", name).replace("FOLDER", str(tmp_path))):
        list(with_rows(folder, tmp_path, name, rows, **more).examples(ENV))


def test_a_corrected_file_is_read_again_by_the_same_process(folder: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="leaves 'q' empty"):
        list(with_rows(folder, tmp_path, "sums", json.dumps(ROWS[0] | {"q": ""}) + "\n").examples(ENV))
    [example] = with_rows(folder, tmp_path, "sums", json.dumps(ROWS[1]) + "\n").examples(ENV)
    assert example.context == "Q: 4 + 4?\nA:"


def test_what_a_template_guards_may_be_empty(folder: str, tmp_path: Path) -> None:
    text = SUMS.replace("{{q}}", "{{q or ''}}{% if options %}{{options}}{% endif %}{{right|default(1, true)}}{{b}}")
    rows = json.dumps({"q": None, "options": [], "right": None, "a": "7", "b": "B"}) + "\n"
    [example] = with_rows(folder, tmp_path, "sums", rows, text).examples(ENV)
    assert (example.context, example.references) == ("Q: 1B\nA:", ("7",))


def test_choices_are_fed_behind_the_prompt(folder: str) -> None:
    task, found = examples(folder, "pick")
    assert found[0].context == "2 + 3?\nAnswer:"  # white space at the end is the choices'
    assert found[0].choices == ("  5", "  6 apples", "  7")
    assert found[1].references == ("8",)
    told = json.dumps([[-3.0, False], [-4.0, False], [-5.0, False]])
    assert task.score(found[0], told).details == {"acc,none": 1.0, "acc_norm,none": 0.0}  # 8 letters for 4 nats
    assert task.score(found[1], told).value == 0.0
    chat = examples(folder, "pick", chat=True)[1][0]
    assert (chat.chat, chat.choices) == (True, ("5", "6 apples", "7"))


def test_a_group_is_all_its_tasks_and_what_our_loop_does_not_ask_is_refused(folder: str) -> None:
    assert sorted({example.group for example in examples(folder, "both")[1]}) == ["pick", "sums"]
    with pytest.raises(TaskError, match="do_sample"):
        examples(folder, "drawn")


def test_a_run_scores_as_their_own_evaluation_of_our_model(folder: str, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from harness.bridges.lm_eval.model import KVHarnessLM
    from tests.fast import PQ, run

    words = {"model": "random", "model.shape": "tiny", "model.layers": 2, "model.tokenizer_name": "bytes"}
    of_the_method = {f"method.{key}": getattr(PQ, key) for key in ("b", "iterations", "seed", "sinks")}
    lm = KVHarnessLM(**words, **of_the_method, method="pqcache", budget=0.8)
    manager = TaskManager(include_path=folder, include_defaults=False)
    for name in ("sums", "pick"):
        theirs = simple_evaluate(lm, tasks=[name], task_manager=manager, num_fewshot=1, bootstrap_iters=0)
        ours = run(tmp_path, PQ, LmEval(name=name, include_path=folder, num_fewshot=1), budget=0.8, batch=2)
        by_id = {record.id: record for record in ours.records}
        assert len(by_id) == len(ROWS)
        for sample in theirs["samples"][name]:
            record = by_id[f"{name}-{sample['doc_id']}"]
            if name == "sums":
                assert record.output == sample["resps"][0][0]
            else:
                told = [likelihood for likelihood, _ in json.loads(record.output)]
                assert told == pytest.approx([resp[0][0] for resp in sample["resps"]], abs=1e-4)
        means = {key: value for key, value in theirs["results"][name].items() if key in by_id[f"{name}-0"].details}
        found = {key: sum(record.details[key] for record in ours.records) / len(ROWS) for key in means}
        assert means
        assert found == pytest.approx(means)
