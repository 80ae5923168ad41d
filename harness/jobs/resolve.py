"""Resolves the settings that a user asked for into those that apply to a run, and refuses what
cannot run, before any weights load.

`resolve` knows method and model: `auto` becomes a value, and a setting that the method has no use
for gets its neutral value, so that equal runs have the same identity. `resolve_for_examples` knows
the prompts as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from evals.base import Task
from harness.config import plugins
from harness.config.entry import READ
from harness.config.settings import (
    ENTRIES,
    NESTED,
    NEUTRAL,
    CommonWindows,
    OverflowSettings,
    Settings,
    SettingsError,
    StoreSettings,
    bytes_of,
)
from harness.jobs.alignment import AlignedBudget, shapes
from harness.jobs.examples import PreparedExample, Prompts, by_context
from harness.models.base import DTYPE_BYTES, ModelInfo, limit
from harness.models.devices import choose_device, usual_chunk
from harness.models.state_sizes import NO_STATES
from harness.prompts.prompt import MOST
from harness.results.files import unwritable
from harness.terminal.notices import say_once
from methods.abilities import ability, asked, refuse
from methods.abilities.evict_every import EvictEvery
from methods.abilities.keep_generated import RULES, KeepRandom
from methods.abilities.kept_codec import KeptCodec
from methods.abilities.merge import Merge
from methods.abilities.repeat import Repeat
from methods.base import Ability, Budget, Method, PaperBudget, check_layers, paper_differs
from methods.full import Full
from methods.tiers import codecs
from methods.tiers.codec import Codec
from methods.tiers.tier import DEVICE

OF_BUDGETS = [key for key, entry in ENTRIES.items() if entry.section == READ and key not in NESTED]


@dataclass(frozen=True)
class Resolved:
    """Method, settings and budget of a run, as the engine takes them. The settings `comm` (what
    scoring may move per step) and `windows` (the first and last tokens that are always read) are
    null here, because they have been turned into parameters of `method`. `notes` are sentences on
    settings that change nothing, or answers where one would not think so."""

    method: Method
    settings: Settings
    budget: Budget | None
    notes: list[str]


def resolve(wanted: Settings, given: Method, info: ModelInfo) -> Resolved:
    """Return the settings that apply to a method and a model, with the method and the budget that
    result. Raise `SettingsError` for what cannot run."""
    if not info.served.num_heads:
        raise SettingsError(
            f"{info.name} is behind a server, and this command computes with its weights here: name them by model=hf."
        )
    device = choose_device(wanted.device)
    refuse_graphs(wanted, device)
    if info.spread:
        _check_spread(wanted, info, device)
    method = given.with_windows(**vars(wanted.windows))
    if wanted.comm is not None:
        method = method.at_communication(wanted.comm, info.head_dim)
    if wanted.budget is None:
        wanted = replace(wanted, budget=method.trained_budget(shapes(info)[0]))
    _check_method(wanted, method, info)
    on_gpu = device != "cpu"
    changes: dict[str, Any] = {
        "device": device,
        "comm": None,  # the method's parameters say both
        "windows": CommonWindows(),
        "overflow": wanted.overflow.resolved(wanted.history),
    }
    if wanted.dtype == "auto":
        changes["dtype"] = info.dtype if on_gpu else "fp32"
    if wanted.overlap != "on":  # auto is off, too: no method was measured to gain by overlap
        changes["overlap"] = "off" if on_gpu else "auto"
    if wanted.graphs == "auto":
        changes["graphs"] = "on" if on_gpu and not info.spread else "off"
    if wanted.prefill_chunk is None:
        changes["prefill_chunk"] = usual_chunk(device, method.dense_prefill)
    for keys, _ in _idle(wanted, method):
        changes |= {key: NEUTRAL[key] for key in keys if "." not in key}
    settings = replace(wanted, **changes)
    budget = _budget(settings, method, info)
    abilities = abilities_of(settings, budget)
    refuse(method, abilities)
    for one in abilities:
        try:
            one.check_model(shapes(info)[0])
        except ValueError as error:
            setting = f"codec={settings.codec}: " * isinstance(one, KeptCodec)
            raise SettingsError(f"{setting}{error}") from error
    return Resolved(method, settings, budget, list(_notes(wanted, method)))


def refuse_graphs(settings: Settings, device: str) -> None:
    if settings.graphs == "on" and device == "cpu":
        raise SettingsError(
            "graphs=on captures CUDA graphs, and device=cpu has none: leave graphs out."
        )


def _check_spread(settings: Settings, info: ModelInfo, device: str) -> None:
    """Raise `SettingsError` for what cannot be done with a model whose layers lie on several
    GPUs."""
    key = "model.device_map=auto spreads the layers over all GPUs"
    if device != "cuda":
        raise SettingsError(
            f"{key}, and device={device} is one device: set device=cuda, or model.device_map=null."
        )
    if any(info.borrowers):
        raise SettingsError(
            f"{key}, and layers of {info.name} read keys and values of others, which may lie elsewhere: set "
            "model.device_map=null."
        )
    for name, value in {"graphs": "on", "trace": "on", "history": "store"}.items():
        if getattr(settings, name) == value:
            raise SettingsError(
                f"{key}, and {name}={value} works on one: leave {name} out, or the map."
            )


def codec_of(settings: Settings) -> Codec | None:
    """Return the codec that the settings name, None without one."""
    return None if settings.codec is None else codecs.codec_of(settings.codec)


def abilities_of(settings: Settings, budget: Budget | None) -> tuple[Ability, ...]:
    """Return the abilities that the settings give a method (methods/abilities)."""
    given = list(asked(budget, codec_of(settings)))
    if budget is None:
        return tuple(given)
    if settings.merge is not None:
        given.append(Merge(settings.merge))
    if settings.keep_generated is not None:
        kind = RULES[settings.keep_generated]
        given.append(kind(settings.seed) if issubclass(kind, KeepRandom) else kind())
    if settings.evict_every is not None:
        given.append(EvictEvery(settings.evict_every))
    return tuple(given)


def _budget(settings: Settings, method: Method, info: ModelInfo) -> Budget | None:
    """Return the budget that the settings ask for; None if the method reads everything."""
    if not method.uses_budget:
        return None
    asked, measure = settings.budget, settings.budget_rule
    most_bytes, specs = bytes_of(asked), shapes(info, settings.device)
    if most_bytes is not None:  # as many tokens as would take so many bytes on the device
        numbers = sum(spec.num_kv_heads * spec.row_channels for spec in specs)
        row = numbers * DTYPE_BYTES[settings.dtype]
        asked, measure = max(1, most_bytes // row), "device_bytes"
    assert isinstance(asked, int | float)  # without a budget the method would have been refused
    dense = tuple(settings.dense_layers)
    given = (asked, dense, settings.budget_generated, settings.budget_mass)
    if measure == "paper":
        return PaperBudget(*given, count=method.paper_tokens)
    if measure == "read":
        return Budget(*given)
    return AlignedBudget(
        *given,
        measure=measure,  # type: ignore[arg-type]
        method=method,
        specs=[spec for spec in specs if spec.index not in dense],
        placement=settings.placement,
        element_bytes=DTYPE_BYTES[settings.dtype],
        codec=codec_of(settings),
        most_bytes=most_bytes,
    )


def _idle(settings: Settings, method: Method) -> Iterator[tuple[list[str], str]]:
    """Yield groups of settings that the method has no use for, and the reason. They get their neutral
    values."""
    if not method.uses_budget:
        yield OF_BUDGETS, "which uses no budget"
    else:
        windows = ("sinks", "recent_ratio")
        yield (
            [f"windows.{name}" for name in windows if name not in method.window_names],
            "which has no such windows",
        )
        if type(method).at_communication is Method.at_communication:
            yield ["comm"], "whose scoring moves nothing"
        if settings.budget_rule == "paper" and not paper_differs(method):
            yield ["budget_rule"], "whose paper counts as we do"
    if not method.offloads:
        yield ["placement", "overlap"], "which keeps nothing elsewhere"
    elif settings.placement == DEVICE:
        yield ["overlap"], f"since placement={DEVICE}"
    if KeptCodec.refusal(method):
        yield ["codec"], "which has no tokens that it is meant for"
    if not method.dense_prefill:
        yield ["shared_prefill"], "whose prefill is not Full's, so that it runs by itself"


def chunked(settings: Settings, method: Method) -> Iterator[str]:
    """Yield a sentence if chunks of a prompt change what the method computes."""
    alike = method.by_query and isinstance(settings.budget, int) and settings.budget_rule == "read"
    if settings.prefill_chunk is not None and not (method.dense_prefill or alike):
        yield (
            f"prefill_chunk={settings.prefill_chunk} changes what {type(method).__name__} computes of longer prompts: "
            "each chunk attends by the budget of the tokens so far"
        )


def _notes(wanted: Settings, method: Method) -> Iterator[str]:
    """Yield a sentence for each setting that the user changed and that changes nothing for the
    method, and for chunks that change its answers."""
    usual = Settings()
    yield from chunked(wanted, method)
    for keys, why in _idle(wanted, method):
        asked = {key: attrgetter(key)(wanted) for key in sorted(keys)}
        names = [
            key
            for key, value in asked.items()
            if value not in (NEUTRAL[key], attrgetter(key)(usual))
        ]
        if names:
            verb = "changes" if len(names) == 1 else "change"
            yield f"{' and '.join(names)} {verb} nothing for {type(method).__name__}, {why}"
    if isinstance(method, Full) and wanted.baseline != usual.baseline:
        yield "baseline changes nothing for Full, which is the baseline"
    if wanted.shared_prefill and method.dense_prefill and wanted.warmup != usual.warmup:
        yield "warmup changes nothing under shared_prefill=true, which measures no times"


def _check_method(settings: Settings, method: Method, info: ModelInfo) -> None:
    """Raise if the settings, the method and the model do not go together."""
    if method.calibration_tokens > MOST:
        raise SettingsError(
            f"method.calibration_tokens={method.calibration_tokens} is too many: set at most {MOST}."
        )
    with plugins.naming("method", plugins.describe(method)):
        method.refuse_model(shapes(info))
    if method.uses_budget and settings.budget is None:
        raise SettingsError(
            f"budget=null leaves {type(method).__name__} without a budget: set budget=1.0 for the whole prompt, or "
            "less."
        )
    check_layers("dense_layers", settings.dense_layers, info.num_whole_layers)
    folder = settings.store.folder if settings.history == "store" else None
    if folder is not None and (why := unwritable(Path(folder))):
        raise SettingsError(f"store.folder={folder} cannot be used: {why}; name another folder.")


def resolve_for_examples(
    resolved: Resolved, task: Task, prompts: Prompts, info: ModelInfo
) -> Settings:
    """Return the settings that apply to these prompts, and print which settings change nothing for
    them. Raise `SettingsError` for settings that do not suit the examples."""
    settings, method, items = resolved.settings, resolved.method, prompts.items
    for note in _notes_here(settings, task, items):
        say_once(note)
    if not KeptCodec.refusal(method) and not method.uses_budget and settings.codec is None:
        say_once(
            f"{type(method).__name__} reads and keeps all as Full does without a codec: set codec=tq4 or another"
        )
    limit = settings.generation.max_new_tokens
    turns = [turn for item in items for turn in item.turns]
    if limit is not None and all(
        turn.example.max_new_tokens == limit and not turn.given for turn in turns
    ):
        settings = replace(settings, generation=replace(settings.generation, max_new_tokens=None))
    if settings.too_long != Settings.too_long and not prompts.any_too_long:
        say_once(
            f"too_long={settings.too_long} changes nothing here: every example fits the model's window"
        )
        settings = replace(settings, too_long=Settings.too_long)
    if settings.thinks and not any(turn.thought for turn in turns):
        settings = replace(settings, thinking=Settings.thinking)  # the note is said
    if settings.questions == "shared" and all(len(group) == 1 for group in by_context(items)):
        say_once("questions=shared changes nothing here: no two examples have the same context")
        settings = replace(settings, questions="separate")
    settings = _conversations(settings, task, items, info, method)
    if settings.fidelity and any(turn.thought and turn.thought.prefix for turn in turns):
        raise SettingsError(
            f"fidelity={settings.fidelity} compares tokens that the model chose, and thinking={settings.thinking} "
            "feeds the first words of these answers: set fidelity=0 or thinking=off."
        )
    if (budget := resolved.budget) is not None:
        if isinstance(budget, AlignedBudget):
            for length in sorted({item.sealed(settings.protocol)[0] for item in items}):
                budget.refuse(length)
        method.check(
            budget,
            next((x for x in range(info.num_whole_layers) if x not in budget.dense_layers), 0),
        )
        if (repeat := ability(method, Repeat)) is not None:
            longest = max(item.sealed(settings.protocol)[0] for item in items)
            _refuse_repetition(method, budget, longest, repeat.tokens(longest), info)
    return settings


def _refuse_repetition(
    method: Method, budget: Budget, longest: int, needed: int, info: ModelInfo
) -> None:
    """Raise `SettingsError` if the model, to repeat its prompt of `longest` tokens (`Repeat`), `needed`
    at a time, would read beyond its window."""
    most = limit(max(info.window, info.trained_window), info.layer_windows)
    layers = range(info.num_whole_layers)
    if longest + needed > most and not all(
        method.reads_all(longest, budget.tokens(longest, x)) for x in layers
    ):
        raise SettingsError(
            f"{type(method).__name__} repeats its prompt, and {longest} tokens with the {needed} that are read again "
            f"at a time go beyond the model's window of {most}: set a smaller method.chunk, or shorten the prompts."
        )


def _notes_here(settings: Settings, task: Task, items: Sequence[PreparedExample]) -> Iterator[str]:
    """Yield a sentence for each setting that the user changed and that changes nothing for these
    examples."""
    usual, wanted = Settings(), settings.generation
    turns = [turn for item in items for turn in item.turns]
    given = all(turn.given for turn in turns)
    for name in ("temperature", "top_k", "top_p", "force_length", "samples"):
        if given and getattr(wanted, name) != getattr(usual.generation, name):
            yield f"generation.{name} changes nothing here: all that is answered is given"
    draws = settings.keep_generated == "random" or (wanted.temperature and not given)
    if settings.seed != usual.seed and not task.seeded and not draws:
        yield "seed changes nothing here: the task has the same examples whatever it is, and no token is drawn"
    if settings.chat == "none" and not any(turn.example.chat for turn in turns):
        yield "chat=none changes nothing here: this task has no prompt wrapped"
    if settings.template_kwargs and not any(turn.prompt.template for turn in turns):
        yield "template_kwargs changes nothing here: no prompt of this task is wrapped in the chat template"
    if settings.thinks and not any(turn.thought for turn in turns):
        yield f"thinking={settings.thinking} changes nothing here: this task has no prompt wrapped in the chat template"
    if settings.protocol == "context" and all(
        turn.prompt.split == len(turn.prompt.ids) for turn in turns
    ):
        yield "protocol=context changes nothing here: no question follows a context"


def _recomputing(settings: Settings, info: ModelInfo, method: Method) -> Settings:
    """Return the settings with the one way in which the history of a hybrid model, or of a method that
    says so, is cut: its text is, and the rest of it computed anew."""
    overflow, stays = settings.overflow, info.states == NO_STATES and method.truncates
    if not overflow.window or overflow.by == "truncate_tokens" or stays:
        return settings
    keeps = (
        f"{info.name} keeps states"
        if method.truncates
        else f"{type(method).__name__} keeps an index"
    )
    say_once(
        f"overflow.by={overflow.by} computes what is left anew, as truncate_tokens does: {keeps}, "
        "which cannot lose the oldest tokens"
    )
    return replace(settings, overflow=replace(overflow, by="truncate_tokens"))


def _conversations(
    settings: Settings,
    task: Task,
    items: Sequence[PreparedExample],
    info: ModelInfo,
    method: Method,
) -> Settings:
    """Return the settings without `history` and `overflow` if no example has a second turn, and
    without `overflow` if every conversation fits into the window. Raise `SettingsError` for
    settings that do not suit conversations."""
    history, window, store = settings.history, settings.overflow.window, settings.store
    if window is None and task.fills is not None:
        raise SettingsError(
            f"This task overflows a window of {task.fills} tokens: set overflow.window={task.fills}."
        )
    if not any(item.further for item in items):
        if history != "device_prefix":
            say_once(f"history={history} changes nothing here: no example has a second turn")
        if window is not None:
            say_once("overflow changes nothing here: no example has a second turn")
        return replace(
            settings, history="device_prefix", store=StoreSettings(), overflow=OverflowSettings()
        )
    if settings.fidelity:
        raise SettingsError(
            f"fidelity={settings.fidelity} follows one turn, and this task's examples have several: set fidelity=0."
        )
    if settings.questions == "shared" and (history != "device_prefix" or window is not None):
        raise SettingsError(
            f"questions=shared goes back to one cache, which history={history} or overflow.window changes between "
            "turns: set questions=separate."
        )
    if window is not None:
        longest = max((turn for item in items for turn in item.turns), key=lambda turn: turn.tokens)
        if window < (least := max(longest.tokens, task.fills or 0)):
            raise SettingsError(
                f"overflow.window={window} is too small for {longest.example.id} and what the task fills: set "
                f"overflow.window={least} or more."
            )
        if window > info.limit:
            raise SettingsError(
                f"overflow.window={window} is more than the model takes: set at most {info.limit}."
            )
        if all(sum(turn.tokens for turn in item.turns) <= window for item in items):
            say_once(f"overflow.window={window} changes nothing here: every conversation fits")
            settings = replace(settings, overflow=OverflowSettings())
    settings = _recomputing(settings, info, method)
    for tier, room in store.capacities.items() if history == "store" else ():
        if 0 < room < info.kv_bytes(settings.dtype, 1):
            raise SettingsError(
                f"store.{tier}={getattr(store, tier)} is in bytes and holds no token: set store.{tier}=8GB, say."
            )
    if (
        settings.budget is not None
        and settings.protocol == "context"
        and history != "device_prefix"
    ):
        say_once(
            f"history={history} seals each later turn anew, over all that was fed before it; history=device_prefix "
            "seals the first context alone"
        )
    return settings
