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
from harness.config.backends import orders
from harness.config.settings import Settings
from harness.engine.attach import Attachment
from harness.jobs.planning.cache_bytes import CacheSpec
from harness.jobs.planning.capacity import MemoryForecast, needed, refuse, size
from harness.jobs.planning.checks import check_budget, check_fit, check_overflow, check_store, check_turns
from harness.jobs.planning.effective import (
    budget_of,
    codec_of,
    effective,
    method_of,
    with_contexts,
    with_own_limit,
    with_turns,
    without_effect,
    without_effect_here,
)
from harness.jobs.planning.examples import PreparedExample, prepare
from harness.jobs.planning.machine import check_machine
from harness.models.base import LoadedModel, ModelError, ModelSource, is_loaded, load
from harness.prompts.calibration import calibration_text
from harness.results.files import writing
from harness.results.identity import identity
from harness.results.records import FailedExample, Record, StoreError
from harness.results.run_folder import INFO, Run, StoredRun, read_records
from harness.results.run_folder import load as load_run
from harness.results.summary import LIKELIHOOD, summary_of, write_summary
from harness.terminal.notices import SLOW_FP16, say_once
from harness.terminal.progress import announce
from kernels import ops, toolchain
from kernels.temporary import remove_abandoned
from methods.base import Budget, Method
from methods.full import Full

Presets = Mapping[str, str]  # method, task, model -> the name of the yaml that the user chose


