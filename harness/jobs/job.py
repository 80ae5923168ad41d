"""A job: one method on one task and model, checked before any weights are loaded. It knows its folder and its summary;
harness/jobs/evaluate.py runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from evals.base import Task
from harness.config import plugins
from harness.config.settings import Settings, bytes_of
from harness.config.values import orders
from harness.engine.attach import Attachment
from harness.engine.attach_options import AttachOptions
from harness.engine.hf import layer_specs
from harness.jobs.examples import PreparedExample, Prompts, prompts_of
from harness.jobs.machine import check_machine, free_here, refuse
from harness.jobs.memory import CacheSpec, MemoryForecast, needed, size
from harness.jobs.model_check import check_against_generate
from harness.jobs.remote import resolve_remote
from harness.jobs.resolve import abilities_of, chunked, codec_of, resolve, resolve_for_examples
from harness.models.base import ARCHITECTURES, LoadedModel, ModelError, ModelSource, is_loaded, load
from harness.models.remote import RemoteModel
from harness.prompts.prompt import calibration_text
from harness.prompts.repeating import repeat_prompts
from harness.results.compared import averages
from harness.results.files import writing
from harness.results.identity import identity
from harness.results.records import LeftOut, Record, StoreError
from harness.results.run_folder import INFO, Run, StoredRun, read_records
from harness.results.run_folder import load as load_run
from harness.results.summary import summary_of, write_summary
from harness.terminal.notices import SLOW_FP16, say_once
from kernels import ops, toolchain
from kernels.temporary import remove_abandoned
from methods.abilities import ability
from methods.abilities.bounded_answer import CountedAnswer
from methods.abilities.repeat import Repeat
from methods.base import Budget, Method, paper_differs
from methods.full import Full

ENDPOINT = "endpoint"  # in the place of a method's name
Presets = Mapping[str, str]  # method, task, model -> the name of the yaml that the user chose


@dataclass(frozen=True)
class Job:
    """A planned run: its settings and prompts have been checked, and no weights are loaded yet.
    `Job.plan` makes one; harness/jobs/evaluate.py runs it."""

    method: Method
    task: Task
    model: ModelSource
    settings: Settings  # those that apply
    budget: Budget | None
    prompts: Prompts
    config: dict[str, Any]
    identity: dict[str, Any]
    wanted: Settings  # those that were asked for
    presets: Presets | None = None  # no part of the identity

    @classmethod
    def plan(
        cls,
        method: Method,
        task: Task,
        model: ModelSource,
        wanted: Settings,
        prompts: Prompts | None = None,
        presets: Presets | None = None,
        *,
        beside: bool = False,
    ) -> Job:
        """Plan a run: resolve the settings, make the prompts, raise for all that cannot run, and
        tell the user which settings change nothing.

        `prompts`: the task's prompts, if they have been made already. `beside`: this is the Full that
        another job is compared with, so that notes about the same settings are not printed twice.
        """
        check_machine(wanted)
        task.require(wanted.data.folder())
        resolved = None
        if isinstance(model, RemoteModel):
            resolved, model = resolve_remote(wanted, method), model.asked()
            presets = {**(presets or {}), "method": model.called}
        info = model.describe()
        resolved = resolved or resolve(wanted, method, info)
        prompts = prompts or prompts_of(task, model, resolved.settings)
        settings = resolve_for_examples(resolved, task, prompts, info)
        if isinstance(model, RemoteModel):
            model.check(prompts.items, settings)
        for note in [] if beside else resolved.notes:
            say_once(note)
        if (settings.device, settings.dtype) == ("cpu", "fp16"):
            say_once(SLOW_FP16)
        if settings.device.startswith("cuda") and (reason := toolchain.unfit()):
            say_once(
                f"Triton's kernels cannot run here, so operations run on plain torch, which is slower: {reason}"
            )
        named = {"method": resolved.method, "task": task, "model": model}
        config = asdict(settings) | {
            kind: plugins.recorded(plugin) for kind, plugin in named.items()
        }
        fed, answers = zip(
            *((item.sha256, item.answers_sha256) for item in prompts.items), strict=True
        )
        own = identity(config, named, revision=info.revision, prompts=fed, answers=answers)
        if isinstance(model, RemoteModel):
            own["served"] = model.said()
        return cls(
            resolved.method,
            task,
            model,
            settings,
            resolved.budget,
            prompts,
            config,
            own,
            wanted,
            presets,
        )

    @cached_property
    def full(self) -> Job | None:
        """The job that runs Full (dense attention, the baseline) on the same examples, which this
        job is compared with; None with baseline=off, and for Full itself."""
        if self.settings.baseline == "off" or isinstance(self.method, Full):  # as behind a server
            return None
        shared = replace(self.settings, shared_prefill=self.wanted.shared_prefill)
        presets = self.presets and {**self.presets, "method": "full"}
        return Job.plan(Full(), self.task, self.model, shared, self.prompts, presets, beside=True)

    @property
    def items(self) -> Sequence[PreparedExample]:
        """The examples that are run."""
        return self.prompts.items

    @property
    def names(self) -> tuple[str, str]:
        """The names of the task's and the method's modules, as in ("niah", "pqcache"); behind a server
        "endpoint" stands for the method."""
        task, method = (
            str(self.config[kind][plugins.TARGET]).split(".")[-2] for kind in ("task", "method")
        )
        return task, ENDPOINT if isinstance(self.model, RemoteModel) else method

    @property
    def label(self) -> str:
        """The words that name this job in messages: task, method, the method's parameters that are
        not at their defaults, the budget, and an adapter of the model."""
        named = self.presets or {}
        task, method = (
            named.get(kind, name) for kind, name in zip(("task", "method"), self.names, strict=True)
        )
        budget = self.settings.budget
        if isinstance(budget, float):
            asked = f"{100 * budget:g}%"
        else:
            in_bytes = bytes_of(budget)
            asked = size(in_bytes) if in_bytes else f"{budget} tokens" if budget else ""
        adapter = self.config["model"].get("adapter")
        with_it = f"with {Path(adapter).name}" if adapter else ""
        return " ".join(filter(None, (task, method, *plugins.changed(self.method), asked, with_it)))

    # memory and model

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec(self.settings, self.method, self.budget)

    def need(self, beside: Sequence[Job] = ()) -> MemoryForecast:
        """Forecast the memory of this job, and of the jobs `beside` it that share its prefill."""
        loaded = is_loaded(self.model, self.settings.dtype, self.settings.device)
        cache_specs = [job.cache_spec for job in beside]
        return needed(
            self.model.describe(), self.cache_spec, self.items, loaded=loaded, beside=cache_specs
        )

    def refuse_memory(self, beside: Sequence[Job] = ()) -> None:
        """Raise `SettingsError` if this job and those `beside` it do not fit into free memory. That of a
        server is none of ours."""
        if isinstance(self.model, RemoteModel):
            return
        refuse(self.need(beside), self.settings, self.free)

    def require_known(self) -> None:
        """Raise `ValueError` if the method must know something of the model that cannot be found
        out. For a model class that is not listed, the loaded weights are needed to find it out."""
        if (
            not self.method.needs
            or self.model.describe().architecture in ARCHITECTURES
            or self.is_done()
        ):
            return
        self.refuse_memory()
        typed = (self.presets or {}).get("method")
        self.method.require_known(
            layer_specs(self.load().model), f"method={typed}" if typed else ""
        )

    @property
    def free(self) -> tuple[int | None, int | None]:
        """Return the free bytes of this job's device, or of all GPUs, and of the host beside it."""
        return free_here(self.settings.device, spread=self.model.describe().spread)

    def load(self) -> LoadedModel:
        """Load the model, and set the order of backends of this process. Raise `ModelError` if the model's files
        have changed since the job was planned, or if the engine does not compute it as `model.generate` does."""
        ops.prefer(orders(self.settings.backends))
        loaded = load(
            self.model, self.settings.dtype, self.settings.device, self.settings.template_kwargs
        )
        if loaded.revision != self.identity["model_revision"]:
            raise ModelError(
                f"the files of {loaded.name} changed since this run was planned: run the same command again."
            )
        self.checked(loaded)
        return loaded

    def checked(self, loaded: LoadedModel) -> dict[str, Any] | None:
        """Return how the loaded model compares with `model.generate`; None if its class is
        listed."""
        return check_against_generate(loaded, self.items[0].prompt.ids)

    def attachment(self, loaded: LoadedModel, info: Mapping[str, Any]) -> Attachment:
        """Return the pair of the loaded model and this job's method (see `attach`). `info` is
        run.json: parameters that the method measured on this machine when the run began stand there
        (`measured`) and are used again on resuming, because other values would give other
        answers. A method that measures nothing takes nothing from there, since a parameter may name code (kvpress)."""
        measures = type(self.method).measured is not Method.measured
        method = replace(self.method, **(info.get("measured", {}) if measures else {}))  # type: ignore[type-var]
        return attach(loaded, method, self.budget, self.settings)

    # the folder

    @property
    def folder(self) -> Path:
        return Run.place(Path(self.settings.results.root), self.identity, *self.names)

    def remove_leftovers(self) -> None:
        """Remove temporary files of processes that were killed."""
        for folder in {Path(gettempdir()), Path(self.settings.store.folder or gettempdir())}:
            remove_abandoned(folder)

    def finished(self) -> StoredRun | None:
        """Return the run in this job's folder if it has tried every example; None if not, or if it
        cannot be read, which is printed."""
        if not (self.folder / INFO).is_file():
            return None
        try:
            run = load_run(self.folder)
            return (
                self.stored()
                if run.records and self._has_all([*run.records, *run.failed])
                else None
            )
        except StoreError as error:
            say_once(f"{self.label} is not there to compare with: {error}")
            return None

    def is_done(self) -> bool:
        """Return True if the folder has a record of every example."""
        return (self.folder / INFO).is_file() and self._has_all(read_records(self.folder))

    def _has_all(self, records: Sequence[Record | LeftOut]) -> bool:
        return {record.id for record in records} >= {item.example.id for item in self.items}

    def stored(self, full: StoredRun | None = None) -> StoredRun:
        """Write summary.json anew from the records in the folder, and return the run. `full`: the
        run of Full that the summary compares it with."""
        run = load_run(self.folder)
        run.info["averages"] = averages(self.task, run.records)
        summary = summary_of(run, load_run(full.folder) if full else None)
        with writing(self.folder):
            write_summary(run, summary)
        return replace(run, summary=summary, full_folder=full.folder if full else None)

    def facts(self) -> dict[str, Any]:
        """Return the entries of run.json that describe this run besides its configuration and do
        not depend on the machine: the task's version and metric, names of presets, cautions."""
        described = self.model.describe()
        abilities = (*self.method.abilities, *abilities_of(self.settings, self.budget))
        counted = next((one for one in abilities if isinstance(one, CountedAnswer)), None)
        return {
            "task_info": {
                "version": self.task.version,
                "metric": self.task.metric,
                "chance": self.task.chance,
            }
            | self.task.provenance(),
            "presets": dict(self.presets or {}) or None,
            "num_expected": len(self.items) + len(self.prompts.left_out),
            "weights": described.weights,
            "quantised": described.quantised and described.quantised.held(self.settings.dtype),
            "cautions": [*filter(None, [described.caution]), *chunked(self.settings, self.method)],
            "budget_use": {
                "paper_leaves_out": paper_differs(self.method),
                "counts": "prompt" if counted is None else "prompt and answer",
                "extra_rows": 0 if counted is None else counted.extra_rows,
            },
            "simulated": self.settings.shared_prefill,
            "host_is_cpu": self.settings.device == "cpu",
        }


def attach(
    loaded: LoadedModel, method: Method, budget: Budget | None, settings: Settings
) -> Attachment:
    """Return the pair of a loaded model and a method, from which an engine makes the caches that
    the model's attention runs through. The method is prepared here, if it needs to be
    (calibration). `settings` must be resolved (harness/jobs/resolve.py)."""
    options = AttachOptions(
        budget=budget,
        placement=settings.placement,
        calibration=torch.tensor([calibration_text(loaded.tokenizer)])
        if method.calibration_tokens
        else None,
        codec=codec_of(settings),
        abilities=abilities_of(settings, budget),
        overlap=settings.overlap == "on",
        repeat_prompts=(
            repeat_prompts(
                loaded.tokenizer,
                chat=settings.chat,  # type: ignore[arg-type]
                keywords=settings.template_kwargs or {},
            )
            if ability(method, Repeat)
            else None
        ),
    )
    return Attachment(loaded.model, method, options)
