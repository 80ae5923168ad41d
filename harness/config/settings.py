"""The settings of a run beside its method, task and model: the schema of conf/config.yaml.

One key, one meaning, whatever the method. Imports neither torch nor hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, Union, get_type_hints

from harness.config.backends import in_one_line
from harness.config.catalogue import plain
from harness.config.groups import (
    OVERFLOWS,
    POLICIES,
    CommonWindows,
    Data,
    GenerationSettings,
    OverflowSettings,
    Results,
    StoreSettings,
    WandbSettings,
    check_codec,
)
from harness.config.values import FROM_0, FROM_1, MOST_SEED, Range, SettingsError, check_values, expand_paths, size
from harness.models.devices import usual_chunk
from methods.budget import BudgetError, check_budgets
from methods.tiers.tier import DEVICE, TIERS

__all__ = [
    "CommonWindows",
    "Data",
    "GenerationSettings",
    "OverflowSettings",
    "Results",
    "RunConfig",
    "Settings",
    "SettingsError",
    "StoreSettings",
    "WandbSettings",
    "recorded_defaults",
    "settings_of",
]
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


def _check_asked(budget: Any) -> None:
    try:
        check_budgets(1.0 if budget is None else budget, ())
    except BudgetError as error:
        raise SettingsError(str(error)) from error


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
        _check_asked(self.budget)
        check_values(self, RANGES)
        expand_paths(self, PATHS)
        self.budget_bytes = self.most_bytes  # however it is written, the run is the same
        self._check_budgets()
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
        self._check_generation(self.generation)

    @property
    def says_budget(self) -> bool:
        """Whether one of the settings limits what a method reads or keeps."""
        return self.budget is not None or self.budget_bytes is not None

    @property
    def measures_likelihood(self) -> bool:
        """Whether right answers are fed before each answer. A run that forces lengths or clocks the parts of a step is
        about time, and measures none."""
        return self.likelihood == "on" and self.trace == "off" and not self.generation.force_length

    @property
    def most_bytes(self) -> int | None:
        """Of `budget_bytes`."""
        return None if self.budget_bytes is None else size("budget_bytes", self.budget_bytes)

    def _check_budgets(self) -> None:
        if self.budget_bytes is not None and (self.dense_layers or self.budget_rule == "paper"):
            raise SettingsError(
                f"budget_bytes={self.budget_bytes} limits the bytes of all layers together: leave dense_layers and "
                "budget_rule=paper out."
            )
        if self.budget_bytes is not None and self.align == "moved_bytes":
            raise SettingsError(
                f"budget_bytes={self.budget_bytes} limits bytes on the device, and align=moved_bytes those that move: "
                "leave one out."
            )

    def _check_generation(self, generation: GenerationSettings) -> None:
        if not generation.temperature and (generation.top_k, generation.top_p) != (0, 1):
            raise SettingsError("Greedy decoding ignores top_k and top_p: set generation.temperature above 0 as well.")


NESTED: Mapping[str, Any] = {name: kind for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)}


@dataclass
class RunConfig(Settings):
    """`Settings` with the three plug-ins: what Hydra checks a command line against."""

    method: Any = None
    task: Any = None
    model: Any = None


def recorded_defaults(device: str = "cpu") -> dict[str, Any]:
    """What the folder of a run on `device` holds of settings that nobody set: the defaults, nested, with `graphs` and
    `prefill_chunk` resolved."""
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
