"""The settings of a run beside its method, task and model: the schema of conf/config.yaml.

One key, one meaning, whatever the method. Imports neither torch nor hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from math import ceil, inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Union, get_type_hints

from harness.config.backends import in_one_line
from harness.config.catalogue import plain
from harness.config.values import FROM_0, FROM_1, MOST_SEED, Range, check_values, expand_paths, size
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
    "baseline": ("run", "reuse", "off"),
    "dtype": ("auto", "fp32", "bf16", "fp16"),
    "trace": ("off", "on"),
    "graphs": ("auto", "on", "off"),
    "likelihood": ("on", "off"),
}
RANGES = {
    **dict.fromkeys(("batch", "prefill_chunk", "threads", "budget_bytes", "budget_generated"), FROM_1),
    **dict.fromkeys(("warmup", "fidelity", "windows.sinks", "generation.top_k"), FROM_0),
    "seed": Range(least=0, most=MOST_SEED),
    "comm": Range(above=0, most=1, hint="a share of the key cache, like 0.0078125"),
    "windows.recent_ratio": Range(least=0, below=1),
    "store.ttl_s": Range(above=0, hint="or null for no end"),
    "overflow.window": FROM_1,
    "overflow.ratio": Range(above=0, below=1),
    "overflow.sinks": FROM_0,
    "generation.temperature": Range(least=0, hint="which is greedy; 1 samples"),
    "generation.top_p": Range(above=0, most=1),
    "generation.max_new_tokens": FROM_1,
}
PATHS = ("data.root", "results.root", "store.folder")
# what changes neither an output nor a measured cost, and so is no part of a run's identity
WITHOUT_EFFECT = (
    "results",
    "data",
    "baseline",
    "dry_run",
    "wandb",
    "likelihood",
    "store.folder",
)
# may differ among jobs that share a prefill
OWN = {
    "budget", "budget_bytes", "budget_rule", "align", "comm", "windows", "budget_generated",
    "placement", "codec", "overlap",
}  # fmt: skip

TUNING_SEED = 271_828  # of the examples that harness.tune chooses parameters by; no table is about them


def check_codec(key: str, codec: str | None) -> None:
    if codec is not None and not codecs.is_codec(codec):
        raise SettingsError(f"{key}={codec} is unknown: choose null, {codecs.choices()}.")


@dataclass
class GenerationSettings:
    """Says how tokens are picked. temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int | None = None  # in place of the task's
    force_length: bool = False  # ignore EOS and stop strings: for speed claims


@dataclass
class CommonWindows:
    """Overrides every method's sinks and window; null keeps the method's values."""

    sinks: int | None = None
    recent_ratio: float | None = None  # of the budget behind the sinks


@dataclass
class StoreSettings:
    """Sets up the store of history=store. Sizes are by tier; a tier of 0 bytes does not exist."""

    host: Union[int, str] = "8GB"  # noqa: UP007 (OmegaConf reads this form)
    disk: Union[int, str] = 0  # noqa: UP007
    folder: str | None = None
    policy: str = "scheduler_aware"
    ttl_s: float | None = None
    codec: str | None = None

    @property
    def given(self) -> str:
        """Its settings that are not at their defaults, as on the command line."""
        return ", ".join(f"store.{one.name}" for one in fields(self) if getattr(self, one.name) != one.default)

    @property
    def capacities(self) -> dict[str, int]:
        """Bytes by tier."""
        return {tier: size(f"store.{tier}", getattr(self, tier)) for tier in (HOST, DISK)}

    @property
    def seconds_to_live(self) -> float:
        return inf if self.ttl_s is None else self.ttl_s

    def check(self) -> None:
        if not any(self.capacities.values()):
            raise SettingsError("history=store has no tier to store in: set store.host=8GB, or store.disk.")
        if self.folder is not None and not self.capacities["disk"]:
            raise SettingsError(
                "store.folder is about the disk tier, which has no bytes: set store.disk=100GB as well."
            )
        check_codec("store.codec", self.codec)
        if self.codec is not None and BLOCK_TOKENS % (together := codecs.codec_of(self.codec).block):
            raise SettingsError(
                f"store.codec={self.codec} writes {together} tokens together, and the {BLOCK_TOKENS} tokens of a block "
                "are no multiple of that: choose a group that divides them."
            )


