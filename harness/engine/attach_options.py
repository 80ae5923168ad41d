"""Holds how a method is attached to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from methods.abilities.repeat import RepeatPrompts
from methods.base import Ability, Budget
from methods.tiers.codec import Codec
from methods.tiers.tier import DEVICE, TIERS

OF_REQUEST = ("placement", "reuse_steps", "codec", "disk")  # what layers are told of the options


@dataclass(frozen=True, kw_only=True, eq=False)
class AttachOptions:
    """Hold the keywords of `attached`.

    `budget`: how many prompt tokens a step may read, as a share of the prompt or a number, for
    methods that use one; 1.0 is all of it. `placement`: where the keys and values lie that a step
    reads only if the method chooses them (device, host or disk). `calibration`: token ids [1 S] of
    ordinary text, for methods that prepare themselves on some (InfiniGen). `reuse_steps`: for how
    many further steps a choice of tokens is used again. `codec`: the compressed form in which a
    method that reads a choice of its tokens stores them (methods/tiers/codec.py). `disk`: the
    folder for placement=disk; None: the system's temporary one. `overlap`: load rows from host or
    disk while the model computes, where the method knows early enough which. `capacity`: tokens,
    prompts and answers of all turns together, that a cache has room for where a call brings none;
    None: the prompt and 1,024, growing. `repeat_prompts`: with which words the model is asked to
    repeat a prompt, for KVzip (harness/prompts/repeating.py makes them); None: with none.
    `abilities`: further ones for the method (methods/abilities)."""

    budget: float | Budget | None = None
    placement: str = DEVICE
    calibration: Tensor | None = None
    reuse_steps: int = 0
    codec: Codec | None = None
    disk: Path | None = None
    overlap: bool = False
    capacity: int | None = None
    repeat_prompts: RepeatPrompts | None = None
    abilities: tuple[Ability, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` for an unknown placement, for a value that should be a number, a codec
        or a folder (`disk`) and is none, or for a number out of range."""
        if self.capacity is not None:
            refuse_number("capacity", self.capacity, least=1)
        if self.placement not in TIERS:
            raise ValueError(
                f"placement={self.placement!r} is unknown: choose one of {', '.join(TIERS)}."
            )
        refuse_number("reuse_steps", self.reuse_steps, least=0)
        if self.disk is not None and not Path(self.disk).is_dir():
            folder = str(self.disk)
            raise ValueError(
                f"disk={folder!r} is not a folder: make it, or leave disk out for a temporary one."
            )
        if not isinstance(self.codec, Codec | None):
            named = str(self.codec)
            raise ValueError(
                f"codec={self.codec!r} is not a codec: pass one, such as codec_of({named!r}) of methods.tiers.codecs."
            )


def refuse_number(key: str, number: object, *, least: int) -> None:
    """Raise `ValueError` unless `number` is a whole number, `least` or more. `key` names it."""
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"{key}={number!r} should be a whole number, at least {least}.")
