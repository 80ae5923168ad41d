"""The settings of a run besides its method, task and model: the schema of conf/config.yaml.

A key means the same whatever the method. Imports neither torch nor hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

from harness.config.catalogue import GROUPS, entries, flatten, plain
from harness.config.plugins import wrong_type
from harness.config.values import FROM_0, FROM_1, Range, backends_in_one_line, check_values, expand_paths, size
from harness.config.values import SettingsError as SettingsError
from harness.models.devices import usual_chunk
from methods.budget import Budget, BudgetError
from methods.tiers import codecs
from methods.tiers.tier import DEVICE, DISK, HOST, TIERS

OVERFLOWS = ("truncate_cache", "truncate_tokens", "truncate_rotated")
BLOCK_TOKENS = 256  # of a block of the store, of which a prefix is found whole
IO_THREADS = 2  # that read for turns that wait, while these compute
WRITE_BUFFER = 256 * 10**6  # bytes that may wait on the device after a turn, and as many for the disk
POLICIES = ("scheduler_aware", "lru", "fifo")
CHOICES = {
    "budget_rule": ("read", "paper"),
    "align": ("tokens", "moved_bytes", "device_bytes"),
    "placement": TIERS,
    "overlap": ("auto", "on", "off"),
    "protocol": ("prompt", "context"),
    "questions": ("separate", "shared"),
    "history": ("device_prefix", "store", "recompute"),
    "store.policy": POLICIES,
    "overflow.by": (None, *OVERFLOWS),
    "chat": ("template", "none"),
    "too_long": ("refuse", "skip", "middle", "left"),
    "baseline": ("run", "reuse", "off"),
    "dtype": ("auto", "fp32", "bf16", "fp16"),
    "trace": ("off", "on"),
    "graphs": ("auto", "on", "off"),
    "likelihood": ("on", "off"),
}
RANGES = {
    **dict.fromkeys(("batch", "prefill_chunk", "threads", "budget_bytes", "budget_generated"), FROM_1),
    **dict.fromkeys(("warmup", "fidelity", "windows.sinks", "generation.top_k"), FROM_0),
    "seed": Range(least=0, most=2**63 - 1),
    "budget_mass": Range(above=0, most=1, hint="a share of the estimated weights, like 0.95"),
    "comm": Range(above=0, most=1, hint="a share of the key cache, like 0.0078125"),
    "windows.recent_ratio": Range(least=0, below=1),
    "store.ttl_s": Range(above=0, hint="or null for no end"),
    "overflow.window": FROM_1,
    "overflow.ratio": Range(above=0, below=1),
    "overflow.sinks": FROM_0,
    "generation.temperature": Range(least=0, hint="which is greedy; 1 samples"),
    "generation.top_p": Range(above=0, most=1),
    "generation.max_new_tokens": FROM_1,
    "generation.samples": FROM_1,
}
PATHS = ("data.root", "results.root", "store.folder")
# what changes neither an output nor a measured cost, and so is no part of a run's identity
WITHOUT_EFFECT = ("results", "data", "baseline", "dry_run", "wandb", "likelihood", "store.folder")
# may differ among jobs that share a prefill
OWN = {
    "budget", "budget_bytes", "budget_rule", "align", "comm", "windows", "budget_mass", "budget_generated",
    "placement", "codec", "overlap",
}  # fmt: skip

# keywords of a chat template that the harness passes itself -> what a user does instead
TEMPLATE_KEYWORDS = {
    "enable_thinking": "set thinking instead",
    **dict.fromkeys(("messages", "add_generation_prompt", "continue_final_message", "tokenize"), "leave it out"),
}
TUNING_SEED = 271_828  # of the examples that harness.tune chooses parameters by; no table is about them


@dataclass
class GenerationSettings:
    """Sets how the tokens of an answer are picked. A temperature of 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int | None = None  # in place of the task's
    force_length: bool = False  # ignore EOS and stop strings: for speed claims
    samples: int = 1  # answers to each question, each with a seed of its own


