"""Lets a model of latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) attend to its latents themselves.

Such a model compresses keys and values of a token to one latent c, from which every query head has keys
W_K c and values W_V c of its own, and to a few rotated channels that all heads share. transformers
caches both, and expands the latents of all tokens in each step. Here queries are multiplied with W_K
and outputs with W_V instead, which is the same but for rounding, since q (W_K c) = (q W_K) c: a token
is one row of rotated channels and c, which is key and, without the rotated channels, value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def is_latent(module: nn.Module) -> bool:
    """Return whether an attention module caches latents, and expands them by a function that can be
    left out."""
    return hasattr(module, "expand_kv") and type(getattr(module, "kv_lora_rank", None)) is int


@contextmanager
def unexpanded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the modules of latent attention among `modules` give their attention function, until the
    block is left, latents [B 1 T C] in place of keys and rotated channels [B 1 T R] in place of
    values."""
    with ExitStack() as undo:
        for module in filter(is_latent, modules):
            undo.callback(delattr, module, "expand_kv")
            module.expand_kv = lambda latents, rotated: (latents, rotated)  # type: ignore[assignment]
        yield


class Latent:
    """Hold W_K and W_V of a module of latent attention, with H query heads."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.rotated: int = module.qk_rope_head_dim  # R, the channels that are rotated
        self.channels: int = module.kv_lora_rank  # C, of a latent
        self.parts: list[int] = [module.qk_nope_head_dim, self.rotated]

    @cached_property
    def _expanding(self) -> tuple[Tensor, Tensor]:
        """Return W_K [H N C] and W_V [H V C]: views of the module's weights, or what they give for
        each channel alone where they are packed or adapted."""
        import torch
        from torch import nn

        joint, like = self.module.kv_b_proj, self.module.kv_a_layernorm.weight
        if type(joint) is nn.Linear:
            weight = joint.weight
        else:
            each = torch.eye(self.channels, dtype=like.dtype, device=like.device)
            with torch.no_grad():
                weight = joint(each).T
        by_head = weight.view(self.module.num_heads, -1, self.channels)
        keys, values = by_head.split([self.parts[0], self.module.v_head_dim], 1)
        return keys, values

    def query(self, q: Tensor) -> Tensor:
        """Return queries of the model [B H T N+R] as those of rows of rotated channels and latents,
        [B H T R+C]."""
        import torch

        plain, rotated = q.split(self.parts, -1)
        return torch.cat([rotated, plain @ self._expanding[0]], -1)

    def rows(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [B 1 T R+C] and values [B 1 T C], which are channels of them, of what the module
        hands over."""
        import torch

        keys = torch.cat([rotated, latents], -1)
        return keys, keys[..., self.rotated :]

    def output(self, mixed: Tensor) -> Tensor:
        """Return what heads give for latents that they have mixed, [B H T C] -> [B H T V]."""
        return mixed @ self._expanding[1].mT
