"""A model behind a server: the same answers as our engine's Full, faults that lose nothing, and runs told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import pytest

from evals.base import Example, Score, Task, TaskEnv, Turn
from harness.config.compose import built, compose_one
from harness.config.settings import GenerationSettings, Settings, SettingsError
from harness.endpoint import client, runner
from harness.endpoint.answers import read_answer
from harness.endpoint.client import ServerGone
from harness.endpoint.runner import Meter
from harness.endpoint.source import Endpoint
from harness.jobs.job import Job
from harness.jobs.resolve import resolve
from harness.models.base import ModelError
from harness.models.hub import HuggingFace
from harness.reports.compare import comparisons
from harness.reports.notes import notes, stamps
from harness.reports.rerun import command
from harness.results.records import Record
from harness.results.run_folder import StoredRun, load
from methods.base import Method
from methods.full import Full
from tests.fast import PQ, niah, run, settings
from tests.harness.jobs.test_choices import Colours
from tests.scripted import EMPTY
from tests.served import NAME, WINDOW, Server
from tests.talks import Talks
from tests.tiny import fresh, saved

# four prompts of the chat template, whose answers begin with given words
NEEDLES = niah(template="{context}\n\n{question}", lengths=[300])


@dataclass(frozen=True, kw_only=True)
class Replayed(Task):
    """A conversation whose replies stand in the text: after what the model says, or in place of it (`forced`)."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "length"

    forced: bool = False

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        reply = None if self.forced else "It is red."
        yield Example(
            id="talk", group="talk", context="What is the cup?", references=("It is red.",), max_new_tokens=4,
            teacher_forced=self.forced, further=(Turn("And the door?", ("It is blue.",), reply=reply),),
        )  # fmt: skip

    def score(self, example: Example, output: str) -> Score:
        return Score(0.5, {"nll": float(output)} if self.forced else {})


MODEL = {field.name for field in fields(Endpoint)}


