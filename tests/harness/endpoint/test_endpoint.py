"""A model behind a server: the same answers as our engine's Full, faults that lose nothing, and runs told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import pytest

from evals.base import Example, Score, Task, TaskEnv, Turn
from harness.config.compose import built, compose_one
from harness.config.settings import GenerationSettings, Settings, SettingsError
from harness.endpoint import client
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
from methods.full import Full
from tests.fast import PQ, niah, run, settings
from tests.harness.jobs.test_choices import Colours
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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return saved(fresh("llama", max_position_embeddings=WINDOW, vocab_size=259), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def served(files: HuggingFace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(client, "WAITS", (0.01, 0.01, 0.01))
    with Server(files.load("fp32", "cpu").model, files.tokenizer()) as server:
        yield server


def endpoint(server: Server, files: HuggingFace, **changes: Any) -> Endpoint:
    known = {"engine": "vllm", "checkpoint": files.name, "url": server.url}
    return Endpoint(**{"name": NAME, **known, **changes})


def by_id(made: StoredRun, what: Callable[[Record], Any]) -> dict[str, Any]:
    return {record.id: what(record) for record in made.records}


@pytest.mark.tokens
@pytest.mark.parametrize(
    "task",
    [NEEDLES, Talks(), Colours(), Replayed(), Replayed(forced=True)],
    ids=["needles", "conversations", "choices", "given replies", "fed replies"],
)
def test_a_server_of_the_same_model_answers_as_our_engine(
    tmp_path: Path, served: Server, files: HuggingFace, task: Task
) -> None:
    ours = run(tmp_path, Full(), task, files, dtype="fp32", device="cpu")
    theirs = run(tmp_path, Full(), task, endpoint(served, files))
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


def test_its_row_stands_beside_full_and_says_what_it_cannot_see(
    tmp_path: Path, served: Server, files: HuggingFace
) -> None:
    run(tmp_path, Full(), NEEDLES, files, dtype="fp32", device="cpu")
    for codec in ("auto", "fp8"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files, notes=f"kv_cache_dtype={codec}"))
    [table] = comparisons([load(folder) for folder in sorted(tmp_path.iterdir()) if folder.is_dir()])
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
@pytest.mark.parametrize("engine", ["vllm", "other"])
@pytest.mark.parametrize("prompts", ["ids", "text", "chat"])
def test_prompts_go_as_ids_as_text_or_as_messages(
    tmp_path: Path, served: Server, files: HuggingFace, prompts: Any, engine: str
) -> None:
    task = replace(NEEDLES, system="Be short.")
    ours = run(tmp_path, Full(), task, files, dtype="fp32", device="cpu")
    theirs = run(tmp_path, Full(), task, endpoint(served, files, prompts=prompts, engine=engine))
    assert by_id(theirs, lambda r: r.output) == by_id(ours, lambda r: r.output)
    assert not any(record["warnings"] for record in theirs.records)
    kinds = {"ids": list, "text": str}
    for body in served.completions:
        if prompts == "chat":
            assert [message["role"] for message in body["messages"]] == ["system", "user"]
        else:
            assert isinstance(body["prompt"], kinds[prompts])
        assert ("repetition_penalty" in body) == (engine == "vllm")  # words that OpenAI's interface lacks


def test_first_words_of_an_answer_need_an_engine_that_takes_them(
    tmp_path: Path, served: Server, files: HuggingFace
) -> None:
    task = niah(lengths=[300], template="{context}\n\n{question}", prefix="The answer is")
    ours = run(tmp_path, Full(), task, files, dtype="fp32", device="cpu")
    theirs = run(tmp_path, Full(), task, endpoint(served, files, prompts="chat"))
    assert by_id(theirs, lambda r: r.output) == by_id(ours, lambda r: r.output)
    with pytest.raises(ModelError, match="first words"):
        run(tmp_path, Full(), task, endpoint(served, files, prompts="chat", engine=None))


@pytest.mark.parametrize("fault", [429, 503, 500, "half", "reset"])
def test_what_may_pass_is_asked_again(tmp_path: Path, served: Server, files: HuggingFace, fault: int | str) -> None:
    served.faults.extend([fault, fault])
    made = run(tmp_path, Full(), NEEDLES, endpoint(served, files))
    assert sorted(record["served"]["retries"] for record in made.records) == [0, 0, 0, 2]
    assert made.summary["served"]["retries"] == 2
    assert len({record.output for record in made.records}) >= 1
    assert not made.failed


def test_a_silent_server_is_given_up_after_a_second_try(
    tmp_path: Path, served: Server, files: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    class Silent(HTTPConnection):
        def getresponse(self) -> HTTPResponse:
            if self._method == "POST":  # type: ignore[attr-defined]
                tries.append(self.timeout)
                raise TimeoutError("timed out")
            return super().getresponse()

    monkeypatch.setattr(client, "HTTPConnection", Silent)
    with pytest.raises(ServerGone, match=r"silent for model.timeout_s=70 seconds"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files, timeout_s=70.0))
    assert tries == [70.0, 70.0]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_server_that_dies_loses_nothing_and_may_come_back_elsewhere(
    tmp_path: Path, served: Server, files: HuggingFace, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WAITS", (0.01,))
    served.dies_after, quiet = 2, {"likelihood": "off", "batch": batch}
    with pytest.raises(ServerGone, match="the same command then goes on"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files), **quiet)
    [folder] = tmp_path.glob("niah-endpoint-*")
    first = load(folder)
    assert (len(first.records), first.status) == (2, "failed")
    with Server(served.model, served.tokenizer) as other:
        made = run(tmp_path, Full(), NEEDLES, endpoint(other, files), **quiet)
        assert len(other.completions) == 2
    assert made.folder == folder
    assert (len(made.records), made.status) == (4, "complete")


def test_a_prompt_that_is_refused_fails_alone(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    served.faults.append(400)
    made = run(tmp_path, Full(), NEEDLES, endpoint(served, files), likelihood="off")
    assert len(made.records) == 3
    [failed] = made.failed
    assert "maximum context length is 4096 tokens" in failed.why
    assert "model.window" in failed.why
    again = run(tmp_path, Full(), NEEDLES, endpoint(served, files), likelihood="off")
    assert (len(again.records), again.failed) == (4, [])


def test_what_the_server_says_limits_the_prompts(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    served.entry["max_model_len"] = 200
    with pytest.raises(ValueError, match="200"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files))
    with pytest.raises(ValueError, match="Every example is left out"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files), too_long="skip")


def test_a_server_that_says_little_is_enough(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    """No usage, no token ids, no logprobs, no metrics."""
    served.says_usage = served.gives_logprobs = False
    made = run(tmp_path, Full(), NEEDLES, endpoint(served, files, engine=None))
    for record in made.records:
        assert record["answer_nll"] is None
        assert "prompt_tokens" not in record["served"]
        assert len(record.tokens) == len(record.token_s) > 2
        assert record.token_s == sorted(record.token_s)
    assert made.info["no_likelihood"] == "the server returns no logprobs of prompts"
    assert made.info["presets"]["method"] == "endpoint"
    weighed = run(tmp_path, Full(), Colours(), endpoint(served, files, engine=None))
    assert ["how likely given texts are" in failed.why for failed in weighed.failed] == [True, True]
    with pytest.raises(ModelError, match=r"model.prompts=ids"):
        run(tmp_path, Full(), Colours(), endpoint(served, files, prompts="text"))


def test_another_template_at_the_server_is_told(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    served.tokenizer.chat_template = f"Be kind. {served.tokenizer.chat_template}"
    made = run(tmp_path, Full(), NEEDLES, endpoint(served, files, prompts="chat"))
    assert any("counted other prompt tokens" in warning for warning in made.summary["warnings"])


def test_a_batch_keeps_so_many_requests_on_their_way(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    served.waits_for = 3
    made = run(tmp_path, Full(), NEEDLES, endpoint(served, files), batch=3)
    assert max(served.at_once) == 3
    assert made.info["no_likelihood"] == "requests for it would disturb the others' times"
    assert made.summary["throughput_tok_s"] > 0
    charged = sum(record["share_s"] for record in made.records)
    assert 0 < charged < sum(record.token_s[-1] for record in made.records)


def test_a_rate_begins_requests_by_the_clock(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    served.waits_for, before = 2, perf_counter()
    run(tmp_path, Full(), NEEDLES, endpoint(served, files, rate=20.0))
    assert max(served.at_once) > 1
    assert served.starts[-1] - before >= 3 / 20.0
    with pytest.raises(SettingsError, match="leave batch out"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files, rate=20.0), batch=2)


def test_time_is_divided_among_requests() -> None:
    meter = Meter(_points=[(0.0, 0.0), (1.0, 0.0), (3.0, 2.0), (7.0, 4.0), (8.0, 5.0)])  # 1, 2 and 1 at a time
    assert meter.between(1.0, 7.0) == pytest.approx(4.0)
    assert meter.between(3.0, 8.0) == pytest.approx(3.0)
    assert meter.between(2.0, 5.0) == pytest.approx(2.0)


VLLM = """# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
vllm:num_preemptions_total{{engine="0"}} {count}
vllm:prefix_cache_queries_total{{engine="0"}} {count}00.0
vllm:prefix_cache_hits_total{{engine="0"}} {count}0.0
"""


def test_metrics_are_read_where_they_are(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    served.metrics = VLLM
    said = run(tmp_path, Full(), NEEDLES, endpoint(served, files), likelihood="off").summary["served"]
    assert (said["cache_share"], said["preemptions"], said["prefix_hits"]) == (0.25, 4, pytest.approx(0.1))


def planned(tmp_path: Path, model: Endpoint, **changes: Any) -> Path:
    return Job.plan(Full(), NEEDLES, model, settings(tmp_path, **changes)).folder


def test_runs_are_told_apart_by_what_is_served(
    tmp_path: Path, served: Server, files: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = planned(tmp_path, endpoint(served, files))
    monkeypatch.setenv("ANOTHER", "secret")
    assert planned(tmp_path, endpoint(served, files, key="ANOTHER", timeout_s=9.0)) == usual
    with Server(served.model, served.tokenizer) as elsewhere:
        assert planned(tmp_path, endpoint(elsewhere, files)) == usual
    others = [{"engine": "sglang"}, {"notes": "kv_cache_dtype=fp8"}, {"prompts": "text"}, {"rate": 2.0}]
    folders = [planned(tmp_path, endpoint(served, files, **other)) for other in others]
    served.entry["root"] = "another"
    folders.append(planned(tmp_path, endpoint(served, files)))
    assert len({usual, *folders}) == 6


def test_the_key_is_sent_and_stands_nowhere(
    tmp_path: Path,
    served: Server,
    files: HuggingFace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served.key = "sk-right"
    monkeypatch.setenv("SERVER_KEY", "sk-wrong")
    model = endpoint(served, files, key="SERVER_KEY")
    with pytest.raises(ServerGone, match="environment variable SERVER_KEY") as raised:
        run(tmp_path, Full(), NEEDLES, model)
    monkeypatch.setenv("SERVER_KEY", "sk-right")
    run(tmp_path, Full(), NEEDLES, model)
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    for text in (*written, str(raised.value), *capsys.readouterr()):
        assert "sk-" not in text
        assert str(served.http.server_port) not in text or text == str(raised.value) or "gives no" in text
    with pytest.raises(ModelError, match="environment variable"):
        _ = endpoint(served, files, url="http://me:sk-right@host/v1").client
    with pytest.raises(ModelError, match="is not the key itself"):
        _ = endpoint(served, files, key="sk-right").client


def test_what_the_server_decides_is_refused(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    model = endpoint(served, files)
    with pytest.raises(SettingsError, match="PQCache cannot run behind an endpoint"):
        run(tmp_path, PQ, NEEDLES, model)
    for changes in ({"budget": 0.3}, {"placement": "host"}, {"protocol": "context"}, {"device": "cpu"}):
        with pytest.raises(SettingsError, match="the server's to decide"):
            run(tmp_path, Full(), NEEDLES, model, **changes)
    with pytest.raises(SettingsError, match=r"generation.force_length is no word"):
        forced = GenerationSettings(force_length=True)
        run(tmp_path, Full(), NEEDLES, replace(model, engine=None), generation=forced)
    with pytest.raises(SettingsError, match=r"behind a server.*model=hf"):  # of commands that compute with weights
        resolve(Settings(), Full(), model.describe())


def test_a_wrong_name_or_address_is_a_sentence(tmp_path: Path, served: Server, files: HuggingFace) -> None:
    with pytest.raises(ModelError, match=f"choose one of {NAME}"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files, name="llama"))
    with pytest.raises(ModelError, match=r"start the server, or correct model\.url"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files, url="http://127.0.0.1:9/v1"))
    with pytest.raises(ModelError, match="names no server"):
        run(tmp_path, Full(), NEEDLES, endpoint(served, files, url=None))


def test_the_command_line_takes_full_unless_a_method_is_typed() -> None:
    words = ["model=endpoint", "model.name=x", "model.url=http://localhost:1/v1"]
    assert built(compose_one(words).config)[0] == Full()
    assert built(compose_one([*words, "method=pqcache"]).config)[0] != Full()
