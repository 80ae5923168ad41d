"""What really applies to a run: the method, the settings and the budget as the engine takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from evals.base import Task
from harness.config.settings import CommonWindows, OverflowSettings, Settings, SettingsError, StoreSettings
from harness.jobs.planning.alignment import aligned, per_token
from harness.jobs.planning.examples import PreparedExample, by_context
from harness.models.base import ModelInfo
from harness.models.devices import choose_device, usual_chunk
from harness.terminal.notices import say_once
from methods.base import Budget, Method, PaperBudget
from methods.full import Full
from methods.tiers import codecs
from methods.tiers.codec import Codec
from methods.tiers.tier import DEVICE, TIERS

PICKING = ("temperature", "top_k", "top_p", "force_length")  # settings of generation
NO_BUDGET: Mapping[str, Any] = {  # what a method without a budget has no use for, and the values that say so
    "budget": None,
    "budget_bytes": None,
    "budget_rule": "read",
    "align": "tokens",
    "dense_layers": [],
    "budget_generated": None,
}
NOTHING_MOVES: Mapping[str, Any] = {"overlap": "auto"}


def method_of(settings: Settings, method: Method, info: ModelInfo) -> Method:
    """Return `method` with the parameters that `comm` and `windows` stand for."""
    method = method.with_windows(**vars(settings.windows))
    return method if settings.comm is None else method.at_communication(settings.comm, info.head_dim)


class Idle(NamedTuple):
    """Lists settings that change nothing for a method: the values that say so, and why."""

    neutral: Mapping[str, Any]
    why: str


def _idle(settings: Settings, method: Method) -> Iterator[Idle]:
    """Yield the settings that the method has no use for."""
    if not method.uses_budget:
        yield Idle(NO_BUDGET, "which uses no budget")
    else:
        if not method.paper_differs:
            yield Idle({"budget_rule": "read"}, "whose paper counts as we do")
    if not method.offloads:
        yield Idle({"placement": DEVICE, **NOTHING_MOVES}, "which keeps nothing elsewhere")
    elif not TIERS[settings.placement].in_files:
        yield Idle(NOTHING_MOVES if settings.placement == DEVICE else {}, f"since placement={settings.placement}")
    if not method.encodes:
        yield Idle({"codec": None}, "which has no tokens that it is meant for")
    if not method.dense_prefill:
        yield Idle({"shared_prefill": False}, "whose prefill is not Full's, so that it runs beside")


def without_effect(settings: Settings, method: Method, given: Set[str] = frozenset()) -> Iterator[str]:
    """Yield what changes nothing for `method`, in words. Settings at their defaults were not asked for, but for those
    whose names are `given`."""
    usual = Settings()
    for neutral, why in _idle(settings, method):
        asked = {
            name
            for name, value in neutral.items()
            if (asked_for := getattr(settings, name)) != value and (name in given or asked_for != getattr(usual, name))
        }
        yield from _nothing(asked, method, why)
    if isinstance(method, Full) and settings.baseline != usual.baseline:
        yield "baseline changes nothing for Full, which is the baseline"
    if settings.shared_prefill and method.dense_prefill and settings.warmup != usual.warmup:
        yield "warmup changes nothing under shared_prefill=true, which measures no times"
    windows = {f"windows.{name}" for name, value in vars(settings.windows).items() if value is not None}
    comm = {"comm"} if settings.comm is not None else set()
    if not method.uses_budget:
        yield from _nothing(windows | comm, method, "which uses no budget")
        return
    yield from _nothing(
        windows - {f"windows.{name}" for name in method.window_names}, method, "which has no such windows"
    )
    if type(method).at_communication is Method.at_communication:
        yield from _nothing(comm, method, "whose scoring moves nothing")


def _nothing(names: Set[str], method: Method, why: str) -> Iterator[str]:
    if names:
        verb = "changes" if len(names) == 1 else "change"
        yield f"{' and '.join(sorted(names))} {verb} nothing for {type(method).__name__}, {why}"


def refuse_graphs(settings: Settings, device: str) -> None:
    """Raise `SettingsError` for steps that should be captured on a CPU."""
    if settings.graphs == "on" and device == "cpu":
        raise SettingsError("graphs=on captures CUDA graphs, and device=cpu has none: leave graphs out.")


def effective(settings: Settings, method: Method, info: ModelInfo) -> Settings:
    """Return the settings as they apply: `auto` resolved, and at its neutral value what `method` does not use, so that
    equal runs have one identity."""
    device = choose_device(settings.device)
    own = "fp32" if device == "cpu" else info.dtype
    changes: dict[str, Any] = {"device": device, "dtype": own if settings.dtype == "auto" else settings.dtype}
    crosses_bus = device != "cpu"
    if settings.overlap == ("auto" if crosses_bus else "off"):  # `auto` is `on` behind a bus, else `off`
        changes |= {"overlap": "on" if crosses_bus else "auto"}
    refuse_graphs(settings, device)
    if settings.graphs == "auto":
        changes |= {"graphs": "off" if device == "cpu" else "on"}
    if settings.prefill_chunk is None:
        changes |= {"prefill_chunk": usual_chunk(device, method.dense_prefill)}
    changes |= {"comm": None, "windows": CommonWindows()}  # the method's parameters say it
    changes |= {"overflow": settings.overflow.resolved(settings.history)}
    if settings.budget_bytes is not None:
        changes |= {"budget": None, "align": "device_bytes"}
    for neutral, _ in _idle(settings, method):
        changes |= neutral
    return replace(settings, **changes)


def without_effect_here(settings: Settings, task: Task, items: Sequence[PreparedExample]) -> Iterator[str]:
    """Yield what changes nothing for these examples, in words."""
    usual, wanted = Settings(), settings.generation
    turns = [turn for item in items for turn in item.turns]
    forced = all(turn.given for turn in turns)
    if forced:
        picking = [name for name in PICKING if getattr(wanted, name) != getattr(usual.generation, name)]
        yield from (f"generation.{name} changes nothing here: all that is answered is given" for name in picking)
    if settings.seed != usual.seed and not task.seeded and (forced or not wanted.temperature):
        yield "seed changes nothing here: the task has the same examples whatever it is, and no token is drawn"
    if settings.chat == "none" and not any(turn.example.chat for turn in turns):
        yield "chat=none changes nothing here: this task has no prompt wrapped"
    if settings.protocol == "context" and all(turn.prompt.split == len(turn.prompt.ids) for turn in turns):
        yield "protocol=context changes nothing here: no question stands behind a context"


def with_own_limit(settings: Settings, items: Sequence[PreparedExample]) -> Settings:
    """Leave generation.max_new_tokens out where it says what every turn has of itself, so that the run is the same.
    A text that is given in place of answers has no limit but that one."""
    asked = settings.generation.max_new_tokens
    turns = [turn for item in items for turn in item.example.turns]
    if asked is None or any(turn.max_new_tokens != asked for turn in turns):
        return settings
    if any(turn.given for item in items for turn in item.turns):
        return settings
    return replace(settings, generation=replace(settings.generation, max_new_tokens=None))


def with_contexts(settings: Settings, items: Sequence[PreparedExample]) -> Settings:
    """Leave questions=shared out where no context has two questions, and say so."""
    if settings.questions == "separate" or any(len(group) > 1 for group in by_context(items)):
        return settings
    say_once("questions=shared changes nothing here: no two examples have the same context")
    return replace(settings, questions="separate")


def with_turns(settings: Settings, items: Sequence[PreparedExample]) -> Settings:
    """Leave history and overflow out where no example has a second turn, and overflow where every conversation fits;
    that is said, and so is what protocol=context means under another history."""
    window = settings.overflow.window
    if any(item.further for item in items):
        if settings.says_budget and settings.protocol == "context" and settings.history != "device_prefix":
            say_once(
                f"history={settings.history} seals each later turn anew, over all that was fed before it; "
                "history=device_prefix seals the first context alone"
            )
        if window is None or any(sum(turn.tokens for turn in item.turns) > window for item in items):
            return settings
        say_once(f"overflow.window={window} changes nothing here: every conversation fits")
        return replace(settings, overflow=OverflowSettings())
    if settings.history != "device_prefix":
        say_once(f"history={settings.history} changes nothing here: no example has a second turn")
    if window is not None:
        say_once("overflow changes nothing here: no example has a second turn")
    return replace(settings, history="device_prefix", store=StoreSettings(), overflow=OverflowSettings())


def codec_of(settings: Settings) -> Codec | None:
    """Return the codec as the engine takes it."""
    return None if settings.codec is None else codecs.codec_of(settings.codec)


def budget_of(settings: Settings, method: Method, info: ModelInfo) -> Budget | None:
    """Return the budget as the engine takes it; None where the method reads everything."""
    if not method.uses_budget:
        return None
    asked = settings.budget
    if settings.most_bytes is not None:  # as many tokens as would take so many bytes, for align=device_bytes
        asked = max(1, settings.most_bytes // per_token(info, settings.dtype))
    assert asked is not None  # check_fit
    budget = Budget(asked, tuple(settings.dense_layers), generated=settings.budget_generated)
    if settings.budget_rule == "paper":
        return PaperBudget(budget.asked, budget.dense_layers, budget.generated, count=method.paper_tokens)
    if settings.align == "tokens":
        return budget
    how = (settings.dtype, settings.placement, codec_of(settings), settings.most_bytes)
    return aligned(budget, settings.align, method, info, *how)  # type: ignore[arg-type]