@dataclass
class World:
    """A server, and the files of what it serves. `changes` are of the model or of the settings."""

    root: Path
    served: Server
    files: HuggingFace

    def model(self, **changes: Any) -> Endpoint:
        known = {"name": NAME, "engine": "vllm", "checkpoint": self.files.name, "url": self.served.url}
        return Endpoint(**known | changes)

    def theirs(self, task: Task = NEEDLES, method: Method | None = None, **changes: Any) -> StoredRun:
        of_model = {key: changes.pop(key) for key in MODEL & changes.keys()}
        return run(self.root, method or Full(), task, self.model(**of_model), **changes)

    def ours(self, task: Task = NEEDLES, **changes: Any) -> StoredRun:
        return run(self.root, Full(), task, self.files, dtype="fp32", device="cpu", **changes)

    def planned(self, **changes: Any) -> Path:
        return Job.plan(Full(), NEEDLES, self.model(**changes), settings(self.root)).folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return saved(fresh("llama", max_position_embeddings=WINDOW, vocab_size=259), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def world(tmp_path: Path, files: HuggingFace, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(client, "WAITS", (0.01, 0.01, 0.01))
    with Server(files.load("fp32", "cpu").model, files.tokenizer()) as served:
        yield World(tmp_path, served, files)


def by_id(made: StoredRun, what: Callable[[Record], Any]) -> dict[str, Any]:
    return {record.id: what(record) for record in made.records}


@pytest.mark.tokens
@pytest.mark.parametrize(
    "task",
    [NEEDLES, Talks(), Colours(), Replayed(), Replayed(forced=True)],
    ids=["needles", "conversations", "choices", "given replies", "fed replies"],
)
def test_a_server_of_the_same_model_answers_as_our_engine(world: World, task: Task) -> None:
    ours, theirs = world.ours(task), world.theirs(task)
    free = {record.id for record in ours.records if record.stop != "forced"}
    for what in (lambda r: r.score, lambda r: r.prompt_sha256):
        assert by_id(theirs, what) == by_id(ours, what)
    details = by_id(theirs, lambda r: r.details)
    for record in ours.records:
        assert details[record.id] == pytest.approx(record.details, abs=1e-3)
    answers = by_id(ours, lambda r: r.answer), by_id(theirs, lambda r: r.answer)
    assert {key: answers[0][key] for key in free} == {key: answers[1][key] for key in free}
    if isinstance(task, Colours):
        for id_ in ("colour-0", "colour-1"):
            own, other = (json.loads(each[id_][0]) for each in answers)
            assert [cost for cost, _ in other] == pytest.approx([cost for cost, _ in own], abs=1e-3)
            assert [greedy for _, greedy in other] == [greedy for _, greedy in own]
    costs = [by_id(made, lambda r: r["answer_nll"]) for made in (ours, theirs)]
    assert costs[1] == pytest.approx(costs[0], abs=1e-3)


def test_right_answers_after_an_empty_thought_cost_what_they_cost_here(world: World) -> None:
    tokenizer = world.files.tokenizer()
    tokenizer.chat_template += EMPTY
    tokenizer.save_pretrained(world.root / "thinks")
    world.served.model.save_pretrained(world.root / "thinks")
    world.files = HuggingFace(str(world.root / "thinks"))
    made = world.ours(thinking=8), world.theirs(thinking=8)
    ours, theirs = (by_id(one, lambda r: r["answer_nll"]) for one in made)
    assert theirs == pytest.approx(ours, abs=1e-3)


@pytest.mark.parametrize("said", [{}, {"stop_reason": "."}, {"stop_reason": None}, {"matched_stop": 2}])
def test_an_answer_of_nothing_but_its_end_is_one_token(files: HuggingFace, said: dict[str, Any]) -> None:
    event = {"choices": [{"text": "", "finish_reason": "stop", **said}]}
    answer = read_answer(1.0, [(1.5, event)], files.tokenizer(), ["."])
    assert (answer.text, answer.token_s) == ("", [0.5])
    assert answer.stop == ("eos" if {None, 2} & {*said.values()} else "stop_string")


def test_its_row_stands_beside_full_and_says_what_it_cannot_see(world: World) -> None:
    world.ours()
    for codec in ("auto", "fp8"):
        world.theirs(notes=f"kv_cache_dtype={codec}")
    [table] = comparisons([load(folder) for folder in sorted(world.root.iterdir()) if folder.is_dir()])
    full, *rows = table.entries
    assert [row.label for row in rows] == ["vllm notes=kv_cache_dtype=auto", "vllm notes=kv_cache_dtype=fp8"]
    for row in rows:
        assert row.full is full.run
        assert row.summary["full"]["diff"] == 0.0
        assert "E" in stamps(row, table)
        assert row.summary["memory"]["kv_device_bytes"] is None
        assert row.summary["seal_s"]["p50"] is None
        assert row.summary["ttft_s"]["p50"] > 0
    assert "E" not in stamps(full, table)
    assert any("prompts are sent as our token ids" in note for note in notes(table))
    assert "model.url=URL" in command(rows[0].run)


@pytest.mark.tokens
@pytest.mark.parametrize("engine", ["vllm", None])
@pytest.mark.parametrize("prompts", ["ids", "text", "chat"])
def test_prompts_go_as_ids_as_text_or_as_messages(world: World, prompts: Any, engine: Any) -> None:
    task = replace(NEEDLES, system="Be short.")
    ours, theirs = world.ours(task), world.theirs(task, prompts=prompts, engine=engine)
    assert by_id(theirs, lambda r: r.output) == by_id(ours, lambda r: r.output)
    assert not any(record["warnings"] for record in theirs.records)
    kinds = {"ids": list, "text": str}
    for body in world.served.completions:
        if prompts == "chat":
            assert [message["role"] for message in body["messages"]] == ["system", "user"]
        else:
            assert isinstance(body["prompt"], kinds[prompts])
        assert ("repetition_penalty" in body) == (engine == "vllm")  # words that OpenAI's interface lacks


def test_first_words_of_an_answer_need_an_engine_that_takes_them(world: World) -> None:
    task = niah(lengths=[300], template="{context}\n\n{question}", prefix="The answer is")
    ours, theirs = world.ours(task), world.theirs(task, prompts="chat")
    assert by_id(theirs, lambda r: r.output) == by_id(ours, lambda r: r.output)
    with pytest.raises(ModelError, match="first words"):
        world.theirs(task, prompts="chat", engine=None)


@pytest.mark.parametrize("fault", [429, 503, 500, "half", "reset"])
def test_what_may_pass_is_asked_again(world: World, fault: int | str) -> None:
    world.served.faults.extend([fault, fault])
    world.served.loading = 2
    made = world.theirs()
    assert sorted(record["served"]["retries"] for record in made.records) == [0, 0, 0, 2]
    assert made.summary["served"]["retries"] == 2
    assert len({record.output for record in made.records}) >= 1
    assert not made.failed


def test_a_silent_server_is_given_up_after_a_second_try(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    class Silent(HTTPConnection):
        def getresponse(self) -> HTTPResponse:
            if self._method == "POST":  # type: ignore[attr-defined]
                tries.append(self.timeout)
                raise TimeoutError("timed out")
            return super().getresponse()

    monkeypatch.setattr(client, "HTTPConnection", Silent)
    with pytest.raises(ServerGone, match=r"silent for model.timeout_s=70 seconds"):
        world.theirs(timeout_s=70.0)
    assert tries == [70.0, 70.0]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_server_that_dies_loses_nothing_and_may_come_back_elsewhere(
    world: World, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WAITS", (0.01,))
    served = world.served
    served.dies_after, quiet = 2, {"likelihood": "off", "batch": batch}
    with pytest.raises(ServerGone, match="the same command then goes on"):
        world.theirs(**quiet)
    [folder] = world.root.glob("niah-endpoint-*")
    first = load(folder)
    assert (len(first.records), first.status) == (2, "failed")
    with Server(served.model, served.tokenizer) as other:
        made = world.theirs(url=other.url, **quiet)
        assert len(other.completions) == 2
    assert made.folder == folder
    assert (len(made.records), made.status) == (4, "complete")


def test_a_prompt_that_is_refused_fails_alone(world: World) -> None:
    world.served.faults.append(400)
    made = world.theirs(likelihood="off")
    assert len(made.records) == 3
    [failed] = made.failed
    assert "maximum context length is 4096 tokens" in failed.why
    assert "model.window" in failed.why
    again = world.theirs(likelihood="off")
    assert (len(again.records), again.failed) == (4, [])


@pytest.mark.parametrize("said", [{"max_model_len": 200}, {"max_model_len": None, "meta": {"n_ctx": 200}}])
def test_what_the_server_says_limits_the_prompts(world: World, said: dict[str, Any]) -> None:
    world.served.entry |= said
    with pytest.raises(ValueError, match="200"):
        world.theirs()
    with pytest.raises(ValueError, match="Every example is left out"):
        world.theirs(too_long="skip")


def test_a_server_that_says_little_is_enough(world: World) -> None:
    """No usage, no token ids, no logprobs, no metrics."""
    world.served.says_usage = world.served.gives_logprobs = False
    made = world.theirs(engine=None)
    for record in made.records:
        assert record["answer_nll"] is None
        assert "prompt_tokens" not in record["served"]
        assert len(record.tokens) == len(record.token_s) > 2
        assert record.token_s == sorted(record.token_s)
    assert made.info["no_likelihood"] == "the server returns no logprobs of prompts"
    assert made.info["presets"]["method"] == "endpoint"
    weighed = world.theirs(Colours(), engine=None)
    assert ["how likely given texts are" in failed.why for failed in weighed.failed] == [True, True]
    with pytest.raises(ModelError, match=r"model.prompts=ids"):
        world.theirs(Colours(), prompts="text")


def test_one_right_answer_that_is_refused_leaves_the_others_measured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, echo = iter([True, False, True, True]), world.served.echo

    def said(ids: list[int]) -> dict[str, Any]:
        world.served.gives_logprobs = next(given)
        return echo(ids)

    monkeypatch.setattr(world.served, "echo", said)
    made = world.theirs()
    assert [record["answer_nll"] is None for record in made.records] == [False, True, False, False]
    assert made.info["no_likelihood"] is None


def test_another_template_at_the_server_is_told(world: World) -> None:
    world.served.tokenizer.chat_template = f"Be kind. {world.served.tokenizer.chat_template}"
    made = world.theirs(prompts="chat")
    assert any("counted other prompt tokens" in warning for warning in made.summary["warnings"])


def test_a_batch_keeps_so_many_requests_on_their_way(world: World) -> None:
    world.served.waits_for = 3
    made = world.theirs(batch=3)
    assert max(world.served.at_once) == 3
    assert made.info["no_likelihood"] == "requests for it would disturb the others' times"
    assert made.summary["throughput_tok_s"] > 0
    charged = sum(record["share_s"] for record in made.records)
    assert 0 < charged < sum(record.token_s[-1] for record in made.records)


def test_a_rate_begins_requests_by_the_clock(world: World) -> None:
    world.served.waits_for, before = 2, perf_counter()
    world.theirs(rate=20.0)
    assert max(world.served.at_once) > 1
    assert world.served.starts[-1] - before >= 3 / 20.0
    with pytest.raises(SettingsError, match="leave batch out"):
        world.theirs(rate=20.0, batch=2)


def test_time_is_divided_among_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "perf_counter", iter([1.0, 3.0, 7.0, 8.0]).__next__)
    meter = Meter()
    first, second = meter.running(), meter.running()
    for one in (first, second):
        one.__enter__()
    for one in (first, second):
        one.__exit__(None, None, None)
    assert (meter.share(1.0, 7.0), meter.share(3.0, 8.0)) == (4.0, 3.0)  # 1, 2 and 1 at a time
    assert meter.share(2.0, 5.0) == 2.0  # of a part


VLLM = """# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:num_preemptions_total{{engine="0"}} {count}
vllm:prefix_cache_queries_total{{engine="0"}} {count}00.0
vllm:prefix_cache_hits_total{{engine="0"}} {count}0.0
"""


def test_metrics_are_read_where_they_are(world: World) -> None:
    world.served.metrics = VLLM
    said = world.theirs(likelihood="off").summary["served"]
    assert (said["cache_share"], said["preemptions"], said["prefix_hits"]) == (0.25, 4, pytest.approx(0.1))


def test_runs_are_told_apart_by_what_is_served(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, served = world.planned(), world.served
    monkeypatch.setenv("ANOTHER", "secret")
    assert world.planned(key="ANOTHER", timeout_s=9.0) == usual
    with Server(served.model, served.tokenizer) as elsewhere:
        assert world.planned(url=elsewhere.url) == usual
    others = [{"engine": "sglang"}, {"notes": "kv_cache_dtype=fp8"}, {"prompts": "text"}, {"rate": 2.0}]
    folders = [world.planned(**other) for other in others]
    served.entry["root"] = "another"
    folders.append(world.planned())
    assert len({usual, *folders}) == 6


def test_the_key_is_sent_and_stands_nowhere(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.served.key, key = "sk-right", {"key": "SERVER_KEY"}
    monkeypatch.setenv("SERVER_KEY", "sk-wrong")
    with pytest.raises(ServerGone, match="environment variable SERVER_KEY") as raised:
        world.theirs(**key)
    monkeypatch.setenv("SERVER_KEY", "sk-right\n")  # as of a file
    world.theirs(**key)
    written = [file.read_text() for file in world.root.rglob("*") if file.is_file()]
    for text in (*written, str(raised.value), *capsys.readouterr()):
        assert "sk-" not in text
        assert str(world.served.http.server_port) not in text or text == str(raised.value) or "gives no" in text
    monkeypatch.setenv("SERVER_KEY", "sk-\nright")
    wrong = {"environment variable": {"url": "http://me:sk-right@host/v1"}, "is not the key": {"key": "sk-right"}}
    for sentence, changes in (wrong | {"characters that no key has": key}).items():
        with pytest.raises(ModelError, match=sentence) as refused:
            _ = world.model(**changes).client
        assert "right" not in str(refused.value)


def test_what_the_server_decides_is_refused(world: World) -> None:
    with pytest.raises(SettingsError, match="PQCache cannot run behind an endpoint"):
        world.theirs(method=PQ)
    for changes in ({"budget": 0.3}, {"placement": "host"}, {"protocol": "context"}, {"device": "cpu"}):
        with pytest.raises(SettingsError, match="the server's to decide"):
            world.theirs(**changes)
    with pytest.raises(SettingsError, match=r"generation.force_length is no word"):
        world.theirs(engine=None, generation=GenerationSettings(force_length=True))
    with pytest.raises(SettingsError, match=r"behind a server.*model=hf"):  # of commands that compute with weights
        resolve(Settings(), Full(), world.model().describe())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "llama"}, f"choose one of {NAME}"),
        ({"url": "http://127.0.0.1:9/v1"}, r"start the server, or correct model\.url"),
        ({"url": "http://127.0.0.1:80a/v1"}, "is no plain address"),
        ({"url": None}, "names no server"),
        ({"checkpoint": "nowhere"}, r"let model\.checkpoint name"),
    ],
)
def test_a_wrong_name_or_address_is_a_sentence(world: World, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        world.theirs(**changes)


def test_the_command_line_takes_full_unless_a_method_is_typed() -> None:
    words = ["model=endpoint", "model.name=x", "model.url=http://localhost:1/v1"]
    assert built(compose_one(words).config)[0] == Full()
    assert built(compose_one([*words, "method=pqcache"]).config)[0] != Full()
