"""Examples that are too long for the model's window: refused, left out, or with their contexts cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from evals.base import Example, Score, Task, TaskEnv, Turn
from evals.lm_eval import LmEval
from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate
from harness.jobs.examples import LintError, itemised, prepare
from harness.jobs.job import Job
from harness.models.hub import HuggingFace
from harness.prompts.prompt import PromptError
from harness.results.run_folder import load
from harness.terminal.notices import say_once
from methods.streaming import Streaming
from tests.fast import MODEL, niah
from tests.harness.conftest import Cli
from tests.tiny import saved

WINDOW = 700
WORDS = [f"word{number}" for number in range(3000)]
ASKED = "\nQuestion: Which word came first?\nAnswer:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    """A tiny model with a token per byte, and a short window."""
    return replace(saved(MODEL.build(torch.float32, "cpu"), tmp_path_factory.mktemp("model")), window=WINDOW)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Four documents in lm-eval's form, of which the third has 3,000 words."""
    docs = [{"context": " ".join(WORDS[:count]), "answer": "word1"} for count in (60, 80, 3000, 70)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "mine.yaml").write_text(
        f"""
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/docs.jsonl}}, cache_dir: {tmp_path}/cache}}
test_split: test
output_type: generate_until
doc_to_text: {json.dumps("{{context}}" + ASKED)}
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
    )
    return tmp_path


@pytest.mark.parametrize("too_long", ["refuse", "skip", "middle", "left"])
def test_one_long_document_does_not_refuse_the_others(
    cli: Cli, rows: Path, model: HuggingFace, too_long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kv-harness[lm-eval]'")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    words = ["model=hf", f"model.name={model.name}", f"model.window={WINDOW}", "method=streaming"]
    words += ["task=lm_eval", "task.name=mine", f"task.include_path={rows}", f"too_long={too_long}"]
    code, out, err = cli(*words)
    if too_long == "refuse":
        assert code == 1
        assert all(
            word in err for word in ("mine-2", f"window of {WINDOW}", "too_long=skip", "too_long=middle or left")
        )
        return
    assert code == 0
    runs = [load(folder.parent) for folder in rows.glob("runs/*/run.json")]
    ids = {f"mine-{number}" for number in range(4)}
    for run in runs:
        (full,) = [other for other in runs if other.info["method"] == "full"]
        lines = {record.id: record for record in run.records}
        if too_long == "skip":
            assert (lines.keys(), [skipped.id for skipped in run.skipped]) == (ids - {"mine-2"}, ["mine-2"])
            assert f"and the model's window has {WINDOW}" in run.skipped[0].why
        else:
            assert (lines.keys(), run.skipped) == (ids, [])
            assert lines["mine-2"].prompt_tokens + 8 == WINDOW
            long = len(" ".join(WORDS) + ASKED)
            assert [lines[name]["cut_tokens"] for name in sorted(ids)] == [0, 0, long - (WINDOW - 8), 0]
        assert run.info["identity"]["too_long"] == too_long == full.info["identity"]["too_long"]
        assert run.info["identity"]["prompts"] == full.info["identity"]["prompts"]
    way = {"skip": "left out", "middle": "cut in the middle", "left": "cut at the beginning"}[too_long]
    assert f"Longer than the model's window: 1 of 4 prompts {way} (too_long={too_long})." in out
    lost = "Caution: in 1 of 4 prompts the answer was in the part that was cut"
    assert (lost in out) == (too_long == "left")
    assert ("1 of 4 examples left out" in err) == (too_long == "skip")
    _, again, err = cli(*words)
    assert "2 of 4" not in err
    assert err.count("finished, reused") == 2
    assert again == out
    assert [len((run.folder / "examples.jsonl").read_text().splitlines()) for run in runs] == [4, 4]


@pytest.mark.parametrize("side", ["middle", "left"])
def test_a_document_behind_a_description_is_cut_with_it(rows: Path, model: HuggingFace, side: Any) -> None:
    """lm-eval's description is the context, and all of the document the question."""
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kv-harness[lm-eval]'")
    described, docs = "Read this text.\n\n", [" ".join(WORDS[:count]) for count in (60, 2000, 3000, 70)]
    (rows / "docs.jsonl").write_text("".join(json.dumps({"context": doc, "answer": "x"}) + "\n" for doc in docs))
    text = (rows / "mine.yaml").read_text()
    (rows / "mine.yaml").write_text(f"{text}description: {json.dumps(described)}\n")
    items = prepare(LmEval(name="mine", include_path=str(rows)), model, Settings(too_long=side))
    assert [item.needed == WINDOW for item in items] == [False, True, True, False]
    for item, doc in zip(items, docs, strict=True):
        whole, kept = described + doc + ASKED, WINDOW - 8
        half = kept // 2 if side == "middle" else 0
        cut = whole[:half] + whole[len(whole) - kept + half :] if len(whole) > kept else whole
        assert item.prompt.text == cut
        assert item.prompt.split == (len(described) if cut == whole else len(item.prompt.ids))


@dataclass(frozen=True)
class Library(Task):
    """Questions of unequal lengths on a text that is too long, and one on a text that is not."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "right"
    own_cut: int | None = None
    words: int = 200
    ask: str = "{}"

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for number, count in enumerate((self.words, self.words, 5)):
            yield Example(
                id=str(number),
                group="all",
                context=" ".join(WORDS[:count]),
                question=f" | Which? {number * 'Think. '}{self.ask.format(number)}",
                prefix="It is",
                system="Be brief.",
                references=("word1",),
                max_new_tokens=6,
                max_prompt_tokens=self.own_cut,
            )

    def score(self, example: Example, output: str) -> Score:
        return Score(0.0)


@pytest.mark.parametrize("side", ["middle", "left"])
def test_a_cut_leaves_template_question_and_prefix_whole(model: HuggingFace, side: str) -> None:
    first, second, short = prepare(Library(), model, Settings(too_long=side))
    whole = prepare(Library(), replace(model, window=None), Settings())
    tokenizer = model.tokenizer()
    assert short.prompt == whole[2].prompt
    assert second.needed == WINDOW
    for item, uncut in zip((first, second), whole, strict=False):
        text, context, question = item.prompt.text, item.example.context, item.example.question
        before, after = uncut.prompt.text.split(context + question)
        kept = text.removeprefix(before).removesuffix(question + after)
        assert text == before + kept + question + after
        assert tuple(tokenizer(text, add_special_tokens=False).input_ids) == item.prompt.ids
        assert len(context) - len(kept) == item.prompt.cut_tokens > 0
        start = len(kept) // 2 if side == "middle" else 0
        assert kept == context[:start] + context[start + item.prompt.cut_tokens :]
        assert uncut.prompt.split - item.prompt.split == item.prompt.cut_tokens
    # both questions lose the same part of their text, so that they can share its prefill
    assert first.prompt.ids[: first.prompt.split] == second.prompt.ids[: second.prompt.split]


def test_a_tasks_own_cut_comes_first(model: HuggingFace) -> None:
    items = prepare(Library(own_cut=400), model, Settings(too_long="left"))
    assert [item.prompt.cut for item in items] == [None] * 3
    assert items == prepare(Library(own_cut=400), model, Settings())
    (first, *_) = prepare(Library(own_cut=800), model, Settings(too_long="left"))
    assert first.prompt.cut is not None
    assert first.needed == WINDOW


def test_what_cannot_be_cut_is_left_out(model: HuggingFace) -> None:
    long = Library(ask=" ".join(WORDS[:200]))
    with pytest.raises(LintError, match=r"Every example is left out: prompt and answer take \d+ tokens.*too short"):
        prepare(long, model, Settings(too_long="middle"))
    with pytest.raises(LintError, match=f"Every example is left out: .*window has {WINDOW}"):
        prepare(Library(words=3000, own_cut=None, ask=" ".join(WORDS)), model, Settings(too_long="skip"))


def test_a_conversation_is_cut_so_that_all_its_turns_fit(model: HuggingFace) -> None:
    turns = tuple(Turn(question=" ".join(WORDS[: 20 * number]), references=("x",)) for number in (1, 2))

    def examples() -> Iterator[Example]:
        for example in Library().examples(None):  # type: ignore[arg-type]
            yield replace(example, further=turns)

    items, left_out = itemised(examples(), model.tokenizer(), Settings(too_long="middle"), WINDOW)
    assert not left_out
    assert [item.needed for item in items[:2]] == [pytest.approx(WINDOW, abs=8), WINDOW]
    assert [[turn.prompt.cut_tokens > 0 for turn in item.turns] for item in items] == [
        [True, False, False],
        [True, False, False],
        [False, False, False],
    ]


@pytest.mark.parametrize("too_long", ["skip", "middle", "left"])
def test_where_all_fit_the_run_is_that_of_the_default(
    model: HuggingFace, too_long: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say_once.cache_clear()
    usual, other = (Job.plan(Streaming(), niah(), model, Settings(too_long=way)) for way in ("refuse", too_long))
    assert other.folder == usual.folder
    assert f"too_long={too_long} changes nothing here: every example fits" in capsys.readouterr().err
    cut, skipped = (Job.plan(Streaming(), Library(), model, Settings(too_long=way)) for way in ("middle", "skip"))
    assert len({cut.folder, skipped.folder, usual.folder}) == 3


def test_questions_with_one_cut_context_share_its_prefill(tmp_path: Path, model: HuggingFace) -> None:
    def run(questions: str) -> dict[str, Any]:
        wanted = Settings(
            protocol="context", questions=questions, too_long="middle", warmup=0, baseline="off",
            results=Results(root=str(tmp_path / questions)),
        )  # fmt: skip
        finished = evaluate(Streaming(), Library(), model, wanted)
        return {record.id: (record.tokens, record["prefilled_by"] is None) for record in finished.records}

    separate, shared = run("separate"), run("shared")
    assert {name: tokens for name, (tokens, _) in shared.items()} == {n: tokens for n, (tokens, _) in separate.items()}
    assert [own for _, own in shared.values()] == [True, False, True]


# prompts that a chat template refuses


def refusing(model: HuggingFace, text: str) -> Any:
    tokenizer = model.tokenizer()
    tokenizer.chat_template = (
        f"{{% if '{text}' in messages[-1]['content'] %}}{{{{ raise_exception('not this') }}}}{{% endif %}}"
        + tokenizer.chat_template
    )
    return tokenizer


def test_a_prompt_that_the_template_refuses_fails_alone(
    tmp_path: Path, model: HuggingFace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = refusing(model, "Nr 1")
    monkeypatch.setattr(HuggingFace, "tokenizer", lambda self: asked)
    task, wanted = Library(words=20, ask="Nr {}"), Settings(results=Results(root=str(tmp_path)))
    finished = evaluate(Streaming(), task, model, wanted)
    assert ([record.id for record in finished.records], [failed.id for failed in finished.failed]) == (
        ["0", "2"],
        ["1"],
    )
    assert finished.failed[0].why.startswith("PromptError: The chat template refuses this prompt (not this)")
    assert (finished.status, finished.info["num_expected"], finished.summary["num_failed"]) == ("complete", 3, 1)
    assert "complete with 1 failed" in capsys.readouterr().err
    again = evaluate(Streaming(), task, model, wanted)
    assert again.folder == finished.folder
    assert len(again.failed) == 1
    everywhere = refusing(model, "Which")
    for count in (1, 3):  # too few to be no matter of one example, and as many
        with pytest.raises(PromptError, match="not this"):
            itemised([*task.examples(None)][:count], everywhere, wanted, WINDOW)  # type: ignore[arg-type]
