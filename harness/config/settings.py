"""The settings of a run besides its method, task and model, each with its entry: the source of conf/config.yaml.

A key means the same whatever the method. Imports neither torch nor hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

from harness.config.catalogue import GROUPS, entries, flatten, plain
from harness.config.entry import (
    ALL,
    BOTH,
    DEFAULT,
    FOLDERS,
    MEASURED,
    OBSERVE,
    PICKED,
    READ,
    RUN,
    SERVE,
    SHOWN,
    TURNS,
    Entry,
    entry_of,
    of_reading,
    setting,
)
from harness.config.plugins import wrong_type
from harness.config.values import (
    FROM_0,
    FROM_1,
    Range,
    backends_in_one_line,
    check_values,
    expand_paths,
    size,
)
from harness.config.values import SettingsError as SettingsError
from harness.models.devices import usual_chunk
from methods.budget import Budget, BudgetError
from methods.tiers import codecs
from methods.tiers.tier import DEVICE, DISK, HOST, TIERS

# the device of a run whose model a server runs, nobody here knows on which
SERVER = "server"
OVERFLOWS = ("truncate_cache", "truncate_tokens", "truncate_rotated")
ALIGNED = ("moved_bytes", "device_bytes")  # budget rules that make bytes equal, not tokens
POLICIES = ("scheduler_aware", "lru", "fifo")
BLOCK_TOKENS = 256  # of a block of the store, of which a prefix is found whole
IO_THREADS = 2  # that read for turns that wait, while these compute
# bytes that may wait on the device after a turn, and as many for the disk
WRITE_BUFFER = 256 * 10**6
# keywords of a chat template that the harness passes itself -> what a user does instead
TEMPLATE_KEYWORDS = {
    "enable_thinking": "set thinking instead",
    **dict.fromkeys(
        ("messages", "add_generation_prompt", "continue_final_message", "tokenize"), "leave it out"
    ),
}
# what is no setting, and what does its work
INSTEAD = {
    "budget_bytes": "write bytes as budget=64MiB",
    "align": "budget_rule says what a budget counts",
    "threads": "set OMP_NUM_THREADS in the environment",
}
# of the examples that harness.tune chooses parameters by; no table is about them
TUNING_SEED = 271_828


@dataclass
class GenerationSettings:
    """Sets how the tokens of an answer are picked. A temperature of 0 is greedy decoding."""

    temperature: float = setting(
        0.0, "0: greedy", within=Range(least=0, hint="which is greedy; 1 samples")
    )
    top_k: int = setting(0, "0: no limit", within=FROM_0)
    top_p: float = setting(1.0, "1: no limit", within=Range(above=0, most=1))
    max_new_tokens: int | None = setting(None, "null: the task's own", within=FROM_1)
    force_length: bool = setting(False, "ignore EOS and stop strings: for speed claims")
    samples: int = setting(
        1,
        "answers that are drawn to each question; its score is their mean, and intervals count it as one",
        within=FROM_1,
    )


@dataclass
class CommonWindows:
    """Replaces the numbers of first tokens (sinks) and last tokens that a method always reads; None
    keeps the method's own."""

    sinks: int | None = setting(None, "first tokens, always read", within=FROM_0)
    recent_ratio: float | None = setting(
        None, "share of the rest for the prompt's last tokens", within=Range(least=0, below=1)
    )


@dataclass
class StoreSettings:
    """Describe the store of conversations between turns (history=store): the size of each tier,
    where 0 bytes means that it is not used, and the rules for what leaves it."""

    host: int | str = setting("8GB", "in host memory")
    disk: int | str = setting(0, "in files")
    folder: str | None = setting(
        None,
        "folder of the disk tier, one folder per run below it; null: a temporary one",
        is_path=True,
        identifies=False,
    )
    policy: str = setting(
        "scheduler_aware",
        "which conversation leaves a full tier: one that no turn waits for, else the one whose turn comes last "
        "(scheduler_aware), the longest unused (lru), the oldest (fifo)",
        choices=POLICIES,
    )
    ttl_s: float | None = setting(
        None,
        "drop a conversation that was not used for so many seconds; null: never",
        within=Range(above=0, hint="or null for no end"),
    )

    @property
    def capacities(self) -> dict[str, int]:
        """The size of each tier in bytes."""
        return {tier: size(f"store.{tier}", getattr(self, tier)) for tier in (HOST, DISK)}


