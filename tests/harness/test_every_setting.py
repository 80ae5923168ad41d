"""No setting is ignored in silence: each changes something, is refused, or is said to be without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from evals.base import Example, Task, TaskEnv
from harness.config.catalogue import flatten
from harness.config.compose import composed
from harness.config.settings import NESTED, WITHOUT_EFFECT, Results, Settings, SettingsError
from harness.engine.attach import attached
from harness.jobs.evaluate import evaluate
from harness.jobs.job import Job
from harness.terminal.notices import say_once
from harness.trackers.session import Copies
from harness.trackers.wandb import Wandb
from methods.base import Method
from methods.full import Full
from methods.layers import Layer
from tests.fast import MODEL, PQ, STREAMING, niah, run
from tests.methods.test_contract import NAMES, small
from tests.talks import Talks
from tests.tiny import prompt, tiny

Changes = Mapping[str, Any]  # by dotted key
STORE = {"history": "store"}
ON_DISK = {**STORE, "store.disk": "100GB"}
WINDOW = {"overflow.window": 90}


class Other(NamedTuple):
    """A value that is not the default, and what must be said beside it for it to have a meaning."""

    value: Any
    beside: Changes = MappingProxyType({})


OTHERS: dict[str, Other] = {
    "budget": Other(0.3),
    "budget_bytes": Other(30_000),
    "budget_rule": Other("paper"),
    "align": Other("device_bytes"),
    "comm": Other(0.125),
    "windows.sinks": Other(6),
    "windows.recent_ratio": Other(0.4),
    "dense_layers": Other([1]),
    "budget_generated": Other(8),
    "placement": Other("host"),
    "codec": Other("int8"),
    "overlap": Other("on", {"placement": "host"}),
    "protocol": Other("context"),
    "questions": Other("shared", {"protocol": "context"}),
    "history": Other("recompute"),
    "store.host": Other("4GB", STORE),
    "store.disk": Other("1GB", STORE),
    "store.folder": Other("kept", ON_DISK),
    "store.policy": Other("lru", STORE),
    "store.ttl_s": Other(60.0, STORE),
    "store.codec": Other("int8", STORE),
    "overflow.window": Other(90),
    "overflow.by": Other("truncate_tokens", WINDOW),
    "overflow.ratio": Other(0.25, WINDOW),
    "overflow.sinks": Other(2, WINDOW),
    "chat": Other("none"),
    "dtype": Other("bf16"),
    "device": Other("cuda:9"),
    "batch": Other(2),
    "prefill_chunk": Other(64),
    "seed": Other(7),
    "threads": Other(1),
    "baseline": Other("off"),
    "warmup": Other(2),
    "shared_prefill": Other(True),
    "fidelity": Other(4),
    "likelihood": Other("off"),
    "trace": Other("on"),
    "graphs": Other("on"),
    "backends": Other("segment_attention=torch"),
    "dry_run": Other(True),
    "generation.temperature": Other(0.7),
    "generation.top_k": Other(5, {"generation.temperature": 0.7}),
    "generation.top_p": Other(0.5, {"generation.temperature": 0.7}),
    "generation.max_new_tokens": Other(4),
    "generation.force_length": Other(True),
    "data.root": Other("."),
    "results.root": Other("elsewhere"),
    "results.save_prompts": Other(True),
    "wandb.project": Other("mine"),
}


@dataclass(frozen=True, kw_only=True)
class Given(Talks):
    """Texts that are fed in place of answers: their likelihood is the score. They are the same for every seed."""

    seeded = False

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for example in super().examples(env):
            yield replace(example, further=(), chat=False, references=("A given text.",), teacher_forced=True)


@dataclass(frozen=True, kw_only=True)
class Rooted(Talks):
    """Talks about the folder of the data."""

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        yield from (replace(example, context=f"It lies in {env.data_root}.") for example in super().examples(env))


QUICK = ("full", "kivi", "pqcache", "snapkv")  # all kinds of settings


def slow(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.slow]


NEEDLES, TALKS, GIVEN = niah(lengths=[200], depths=1), Talks(conversations=3, max_new_tokens=5), Given()
SHORT = {"budget": 12}  # prompts that hold no larger windows
WALKS = [
    *(pytest.param(name, NEEDLES, {}, marks=slow(name), id=name) for name in NAMES),
    *(
        pytest.param(name, TALKS, SHORT, id=f"{name}, turns", marks=slow(name))
        for name in ("full", "pqcache", "snapkv")
    ),
    pytest.param("pqcache", GIVEN, SHORT, id="given answers"),
]


def settings(changes: Changes) -> Settings:
    nested = {
        name: kind(**{key.partition(".")[2]: value for key, value in changes.items() if key.startswith(f"{name}.")})
        for name, kind in NESTED.items()
    }
    return Settings(**nested | {key: value for key, value in changes.items() if "." not in key})


def keys() -> list[str]:
    return list(flatten(asdict(Settings())))


def test_every_setting_is_walked() -> None:
    assert list(OTHERS) == keys()


class Walked(NamedTuple):
    """A job as planned, or the sentence it was refused with; what was said meanwhile."""

    job: Job | None
    refused: str
    said: str


def walked(method: Method, task: Task, changes: Changes, capsys: pytest.CaptureFixture[str]) -> Walked:
    say_once.cache_clear()
    capsys.readouterr()
    try:
        job = Job.plan(method, task, MODEL, settings(changes))
    except ValueError as error:
        return Walked(None, str(error), "")
    return Walked(job, "", capsys.readouterr().err)


def shows(key: str, value: Any, before: Job, after: Job) -> bool:
    """Whether the plan has changed by it, and the run has another identity unless no result can depend on it."""
    applies = (
        flatten(asdict(after.settings))[key] == value or after.method != before.method or after.budget != before.budget
    )
    free = {key, key.partition(".")[0]} & {*WITHOUT_EFFECT}
    return applies and (bool(free) or after.identity != before.identity)


@pytest.mark.parametrize(("name", "task", "always"), WALKS)
def test_none_is_ignored_in_silence(name: str, task: Task, always: Changes, capsys: pytest.CaptureFixture[str]) -> None:
    method, ignored, known = small(name), dict[str, str](), dict[str, Job | None]()
    for key, (value, beside) in OTHERS.items():
        for companions in ({}, beside) if beside else ({},):
            if str(companions) not in known:
                known[str(companions)] = walked(method, task, {**always, **companions}, capsys).job
            before = known[str(companions)]
            job, refused, said = walked(method, task, {**always, **companions, key: value}, capsys)
            named = any(word in said or word in refused for word in (key, key.partition(".")[0], *companions))
            if named or (refused and key in ("budget_bytes", "device", "graphs")):
                continue
            if job is None or before is None or not shows(key, value, before, job):
                ignored[key] = f"beside {companions}: refused {refused!r}, said {said!r}"
    assert not ignored


class Seen(NamedTuple):
    """What a setting without effect on results changes: how it is looked at."""

    look: Callable[[Settings, Path, pytest.CaptureFixture[str]], Any]
    beside: Changes = MappingProxyType({})


def _job(wanted: Settings, method: Method = PQ, task: Task = TALKS) -> Job:
    return Job.plan(method, task, MODEL, wanted)


def _made(wanted: Settings, folder: Path, method: Method = STREAMING, task: Task = NEEDLES) -> Any:
    wanted = replace(wanted, results=replace(wanted.results, root=str(folder)), warmup=0)
    return evaluate(method, task, MODEL, wanted)


def _stored(wanted: Settings, folder: Path, *_: Any) -> bool:
    named = wanted.store.folder and replace(wanted.store, folder=str(folder / "kept"))
    _made(replace(wanted, baseline="off", store=named or wanted.store), folder, task=TALKS)
    return (folder / "kept").exists()


def _copied_to(wanted: Settings, *_: Any) -> list[Wandb]:
    copies = Copies()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wandb, "missing", lambda project: None)
        copies.open([wanted])
    return copies.projects


SEEN: dict[str, Seen] = {
    "results.root": Seen(lambda wanted, *_: _job(wanted).folder),
    "results.save_prompts": Seen(lambda wanted, folder, _: bool(_made(wanted, folder).records[0].prompt_ids)),
    "data.root": Seen(lambda wanted, *_: _job(wanted, task=Rooted()).items[0].prompt.text),
    "baseline": Seen(lambda wanted, folder, _: _made(wanted, folder).full_folder),
    "wandb.project": Seen(_copied_to),
    "likelihood": Seen(lambda wanted, folder, _: _made(wanted, folder).records[0].measured["answer_nll"]),
    "store.folder": Seen(_stored, ON_DISK),
}
OF_THE_COMMAND = ("dry_run",)  # below


def test_all_without_effect_on_results_are_looked_at() -> None:
    free = {key for key in keys() if {key, key.partition(".")[0]} & {*WITHOUT_EFFECT}}
    assert free == {*SEEN, *OF_THE_COMMAND}


@pytest.mark.parametrize("key", SEEN)
def test_what_no_identity_holds_is_seen_elsewhere(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    look, beside = SEEN[key]
    usual = look(settings(beside), tmp_path / "usual", capsys)
    assert look(settings({**beside, key: OTHERS[key].value}), tmp_path / "other", capsys) != usual


Cli = Callable[..., tuple[int, str, str]]


def test_a_dry_run_runs_nothing(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("method=full", "dry_run=true")
    assert (code, "KV cache" in out, (tmp_path / "runs").exists()) == (0, True, False)


BOTH = "budget=0.3 would be ignored beside "


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["budget=0.3", "budget_bytes=30000"], f"{BOTH}budget_bytes=30000: leave one of them out."),
        (["budget=0.2", "budget_bytes=30000"], "budget=0.2 would be ignored beside budget_bytes=30000"),  # the default
        (["method=full", "budget=0.3", "budget_bytes=30000"], BOTH),
        (["-m", "budget=0.3,0.4", "budget_bytes=null,30000"], "budget=0.3,0.4 would be ignored beside"),
        (
            ["-m", "+experiment=small/pqcache_fig9b", "budget_bytes=30000"],
            "budget=0.2 would be ignored beside budget_bytes=30000: set budget=null as well.",
        ),
    ],
)
def test_of_two_budgets_neither_is_dropped(cli: Cli, words: list[str], says: str) -> None:
    code, _, err = cli(*words, "dry_run=true")
    assert (code, says in err) == (1, True), err


@pytest.mark.parametrize("words", [["budget=null", "budget_bytes=30000"], ["budget=0.3", "budget_bytes=null"]])
def test_null_says_that_there_is_no_second_one(words: list[str]) -> None:
    assert composed(words)["task"]


def test_two_budgets_are_refused_in_python_too(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"budget=0\.3 .*budget_bytes=30000"):
        run(tmp_path, PQ, NEEDLES, budget=0.3, budget_bytes=30_000)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget_generated": 8}, "budget_generated changes nothing for Full, which uses no budget"),
        ({"budget_bytes": 10**6}, "budget_bytes changes nothing for Full, which uses no budget"),
        ({"budget": 0.5}, "budget changes nothing for Full, which uses no budget"),
        ({"comm": 0.125, "windows.sinks": 4}, "comm and windows.sinks change nothing for Full, which uses no budget"),
        ({"placement": "host", "codec": "int8"}, "placement changes nothing for Full, which keeps nothing elsewhere"),
        ({"baseline": "off"}, "baseline changes nothing for Full, which is the baseline"),
    ],
)
def test_what_full_has_no_use_for_is_said(changes: Changes, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"note: {says}.\n" in walked(Full(), NEEDLES, changes, capsys).said


def test_nothing_is_said_of_the_full_beside_a_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()
    wanted = settings({"budget": 0.5, "budget_generated": 8, "placement": "host", "results.root": str(tmp_path)})
    assert _job(wanted, small("pqcache"), NEEDLES).full
    assert "changes nothing" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "task", "changes", "says"),
    [
        ("snapkv", NEEDLES, {"comm": 0.125}, "comm changes nothing for SnapKV, whose scoring moves nothing"),
        ("infllm", NEEDLES, {"shared_prefill": True}, "shared_prefill changes nothing for InfLLM, whose prefill"),
        ("pqcache", NEEDLES, {"shared_prefill": True, "warmup": 2}, "warmup changes nothing under shared_prefill=true"),
        ("pqcache", GIVEN, {"generation.temperature": 0.7}, "generation.temperature changes nothing here: all that is"),
        ("pqcache", GIVEN, {"generation.force_length": True}, "generation.force_length changes nothing here: all that"),
        ("pqcache", GIVEN, {"seed": 7}, "seed changes nothing here: the task has the same examples whatever it is"),
        ("pqcache", GIVEN, {"chat": "none"}, "chat=none changes nothing here: this task has no prompt wrapped"),
        ("pqcache", GIVEN, {"protocol": "context"}, "protocol=context changes nothing here: no question stands behind"),
    ],
)  # fmt: skip
def test_what_a_method_or_a_task_has_no_use_for_is_said(
    name: str, task: Task, changes: Changes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"note: {says}" in walked(small(name), task, {**(SHORT if task is GIVEN else {}), **changes}, capsys).said


@pytest.mark.parametrize("name", [name for name in NAMES if small(name).uses_budget])
def test_a_method_says_whether_a_step_chooses(name: str) -> None:
    """Otherwise reuse_steps would be ignored, or refused where it has a meaning."""
    method = small(name)
    with attached(tiny("llama"), method, budget=0.5, calibration=prompt(64)) as kv:
        layers = kv.cache(capacity=80).layers
    assert method.selects == any(isinstance(layer, Layer) and layer.reads is not None for layer in layers)


def test_prompts_cannot_be_saved_of_examples_that_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = Results(root=str(tmp_path), save_prompts=True)
    for asked, said in ((Results(root=str(tmp_path)), False), (saved, True)):
        say_once.cache_clear()
        capsys.readouterr()
        evaluate(STREAMING, NEEDLES, MODEL, Settings(results=asked, baseline="off", warmup=0))
        assert ("results.save_prompts changes nothing" in capsys.readouterr().err) == said


def test_evaluate_refuses_what_only_the_command_reads(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^dry_run="):
        run(tmp_path, STREAMING, NEEDLES, dry_run=True)
