"""Examples that fail: named in their records, left out of every pair, tried again; the others run on."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import ref

import pytest
import torch

from evals.base import Example, Score, Task
from evals.niah import Niah
from harness.config.errors import breaks_device, is_memory, one_sentence
from harness.config.settings import GenerationSettings
from harness.engine.attach import attached
from harness.engine.batch.running_sequence import Generation
from harness.engine.cache import KVCache
from harness.engine.engine import Engine, NotFiniteError
from harness.jobs.evaluate import evaluate_together
from harness.jobs.job import Job
from harness.jobs.questions import ContextSession
from harness.models.hub import HuggingFace
from harness.results.run_folder import StoredRun, load
from methods.base import CacheState, KVLayer, LayerSpec, Method
from methods.full import Full
from methods.streaming import Streaming
from tests import fast
from tests.fast import MODEL, niah, settings, tokens
from tests.harness.jobs.test_questions import Balances, Retold
from tests.tiny import prompt, saved, tiny

Damage = Callable[..., HuggingFace]
both = pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])


class Moody(Streaming):
    """Fails at the caches whose numbers are in `at`, each in the phase that is given."""

    at: ClassVar[dict[int, str]] = {}
    made: ClassVar[list[int]] = []
    error: ClassVar[type[Exception]] = ValueError

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        layers, phase = super().start(specs, cache), self.at.get(len(self.made))
        self.made.append(len(self.made))
        if phase == "start":
            self._fail()
        for name in filter(None, [phase]):
            setattr(layers[-1], name, self._fail)
        return layers

    def _fail(self, *_: object) -> None:
        raise self.error("not today")


@pytest.fixture(autouse=True)
def _in_a_good_mood(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"at": {}, "made": [], "error": ValueError}.items():
        monkeypatch.setattr(Moody, name, value)


def run(root: Path, method: Method | None = None, task: Task | None = None, **changes: Any) -> StoredRun:
    return fast.run(root, method or Moody(), task or niah(), **changes)


def names(made: StoredRun) -> tuple[list[str], list[str]]:
    """Ids of the examples that have an answer, in the order of the task, and of those that failed."""
    return sorted(record.id for record in made.records), [failed.id for failed in made.failed]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()]


@both
@pytest.mark.parametrize(
    ("phase", "error", "says"),
    [
        *((phase, ValueError, "not today (") for phase in ("start", "decode", "seal")),  # and the line of the method's
        ("decode", torch.OutOfMemoryError, "Out of memory"),
    ],
)
def test_one_example_that_fails_does_not_end_a_run(
    tmp_path: Path, phase: str, error: type[Exception], says: str, shared: bool
) -> None:
    whole = run(tmp_path / "whole", Streaming(), shared_prefill=shared)
    ids = [record.id for record in whole.records]
    Moody.at = {1: phase}
    Moody.error = error
    finished = run(tmp_path, shared_prefill=shared)
    assert names(finished) == (sorted([ids[0], *ids[2:]]), [ids[1]])
    assert finished.failed[0].why.startswith(f"{error.__name__}: {says}")
    assert [line["id"] for line in lines(finished.folder) if "error" in line] == [ids[1]]
    assert (finished.status, finished.summary["num_examples"], finished.summary["num_failed"]) == ("complete", 3, 1)
    assert tokens(finished) == {name: made for name, made in tokens(whole).items() if name != ids[1]}
    again = run(tmp_path, shared_prefill=shared)  # in a good mood since
    assert again.folder == finished.folder
    assert names(again) == (sorted(ids), [])
    assert len(Moody.made) == 5
    assert tokens(again) == tokens(whole)


def test_pairs_with_full_leave_out_what_failed_on_either_side(tmp_path: Path) -> None:
    ids = [record.id for record in run(tmp_path / "whole", Streaming()).records]
    Moody.at = {1: "decode"}
    finished = run(tmp_path, baseline="run")
    assert finished.full_folder is not None
    full = load(finished.full_folder)
    assert len(full.records) == 4
    others = [record.score for record in full.records if record.id != ids[1]]
    assert finished.summary["full"]["mean"] == sum(others) / len(others)
    Moody.at = {}
    reused = run(tmp_path, Streaming(sinks=5), baseline="reuse")
    assert reused.full_folder == full.folder
    # now Full lacks one that the method has
    kept = [line for line in (full.folder / "examples.jsonl").read_text().splitlines() if ids[2] not in line]
    wrong = {"id": ids[2], "group": "g", "prompt_sha256": "", "prompt_tokens": 1, "error": "ValueError: not today"}
    (full.folder / "examples.jsonl").write_text("\n".join([*kept, json.dumps(wrong)]) + "\n")
    run_again = run(tmp_path, Streaming(sinks=5), baseline="reuse")
    assert run_again.full_folder == full.folder
    assert any("compared with Full on 3 of 4 examples" in warning for warning in run_again.summary["warnings"])


@pytest.mark.parametrize("phase", ["seal", "decode"])
def test_of_a_batch_the_one_that_fails_is_named_and_the_others_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """A step of several that fails does not say whose fault it was: each is asked again by itself."""
    task = niah(lengths=[400, 440, 480], depths=2)
    whole = run(tmp_path / "whole", Streaming(), task, batch=3)
    middle = {record.id for record in whole.records if 440 <= record.prompt_tokens < 480}
    really = KVCache.seal if phase == "seal" else Engine.decode

    def fails(*given: Any) -> Any:
        caches = [cache for one in given for cache in getattr(one, "members", [one]) if isinstance(cache, KVCache)]
        if any(440 <= cache.capacity - 6 < 480 for cache in caches):
            raise ValueError("not today")
        return really(*given)

    monkeypatch.setattr(KVCache if phase == "seal" else Engine, phase, fails)
    finished = run(tmp_path, Streaming(), task, batch=3, likelihood="off")  # which is measured alone, behind the seal
    assert {failed.id for failed in finished.failed} == middle
    assert len(middle) == 2
    assert tokens(finished) == {name: made for name, made in tokens(whole).items() if name not in middle}


@both
def test_a_run_whose_examples_all_fail_ends_with_their_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared: bool
) -> None:
    Moody.at = {0: "decode", 1: "start"}
    task = niah(depths=2)
    with pytest.raises(ValueError, match="not today"):
        run(tmp_path, Moody(), task, shared_prefill=shared)
    (folder,) = tmp_path.iterdir()
    stored = load(folder)
    assert (stored.status, stored.info["error"], len(stored.failed)) == ("failed", "ValueError: not today", 2)
    assert (folder / "error.txt").is_file()
    assert len(run(tmp_path, Moody(), task, shared_prefill=shared).records) == 2
    assert not (folder / "error.txt").exists()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_run_in_which_nothing_succeeds_ends_after_three_batches(tmp_path: Path, batch: int) -> None:
    Moody.at = dict.fromkeys(range(3 * batch), "start")
    task = niah(depths=9)
    with pytest.raises(ValueError, match="not today"):
        run(tmp_path, Moody(), task, batch=batch)
    (folder,) = tmp_path.iterdir()
    stored = load(folder)
    assert (stored.status, len(stored.records), len(stored.failed)) == ("failed", 0, 3 * batch)
    Moody.at = dict.fromkeys(range(len(Moody.made) + 9 - 3 * batch, 99), "start")
    again = run(tmp_path, Moody(), task, batch=batch)  # which tries last what failed, so that the others get their turn
    assert (again.status, len(again.records)) == ("complete", 9 - 3 * batch)
    assert {failed.id for failed in again.failed} == {failed.id for failed in stored.failed}


@both
def test_however_many_fail_in_a_row_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared: bool
) -> None:
    Moody.at = dict.fromkeys(range(1, 6), "decode")
    finished = run(tmp_path, Moody(), niah(depths=7), shared_prefill=shared)
    assert (finished.status, len(finished.records), len(finished.failed)) == ("complete", 2, 5)
    assert "complete with 5 failed; the same command tries them again" in capsys.readouterr().err


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("questions", ["separate", "shared"])
def test_of_several_questions_on_a_context_one_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, questions: str
) -> None:
    changes = {"protocol": "context", "questions": questions, "batch": batch}
    whole = run(tmp_path / "whole", Streaming(), Balances(), **changes)
    really, wrong = ContextSession.ended, "1/2"

    def ended(self: ContextSession, finished: Generation) -> None:
        if self.asked.example.id == wrong:
            raise ValueError("not today")
        really(self, finished)

    with monkeypatch.context() as patch:
        patch.setattr(ContextSession, "ended", ended)
        finished = run(tmp_path, Streaming(), Balances(), **changes)
    assert [failed.id for failed in finished.failed] == [wrong]
    assert tokens(finished) == {name: made for name, made in tokens(whole).items() if name != wrong}
    again = run(tmp_path, Streaming(), Balances(), **changes)
    assert tokens(again) == tokens(whole)


def test_a_step_of_several_that_fails_costs_no_question_on_their_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each context is asked again by itself, with all questions that wait on it."""
    how = {"protocol": "context", "questions": "shared", "batch": 2, "likelihood": "off"}
    whole, really = run(tmp_path / "whole", Streaming(), Balances(), **how), Engine.decode

    def fails(engine: Engine, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        if len(ids) > 1:
            raise ValueError("two are too many")
        return really(engine, ids, *more)

    monkeypatch.setattr(Engine, "decode", fails)
    assert tokens(run(tmp_path, Streaming(), Balances(), **how)) == tokens(whole)


@dataclass(frozen=True)
class Picky(Niah):
    """Its score is NaN in one example, and raises in another."""

    def score(self, example: Example, output: str) -> Score:
        if example.id.endswith("33.3/0"):
            return Score(0.5, {"found": float("nan")})
        if example.id.endswith("66.7/0"):
            raise KeyError("found")
        return super().score(example, output)


def test_an_answer_that_cannot_be_scored_fails_its_example(tmp_path: Path) -> None:
    finished = run(tmp_path, Streaming(), Picky(**vars(niah())))
    assert [failed.why.partition(":")[0] for failed in finished.failed] == ["RecordError", "KeyError"]
    assert (finished.status, len(finished.records)) == ("complete", 2)


# memory and the device


@pytest.fixture
def collects_new_objects_alone() -> Iterator[None]:
    """Keep each of many collections of a test from looking at what lived before it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("collects_new_objects_alone")
@pytest.mark.parametrize(("phase", "shared"), [("start", False), ("seal", False), ("decode", False), ("seal", True)])
def test_sequences_that_do_not_fit_together_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, shared: bool
) -> None:
    """Memory holds two caches, and one alone of the longest."""
    task = niah(lengths=[400, 440, 480], depths=2)
    whole = run(tmp_path / "whole", Streaming(), task, batch=3)
    known, ran_out, begin = list[ref[KVLayer]](), list[int](), Streaming.start

    def start(self: Any, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        def full(*arguments: Any) -> Any:
            gc.collect()
            alive = [layer() for layer in known if layer()]
            if len(alive) > 2 or (cache.request.capacity > 450 and len(alive) > 1):
                ran_out.append(len(alive))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return really(*arguments) if really else None

        layers, really = begin(self, specs, cache), None
        known.append(ref(layers[-1]))
        if phase == "start":
            full()
        else:
            really = getattr(layers[-1], phase)
            setattr(layers[-1], phase, full)
        return layers

    monkeypatch.setattr(Moody, "start", start)
    finished = run(tmp_path, Moody(), task, batch=3, shared_prefill=shared)
    assert ran_out
    assert not finished.failed
    assert tokens(finished) == tokens(whole)


def test_memory_that_ends_while_weights_load_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_weights(job: Job) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB")

    monkeypatch.setattr(Job, "load", load_weights)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run(tmp_path)
    assert one_sentence(raised.value).startswith("Out of memory (CUDA out of memory. Tried to allocate 4 GiB): use ")
    (folder,) = tmp_path.iterdir()
    assert (load(folder).status, load(folder).failed) == ("failed", [])


@pytest.mark.parametrize(
    ("error", "memory", "device"),
    [
        (MemoryError(), True, False),
        ("CUDA error: out of memory", True, False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True, False),
        ("Triton Error [CUDA]: an illegal memory access was encountered", False, True),
        ("CUDA error: unspecified launch failure", False, True),
        ("mat1 and mat2 shapes cannot be multiplied", False, False),
    ],
)
def test_errors_are_told_apart_by_their_texts(error: str | Exception, memory: bool, device: bool) -> None:
    raised = RuntimeError(error) if isinstance(error, str) else error
    assert (is_memory(raised), breaks_device(raised)) == (memory, device)


class _Cuda(RuntimeError):
    def __init__(self, text: str) -> None:
        super().__init__(
            f"CUDA error: device-side assert triggered ({text})\nCUDA kernel errors might be reported later"
        )


@both
@pytest.mark.parametrize(("error", "batch"), [(_Cuda, 1), (_Cuda, 2), (OSError, 1), (torch.AcceleratorError, 1)])
def test_what_no_other_example_survives_ends_a_run_at_once(
    tmp_path: Path, error: type[Exception], shared: bool, batch: int
) -> None:
    Moody.at = {batch: "decode"}
    Moody.error = error
    with pytest.raises(error, match="not today") as raised:
        run(tmp_path, shared_prefill=shared, batch=batch)
    (folder,) = tmp_path.iterdir()
    stored = load(folder)
    assert (stored.status, len(stored.records), stored.failed) == ("failed", batch, [])
    text = one_sentence(raised.value)
    assert ("cannot use the GPU any more. Run the same command again" in text) == (error is not OSError)
    assert "\n" not in text
    Moody.at = {}
    assert len(run(tmp_path, shared_prefill=shared, batch=batch).records) == 4


def test_a_conversation_that_fails_in_a_later_turn_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for history in ("recompute", "device_prefix"):
        root = tmp_path / history
        whole = tokens(run(root / "w", Streaming(), Retold(), history=history))
        monkeypatch.setattr(ContextSession, "_turn", failing_once(ContextSession._turn))
        finished = run(root, Streaming(), Retold(), history=history)
        assert (len(finished.records), len(finished.failed)) == (len(whole) - 1, 1)
        assert tokens(finished).items() < whole.items()
        again = run(root, Streaming(), Retold(), history=history)
        assert tokens(again) == whole


def failing_once(really: Any) -> Any:
    calls: list[Any] = []

    def fails(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise ValueError("not today")
        return really(self, *arguments)

    return fails


# logits that are not finite


@pytest.fixture
def damaged(tmp_path: Path) -> Damage:
    """A model with NaN or infinity in one weight."""

    def save(name: str, value: float, place: tuple[int, ...] = (0, 0)) -> HuggingFace:
        model = MODEL.build(torch.float32, "cpu")
        with torch.no_grad():
            model.get_parameter(name)[place] = value
        return saved(model, tmp_path / "damaged")

    return save


@pytest.mark.parametrize("likelihood", ["off", "on"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_in_a_weight_ends_a_run_by_layer_and_weight(
    tmp_path: Path, damaged: Damage, likelihood: str, temperature: float
) -> None:
    model = damaged("model.layers.1.mlp.up_proj.weight", float("nan"))
    changes = {"likelihood": likelihood, "generation": GenerationSettings(temperature=temperature)}
    with pytest.raises(NotFiniteError, match=r"layer 1 .*fp32.*mlp\.up_proj\.weight"):
        fast.run(tmp_path / "runs", Full(), niah(), model, **changes)
    (folder,) = (tmp_path / "runs").iterdir()
    assert [len(failed.why) > 50 for failed in load(folder).failed] == [True] * 3


def test_a_step_of_a_method_that_stops_being_finite_is_found_by_its_layer() -> None:
    class Overflows(Streaming):
        def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
            layers, steps = super().start(specs, cache), list[Any]()
            decode = layers[1].decode

            def third(x: Any) -> Any:
                steps.append(x)
                return decode(x) * (float("inf") if len(steps) == 3 else 1)

            layers[1].decode = third  # type: ignore[method-assign]
            return layers

    with (
        attached(tiny("llama"), Overflows(), budget=0.5) as kv,
        pytest.raises(NotFiniteError, match=r"layer 1 .*method=full.*Overflows"),
    ):
        Engine(kv).generate(prompt(40), max_new_tokens=8)


def test_jobs_with_one_prefill_fail_and_go_on_each_by_itself(tmp_path: Path) -> None:
    """One lacks the second example then, and one the third: each of these is prefilled for one of them."""
    Moody.at = {2: "absorb", 5: "absorb"}
    for failed, prefills in ((1, 8), (0, 10)):
        methods = Moody(sinks=4), Moody(sinks=5)
        wanted = [Job.plan(method, niah(), MODEL, settings(tmp_path, shared_prefill=True)) for method in methods]
        for made in evaluate_together(wanted):
            assert (len(made.records), len(made.failed)) == (4 - failed, failed)
        assert len(Moody.made) == prefills