@dataclass
class OverflowSettings:
    """Says what happens to conversations that outgrow the window."""

    window: int | None = None
    by: str | None = None
    ratio: float = 0.5
    sinks: int = 0

    def check(self, history: str) -> None:
        if self.window is None:
            if given := [one.name for one in fields(self) if getattr(self, one.name) != one.default]:
                raise SettingsError(
                    f"overflow.{given[0]} needs a window: set overflow.window=2048 as well, or leave it out."
                )
            return
        if history == "recompute" and self.by not in (None, "truncate_tokens"):
            raise SettingsError(
                f"history=recompute has no cache for overflow.by={self.by}: set overflow.by=truncate_tokens."
            )
        if history == "store" and self.by == "truncate_rotated":
            raise SettingsError(
                "history=store has keys before their rotation, and overflow.by=truncate_rotated is about rotated ones: "
                "set overflow.by=truncate_cache, or history=device_prefix without settings of the store."
            )
        self._check_share(self.window)

    def _check_share(self, window: int) -> None:
        stays = int(self.ratio * window)
        if stays < 1:
            raise SettingsError(
                f"overflow.window={window} is too small: no token would stay of it; set {ceil(1 / self.ratio)} or more."
            )
        if self.sinks >= stays:
            raise SettingsError(
                f"overflow.sinks={self.sinks} must be fewer than the {stays} tokens that stay of "
                f"overflow.window={window}."
            )

    def resolved(self, history: str) -> OverflowSettings:
        """Return these settings with `by` said."""
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
    """Everything of a run but its method, task and model. conf/config.yaml says what each is for."""

    budget: Union[int, float, None] = 0.2  # noqa: UP007 (OmegaConf reads this form)
    budget_bytes: Union[int, str, None] = None  # noqa: UP007
    budget_rule: str = "read"
    align: str = "tokens"
    comm: float | None = None
    windows: CommonWindows = field(default_factory=CommonWindows)
    dense_layers: list[int] = field(default_factory=list)
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
        try:
            Budget(1.0 if self.budget is None else self.budget)
        except BudgetError as error:
            raise SettingsError(str(error)) from error
        check_values(self, RANGES)
        expand_paths(self, PATHS)
        self.budget_bytes = self.most_bytes  # however it is written, the run is the same
        if self.budget_bytes is not None:
            limit = f"budget_bytes={self.budget_bytes}"
            if self.budget not in (None, Settings.budget):
                raise SettingsError(f"budget={self.budget} would be ignored beside {limit}: leave one of them out.")
            if self.dense_layers or self.budget_rule == "paper":
                raise SettingsError(
                    f"{limit} limits the bytes of all layers together: leave dense_layers and budget_rule=paper out."
                )
            if self.align == "moved_bytes":
                raise SettingsError(
                    f"{limit} limits bytes on the device, and align=moved_bytes those that move: leave one out."
                )
        if self.budget_generated is not None and not self.says_budget:
            raise SettingsError("budget_generated goes with a budget: set one; budget=1.0 leaves the prompt whole.")
        check_codec("codec", self.codec)
        self.backends = in_one_line(self.backends)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise SettingsError(f"device={self.device} is unknown: choose auto, cpu, cuda or cuda:N.")
        if self.questions == "shared" and self.protocol != "context":
            raise SettingsError(
                f"questions=shared seals a context before its questions, and protocol={self.protocol} seals them with "
                "it: set protocol=context."
            )
        if self.align != "tokens" and self.budget_rule == "paper":
            raise SettingsError(
                f"align={self.align} makes bytes equal, budget_rule=paper counts tokens as papers do: leave one out."
            )
        if self.history == "store":
            self.store.check()
        elif given := self.store.given:
            raise SettingsError(f"history={self.history} has no store: set history=store, or leave {given} out.")
        self.overflow.check(self.history)
        if not self.generation.temperature and (self.generation.top_k, self.generation.top_p) != (0, 1):
            raise SettingsError("Greedy decoding ignores top_k and top_p: set generation.temperature above 0 as well.")

    @property
    def says_budget(self) -> bool:
        """Says whether one of the settings limits what a method reads or keeps."""
        return self.budget is not None or self.budget_bytes is not None

    @property
    def measures_likelihood(self) -> bool:
        """Says whether right answers are fed before each answer. A run that forces lengths or clocks the parts of a
        step is about time, and measures none."""
        return self.likelihood == "on" and self.trace == "off" and not self.generation.force_length

    @property
    def most_bytes(self) -> int | None:
        """The value of `budget_bytes` as a number."""
        return None if self.budget_bytes is None else size("budget_bytes", self.budget_bytes)


NESTED: Mapping[str, Any] = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}


@dataclass
class RunConfig(Settings):
    """`Settings` with the three plug-ins: what Hydra checks a command line against."""

    method: Any = None
    task: Any = None
    model: Any = None


def recorded_defaults(device: str = "cpu") -> dict[str, Any]:
    """Return what the folder of a run on `device` holds of settings that nobody set: the defaults, nested, with
    `graphs` and `prefill_chunk` resolved."""
    resolved = {"graphs": "on" if device.startswith("cuda") else "off", "prefill_chunk": usual_chunk(device)}
    return asdict(Settings()) | resolved


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Return a composed configuration, given as plain values, as checked `Settings`. Configurations of older versions
    lack some settings, and have others that are gone, which are ignored."""
    values = {one.name: config[one.name] for one in fields(Settings) if one.name in config}
    nested = {
        name: make(**{one.name: values[name][one.name] for one in fields(make) if one.name in values[name]})
        for name, make in NESTED.items()
        if name in values
    }
    return Settings(**values | nested)
