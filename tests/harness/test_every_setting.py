"""No setting is ignored in silence: each changes something, is refused, or is said to be without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from evals.base import Example, Task, TaskEnv
from harness.cachedattention.serving.plan import OWN, READ, ServingPlan, points
from harness.cachedattention.simulation.costs import load as load_costs
from harness.cachedattention.simulation.outcome import simulated
from harness.cachedattention.simulation.scenario import Scenario
from harness.commands import tune
from harness.config.catalogue import flatten
from harness.config.settings import NESTED, WITHOUT_EFFECT, Settings, SettingsError
from harness.jobs.job import Job
from harness.terminal.notices import say_once
from methods.base import Method
from tests.fast import MODEL, MODEL_ARGS, TASK_ARGS, niah
from tests.methods.test_contract import small
from tests.talks import Talks, configured

Changes = Mapping[str, Any]  # by dotted key
STORE = {"history": "store"}
ON_DISK = {**STORE, "store.disk": "100GB"}
WINDOW = {"overflow.window": 90}


class Other(NamedTuple):
    """A value that is not the default, and what must be said beside it for it to have a meaning."""

    value: Any
    beside: Changes = MappingProxyType({})


OTHERS: dict[str, Other] = {
    "budget": Other(0.3), "budget_rule": Other("paper"), "comm": Other(0.125),
    "windows.sinks": Other(6), "windows.recent_ratio": Other(0.4),
    "dense_layers": Other([1]), "budget_mass": Other(0.6), "budget_generated": Other(8),
    "keep_generated": Other("random", {"budget_generated": 8}), "evict_every": Other(6), "merge": Other("cam"),
    "placement": Other("host"), "codec": Other("int8"), "overlap": Other("on", {"placement": "host"}),
    "protocol": Other("context"), "questions": Other("shared", {"protocol": "context"}),
    "history": Other("recompute"),
    "store.host": Other("4GB", STORE), "store.disk": Other("1GB", STORE), "store.folder": Other("kept", ON_DISK),
    "store.policy": Other("lru", STORE), "store.ttl_s": Other(60.0, STORE),
    "overflow.window": Other(90), "overflow.by": Other("truncate_tokens", WINDOW),
    "overflow.ratio": Other(0.25, WINDOW), "overflow.sinks": Other(2, WINDOW),
    "chat": Other("none"), "template_kwargs": Other({"messages_of": "no one"}), "thinking": Other("on"),
    "too_long": Other("skip"), "dtype": Other("bf16"), "device": Other("cuda:9"), "batch": Other(2),
    "prefill_chunk": Other(64), "seed": Other(7), "baseline": Other("off"), "warmup": Other(2),
    "shared_prefill": Other(True), "fidelity": Other(4), "likelihood": Other("off"), "trace": Other("on"),
    "graphs": Other("on"), "backends": Other("segment_attention=torch"), "dry_run": Other(True),
    "generation.temperature": Other(0.7), "generation.top_k": Other(5, {"generation.temperature": 0.7}),
    "generation.top_p": Other(0.5, {"generation.temperature": 0.7}), "generation.max_new_tokens": Other(4),
    "generation.force_length": Other(True), "generation.samples": Other(3, {"generation.temperature": 0.7}),
    "data.root": Other("."),
    "results.root": Other("elsewhere"), "results.save_prompts": Other(True),
    "wandb.project": Other("mine"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Given(Talks):
    """Texts that are fed in place of answers: their likelihood is the score. They are the same for every seed."""

    seeded = False

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for example in super().examples(env):
            yield replace(example, further=(), chat=False, references=("A given text.",), teacher_forced=True)


QUICK = ("full", "kivi", "pqcache", "snapkv")  # all kinds of settings


NEEDLES, TALKS, GIVEN = niah(lengths=[200], depths=1), Talks(conversations=3, max_new_tokens=5), Given()
SHORT = {"budget": 12}  # prompts that hold no larger windows
WALKS = [
    *(pytest.param(name, NEEDLES, {}, id=name) for name in QUICK),
    pytest.param("snapkv", TALKS, SHORT, id="turns"),
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
    assert list(OTHERS) == keys()
    for key, (value, beside) in OTHERS.items():
        for companions in ({}, beside) if beside else ({},):
            if str(companions) not in known:
                known[str(companions)] = walked(method, task, {**always, **companions}, capsys).job
            before = known[str(companions)]
            job, refused, said = walked(method, task, {**always, **companions, key: value}, capsys)
            named = any(word in said or word in refused for word in (key, key.partition(".")[0], *companions))
            if named or (refused and key in ("device", "graphs")):
                continue
            if job is None or before is None or not shows(key, value, before, job):
                ignored[key] = f"beside {companions}: refused {refused!r}, said {said!r}"
    assert not ignored


# No word is ignored in silence by the other commands: each changes something, is refused, or is said to be idle.


def tuned(*words: str) -> list[str]:
    small_search = ["method=streaming", *MODEL_ARGS, *TASK_ARGS, "method.sinks=1,4", "dry_run=true"]
    return [*small_search, *words]


def test_tune_says_what_the_method_has_no_use_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Of shorthands too, which it spells out for itself."""
    assert tune.main(tuned("comm=0.125", "windows.recent_ratio=0.4")) == 0
    err = capsys.readouterr().err
    assert "note: comm changes nothing for Streaming, whose scoring moves nothing.\n" in err
    assert "note: windows.recent_ratio changes nothing for Streaming, which has no such windows.\n" in err


