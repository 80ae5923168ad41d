"""Several questions on one sealed context: one prefill, and the answers of separate runs. Turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from evals.base import Example, Score, Task, TaskEnv, Turn
from evals.multiturn import Multiturn
from evals.scbench import SCBench
from harness import Engine, attached
from harness.checks.answers import apart, seen, together
from harness.config.settings import Data, GenerationSettings, Settings
from harness.engine.cache import KVCache
from harness.jobs.examples import PreparedExample, by_context, prepare
from harness.models.base import load
from harness.reports.compare import comparisons
from harness.reports.groups import by_turn
from harness.results.measures import MEASURES
from harness.results.run_folder import StoredRun
from harness.results.run_folder import load as load_run
from harness.terminal.notices import say_once
from kernels.dispatch import use_backend
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.snapkv import SnapKV
from tests import fast
from tests.evals.test_scbench import PROMPTS
from tests.fast import MODEL, PQ, niah
from tests.methods.test_contract import attach, small
from tests.quick import mostly_slow
from tests.tape import Tape
from tests.tiny import HYBRID, prompt

CONTEXT, NEW = prompt(61), 4
QUESTIONS = [prompt(2 + i % 4, seed=i) for i in range(1, 11)]
ASKED = (CONTEXT, QUESTIONS, NEW)


def assert_as_apart(engine: Engine) -> None:
    assert list(map(seen, together(engine, *ASKED))) == list(map(seen, apart(engine, *ASKED)))


@pytest.mark.tokens
@pytest.mark.parametrize("architecture", HYBRID)
@pytest.mark.parametrize("name", mostly_slow(["full", "quest"], "quest"))
def test_windows_of_the_models_own_go_back_as_well(name: str, architecture: str) -> None:
    with attach(small(name), 0.4, architecture) as kv:
        assert_as_apart(Engine(kv))


STATEFUL: dict[str, dict[str, Any]] = {  # methods whose steps leave more behind than tokens, and what makes them
    "infinigen": {"pool_capacity": 60, "pool_policy": "lru"},
    "pqcache": {"cache_tokens": 8, "cache_block": 4, "cache_offered": 1},
    "shadowkv": {"hit_cache": True},
    "h2o": {},
    "infllm": {},
    "kivi": {"residual": 8, "group": 8},
}


@pytest.mark.tokens
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("reuse_steps", mostly_slow([0, 2], 0))
def test_what_steps_leave_behind_is_taken_back(name: str, reuse_steps: int) -> None:
    method: Method = replace(small(name), **STATEFUL[name])  # type: ignore[type-var]
    with attach(method, 0.4, placement="host" if method.offloads else "device") as kv:
        kv.options = replace(kv.options, reuse_steps=reuse_steps if name != "infinigen" else 0)
        assert_as_apart(Engine(kv))


@pytest.mark.tokens
@pytest.mark.parametrize("name", mostly_slow(["full", "h2o", "infinigen", "infllm", "pqcache"], "pqcache"))
def test_steps_are_captured_anew_for_each_question(name: str) -> None:
    with attach(small(name), 0.4) as kv, use_backend("torch"):
        plain, captured = Engine(kv), Engine(kv, graphs=Tape())
        generations = together(captured, *ASKED)
        alone = apart(plain, *ASKED)
        assert [generation.tokens for generation in generations] == [generation.tokens for generation in alone]
        assert all(generation.capture_s for generation in generations)


# whole runs

OWN = ("output", "tokens", "score", "details", "prompt_sha256", "measured")


@dataclass(frozen=True)
class Balances(Task):
    """Two lists of balances with four questions each, in turn; `talks`: as two conversations."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "right"
    talks: bool = False

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        lists = [[f"{name}{i} has {37 * i * (1 + len(name)) % 997}. " for i in range(24)] for name in ("Ada", "Bo")]
        if not self.talks:
            for asked in range(4):
                for which, lines in enumerate(lists):
                    yield self._example(f"{which}/{asked}", lines, asked)
            return
        for which, lines in enumerate(lists):
            rest = tuple(Turn(question=_question(lines, i), references=(lines[i][-5:-2],)) for i in (1, 2, 3))
            yield replace(self._example(f"{which}", lines, 0), further=rest)

    def _example(self, name: str, lines: list[str], asked: int) -> Example:
        return Example(
            id=name,
            group="balances",
            context="".join(lines),
            question=_question(lines, asked),
            references=(lines[asked][-5:-2],),
            max_new_tokens=4 + asked % 2,
            data={"asked": asked},
        )

    def score(self, example: Example, output: str) -> Score:
        return Score(float(example.references[0] in output), {"length": float(len(output))})


@dataclass(frozen=True)
class Retold(Balances):
    """Two conversations over one list."""

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        first, second = Balances(talks=True).examples(env)
        yield from (first, replace(second, context=first.context))


def _question(lines: list[str], asked: int) -> str:
    return f"And {lines[asked].split()[0]}" + "?" * asked