@dataclass(frozen=True)
class Job:
    """A run that has been checked and can start: nothing here has loaded weights yet."""

    method: Method
    task: Task
    model: ModelSource
    settings: Settings
    budget: Budget | None
    items: list[PreparedExample]
    config: dict[str, Any]
    identity: dict[str, Any]
    wanted: Settings  # as they were asked for; `settings` are those that apply
    presets: Presets | None = None  # by kind; no part of the identity

    @classmethod
    def plan(
        cls,
        method: Method,
        task: Task,
        model: ModelSource,
        wanted: Settings,
        items: Sequence[PreparedExample] | None = None,
        presets: Presets | None = None,
        *,
        beside: bool = False,
    ) -> Job:
        """Check all that can be checked, and say which of the settings change nothing. `beside`: it is the Full of
        another job, whose settings these are."""
        check_machine(wanted)
        task.require(wanted.data.folder())
        info = model.describe()
        given, method = method, method_of(wanted, method, info)
        check_fit(wanted, method, info)
        settings = effective(wanted, method, info)
        if (settings.device, settings.dtype) == ("cpu", "fp16"):
            say_once(SLOW_FP16)
        if settings.device.startswith("cuda") and (reason := toolchain.unfit()):
            say_once(f"Triton's kernels cannot run here, so operations run on plain torch, which is slower: {reason}")
        budget = budget_of(settings, method, info)
        items = list(items or prepare(task, model, settings))
        for words in without_effect_here(settings, task, items):
            say_once(words)
        settings = with_contexts(with_own_limit(settings, items), items)
        check_turns(items, settings)
        check_overflow(items, task, settings, info.limit)
        settings = with_turns(settings, items)
        check_store(items, settings, method, info)
        check_budget(items, method, budget, settings)
        named = {"method": method, "task": task, "model": model}
        config = asdict(settings) | {kind: plugins.describe(plugin) for kind, plugin in named.items()}
        own = identity(
            config,
            named,
            revision=info.revision,
            prompts=[item.sha256 for item in items],
            answers=[item.answers_sha256 for item in items],
        )
        for words in () if beside else without_effect(wanted, given):
            say_once(words)
        return cls(method, task, model, settings, budget, items, config, own, wanted, presets)

    @cached_property
    def full(self) -> Job | None:
        """Full on the same examples, to hold this job against; None where none is, or it is one."""
        if self.settings.baseline == "off" or isinstance(self.method, Full):
            return None
        shared = replace(self.settings, shared_prefill=self.wanted.shared_prefill)
        presets = self.presets and {**self.presets, "method": "full"}
        return Job.plan(Full(), self.task, self.model, shared, self.items, presets, beside=True)

    def finished(self) -> StoredRun | None:
        """Return what an earlier run left that has tried every example; None where there is none, and where it cannot
        be read, which is said."""
        if not (self.folder / INFO).is_file():
            return None
        try:
            found = load_run(self.folder)
            tried: list[Record | FailedExample] = [*found.records, *found.failed]
            return self.stored() if found.records and self._has_all(tried) else None
        except StoreError as error:
            say_once(f"{self.label} is not there to compare with: {error}")
            return None

    def is_done(self) -> bool:
        """Return whether the folder holds every example already."""
        return (self.folder / INFO).is_file() and self._has_all(read_records(self.folder))

    def _has_all(self, records: Sequence[Record | FailedExample]) -> bool:
        return {record.id for record in records} >= {item.example.id for item in self.items}

    def refuse_memory(self, beside: Sequence[Job] = ()) -> None:
        """Raise `SettingsError` where a model that is still to be loaded, the caches of this job and of those `beside`
        it in a shared prefill, or the prefill cannot fit."""
        refuse(self.need(beside), self.settings)

    def need(self, beside: Sequence[Job] = ()) -> MemoryForecast:
        loaded = is_loaded(self.model, self.settings.dtype, self.settings.device)
        cache_specs = [job.cache_spec for job in beside]
        return needed(self.model.describe(), self.cache_spec, self.items, loaded=loaded, beside=cache_specs)

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec(self.settings, self.method, self.budget)

    def load(self) -> LoadedModel:
        """Load the model, which computes with the job's threads and backends from now on."""
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        ops.prefer(orders(self.settings.backends))
        loaded = load(self.model, self.settings.dtype, self.settings.device)
        if loaded.revision != self.identity["model_revision"]:
            raise ModelError(
                f"the files of {loaded.name} changed after this run was planned, so its folder {self.folder} is named "
                "after another model: run the same command again."
            )
        return loaded

    @property
    def names(self) -> tuple[str, str]:
        """The names of task and method, as their modules are called."""
        return _name(self.config["task"]), _name(self.config["method"])

    @property
    def folder(self) -> Path:
        return Run.place(Path(self.settings.results.root), self.identity, *self.names)

    def remove_leftovers(self) -> None:
        """Remove what processes that were killed left where this job keeps its temporary files: one that is complete
        makes none any more, and would not come there."""
        store = self.settings.store.folder
        for folder in {Path(gettempdir()), Path(store or gettempdir())}:
            remove_abandoned(folder)

    def pending(self, run: Run) -> list[PreparedExample]:
        return [item for item in self.items if not run.contains(item.example.id)]

    def stored(self, full: StoredRun | None = None) -> StoredRun:
        """Return what the run's folder holds now, with its summary brought up to date."""
        stored, beside = load_run(self.folder), load_run(full.folder) if full else None
        summary = summary_of(stored, beside)
        with writing(self.folder):
            write_summary(stored, summary)
        return replace(stored, summary=summary, full_folder=full.folder if full else None)

    @property
    def label(self) -> str:
        """Task, method, what of it is not the default, and the budget."""
        named = self.presets or {}
        task, method = (named.get(kind, name) for kind, name in zip(("task", "method"), self.names, strict=True))
        budget, in_bytes = self.settings.budget, self.settings.most_bytes
        asked = f"{100 * budget:g}%" if isinstance(budget, float) else f"{budget} tokens" if budget else ""
        asked = size(in_bytes) if in_bytes else asked
        return " ".join(filter(None, (task, method, *plugins.changed(self.method), asked)))

    def announce(self, pending: Sequence[PreparedExample]) -> None:
        """Say where the run is and what of it was there."""
        announce(self.label, self.folder, len(self.items) - len(pending), len(self.items))
        known = len(self.items) - len(pending)
        if (
            known
            and self.settings.results.save_prompts
            and not all(r.prompt_ids for r in load_run(self.folder).records)
        ):
            say_once(f"results.save_prompts changes nothing for examples that are there already, in {self.folder}")
        if known and (words := self._without_likelihood()):
            say_once(words)

    def _without_likelihood(self) -> str | None:
        """Return a sentence on examples that were run before likelihood=on asked for what they lack."""
        stored = load_run(self.folder)
        lacking = sum(record.measured.get(LIKELIHOOD) is None for record in stored.records)
        if not lacking or not self.settings.measures_likelihood or stored.config.get("likelihood") != "off":
            return None
        return (
            f"{lacking} of {len(stored.records)} examples in {self.folder} were run with likelihood=off and have no "
            "likelihood: to measure it, delete that folder or name another results.root, and run again"
        )

    def facts(self) -> dict[str, Any]:
        """Return what run.json says of this run besides its configuration, whoever runs it."""
        return {
            "task_info": {"version": self.task.version, "metric": self.task.metric, "chance": self.task.chance}
            | self.task.provenance(),
            "presets": dict(self.presets or {}) or None,
            "num_expected": len(self.items),
            "weights": self.model.describe().weights,
            "cautions": [caution] if (caution := self.model.describe().caution) else [],
            "budget_use": {"paper_leaves_out": self.method.paper_differs},
            "simulated": self.settings.shared_prefill,
            "host_is_cpu": self.settings.device == "cpu",
        }

    def attachment(self, loaded: LoadedModel, info: Mapping[str, Any]) -> Attachment:
        """Attach the method to the model. `info`: run.json, which keeps the parameters that an earlier session measured
        on its machine (`measured`): others would make other answers."""
        method = replace(self.method, **info.get("measured", {}))  # type: ignore[type-var]
        return attach(loaded, method, self.budget, self.settings)


def _name(config: dict[str, Any]) -> str:
    """Return the short name of a plug-in: its module's."""
    return str(config[plugins.TARGET]).split(".")[-2]


def attach(loaded: LoadedModel, method: Method, budget: Budget | None, settings: Settings) -> Attachment:
    """Attach a method to a loaded model. `settings`: as they apply to it (harness/jobs/planning/effective.py)."""
    return Attachment(
        loaded.model,
        method,
        budget,
        settings.placement,
        torch.tensor([calibration_text(loaded.tokenizer)]) if method.calibration_tokens else None,
        codec=codec_of(settings),
        overlap=settings.overlap == "on",
    )