TIGHT = {"host": "2GB", "disk": "20GB", "sessions": 40, "warmup": 0, "rate": 2.0, "write_buffer": "1GB"}
SIMULATED: dict[str, Other] = {
    "model": Other("llama-65b"), "policy": Other("lru"), "device": Other("1GB"), "host": Other("4GB"),
    "disk": Other("6GB"), "write_buffer": Other("10MB"), "copies": Other(False, {"disk": "6GB"}), "ttl_s": Other(20),
    "positions": Other("coupled"), "truncation_ratio": Other(0.9), "preload": Other("off"), "sessions": Other(41),
    "rate": Other(3.0), "think_s": Other(3), "question_share": Other(0.6), "correlation": Other(0.1),
    "warmup": Other(20), "seed": Other(5),
}  # fmt: skip


def test_every_key_of_simulate_changes_something() -> None:
    assert SIMULATED.keys() == asdict(Scenario()).keys()
    costs = load_costs()

    def figures(changes: Changes) -> Any:
        try:
            row = simulated(Scenario(**TIGHT | changes), costs)
        except ValueError as error:
            return str(error)
        return {name: value for name, value in row.items() if name != "settings"}

    same = [key for key, (value, beside) in SIMULATED.items() if figures({**beside, key: value}) == figures(beside)]
    assert not same


SERVED: dict[str, Other] = {"rate": Other(2.0), "think_s": Other(9.0), "slots": Other(2), "clock": Other("busy")}


@pytest.mark.parametrize("key", SERVED)
def test_every_key_of_serve_makes_another_run(key: str, tmp_path: Path) -> None:
    assert list(SERVED) == list(OWN)
    folder = configured(tmp_path)

    def identity(changes: Changes) -> Any:
        words = [f"{name}={value}" for name, value in changes.items()]
        try:
            [point] = points(["task=talks", "method=full", *MODEL_ARGS, *words])
            return ServingPlan.of(point, [folder]).identity
        except ValueError as error:
            return str(error)
        except OSError as error:
            return str(error)

    value, beside = SERVED[key]
    assert identity({**beside, key: value}) != identity(beside)


def test_serve_refuses_the_settings_that_it_does_not_read() -> None:
    for key in keys():
        if key.partition(".")[0] not in READ and key not in OWN:
            with pytest.raises(SettingsError, match=key):
                points([f"{key}={OTHERS[key].value}"])


def test_serve_tells_the_template_and_cuts_what_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = configured(tmp_path)

    def plan(word: str) -> ServingPlan:
        [point] = points(["task=talks", "method=full", *MODEL_ARGS, word])
        return ServingPlan.of(point, [folder])

    assert plan("too_long=middle").job.settings.too_long == "refuse"
    assert "too_long=middle changes nothing here: every example fits" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"template_kwargs\.mood would change nothing"):
        plan("template_kwargs={mood: good, tone: low}")