def run(root: Path, method: Method = PQ, task: Task | None = None, **changes: Any) -> StoredRun:
    return fast.run(root, method, task or Balances(), **{"protocol": "context", "budget": 0.3} | changes)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each prefill from now on."""
    made, real = list[int](), Engine.prefill

    def prefill(engine: Engine, cache: KVCache, prompt: Tensor, **how: Any) -> Tensor:
        made.append(prompt.shape[1])
        return real(engine, cache, prompt, **how)

    monkeypatch.setattr(Engine, "prefill", prefill)
    return made


@pytest.mark.tokens
@pytest.mark.parametrize(
    "how", mostly_slow([{}, {"batch": 2}, {"shared_prefill": True}, {"prefill_chunk": 100}], {"batch": 2}), ids=str
)
def test_a_run_of_shared_questions_is_the_run_of_separate_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    separate = run(tmp_path)
    apart = {record.id: record for record in separate.records}
    prefills = counted(monkeypatch)
    shared = run(tmp_path, questions="shared", **how)
    assert len(prefills) == 2
    assert shared.folder != separate.folder
    assert {record.id for record in shared.records} == apart.keys()
    for record in shared.records:
        own = apart[record.id]
        for name in ("output", "tokens", "score", "details", "prompt_sha256"):
            assert getattr(record, name) == getattr(own, name), name
        assert [record[name] for name in MEASURES] == [own[name] for name in MEASURES]
        first = f"{record.id[0]}/0"
        assert record["prefilled_by"] == (None if record.id == first else first)
        assert (record["seal_s"] is None) == (record.id != first)
        assert own["prefilled_by"] is None


def test_a_context_is_the_same_to_its_last_token() -> None:
    first, *_ = prepare(Balances(), MODEL, Settings())
    ids, split = first.prompt.ids, first.prompt.split

    def item(name: str, ids: tuple[int, ...], split: int) -> PreparedExample:
        return replace(
            first, example=replace(first.example, id=name), prompt=replace(first.prompt, ids=ids, split=split)
        )

    items = [
        item("a", ids, split),
        item("another end", (*ids[: split - 1], ids[split - 1] + 1, *ids[split:]), split),
        item("another question", (*ids[:split], 7), split),
        item("no question", ids[:split], split),
        item("nor this", ids[:split], split),
        item("shorter", ids, split - 1),
    ]
    groups = [[one.example.id for one in group] for group in by_context(items)]
    assert groups == [["a", "another question"], ["another end"], ["no question"], ["nor this"], ["shorter"]]


@pytest.mark.tokens
def test_a_torn_run_pays_for_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path, questions="shared")
    lines = whole.folder / "examples.jsonl"
    kept = lines.read_text().splitlines(keepends=True)[:5]  # all of the first context, one of the second
    lines.write_text("".join(kept))
    prefills = counted(monkeypatch)
    again = run(tmp_path, questions="shared")
    assert len(prefills) == 1
    assert [(r.id, r.tokens) for r in again.records] == [(r.id, r.tokens) for r in whole.records]
    assert [r["prefilled_by"] for r in again.records[4:]] == [None, None, "1/1", "1/1"]


def test_where_no_context_has_two_questions_the_run_is_the_plain_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say_once.cache_clear()
    plain = run(tmp_path, task=niah(depths=2))
    shared = run(tmp_path, task=niah(depths=2), questions="shared")
    assert shared.folder == plain.folder
    assert "questions=shared changes" in capsys.readouterr().err


REPLIES = ("It has 74.", "It has 222.", "")


@dataclass(frozen=True)
class Given(Balances):
    """Conversations whose history is given, whatever the model says in `new` tokens."""

    talks: bool = True
    new: int = 4

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for given in super().examples(env):
            turns = [replace(turn, reply=reply) for turn, reply in zip(given.further, REPLIES, strict=True)]
            yield replace(given, further=tuple(turns), max_new_tokens=self.new)


@pytest.mark.tokens
@pytest.mark.parametrize("protocol", ["prompt", "context"])
@pytest.mark.parametrize("task", [Balances(talks=True), Given()], ids=["own", "given"])
def test_a_turn_reads_the_models_own_answers_or_the_replies_in_their_place(
    tmp_path: Path, task: Balances, protocol: str
) -> None:
    """What a turn is fed, as one prompt, gives its answer where everything is read."""
    finished = run(tmp_path, Full(), task, protocol=protocol)
    assert len(finished.records) == 2
    loaded = load(MODEL, "fp32", "cpu")
    for record, item in zip(finished.records, prepare(task, MODEL, Settings()), strict=True):
        fed: list[int] = []
        for turn, asked, reply in zip(record.turns or (), item.turns, ("", *REPLIES), strict=True):
            fed += asked.prompt.ids
            assert turn.history_tokens + turn.prompt_tokens == len(fed)
            with attached(loaded.model, Full()) as kv:
                wanted = Engine(kv).generate(torch.tensor([fed]), max_new_tokens=len(turn.tokens))
            assert wanted.tokens == [turn.tokens]
            assert turn.data["asked"] == 0
            if isinstance(task, Given):
                assert asked.prompt.text.startswith(reply)
            else:
                fed += turn.tokens[: len(turn.tokens) - (turn.stop == "eos")]


@pytest.mark.tokens
@pytest.mark.parametrize("protocol", ["prompt", "context"])
@pytest.mark.parametrize("method", mostly_slow([PQ, SnapKV(), H2O()], PQ), ids=lambda method: type(method).__name__)
def test_an_answer_that_is_replaced_leaves_no_trace(tmp_path: Path, method: Method, protocol: str) -> None:
    """Two tokens alone, or nine beside another: what follows is the same."""
    how = {"protocol": protocol, "generation": GenerationSettings(force_length=True)}
    runs = [run(tmp_path, method, Given(new=new), **how, batch=batch) for new, batch in ((2, 1), (9, 2))]
    for short, long in zip(*(sorted(finished.records, key=lambda record: record.id) for finished in runs), strict=True):
        for mine, their in zip(short.turns or (), long.turns or (), strict=True):
            assert (len(mine.tokens), len(their.tokens)) == (2, 9)
            assert mine.tokens == their.tokens[:2]
            assert mine.history_tokens == their.history_tokens


# Conversations from task to table: likelihoods of forced replies, facts by turn, requests on one context.

SHORT: dict[str, Any] = {"conversations": 2, "turns": 3, "longest": 2000, "opening": 100, "haystack": "pydoc"}


def ran(root: Path, task: Task, method: Method, **changes: Any) -> StoredRun:
    return fast.run(root, method, task, **{"budget": 0.4} | changes)


def test_forced_replies_have_the_likelihood_of_the_whole_text(tmp_path: Path) -> None:
    task = Multiturn(**SHORT, replies="forced")
    finished = ran(tmp_path, task, Full())
    model = load(MODEL, "fp32", "cpu").model
    for record, item in zip(finished.records, prepare(task, MODEL, Settings()), strict=True):
        ids = [token for turn in item.turns for token in (*turn.prompt.ids, *turn.forced)]
        with torch.inference_mode():
            costs = -model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        end = 0
        for turn, asked in zip(record.turns or (), item.turns, strict=True):
            start, end = end + len(asked.prompt.ids), end + len(asked.prompt.ids) + len(asked.forced)
            wanted = costs[range(start - 1, end - 1), ids[start:end]].mean().item()
            assert turn.details["nll"] == pytest.approx(wanted, abs=1e-4)
            assert turn.stop == "forced"
    assert finished.summary["score"]["averages"]["perplexity"] > 1


@pytest.mark.parametrize("replies", ["own", "given"])
def test_a_table_shows_the_score_by_turn_and_by_turns_ago(tmp_path: Path, replies: str) -> None:
    finished = ran(tmp_path, Multiturn(**SHORT, replies=replies, about="first", max_new_tokens=4), PQ)
    assert {name: row["n"] for name, row in finished.summary["turns"].items()} == {"1": 2, "2": 2, "3": 2}
    assert {name: row["n"] for name, row in finished.summary["turns_ago"].items()} == {"0": 2, "1": 2, "2": 2}
    info = json.loads((finished.folder / "run.json").read_text())["task_info"]
    assert info["metric"] == "needle found"
    assert info["statistics"]["turns"] == 6
    [table] = comparisons([load_run(finished.folder)])
    heads = [[column.head for column in by_turn(table, section, "score")[2:]] for section in ("turns", "turns_ago")]
    assert heads == [["turn 1", "turn 2", "turn 3"], ["0", "1", "2"]]


@pytest.mark.parametrize(
    "changes",
    [{"task": {}}, {"task": {"mode": "multi_request"}, "protocol": "context", "questions": "shared"}],
    ids=["multi_turn", "multi_request"],
)
def test_scbench_runs_in_both_modes(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "scbench").mkdir()
    row = PROMPTS["scbench_kv"]["row"]
    lines = [row, {**row, "context": row["context"] * 2}]
    (tmp_path / "scbench" / "scbench_kv.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = SCBench(tasks="scbench_kv", **changes.pop("task"))
    finished = ran(tmp_path / "runs", task, Full(), data=Data(str(tmp_path)), **changes)
    assert finished.summary["prefills"] == 2
    if task.mode == "multi_turn":
        assert [len(record.turns or ()) for record in finished.records] == [2, 2]
    else:
        assert [record["prefilled_by"] for record in finished.records] == [
            None,
            "scbench_kv/0/0",
            None,
            "scbench_kv/1/0",
        ]
        assert {record["unit"] for record in finished.records} == {"scbench_kv/0", "scbench_kv/1"}


@pytest.mark.tokens
def test_given_replies_are_the_same_with_a_store(tmp_path: Path) -> None:
    """What is put back behind an answer is what the store keeps."""
    task = Multiturn(**SHORT, replies="given", max_new_tokens=4)
    runs = [ran(tmp_path, task, Full(), history=history) for history in ("device_prefix", "store", "recompute")]
    tokens = [[[turn.tokens for turn in record.turns or ()] for record in finished.records] for finished in runs]
    assert tokens[0] == tokens[1] == tokens[2]
    assert [len(turns) for turns in tokens[1]] == [3, 3]
    assert all(turn["reused_tokens"] for record in runs[1].records for turn in (record.turns or ())[1:])