@dataclass
class OverflowSettings:
    """Sets which tokens of a conversation are dropped once it has more than `window` of them."""

    window: int | None = setting(
        None,
        "tokens of history, turn and answer together, at most; null: conversations must fit the model's window",
        within=FROM_1,
    )
    by: str | None = setting(
        None,
        "truncate_cache: keys are rotated again (CachedAttention); truncate_tokens: what stays is computed again; "
        "truncate_rotated: keys stay as they are (NKVT); null: the first, or under history=recompute the second",
        choices=(None, *OVERFLOWS),
    )
    ratio: float = setting(0.5, "share of the history that stays", within=Range(above=0, below=1))
    sinks: int = setting(0, "first tokens that stay as well, within that share", within=FROM_0)

    def resolved(self, history: str) -> OverflowSettings:
        """Return these settings with `by`, the way in which old tokens are dropped, filled in if a
        window is set: the cache is cut, or with history=recompute, which keeps no cache between
        turns, the text alone."""
        if self.window is None or self.by is not None:
            return self
        return replace(self, by="truncate_tokens" if history == "recompute" else "truncate_cache")


@dataclass
class Data:
    root: str | None = setting(None, "folder with data sets, searched before the hub", is_path=True)

    def folder(self) -> Path | None:
        root = Path(self.root) if self.root else None
        if root is not None and not root.is_dir():
            raise SettingsError(
                f"data.root={self.root} is not a folder: give the folder that holds the data sets."
            )
        return root


@dataclass
class Results:
    root: str = setting("results/runs", "one folder per run below it", is_path=True)
    save_prompts: bool = setting(False, "store the exact prompt token ids")


@dataclass
class WandbSettings:
    project: str | None = setting(
        None, "the project that gets a copy of each finished run; null: nothing is sent"
    )


