"""Changes how a model rotates keys and queries, so that it reads longer texts than it was trained with (`model.rope`).

The rotations are transformers' own: YaRN, linear, dynamic NTK, Llama 3's and LongRoPE. What is given
takes the place of the config's `rope_parameters`; the base of the rotation and the part of each head
that is rotated stay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from evals.data import misfit
from harness.models.base import (
    ORIGINAL,
    STRETCHED,
    WINDOW,
    Identity,
    ModelError,
    full_rotation,
    no_window,
)
from harness.models.layer_kinds import WHOLE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FACTOR, _MORE = "a number above 0", {"rope_theta?": "a number above 0"}
_ORIGINAL = {f"{ORIGINAL}?": "a whole number above 0", **_MORE}
# what each rotation takes; a "?" marks what may be left out
KEYS: Mapping[str, Mapping[str, Any]] = {
    "yarn": {
        "factor": _FACTOR,
        **{
            f"{key}?": _FACTOR
            for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        },
        "truncate?": "true or false",
        **_ORIGINAL,
    },
    "linear": {"factor": _FACTOR, **_ORIGINAL},
    "dynamic": {"factor": _FACTOR, **_MORE},  # its original length is always the config's window
    "llama3": {
        "factor": _FACTOR,
        "low_freq_factor": _FACTOR,
        "high_freq_factor": _FACTOR,
        **_ORIGINAL,
    },
    "longrope": {
        "factor": _FACTOR,
        "short_factor": [_FACTOR, ...],
        "long_factor": [_FACTOR, ...],
        "attention_factor?": _FACTOR,
        **_ORIGINAL,
    },
}

# of the config's rotation, whatever takes its place
_STAY = ("rope_theta", "partial_rotary_factor")


class Fixed(dict[str, Any]):
    """Hold a mapping that does not change and has a hash, as the parameters of a model or a method
    need. Its text is that of the command line."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=repr))

    def __str__(self) -> str:
        return f"{{{', '.join(f'{key}: {value}' for key, value in self.items())}}}"


def checked(rope: Mapping[str, Any] | None) -> Fixed | None:
    """Return `model.rope` as a value that can be hashed. If it is not a known rotation with the
    right keys, raise `ModelError`, which names the known rotations, or the keys of this one."""
    if rope is None:
        return None
    rope = Fixed({key: deepcopy(value) for key, value in rope.items() if value is not None})
    kind = rope.get("rope_type")
    given = {key: value for key, value in rope.items() if key != "rope_type"}
    if not isinstance(kind, str) or kind not in KEYS:
        old = (
            "`type`, the old spelling of rope_type"
            if "type" in rope
            else f"rope_type={kind}, which is unknown"
        )
        raise ModelError(
            f"model.rope={rope} has {old}: choose one of {', '.join(KEYS)}, as in "
            "'model.rope={rope_type: yarn, factor: 4}'."
        )
    known = [key.rstrip("?") for key in KEYS[kind]]
    wrong: str | None
    if unknown := [key for key in given if key not in known]:
        wrong = f"has the unknown key {unknown[0]}"
    elif not (wrong := misfit(given, KEYS[kind])):
        if given["factor"] < 1:
            wrong = f"has factor={given['factor']}, which should be at least 1"
        elif given.get("low_freq_factor", 0) >= given.get("high_freq_factor", 1):
            wrong = "has a low_freq_factor that is not below its high_freq_factor"
        elif given.get("beta_slow", 1) >= given.get("beta_fast", 32):  # transformers' numbers
            wrong = "has a beta_slow that is not below its beta_fast"
    if wrong:
        needed = [key for key in KEYS[kind] if not key.endswith("?")]
        raise ModelError(
            f"model.rope={rope} {wrong}: rope_type={kind} needs {', '.join(needed)}, and may have "
            f"{', '.join(key for key in known if key not in needed)}."
        )
    return rope


def identified(own: Identity, rope: Mapping[str, Any] | None) -> Identity:
    """Return the identity of a model whose rotation is changed; its revision contains a hash of
    `rope`. `own`: the identity without."""
    if rope is None:
        return own
    digest = sha256(json.dumps(rope, sort_keys=True).encode()).hexdigest()
    return own._replace(revision=f"{own.revision}+rope-sha256:{digest[:16]}")


def stretched(
    config: PreTrainedConfig, rope: Mapping[str, Any] | None, name: str
) -> PreTrainedConfig:
    """Return `config` of the model `name` with the rotation that `rope` asks for. Its attribute
    STRETCHED holds the window that follows: the factor times the original length. If each kind of
    layer has a rotation of its own, only that of the layers that see the whole text is changed."""
    if rope is None:
        return config
    config, kind = deepcopy(config), rope["rope_type"]
    every, own = getattr(config, "rope_parameters", None) or {}, full_rotation(config)
    if own.get("rope_theta") is None:
        raise ModelError(
            f"{name} does not rotate its keys, so that model.rope has nothing to change: set it to null."
        )
    if config.model_type == "phi3" and kind != "longrope":
        raise ModelError(
            f"{name} is a Phi-3, whose rotation transformers changes by rope_type=longrope alone."
        )
    trained = None if kind == "dynamic" else rope.get(ORIGINAL) or own.get(ORIGINAL)
    original = trained or getattr(config, WINDOW, None)
    if original is None:
        raise no_window(name)
    merged = (
        own if own.get("rope_type") == kind else {key: own[key] for key in _STAY if key in own}
    ) | dict(rope)
    merged.pop(ORIGINAL, None)
    if kind in ("yarn", "llama3", "longrope"):
        merged[ORIGINAL] = original
    _check_factors(config, merged, name)
    if hasattr(config, ORIGINAL):  # which transformers prefers to that of the rotation
        config.original_max_position_embeddings = original
    config.rope_parameters = {**every, WHOLE: merged} if WHOLE in every else merged
    setattr(config, STRETCHED, int(rope["factor"] * original))
    return config


def _check_factors(config: PreTrainedConfig, rope: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` unless LongRoPE has one factor for each pair of channels that is
    rotated."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if key in rope and len(rope[key]) != pairs:
            raise ModelError(
                f"model.rope has {len(rope[key])} numbers in {key}, and {name} rotates {pairs} pairs of channels: give "
                "one for each."
            )
