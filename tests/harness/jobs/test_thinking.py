"""thinking=off, on and N with models whose thoughts and answers are known: what is fed, scored, counted and said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from evals.base import Example, Score, Task, TaskEnv, Turn
from evals.mathematics import SETS
from harness.commands import rescore, show
from harness.config.settings import GenerationSettings, Results, Settings, SettingsError
from harness.jobs.examples import itemised
from harness.jobs.job import Job
from harness.models.hub import HuggingFace
from harness.prompts.thinking import SPACE, ThinkingTokenizer
from harness.reports.compare import comparisons
from harness.reports.notes import notes
from harness.reports.overview import all_lines
from harness.results.run_folder import StoredRun
from harness.terminal.notices import say_once
from methods.full import Full
from methods.snapkv import SnapKV
from tests import fast
from tests.scripted import END, FINAL, SAYS, TURN, scripted

KINDS = ("empty block", "open block", "harmony")
THOUGHTS = {
    "empty block": "<think>\nso we stop there</think>\n\n",
    "open block": "so we stop there</think>\n\n",
    "harmony": f"<|channel|>analysis<|message|>so we stop there<|end|>{FINAL}",
}

SHARED = {"protocol": "context", "questions": "shared"}
DRAWN = SHARED | {"generation": GenerationSettings(temperature=0.01, samples=2)}


@dataclass(frozen=True)
class Key(Task):
    """A question whose answer is 7, or 42 after "Answer:"; a thought in it costs the score."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "found"
    seeded: ClassVar[bool] = False
    chance: ClassVar[float | None] = None

    prefix: str = ""
    stop: tuple[str, ...] = (" stop",)
    chat: bool = True
    further: tuple[Turn, ...] = ()
    forced: bool = False

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for number in range(3):  # the first two are asked on one context
            context = "A text. " * (9 + 5 * (number // 2))
            yield Example(
                id=str(number), group="g", context=context, question="Where?", chat=self.chat,
                prefix=self.prefix, references=("7 more or less",), max_new_tokens=7, stop=self.stop,
                further=self.further, teacher_forced=self.forced,
            )  # fmt: skip

    def score(self, example: Example, output: str) -> Score:
        return Score(float("we" not in output))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFace]:
    return {kind: scripted(tmp_path_factory.mktemp("scripted") / kind, kind) for kind in SAYS}


def run(root: Path, model: HuggingFace, task: Task | None = None, method: Any = None, **changes: Any) -> StoredRun:
    return fast.run(root, method or Full(), task or Key(), model, **{"device": "cpu"} | changes)


def text_of(model: HuggingFace, tokens: list[int]) -> str:
    return str(model.tokenizer().decode(tokens))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{"batch": 2}, SHARED, DRAWN, {"method": SnapKV(window=2)}], ids=str)