@dataclass
class Settings:
    """Hold all settings of a run except its method, task and model."""

    budget: int | float | str | None = of_reading(
        0.2,
        "prompt tokens that a selecting head may read per step: a share (0.2) or a number (512); of TOVA, R-KV and "
        "DSA, rows of prompt and answer; 64MiB: the bytes that keys, values and index of a sequence may take on the "
        "device, in any codec",
        neutral=None,
        named="never",
    )
    budget_rule: str = of_reading(
        "read",
        "read: the budget counts every prompt token that is read; paper: it counts as each method's paper does; "
        "moved_bytes, device_bytes: a method reads as many tokens as cost it the bytes of the budget's keys and "
        "values, moved by a step or held on the device",
        choices=("read", "paper", *ALIGNED),
        named="always",
    )
    comm: float | None = of_reading(
        None,
        "share of the 16-bit keys that scoring may move per step; 0.0078125 in PQCache's comparison",
        within=Range(above=0, most=1, hint="a share of the key cache, like 0.0078125"),
    )
    windows: CommonWindows = of_reading(
        CommonWindows,
        "one split of the budget for all methods with such windows, in place of their own",
    )
    dense_layers: list[int] = setting(
        list,
        "layers that read everything, whatever the budget (counted among those that do not slide over a window)",
        READ,
        read_by=BOTH,
    )
    budget_mass: float | None = of_reading(
        None,
        "of the tokens that Oracle, Quest or PQCache chooses by its budget, read only as many as carry this share "
        "(0.95) of the weights that keys in 4 bits estimate, as Twilight does",
        within=Range(above=0, most=1, hint="a share of the estimated weights, like 0.95"),
        named="always",
    )
    budget_generated: int | None = of_reading(
        None,
        "generated tokens that a KV head keeps at most; null: all, on top of the budget",
        within=FROM_1,
    )
    keep_generated: str | None = of_reading(
        None,
        "which generated tokens stay under budget_generated: the newest, those that the method scores best, or the "
        "newest 64 and a random sample, as in Random Attention; null: the newest, and under H2O also the best",
        choices=(None, "newest", "score", "random"),
        named="always",
    )
    evict_every: int | None = of_reading(
        None,
        "after every so many generated tokens, a method that evicts ranks all rows anew, down to the budget, which "
        "then counts prompt and answer; null: it evicts at the prompt's end alone",
        within=FROM_1,
    )
    merge: str | None = of_reading(
        None,
        "cam: where rows go while the answer grows (TOVA, R-KV), merge their values into rows that stay, as CaM does",
        choices=(None, "cam"),
        named="always",
    )
    placement: str = setting(
        DEVICE,
        "host, disk: methods that offload keep the prompt's keys and values in host memory, or in files",
        RUN,
        choices=TIERS,  # a plug-in may add its own
        after_prefill=True,
        named="among_namesakes",
        read_by=BOTH,
    )
    codec: str | None = setting(
        None,
        "int8, int4, int2: write what a step reads by choice, or an evicting method keeps, in so few bits, wherever it "
        "lies; int4g64: a range per 64 numbers, not 32; int4/int2: keys and values apart; int4+4: 4 channels of keys "
        "in full; fp8, nvfp4: floats of 8 and 4 bits, fp8_ds_mla: of latents; int4h: rotated first; tq4, tq3, tq2: "
        "TurboQuant, tq4q: with a residual bit",
        RUN,
        after_prefill=True,
        named="always",
        read_by=BOTH,
    )
    overlap: str = setting(
        "auto",
        "on: rows that lie elsewhere come to the device while the model computes, where the method knows early enough "
        "which; auto: where a GPU was measured to gain by it, so far nowhere",
        RUN,
        choices=("auto", "on", "off"),
        after_prefill=True,
        read_by=BOTH,
    )
    protocol: str = setting(
        "prompt",
        "prompt: seal after the whole prompt; context: seal before the question",
        RUN,
        choices=("prompt", "context"),
        one_table=True,
    )
    questions: str = setting(
        "separate",
        "shared: examples with the same context have one prefill, and each question begins behind its seal",
        RUN,
        choices=("separate", "shared"),
    )
    history: str = setting(
        "device_prefix",
        "where a conversation's cache is between turns: on the device (device_prefix), in a store (store), or nowhere "
        "(recompute: it is computed again)",
        TURNS,
        choices=("device_prefix", "store", "recompute"),
        read_by=(SERVE,),
    )
    store: StoreSettings = setting(
        StoreSettings,
        "for history=store: bytes of each tier, as 8GB or 64GiB; 0: no such tier",
        TURNS,
        read_by=(SERVE,),
    )
    overflow: OverflowSettings = setting(
        OverflowSettings,
        "what happens where a conversation outgrows the window: a share of its history stays",
        TURNS,
    )
    chat: str = setting(
        "template",
        "template: wrap prompts in the tokenizer's chat template",
        RUN,
        choices=("template", "none"),
        one_table=True,
        read_by=(SERVE, OBSERVE),
    )
    template_kwargs: dict[str, Any] | None = setting(
        None,
        "keywords for that template, as '{reasoning_effort: low}'",
        RUN,
        one_table=True,
        read_by=ALL,
    )
    thinking: str = setting(
        "off",
        "on: a reasoning model thinks before its answer, in 8192 tokens (most of the task's, if it allows 16384) or "
        "what the window leaves; N: in N tokens; a thought is not scored, and one that does not end scores 0; off: it "
        "answers at once",
        RUN,
        one_table=True,
    )
    too_long: str = setting(
        "refuse",
        "what becomes of an example that exceeds the model's window with its answer: the run is refused, or the "
        "example is left out (skip), or its context loses its middle (middle) or its beginning (left)",
        RUN,
        choices=("refuse", "skip", "middle", "left"),
        one_table=True,
        read_by=(SERVE,),
    )
    dtype: str = setting(
        "auto",
        "auto: fp32 on a CPU, the checkpoint's own on a GPU",
        RUN,
        choices=("auto", "fp32", "bf16", "fp16"),
        named="among_namesakes",
        read_by=ALL,
    )
    device: str = setting(
        "auto",
        "cpu, cuda, cuda:1; auto: cuda where there is one",
        RUN,
        named="among_namesakes",
        read_by=ALL,
    )
    batch: int = setting(
        1,
        "examples that run side by side, of any lengths; where one ends the next joins",
        RUN,
        within=FROM_1,
    )
    prefill_chunk: int | None = setting(
        None,
        "tokens of a prompt that pass through a layer at once; null: all on a CPU, 8192 on a GPU where the method's "
        "prefill is dense; InfLLM, LM-Infinite and DSA under a share answer otherwise in chunks",
        RUN,
        within=FROM_1,
        read_by=BOTH,
    )
    seed: int = setting(
        42,
        "for data and sampling",
        RUN,
        within=Range(least=0, most=2**63 - 1),
        one_table=True,
        read_by=(SERVE, OBSERVE),
    )
    baseline: str = setting(
        "run",
        "whether Full runs on the same examples: run it, reuse it if it has run, or off",
        MEASURED,
        choices=("run", "reuse", "off"),
        identifies=False,
    )
    warmup: int = setting(
        1,
        "examples to run first and discard",
        MEASURED,
        within=FROM_0,
        named="never",
        read_by=(SERVE,),
    )
    shared_prefill: bool = setting(
        False,
        "one prefill per prompt for all methods whose prompt is dense: scores and fidelity, no times; other methods "
        "run by themselves",
        MEASURED,
        named="among_namesakes",
    )
    fidelity: int = setting(
        0,
        "compare every n-th step with exact attention and with Full; 0: never",
        MEASURED,
        within=FROM_0,
    )
    likelihood: str = setting(
        "on",
        "on: measure the likelihood of the right answer beside each score; not where lengths are forced or trace=on; "
        "off: do not",
        MEASURED,
        choices=("on", "off"),
        identifies=False,
    )
    trace: str = setting(
        "off",
        "on: show where a decode step spends its time; no speed",
        MEASURED,
        choices=("off", "on"),
    )
    graphs: str = setting(
        "auto",
        "on: capture a decode step as a CUDA graph and replay it, where the method allows it; auto: on a GPU",
        MEASURED,
        choices=("auto", "on", "off"),
        read_by=BOTH,
    )
    backends: str | None = setting(
        None,
        "a yaml file with another order of backends, as `segment_attention: [flash, triton]`; null: that of "
        "kernels/ops.py",
        MEASURED,
        read_by=BOTH,
    )
    dry_run: bool = setting(
        False,
        "print lengths, budget, bytes and folder; load no weights",
        MEASURED,
        identifies=False,
    )
    generation: GenerationSettings = setting(
        GenerationSettings, "", PICKED, one_table=True, read_by=(SERVE,)
    )
    data: Data = setting(Data, "", FOLDERS, identifies=False, read_by=(SERVE, OBSERVE))
    results: Results = setting(Results, "", FOLDERS, identifies=False, read_by=(OBSERVE,))
    wandb: WandbSettings = setting(
        WandbSettings,
        "Weights & Biases; offline, in the run's folder, without login",
        SHOWN,
        identifies=False,
    )

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := attrgetter(name)(self)) not in choices:
                raise SettingsError(
                    f"{name}={value} is unknown: choose one of {', '.join(map(plain, choices))}."
                )
        asked = str(self.thinking)
        if asked not in ("off", "on") and not (asked.isdecimal() and int(asked)):
            remedy = "choose off, on (both in quotes in YAML), or a number of tokens from 1"
            raise SettingsError(f"thinking={asked} is unknown: {remedy}.")
        check_values(self, RANGES)
        budget = self.budget
        if isinstance(budget, str):
            if (given := size("budget", budget)) < 1:
                raise SettingsError(
                    f"budget={budget} is no room for keys: give 1B or more, as 64MiB."
                )
            budget = given
            self.budget = f"{budget}B"  # however it is written, the run is the same
        try:
            Budget(1.0 if budget is None else budget)
        except BudgetError as error:
            raise SettingsError(str(error)) from error
        expand_paths(self, PATHS)
        self.backends = backends_in_one_line(self.backends)
        self.template_kwargs = self.template_kwargs or None
        if self.codec is not None and not codecs.is_codec(self.codec):
            raise SettingsError(
                f"codec={self.codec} is unknown: choose null, or one written like {codecs.choices()}."
            )
        if clashes := [*self._clashes(), *self._clashes_of_conversations()]:
            raise SettingsError(clashes[0])

    def _clashes(self) -> Iterator[str]:
        """Yield a sentence for each combination of settings that exclude each other, with the
        remedy."""
        other = "dense_layers" if self.dense_layers else f"budget_rule={self.budget_rule}"
        if isinstance(self.budget, str) and other != "budget_rule=read":
            yield (
                f"budget={self.budget} limits the bytes of all layers on the device: leave {other} out."
            )
        if self.keep_generated is not None and self.budget_generated is None:
            yield (
                f"keep_generated={self.keep_generated} chooses among more generated tokens than budget_generated "
                "allows: set that as well."
            )
        if self.template_kwargs and self.chat == "none":
            yield "template_kwargs are for the chat template, which chat=none leaves out: leave one of them out."
        for key in TEMPLATE_KEYWORDS.keys() & (self.template_kwargs or {}):
            yield f"template_kwargs.{key} is passed to the chat template by the harness: {TEMPLATE_KEYWORDS[key]}."
        if self.questions == "shared" and self.protocol != "context":
            yield "questions=shared seals a context before its questions: set protocol=context as well."
        if self.thinks and self.chat == "none":
            yield f"thinking={self.thinking} needs the chat template, which chat=none leaves out: set one of them."
        if self.thinks and self.generation.force_length:
            yield f"generation.force_length leaves out where a thought ends: leave thinking={self.thinking} out."
        if not self.generation.temperature and (self.generation.top_k, self.generation.top_p) != (
            0,
            1,
        ):
            yield "Greedy decoding ignores top_k and top_p: set generation.temperature above 0 as well."
        if self.generation.samples > 1 and not self.generation.temperature:
            yield (
                f"generation.samples={self.generation.samples} asks a question several times, and greedy decoding "
                "answers the same each time: set generation.temperature above 0 as well."
            )

    def _clashes_of_conversations(self) -> Iterator[str]:
        """Yield a sentence, with the remedy, for each combination of settings about conversations
        of several turns (history, store, overflow) that exclude each other."""
        store, overflow, stored = self.store, self.overflow, self.history == "store"
        given = [
            f"store.{name}"
            for name, value in vars(StoreSettings()).items()
            if getattr(store, name) != value
        ]
        if given and not stored:
            yield f"history={self.history} has no store: set history=store, or leave {', '.join(given)} out."
        if stored and not any(store.capacities.values()):
            yield "history=store has no tier to store in: set store.host=8GB, or store.disk."
        if store.folder is not None and not store.capacities["disk"]:
            yield "store.folder is about the disk tier, which has no bytes: set store.disk=100GB as well."
        if overflow.window is None:
            if overflow != OverflowSettings():
                yield "overflow.by, ratio and sinks need a window: set overflow.window=2048, or leave them out."
            return
        if self.history == "recompute" and overflow.by not in (None, "truncate_tokens"):
            yield f"history=recompute has no cache for overflow.by={overflow.by}: set overflow.by=truncate_tokens."
        if stored and overflow.by == "truncate_rotated":
            yield "history=store keeps keys before their rotation: set overflow.by=truncate_cache or truncate_tokens."
        if overflow.sinks >= (stays := int(overflow.ratio * overflow.window)):
            yield (
                f"overflow.window={overflow.window} keeps {stays} tokens, and overflow.sinks={overflow.sinks} must be "
                "fewer: set a larger window."
            )

    @property
    def thinks(self) -> bool:
        """True if a model that can think does so before its answers."""
        return self.thinking != "off"

    @property
    def measures_likelihood(self) -> bool:
        """True if the run measures how likely the right answers are before each answer. Runs about
        time (forced lengths, traces) do not."""
        return self.likelihood == "on" and self.trace == "off" and not self.generation.force_length


