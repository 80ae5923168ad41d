"""One run, end to end: prompts, weights, generations, records, summary. `evaluate` is its Python name.

evaluate(PQCache(...), Niah(...), SmolLM2(), budget=0.2).summary["score"]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evals.base import Task
from harness import plugins
from harness.attach import Attachment
from harness.config import WITHOUT_EFFECT, Settings, SettingsError
from harness.engine import Engine, Generation, Stop, after, never
from harness.files import write_json
from harness.hf import routed
from harness.memory import PeakMeter
from harness.models.base import LoadedModel, ModelSource
from harness.preparation import (
    Item,
    at_communication,
    budget_of,
    calibration_text,
    check_budget,
    effective,
    limit_threads,
    prepare,
    refuse,
)
from harness.provenance import provenance, source_hash
from harness.records import Record
from harness.sampling import Greedy, MinLength, Sampled, Sampler
from harness.stops import StopRule
from harness.store import Run
from harness.store import load as load_run
from harness.summary import summarise
from harness.teacher import Forced
from kernels import ops
from methods.base import Method
from methods.budget import Budget
from methods.full import Full

WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished run: its folder, its records, its summary (the keys of docs/results.md), and Full's folder beside."""

    folder: Path
    full_folder: Path | None
    records: list[Record]
    summary: dict[str, Any]


def evaluate(
    method: Method, task: Task, model: ModelSource, settings: Settings | None = None, **changes: Any
) -> Evaluation:
    """Run `task` with `model` under `method`, beside Full unless `baseline=off`. `changes` are fields of `Settings`.

    The same call again finds the finished run; an interrupted one goes on where it stopped.
    """
    wanted = replace(settings or Settings(), **changes)
    job = Job.plan(method, task, model, wanted)
    return job.run(None if isinstance(method, Full) else job.baseline())


@dataclass(frozen=True)
class Job:
    """A run that has been checked and can start: nothing here has loaded weights yet."""

    method: Method
    task: Task
    model: ModelSource
    settings: Settings
    budget: Budget | None
    items: list[Item]
    config: dict[str, Any]
    identity: dict[str, Any]

    @classmethod
    def plan(
        cls, method: Method, task: Task, model: ModelSource, wanted: Settings, items: list[Item] | None = None
    ) -> Job:
        info = model.describe()
        method = at_communication(wanted, method, info)
        settings = effective(wanted, method)
        budget = budget_of(settings, method, info)
        items = items or prepare(task, model, settings)
        refuse(items)
        check_budget(items, method, budget, settings, info.num_layers)
        named = {"method": method, "task": task, "model": model}
        config = asdict(settings) | {kind: plugins.describe(plugin) for kind, plugin in named.items()}
        identity = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT} | {
            "sources": source_hash(outside(method, task, model)),
            "task_version": task.version,
            "model_revision": info.revision,
            "prompts": hashlib.sha256("".join(item.sha256 for item in items).encode()).hexdigest(),
        }
        return cls(method, task, model, settings, budget, items, config, identity)

    def baseline(self) -> Evaluation | None:
        """Full on the same examples: run, or reused where it is complete."""
        if self.settings.baseline == "off":
            return None
        job = Job.plan(Full(), self.task, self.model, self.settings, self.items)
        if self.settings.baseline == "run":
            return job.run(None)
        return job.finished()

    def finished(self) -> Evaluation | None:
        """What a complete earlier run left; None where there is none."""
        run = self.open()
        whole = not self.pending(run)
        run.close("complete" if whole else "interrupted")
        return self.evaluation(run) if whole else None

    def _names(self) -> tuple[str, str]:
        return _name(self.config["task"]), _name(self.config["method"])

    @property
    def folder(self) -> Path:
        return Run.place(Path(self.settings.results.root), self.identity, *self._names())

    def open(self) -> Run:
        root = Path(self.settings.results.root)
        return Run.open(root, self.config, self.identity, *self._names())

    def run(self, full: Evaluation | None) -> Evaluation:
        """Generate what is not there yet. Ctrl-C and errors leave a folder that the same command continues."""
        run = self.open()
        status, error = "failed", None
        try:
            if pending := self.pending(run):
                self._generate(run, pending)
            status = "complete"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            run.close(status, error)
        return self.evaluation(run, full)

    def pending(self, run: Run) -> list[Item]:
        return [item for item in self.items if not run.contains(item.example.id)]

    def evaluation(self, run: Run, full: Evaluation | None = None) -> Evaluation:
        stored = load_run(run.folder)
        summary = summarise(
            stored.records,
            config=self.config,
            info=stored.info,
            full=full.records if full else None,
        )
        write_json(run.folder / "summary.json", summary)
        return Evaluation(run.folder, full.folder if full else None, stored.records, summary)

    def _generate(self, run: Run, pending: list[Item]) -> None:
        limit_threads(self.settings)
        loaded = load(self.model, self.settings.dtype, self.settings.device)
        ops.forget_used()
        self.note(run)
        attachment = self.attachment(loaded)
        with routed(loaded.model):
            runner = Runner(self, attachment, loaded)
            runner.warm_up(pending)
            for record in progress(runner.records(pending), self.label, pending, self.settings.progress):
                run.append(record)
        run.note(backends=ops.used_backends())

    @property
    def label(self) -> str:
        return " ".join(self._names())

    def note(self, run: Run) -> None:
        """What run.json says of this run beside its configuration."""
        run.note(
            provenance=provenance(self.settings.device, outside(self.method, self.task, self.model)),
            task_info={"version": self.task.version, "metric": self.task.metric, "chance": self.task.chance}
            | self.task.provenance(),
            num_expected=len(self.items),
            simulated=self.method.simulated or self.settings.shared_prefill,
            host_is_cpu=self.settings.device == "cpu",
        )

    def attachment(self, loaded: LoadedModel) -> Attachment:
        return Attachment(
            loaded.model,
            self.method,
            self.budget,
            self.settings.placement,  # type: ignore[arg-type]
            torch.tensor([calibration_text(self.model)]),
            self.settings.stale_by,
        )