def test_a_thought_is_counted_and_its_answer_scored(
    kind: str, changes: dict[str, Any], models: dict[str, HuggingFace], tmp_path: Path
) -> None:
    model, thought = models[kind], THOUGHTS[kind]
    for thinking in ("on", "50"):
        for record in run(tmp_path, model, thinking=thinking, **changes).records:
            assert (record.output, record.stop, record.score) == ("The key is 7", "stop_string", 1.0)
            assert text_of(model, record.tokens) == f"{thought}The key is 7 stop!"
            assert text_of(model, record.tokens[: record["thought_tokens"]]) == thought
    for record in run(tmp_path, model, Key("Answer:"), thinking="on", **changes).records:
        assert (record.output, record.stop, record.score) == (" 42", "stop_string", 1.0)
        assert text_of(model, record.tokens) == f"{thought}Answer: 42 stop!"
        assert text_of(model, record.tokens[: record["thought_tokens"]]) == thought.rstrip("\n")
        assert len(record.token_s) == len(record.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_off_ends_the_thought_in_the_prompt(kind: str, models: dict[str, HuggingFace], tmp_path: Path) -> None:
    for prefix, answer in (("", "The key is 7"), ("Answer:", " 42")):
        plan = Job.plan(Full(), Key(prefix), models[kind], Settings(device="cpu", results=Results(str(tmp_path))))
        assert all(item.prompt.text.endswith(prefix) for item in plan.items)
        assert "thinking" not in plan.identity
        for record in run(tmp_path, models[kind], Key(prefix)).records:
            assert (record.output, record["thought_tokens"], record.score) == (answer, None, 1.0)
    on = Job.plan(Full(), Key("Answer:"), models[kind], Settings(device="cpu", thinking="on"))
    assert on.identity["prompts"] != plan.identity["prompts"]
    other = Job.plan(Full(), Key(), models[kind], Settings(device="cpu", thinking="on"))
    assert other.identity["prompts"] != on.identity["prompts"]  # though only what is fed later differs


@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_that_does_not_end_has_no_answer(
    kind: str, models: dict[str, HuggingFace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = run(tmp_path, models[kind], thinking="4")
    for record in finished.records:
        assert (record.output, record.stop, record.score) == ("", "thought", 0.0)  # the task itself would give it 1
        assert record["thought_tokens"] == len(record.tokens) == 4
    [warning] = [text for text in finished.summary["warnings"] if "thought" in text]
    assert warning.startswith("3 of 3 examples did not end their thought")
    assert "Caution: full: 3 of 3 thoughts did not end, so there is no answer." in all_lines(*comparisons([finished]))
    assert any(
        "thoughts (full): before 3 of 3 answers, of 4 tokens" in note for note in notes(*comparisons([finished]))
    )
    show.main([str(finished.folder)])
    assert "4 tokens, 4 of them a thought that did not end, so there is no answer" in capsys.readouterr().out
    named = tmp_path / "conf" / "task" / "key.yaml"  # only a task that the user names is built
    named.parent.mkdir(parents=True)
    named.write_text(f"_target_: {Key.__module__}.Key\n")
    rescore.main([str(finished.folder), f"--config-dir={tmp_path / 'conf'}"])
    assert "0 of 3 scores differ" in capsys.readouterr().out
    ends = scripted(tmp_path / "ends", kind, [[*SAYS[kind][0][: SAYS[kind][0].index(" we")], END]])
    for record in run(tmp_path, ends, thinking="on").records:
        assert (record.output, record.stop, record.score) == ("", "eos", 0.0)
        assert record["thought_tokens"] == len(record.tokens)


def test_a_model_may_answer_without_a_thought(tmp_path: Path) -> None:
    at_once = scripted(tmp_path / "model", "empty block", [[TURN, "The"]])
    for record in run(tmp_path, at_once, thinking="on").records:
        assert (record.output, record["thought_tokens"], record.stop) == ("The key is 7", 0, "stop_string")


def test_tokens_are_those_of_generate(models: dict[str, HuggingFace], tmp_path: Path) -> None:
    for kind in KINDS:
        longer = GenerationSettings(max_new_tokens=99)
        finished = run(tmp_path, models[kind], Key(stop=()), thinking="on", generation=longer)
        item = Job.plan(Full(), Key(stop=()), models[kind], Settings(device="cpu", thinking="on")).items[0]
        loaded = models[kind].load("fp32", "cpu")
        ids = torch.tensor([item.prompt.ids])
        [wanted] = loaded.model.generate(ids, max_new_tokens=99, eos_token_id=loaded.tokenizer.eos_token_id)
        assert finished.records[0].tokens == wanted[ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_are_measured_after_an_empty_thought(
    kind: str, models: dict[str, HuggingFace], tmp_path: Path
) -> None:
    """With thinking off, the same text is read."""
    for prefix in ("", "Answer:"):
        costs = [
            [record["answer_nll"] for record in run(tmp_path, models[kind], Key(prefix), **changes).records]
            for changes in (
                {"protocol": "context"},
                {"protocol": "context", "thinking": "on"},
                {"thinking": "2"},  # less than the empty thought has
            )
        ]
        assert None not in costs[0]
        assert all(cost == pytest.approx(costs[0], abs=1e-5) for cost in costs)


def test_a_thought_takes_what_the_window_leaves(models: dict[str, HuggingFace]) -> None:
    for prefix in ("", "Answer:"):  # of fewer tokens than white space may have
        for item in Job.plan(Full(), Key(prefix), models["empty block"], Settings(thinking="on")).items:
            assert item.thought
            assert len(item.prompt.ids) + item.thought.most + SPACE + 7 == 400
            assert item.answer_tokens == 7
    with pytest.raises(ValueError, match="more than the model's window"):
        Job.plan(Full(), Key(), models["empty block"], Settings(device="cpu", thinking="399"))
    short = replace(models["empty block"], window=40)  # of which a prompt that is cut leaves half
    for item in Job.plan(Full(), Key(), short, Settings(device="cpu", thinking="on", too_long="left")).items:
        assert item.thought
        assert item.prompt.cut
        assert (item.needed, item.thought.most) == (40, (40 - 7) // 2)


@pytest.mark.parametrize(
    ("thinking", "length", "thought", "answer"),
    [
        ("on", SETS["math500"].max_new_tokens, 14336, 2048),
        ("on", SETS["aime24"].max_new_tokens, 30720, 2048),
        ("20000", SETS["aime24"].max_new_tokens, 20000, 2048),
        ("on", 16383, 8192, 16383),
        ("off", SETS["aime24"].max_new_tokens, None, 32768),
    ],
)
def test_lengths_made_for_thinking_count_the_thought(
    thinking: str, length: int, thought: int | None, answer: int, models: dict[str, HuggingFace]
) -> None:
    """In the window of Qwen3-8B. A thought that gets the rest of the window after an answer of its own of 32768 tokens
    would end before most that solve AIME."""
    asked: Any = ThinkingTokenizer(models["empty block"].tokenizer(), on=thinking != "off")
    example = Example(id="0", group="g", context="A text. " * 99, references=("7",), max_new_tokens=length)
    [item] = itemised([example], asked, Settings(thinking=thinking), 40960).items
    assert (item.thought and item.thought.most, item.answer_tokens) == (thought, answer)


@pytest.mark.parametrize(
    ("kind", "task", "changes", "says"),
    [
        ("none", Key(), {"thinking": "on"}, "knows no thoughts that end in </think>"),
        ("harmony", Key(), {"thinking": "0"}, "thinking=0 is unknown"),
        ("harmony", Key(), {"thinking": True}, "thinking=True is unknown: choose off, on .both in quotes in YAML"),
        ("harmony", Key(), {"thinking": "on", "chat": "none"}, "chat=none leaves out"),
        ("harmony", Key(), {"thinking": "on", "generation": GenerationSettings(force_length=True)}, "force_length"),
        ("harmony", Key("Answer:"), {"thinking": "9", "fidelity": 1}, "set fidelity=0"),
        ("harmony", Key(further=(Turn("And?", ("7",)),)), {"thinking": "on"}, "has several turns"),
        ("harmony", Key(forced=True), {"thinking": "on"}, "feeds its answers"),
    ],
)
def test_what_cannot_think_is_refused(
    kind: str, task: Key, changes: dict[str, Any], says: str, models: dict[str, HuggingFace]
) -> None:
    with pytest.raises(SettingsError, match=says):
        Job.plan(Full(), task, models[kind], Settings(**changes))


@pytest.mark.parametrize("mark", ["<response>", "<answer>"])
def test_a_model_that_marks_its_answers_is_refused(
    mark: str, models: dict[str, HuggingFace], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = models["none"].tokenizer()
    tokenizer.chat_template += f"{{# Think between <think></think>, answer behind {mark}. #}}"
    monkeypatch.setattr(HuggingFace, "tokenizer", lambda self: tokenizer)
    with pytest.raises(SettingsError, match=f"has it write {mark} before its answers"):
        Job.plan(Full(), Key(), models["none"], Settings(device="cpu", thinking="on"))
    assert Job.plan(Full(), Key(), models["none"], Settings(device="cpu")).items


def test_what_changes_nothing_is_said(
    models: dict[str, HuggingFace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Job.plan(Full(), Key(chat=False), models["harmony"], Settings(thinking="on"))
    assert "thinking=on changes nothing here" in capsys.readouterr().err
    assert plan.folder == Job.plan(Full(), Key(chat=False), models["harmony"], Settings()).folder
    say_once.cache_clear()
    thinks = scripted(tmp_path / "model", "none", [[TURN, "<think>", "so"]])
    warnings = run(tmp_path, thinks).summary["warnings"]
    assert any("begin with a thought although thinking=off" in text for text in warnings)
    twice = scripted(tmp_path / "twice", "empty block", [[TURN, "<think>", "\n", "so", " we", "</think>", "<think>"]])
    warnings = run(tmp_path, twice, thinking="on").summary["warnings"]
    assert any("begin with a second thought behind the first" in text for text in warnings)