def bytes_of(budget: object) -> int | None:
    """Return how many bytes a budget such as 64MiB is; None for a share or a number of tokens."""
    return size("budget", budget) if isinstance(budget, str) else None


NESTED: Mapping[str, Any] = {
    name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)
}


def _entries() -> Iterator[tuple[str, Entry]]:
    """Yield the key and the entry of each setting and each group of settings, a group before what is
    in it."""
    for each in fields(Settings):
        entry = entry_of(each.metadata)
        yield each.name, entry
        for inner in fields(NESTED[each.name]) if each.name in NESTED else ():
            yield (
                f"{each.name}.{inner.name}",
                replace(entry_of(inner.metadata), section=entry.section),
            )


ENTRIES = dict(_entries())
KEYS = tuple(ENTRIES)
CHOICES = {key: entry.choices for key, entry in ENTRIES.items() if entry.choices}
RANGES = {key: entry.within for key, entry in ENTRIES.items() if entry.within}
PATHS = [key for key, entry in ENTRIES.items() if entry.is_path]
WITHOUT_EFFECT = [key for key, entry in ENTRIES.items() if not entry.identifies]
NEUTRAL = flatten(asdict(Settings())) | {
    key: entry.neutral for key, entry in ENTRIES.items() if entry.neutral is not DEFAULT
}


