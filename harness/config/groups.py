"""Settings that belong together. Imports neither torch nor hydra."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Union

from harness.config.values import SettingsError, size
from methods.tiers import codecs
from methods.tiers.tier import TIERS

OVERFLOWS = ("truncate_cache", "truncate_tokens", "truncate_rotated")
BLOCK_TOKENS = 256  # of a block of the store, of which a prefix is found whole
IO_THREADS = 2  # that read for turns that wait, while these compute
WRITE_BUFFER = 256 * 10**6  # bytes that may wait on the device after a turn, and as many for the disk
POLICIES = ("scheduler_aware", "lru", "fifo")


def check_codec(key: str, codec: str | None) -> None:
    if codec is not None and not codecs.is_codec(codec):
        raise SettingsError(f"{key}={codec} is unknown: choose null, {codecs.choices()}.")


@dataclass
class GenerationSettings:
    """How tokens are picked. temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int | None = None  # in place of the task's
    force_length: bool = False  # ignore EOS and stop strings: for speed claims


@dataclass
class CommonWindows:
    """In place of the methods' own; null leaves them."""

    sinks: int | None = None
    recent_ratio: float | None = None  # of the budget behind the sinks


@dataclass
class StoreSettings:
    """Of history=store. Sizes by tier; one of 0 bytes does not exist."""

    device: Union[int, str] = 0  # noqa: UP007 (OmegaConf reads this form)
    host: Union[int, str] = "8GB"  # noqa: UP007
    disk: Union[int, str] = 0  # noqa: UP007
    folder: str | None = None
    policy: str = "scheduler_aware"
    ttl_s: float | None = None
    codec: str | None = None
    share: bool = False

    @property
    def given(self) -> str:
        """Its settings that are not at their defaults, as on the command line."""
        return ", ".join(f"store.{one.name}" for one in fields(self) if getattr(self, one.name) != one.default)

    @property
    def capacities(self) -> dict[str, int]:
        """Bytes by tier."""
        return {tier: size(f"store.{tier}", getattr(self, tier)) for tier in TIERS if hasattr(self, tier)}

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
    """Of conversations that outgrow the window."""

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
        """With `by` said."""
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
