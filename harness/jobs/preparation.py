"""Everything a run needs before any weights: examples as token ids, checked, and the settings that really apply."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evals.base import Example, Task, TaskEnv
from harness.config.settings import CommonWindows, Settings, SettingsError
from harness.jobs.alignment import AlignedBudget, aligned, shapes
from harness.models.base import ModelInfo, ModelSource, choose_device
from harness.models.embedded import cache_root
from harness.prompts.prompt import Prompt, Tokenizer, Tools, render
from harness.prompts.prompt_lint import Finding, lint
from harness.prompts.teacher import forced_ids
from methods.base import Budget, Method, PaperBudget, check_layers


@dataclass(frozen=True, slots=True)
class Item:
    """One example, ready to run."""

    example: Example
    prompt: Prompt
    new_tokens: int
    findings: tuple[Finding, ...]
    forced: tuple[int, ...] = ()  # what is fed in place of what the model would have said

    @property
    def sealed(self) -> int | None:
        """Tokens sealed before the question under protocol=context."""
        return self.prompt.split

    @property
    def sha256(self) -> str:
        ids = ",".join(map(str, self.prompt.ids))
        forced = f":{','.join(map(str, self.forced))}" if self.forced else ""
        return hashlib.sha256(f"{self.prompt.split}:{ids}{forced}".encode()).hexdigest()


class LintError(ValueError):
    """A prompt that would measure something else than the user believes."""


def method_of(settings: Settings, method: Method, info: ModelInfo) -> Method:
    """`method` with the parameters that `comm` and `windows` stand for."""
    method = method.with_windows(**vars(settings.windows))
    return method if settings.comm is None else method.at_communication(settings.comm, info.head_dim)


def without_effect(settings: Settings, method: Method) -> Iterator[str]:
    """What of `windows` and `budget_rule` changes nothing for `method`, in words."""
    name = type(method).__name__
    given = {key for key, value in vars(settings.windows).items() if value is not None}
    for key in sorted(given - method.window_names.keys()):
        yield f"windows.{key} changes nothing for {name}, which has no such parameter"
    if settings.budget_rule == "paper" and not method.paper_leaves_out:
        yield f"budget_rule=paper changes nothing for {name}, whose budget leaves nothing out"


def check_fit(settings: Settings, method: Method, info: ModelInfo) -> None:
    """Refuse what suits the model or the machine ill, before any weights are loaded."""
    cpus = os.cpu_count() or 1
    if settings.threads is not None and settings.threads > cpus:
        raise SettingsError(
            f"threads={settings.threads} is too many: this machine has {cpus} CPUs, choose at most {cpus}."
        )
    method.check_model(shapes(info)[0])
    check_layers("dense_layers", settings.dense_layers, info.num_layers)
    if settings.layer_budgets and len(settings.layer_budgets) != info.num_layers:
        raise SettingsError(
            f"layer_budgets names {len(settings.layer_budgets)} layers and {info.name} has {info.num_layers}: give "
            "one each."
        )


def effective(settings: Settings, method: Method, info: ModelInfo) -> Settings:
    """The settings as they apply: `auto` resolved, and at its neutral value what `method` does not use, so that equal
    runs have one identity."""
    device = choose_device(settings.device)
    own = "fp32" if device == "cpu" else info.dtype
    changes: dict[str, Any] = {"device": device, "dtype": own if settings.dtype == "auto" else settings.dtype}
    changes |= {"comm": None, "windows": CommonWindows()}  # the method's parameters say it
    if not method.paper_leaves_out:
        changes |= {"budget_rule": "read"}
    if not method.uses_budget:
        changes |= {"budget": None, "align": "tokens", "dense_layers": [], "layer_budgets": [], "reuse_steps": 0}
    if not method.offloads:
        changes |= {"placement": "device"}
    if not method.dense_prefill:
        changes |= {"shared_prefill": False}
    return replace(settings, **changes)


def budget_of(settings: Settings, method: Method, info: ModelInfo) -> Budget | None:
    """The budget as the engine takes it; None where the method reads everything."""
    if settings.budget is None or not method.uses_budget:
        return None
    layers = settings.layer_budgets
    budget = Budget(settings.budget, tuple(settings.dense_layers), tuple(layers))
    if settings.budget_rule == "paper":
        return PaperBudget(budget.asked, budget.dense_layers, budget.per_layer, count=method.paper_tokens)
    if settings.align == "tokens":
        return budget
    return aligned(budget, settings.align, method, info, settings.dtype, settings.placement)  # type: ignore[arg-type]


def task_env(settings: Settings, tokenizer: Tokenizer, window: int) -> TaskEnv:
    tools = Tools(tokenizer, settings.chat)  # type: ignore[arg-type]
    root = settings.data.folder()
    return TaskEnv(text=tools, seed=settings.seed, data_root=root, cache_dir=cache_root() / "tasks", window=window)


def prepare(task: Task, source: ModelSource, settings: Settings, *, strict: bool = True) -> list[Item]:
    """All examples of `task` as prompts of `source`; stops at the first that lint finds an error in, if `strict`."""
    info, tokenizer = source.describe(), source.tokenizer()
    items = []
    for example in task.examples(task_env(settings, tokenizer, info.limit)):
        prompt = render(example, tokenizer, chat=settings.chat)  # type: ignore[arg-type]
        limit = settings.generation.max_new_tokens
        forced = forced_ids(example, prompt, tokenizer)[:limit]
        new_tokens = len(forced) or limit or example.max_new_tokens
        findings = lint(example, prompt, tokenizer, window=info.limit, new_tokens=new_tokens)
        items.append(Item(example, prompt, new_tokens, tuple(findings), forced))
        if strict:
            _refuse(items[-1])
    if not items:
        raise SettingsError("The task has no examples: see its parameters with `python -m harness.list`.")
    _refuse_twins(items)
    return items


def _refuse(item: Item) -> None:
    """Stop on the first error that lint found, before more prompts are made."""
    for finding in item.findings:
        if finding.level == "error":
            raise LintError(
                f"Example {item.example.id}: {finding.message.rstrip('.')}; `python -m harness.lint` goes through all."
            )


def check_budget(items: Sequence[Item], method: Method, budget: Budget | None, settings: Settings, layers: int) -> None:
    """Refuse a budget that some example cannot be served with, before any work."""
    if budget is None:
        return
    lengths = {item.prompt.split if settings.protocol == "context" else len(item.prompt.ids) for item in items}
    for length in sorted(lengths):
        if isinstance(budget, AlignedBudget):
            budget.refuse(length)
        for layer in range(layers) if budget.per_layer else (0,):
            if layer not in budget.dense_layers:
                method.check(budget, length, layer)


def check_batches(items: Sequence[Item], settings: Settings) -> None:
    """Refuse examples that would run together and differ in a length, before any work."""
    for start in range(0, len(items) if settings.batch > 1 else 0, settings.batch):
        check_alike(items[start : start + settings.batch], settings)


def check_alike(batch: Sequence[Item], settings: Settings) -> None:
    """Raise where the examples of one batch differ in a length; the message says which and by how much."""
    lengths = {
        "prompt tokens": [len(item.prompt.ids) for item in batch],
        "new tokens at most": [item.new_tokens for item in batch],
        "new tokens at least": [item.example.min_new_tokens for item in batch],
    }
    if settings.protocol == "context":
        lengths["tokens before the question"] = [item.prompt.split or 0 for item in batch]
    for what, counts in lengths.items():
        if len(set(counts)) > 1:
            other = next(place for place, count in enumerate(counts) if count != counts[0])
            raise SettingsError(
                f"batch={settings.batch} runs examples of equal length together, and {batch[0].example.id} has "
                f"{counts[0]} {what} where {batch[other].example.id} has {counts[other]}: use batch=1."
            )


def calibration_text(source: ModelSource, tokens: int = 4096) -> list[int]:
    """Token ids of ordinary text for methods that calibrate themselves: the end of Python's help topics, so that it
    is not the beginning that haystacks are cut from."""
    from evals.haystack import load

    tools = Tools(source.tokenizer(), "none")
    text = load("pydoc", TaskEnv(text=tools, seed=0)).text
    return tools.encode(text[-8 * tokens :])[-tokens:]


def limit_threads(settings: Settings) -> None:
    import torch

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


def _refuse_twins(items: Sequence[Item]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.example.id in seen:
            raise SettingsError(f"The task names two examples {item.example.id}: its lengths or depths repeat a value.")
        seen.add(item.example.id)
