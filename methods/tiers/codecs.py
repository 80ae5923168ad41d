"""Lists the codecs, which encode keys and values in fewer bits, that settings can name. It imports
no torch: a class is loaded when it is asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from methods.tiers.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Say how a codec is named in settings. `pattern`: a regular expression for its names; its
    named groups are whole numbers, the arguments of the codec's class. `codec`: that class, or a
    function that returns a codec, with its module. `choices`: some of them, for an error."""

    pattern: str
    codec: str
    choices: str


CODECS = [
    Spelling(
        pattern=r"int(?P<bits>[248])(?:\+(?P<kept>[1-9]\d*))?(?:/int(?P<value_bits>[248]))?(?:g(?P<group>[1-9]\d*))?",
        codec="methods.tiers.codec.IntCodec",
        choices="int8, int4, int2, int4g64, int4/int2, int4+4",
    ),
    Spelling(
        pattern=r"int(?P<bits>[248])(?:/int(?P<value_bits>[248]))?(?:g(?P<group>[1-9]\d*))?h",
        codec="methods.tiers.codec.rotated_integers",
        choices="int4h",
    ),
    Spelling(
        pattern=r"tq(?P<bits>[234])",
        codec="methods.tiers.codec.turboquant",
        choices="tq4, tq3, tq2",
    ),
    Spelling(
        pattern=r"tq(?P<bits>[234])q",
        codec="methods.tiers.codec.turboquant_residual",
        choices="tq4q",
    ),
    Spelling(pattern="fp8", codec="methods.tiers.codec.FloatCodec", choices="fp8"),
    Spelling(
        pattern="fp8_ds_mla",
        codec="methods.tiers.codec.LatentCodec",
        choices="fp8_ds_mla",
    ),
    Spelling(pattern="nvfp4", codec="methods.tiers.codec.Nvfp4Codec", choices="nvfp4"),
]


def is_codec(name: str) -> bool:
    """Return whether `name` names a codec, as int4 or fp8 does."""
    return any(re.fullmatch(line.pattern, name) for line in CODECS)


def choices() -> str:
    """Return names of codecs of every kind, for an error message."""
    return ", ".join(line.choices for line in CODECS)


def codec_of(name: str) -> Codec:
    """Return the codec that `name` names, such as int4g64. Raises `ValueError` if there is none."""
    for line in CODECS:
        if named := re.fullmatch(line.pattern, name):
            module, _, kind = line.codec.rpartition(".")
            given = {
                argument: int(value)
                for argument, value in named.groupdict().items()
                if value is not None
            }
            return getattr(import_module(module), kind)(**given)
    raise ValueError(f"{name!r} is not a codec: choose one written like {choices()}.")