@dataclass
class CommonWindows:
    """Replaces the numbers of first tokens (sinks) and last tokens that a method always reads; None
    keeps the method's own."""

    sinks: int | None = None
    recent_ratio: float | None = None  # of the budget behind the sinks


@dataclass
class StoreSettings:
    """The store of conversations between turns (history=store): the size of each tier, where 0
    bytes means that it is not used, and the rules for what leaves it."""

    host: int | str = "8GB"
    disk: int | str = 0
    folder: str | None = None
    policy: str = "scheduler_aware"
    ttl_s: float | None = None

    @property
    def capacities(self) -> dict[str, int]:
        """The size of each tier in bytes."""
        return {tier: size(f"store.{tier}", getattr(self, tier)) for tier in (HOST, DISK)}

    @property
    def seconds_to_live(self) -> float:
        return inf if self.ttl_s is None else self.ttl_s


@dataclass
class OverflowSettings:
    """Sets which tokens of a conversation are dropped once it has more than `window` of them."""

    window: int | None = None
    by: str | None = None
    ratio: float = 0.5
    sinks: int = 0

    def resolved(self, history: str) -> OverflowSettings:
        """Return these settings with `by`, the way in which old tokens are dropped, filled in if a
        window is set: the cache is cut, or with history=recompute, which keeps no cache between
        turns, the text alone."""
        if self.window is None or self.by is not None:
            return self
        return replace(self, by="truncate_tokens" if history == "recompute" else "truncate_cache")


@dataclass
class Data:
    root: str | None = None

    def folder(self) -> Path | None:
        root = Path(self.root) if self.root else None
        if root is not None and not root.is_dir():
            raise SettingsError(f"data.root={self.root} is not a folder: give the folder that holds the data sets.")
        return root


@dataclass
class Results:
    root: str = "results/runs"
    save_prompts: bool = False


@dataclass
class WandbSettings:
    project: str | None = None