class Runner:
    """Turns items into records with one attached model."""

    def __init__(self, job: Job, attachment: Attachment, loaded: LoadedModel) -> None:
        self.job, self.settings, self.loaded = job, job.settings, loaded
        self.engine = Engine(attachment, prefill_chunk=job.settings.prefill_chunk, fidelity=job.settings.fidelity)
        self.peaks = PeakMeter(loaded.model.device)

    def warm_up(self, pending: Sequence[Item]) -> None:
        """The first forwards pay for allocations and lazy imports; the shortest examples take that off the clock."""
        shortest = sorted(pending, key=lambda item: len(item.prompt.ids))[: self.settings.warmup]
        for item in shortest:
            self._run([item], max_new_tokens=min(item.new_tokens, WARMUP_TOKENS))

    def records(self, pending: Sequence[Item]) -> Iterator[Record]:
        size = self.settings.batch
        for start in range(0, len(pending), size):
            batch = pending[start : start + size]
            self.peaks.start()
            generation = self._run(batch, max_new_tokens=batch[0].new_tokens)
            for place, item in enumerate(batch):
                yield self.record(item, generation, place)

    def _run(self, batch: Sequence[Item], max_new_tokens: int) -> Generation:
        lengths = {len(item.prompt.ids) for item in batch}
        alike = {(item.prompt.split, item.new_tokens, item.example.min_new_tokens) for item in batch}
        if len(lengths) > 1 or len(alike) > 1:
            raise SettingsError(
                f"batch={len(batch)} needs prompts of equal length, and these have {min(lengths)} to {max(lengths)} "
                "tokens: use batch=1."
            )
        context = batch[0].prompt.split if self.settings.protocol == "context" else None
        ids = torch.tensor([item.prompt.ids for item in batch])
        return self.engine.generate(ids, context_tokens=context, **self.ending(batch, max_new_tokens))

    def ending(self, batch: Sequence[Item], max_new_tokens: int) -> dict[str, Any]:
        """How the engine picks tokens for `batch`, and when it stops."""
        stops = [self._stop(item) for item in batch]
        return {"max_new_tokens": max_new_tokens, "stops": stops, "sampler": self._sampler(batch)}

    def _stop(self, item: Item) -> Stop:
        if item.forced:
            return after(len(item.forced))
        if self.settings.generation.force_length:
            return never
        return self._rule(item)

    def _rule(self, item: Item) -> StopRule:
        example = item.example
        return StopRule(self.loaded.tokenizer, self.loaded.eos_ids, example.stop, example.min_new_tokens)

    def _sampler(self, batch: Sequence[Item]) -> Sampler:
        """As asked; where the examples have a least length, nothing ends before it; where a text is given, that."""
        if batch[0].forced:
            return Forced(torch.tensor([item.forced for item in batch]))
        sampler = self._free_sampler(batch[0])
        least = batch[0].example.min_new_tokens
        return MinLength(sampler, [self._rule(item).ends for item in batch], least) if least else sampler

    def _free_sampler(self, item: Item) -> Sampler:
        """Sampling starts from the example's own seed, so that a resumed run draws the same."""
        wanted = self.settings.generation
        if not wanted.temperature:
            return Greedy()
        device = self.loaded.model.device
        digest = hashlib.sha256(f"{self.settings.seed}/{item.example.id}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:4]))
        return Sampled(wanted.temperature, wanted.top_k, wanted.top_p, generator)

    def record(self, item: Item, made: Generation, place: int) -> Record:
        example, tokens = item.example, made.tokens[place]
        output = repr(made.nll[place]) if made.nll else self._rule(item).text(tokens)
        score = self.job.task.score(example, output)
        return Record(
            id=example.id,
            group=example.group,
            prompt_sha256=item.sha256,
            prompt_tokens=len(item.prompt.ids),
            context_tokens=item.prompt.split if self.settings.protocol == "context" else None,
            output=output,
            tokens=tokens,
            stop=made.stops[place],
            score=score.value,
            details=dict(score.details),
            token_s=made.token_s[: len(tokens)],
            seal_s=made.seal_s,
            question_s=made.question_s,
            attended_prompt=made.attended_prompt,
            attended_total=made.attended_total,
            kv_device_bytes=made.kv.device_bytes,
            kv_host_bytes=made.kv.host_bytes,
            device_peak_bytes=self.peaks.device_bytes,
            host_peak_bytes=self.peaks.host_bytes,
            moved_bytes_per_step=made.moved_bytes_per_step,
            sealed=made.sealed,
            fallback=made.fallback,
            warnings=[finding.message for finding in item.findings],
            fidelity=made.fidelity[place] if made.fidelity else None,
            trace=None,
            data=dict(example.data),
            prompt_ids=list(item.prompt.ids) if self.settings.results.save_prompts else None,
        )


def progress(records: Iterator[Record], label: str, pending: Sequence[Item], shown: bool) -> Iterator[Record]:
    """A bar over prompt tokens, since they are what takes the time."""
    total = sum(len(item.prompt.ids) for item in pending)
    with tqdm(total=total, desc=label, unit="tok", unit_scale=True, disable=not shown) as bar:
        for done, record in enumerate(records, 1):
            yield record
            bar.set_postfix_str(f"example {done}/{len(pending)}", refresh=False)
            bar.update(record.prompt_tokens)


_loaded: dict[tuple[ModelSource, str, str], LoadedModel] = {}


def load(model: ModelSource, dtype: str, device: str) -> LoadedModel:
    """The model of the last run stays loaded for the next one of a sweep; never two at once."""
    key = (model, dtype, device)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = model.load(dtype, device)
    return _loaded[key]


def outside(*plugs: Any) -> list[Path]:
    """Source files of plug-ins that live outside this repository: part of a run's identity."""
    root = Path(__file__).resolve().parent.parent
    files = {Path(plugins.source_file(plug)).resolve() for plug in plugs}
    return sorted(file for file in files if not file.is_relative_to(root))


def _name(config: dict[str, Any]) -> str:
    """The short name of a plug-in: its module's."""
    return str(config[plugins.TARGET]).split(".")[-2]