@cache
def recorded_defaults(device: str = "cpu") -> dict[str, Any]:
    """Return the settings that a run folder records if nobody set any, as nested values: the
    defaults, with `graphs` and `prefill_chunk` resolved for `device`. A report asks for them with
    every run, so they are cached, and callers must not modify them."""
    resolved = {
        "graphs": "on" if device.startswith("cuda") else "off",
        "prefill_chunk": usual_chunk(device),
    }
    return asdict(Settings()) | resolved


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Return a composed configuration (plain values) as checked `Settings`. Raise `SettingsError`
    for a key that is no setting."""
    for name in config.keys() & NESTED:
        if not isinstance(config[name], Mapping):
            raise SettingsError(wrong_type(name, config[name], NESTED[name]))
    keys = flatten({name: value for name, value in config.items() if name not in GROUPS})
    for key in sorted(set(keys) - set(KEYS)):
        raise SettingsError(unknown_setting(key))
    return settings_known_today(config)


def unknown_setting(key: str) -> str:
    """Return a sentence on a key that is no setting, with the nearest setting or parameter."""
    if key in INSTEAD:
        return f"There is no setting {key}; {INSTEAD[key]}."
    own = [
        f"{group}.{name}"
        for group in GROUPS
        for entry in entries(group).values()
        for name in entry.values()
    ]
    owners = [name for name in own if name.endswith(f".{key}")]
    near = owners or get_close_matches(key, (*KEYS, *GROUPS, "experiment", *own), n=1, cutoff=0.5)
    end = f"did you mean {near[0]}?" if near else "`python -m harness --help` shows them all."
    return f"There is no setting {key}; {end}"


def in_todays_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a recorded run with the keys of today. Older runs have the bytes
    of a budget in `budget_bytes`, and in `align` what budgets make equal instead of tokens."""
    known = dict(config)
    most_bytes, aligned = known.pop("budget_bytes", None), known.pop("align", "tokens")
    if most_bytes is not None:
        known["budget"] = f"{most_bytes}B"
    elif aligned != "tokens":
        known["budget_rule"] = aligned
    return known


def settings_known_today(config: Mapping[str, Any]) -> Settings:
    """Return the settings of a recorded run, of whatever version: settings that it lacks get their
    defaults, and those that no longer exist are ignored."""

    def made(kind: Any, values: Mapping[str, Any]) -> Any:
        return kind(
            **{each.name: values[each.name] for each in fields(kind) if each.name in values}
        )

    groups = {key: made(kind, config[key]) for key, kind in NESTED.items() if key in config}
    settings: Settings = made(Settings, {**config, **groups})
    return settings