@dataclass
class Settings:
    """All settings of a run except its method, task and model. conf/config.yaml says what each
    means."""

    budget: int | float | None = 0.2
    budget_bytes: int | str | None = None
    budget_rule: str = "read"
    align: str = "tokens"
    comm: float | None = None
    windows: CommonWindows = field(default_factory=CommonWindows)
    dense_layers: list[int] = field(default_factory=list)
    budget_mass: float | None = None
    budget_generated: int | None = None
    placement: str = DEVICE
    codec: str | None = None
    overlap: str = "auto"
    protocol: str = "prompt"
    questions: str = "separate"
    history: str = "device_prefix"
    store: StoreSettings = field(default_factory=StoreSettings)
    overflow: OverflowSettings = field(default_factory=OverflowSettings)
    chat: str = "template"
    template_kwargs: dict[str, Any] | None = None
    thinking: str = "off"
    too_long: str = "refuse"
    dtype: str = "auto"
    device: str = "auto"
    batch: int = 1
    prefill_chunk: int | None = None
    seed: int = 42
    threads: int | None = None
    baseline: str = "run"
    warmup: int = 1
    shared_prefill: bool = False
    fidelity: int = 0
    likelihood: str = "on"
    trace: str = "off"
    graphs: str = "auto"
    backends: str | None = None
    dry_run: bool = False
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    data: Data = field(default_factory=Data)
    results: Results = field(default_factory=Results)
    wandb: WandbSettings = field(default_factory=WandbSettings)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := attrgetter(name)(self)) not in choices:
                raise SettingsError(f"{name}={value} is unknown: choose one of {', '.join(map(plain, choices))}.")
        asked = str(self.thinking)
        if asked not in ("off", "on") and not (asked.isdecimal() and int(asked)):
            remedy = "choose off, on (both in quotes in YAML), or a number of tokens from 1"
            raise SettingsError(f"thinking={asked} is unknown: {remedy}.")
        check_values(self, RANGES)
        try:
            Budget(1.0 if self.budget is None else self.budget)
        except BudgetError as error:
            raise SettingsError(str(error)) from error
        expand_paths(self, PATHS)
        self.budget_bytes = self.most_bytes  # however it is written, the run is the same
        self.backends = backends_in_one_line(self.backends)
        self.template_kwargs = self.template_kwargs or None
        if self.codec is not None and not codecs.is_codec(self.codec):
            raise SettingsError(f"codec={self.codec} is unknown: choose null, {codecs.choices()}.")
        if clashes := [*self._clashes(), *self._clashes_of_conversations()]:
            raise SettingsError(clashes[0])

    def _clashes(self) -> Iterator[str]:
        """Yield a sentence for each combination of settings that exclude each other, with the
        remedy."""
        if self.budget_bytes is not None:
            limit = f"budget_bytes={self.budget_bytes}"
            if self.budget not in (None, Settings.budget):
                yield f"budget={self.budget} would be ignored beside {limit}: leave one of them out."
            if self.dense_layers or self.budget_rule == "paper" or self.align == "moved_bytes":
                yield (
                    f"{limit} limits the bytes of all layers on the device: leave dense_layers, budget_rule=paper and "
                    "align=moved_bytes out."
                )
        if self.budget_generated is not None and not self.says_budget:
            yield "budget_generated goes with a budget: set one; budget=1.0 leaves the prompt whole."
        if self.budget_mass is not None and not self.says_budget:
            yield "budget_mass goes with a budget, by which a method picks the candidates: set one."
        if self.align != "tokens" and self.budget_rule == "paper":
            yield f"align={self.align} makes bytes equal, budget_rule=paper counts tokens as papers do: leave one out."
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
        if not self.generation.temperature and (self.generation.top_k, self.generation.top_p) != (0, 1):
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
        given = [f"store.{name}" for name, value in vars(StoreSettings()).items() if getattr(store, name) != value]
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
    def says_budget(self) -> bool:
        """True if `budget` or `budget_bytes` limits what a method reads or keeps."""
        return self.budget is not None or self.budget_bytes is not None

    @property
    def thinks(self) -> bool:
        """True if a model that can think does so before its answers."""
        return self.thinking != "off"

    @property
    def measures_likelihood(self) -> bool:
        """True if the run measures how likely the right answers are before each answer. Runs about
        time (forced lengths, traces) do not."""
        return self.likelihood == "on" and self.trace == "off" and not self.generation.force_length

    @property
    def most_bytes(self) -> int | None:
        """`budget_bytes` as a number of bytes; None if it is not set."""
        return None if self.budget_bytes is None else size("budget_bytes", self.budget_bytes)


NESTED: Mapping[str, Any] = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}
KEYS = (
    *(field.name for field in fields(Settings)),
    *(f"{name}.{field.name}" for name, kind in NESTED.items() for field in fields(kind)),
)


@cache
def recorded_defaults(device: str = "cpu") -> dict[str, Any]:
    """Return the settings that a run folder records if nobody set any, as nested values: the
    defaults, with `graphs` and `prefill_chunk` resolved for `device`. A report asks for them with
    every run, so they are cached, and callers must not modify them."""
    resolved = {"graphs": "on" if device.startswith("cuda") else "off", "prefill_chunk": usual_chunk(device)}
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
    owners = [f"{group}.{key}" for group in GROUPS if any(key in entry.values() for entry in entries(group))]
    near = owners or get_close_matches(key, (*KEYS, *GROUPS, "experiment"), n=1, cutoff=0.5)
    end = f"did you mean {near[0]}?" if near else "`python -m harness --help` shows them all."
    return f"There is no setting {key}; {end}"


def settings_known_today(config: Mapping[str, Any]) -> Settings:
    """Return the settings of a recorded run, of whatever version: settings that it lacks get their
    defaults, and those that no longer exist are ignored."""
    values = {field.name: config[field.name] for field in fields(Settings) if field.name in config}
    nested = {
        name: kind(**{field.name: values[name][field.name] for field in fields(kind) if field.name in values[name]})
        for name, kind in NESTED.items()
        if name in values
    }
    return Settings(**values | nested)
