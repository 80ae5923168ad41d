"""Lets a model with trained sparse attention (DSA, DeepSeek V3.2, arXiv 2512.02556) say how it would
choose, and leaves the choice to the KV method.

In each layer of such a model an indexer gives a small key per token, and a few queries with weights
per token. `generate` reads the tokens alone that these score best, `index_topk` of them. In some
models (GLM-5) a layer may read what the layer before it has chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from inspect import unwrap
from typing import TYPE_CHECKING, Any

from harness.models.latents import is_latent

if TYPE_CHECKING:
    from torch import Tensor, nn

    from methods.base import Indexer

# the parts of an indexer that `IndexOf` uses, and the number that says how many tokens it chooses
PARTS = ("wq_b", "wk", "k_norm", "weights_proj", "softmax_scale", "qk_rope_head_dim")
TOP = "index_topk"


def is_indexed(module: nn.Module) -> bool:
    """Return whether an attention module reads what an indexer of the known form has chosen, its own
    or that of a layer before it."""
    if not (is_latent(module) and hasattr(module, "indexer")):
        return False
    own: Any = module.indexer
    return own is None or all(hasattr(own, name) for name in (*PARTS, TOP))


def indexer_of(module: Any) -> Indexer | None:
    """Return how an attention module chooses tokens; None if it reads all."""
    if not is_indexed(module):
        return None
    from methods.base import Indexer

    config, own = module.config, module.indexer is not None
    top = getattr(module.indexer if own else config, TOP)
    return Indexer(config.index_n_heads, config.index_head_dim, top, own)


def indexers(modules: Iterable[Any]) -> list[Any]:
    """Return the indexers of the attention modules that have one of their own."""
    return [x.indexer for x in modules if is_indexed(x) and x.indexer is not None]


class IndexOf:
    """Compute what an indexer gives for new tokens (`methods.base.Index`), once it is asked for."""

    def __init__(
        self, indexer: Any, hidden: Tensor, latent: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> None:
        """`hidden` [B T E]: the input of the attention module; `latent` [B T Q]: its compressed
        queries; `rotation`: cos and sin [1|B T R] of the positions, as the model gives them."""
        self.indexer, self.hidden, self.latent, self.rotation = indexer, hidden, latent, rotation

    @cached_property
    def _rotated(self) -> tuple[Tensor, Tensor]:
        """Return queries [B T Hi Di] and keys [B T 1 Di]. DeepSeek V3.2 rotates halves of them, GLM-5
        neighbours: the function that the indexer's own forward calls does so here."""
        import torch

        own = self.indexer
        forward: Any = unwrap(type(own).forward)
        name = next(x for x in forward.__code__.co_names if x.startswith("apply_rotary"))
        k = own.k_norm(own.wk(self.hidden)).unsqueeze(2)
        q = own.wq_b(self.latent).unflatten(-1, (-1, k.shape[-1]))
        sizes = [own.qk_rope_head_dim, k.shape[-1] - own.qk_rope_head_dim]
        (turning, still), (key_turning, key_still) = q.split(sizes, -1), k.split(sizes, -1)
        turned = forward.__globals__[name](turning, key_turning, *self.rotation, unsqueeze_dim=2)
        pairs = zip(turned, (still, key_still), strict=True)
        q, k = (torch.cat(pair, -1) for pair in pairs)
        return q, k

    @property
    def q(self) -> Tensor:
        return self._rotated[0].transpose(1, 2)

    @property
    def k(self) -> Tensor:
        return self._rotated[1].transpose(1, 2)

    @cached_property
    def weights(self) -> Tensor:
        own = self.indexer
        given = own.weights_proj(self.hidden.to(own.weights_proj.weight.dtype)).float()
        return (given * given.shape[-1] ** -0.5 * own.softmax_scale).transpose(1, 2)

    def part(self, rows: Tensor | slice, tokens: Tensor | None = None) -> IndexOf:
        batch = len(self.hidden)
        given = (self.hidden, self.latent, *self.rotation)
        parts = [x.expand(batch, -1, -1)[rows] for x in given]
        if tokens is not None:
            parts = [x.index_select(1, tokens) for x in parts]
        hidden, latent, cos, sin = parts
        return IndexOf(self.indexer, hidden, latent, (cos, sin))


@contextmanager
def choosing_nothing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the indexers of `modules` give their attention function an `IndexOf` in place of the tokens
    that they choose, until the block is left."""
    with ExitStack() as undo:
        for own in indexers(modules):

            def forward(
                hidden: Tensor, latent: Tensor, rotation: Any, *_: Any, own: Any = own, **__: Any
            ) -> IndexOf:
                return IndexOf(own, hidden, latent, rotation)

            undo.callback(delattr, own, "forward")
            own.forward = forward
        yield


@contextmanager
def reading(modules: Iterable[nn.Module], tokens: int) -> Iterator[None]:
    """Let the indexers of `modules` choose so many tokens, until the block is left."""
    with ExitStack() as undo:
        for own in indexers(modules):
            undo.callback(setattr, own, TOP, getattr(own, TOP))
            setattr(own, TOP, tokens)
        yield


def ranks_otherwise(indexer: Any, rotation: tuple[Tensor, Tensor]) -> bool:
    """Return whether an indexer itself ranks tokens otherwise than by the scores of its `IndexOf`.
    `rotation`: cos and sin [1 T R] of some positions, at each of which several tokens are tried."""
    import torch

    draw, like = torch.Generator().manual_seed(0), indexer.wk.weight
    cos, sin = (x.to(like.device).repeat(1, 16, 1) for x in rotation)
    tokens = cos.shape[1]
    hidden, latent = (
        torch.randn(1, tokens, layer.in_features, generator=draw).to(like)
        for layer in (indexer.wk, indexer.wq_b)
    )
    most, mask = getattr(indexer, TOP), torch.zeros(1, tokens, tokens, device=like.device)
    with torch.no_grad():
        setattr(indexer, TOP, tokens)
        try:
            ranking = indexer(hidden, latent, (cos, sin), mask, None)
        finally:
            setattr(indexer, TOP, most)
        index = IndexOf(indexer, hidden, latent, (cos, sin))
        products = (index.q.float() @ index.k.float().mT).relu()
        scores = (products * index.weights.unsqueeze(-1)).sum(1)
    ranked = scores.gather(-1, ranking.long())
    rises = (ranked[..., 1:] - ranked[..., :-1]).amax(-1)
    spread = ranked.amax(-1) - ranked.amin(-1)
    return bool((rises > 0.02 * spread).any()) or ranking.shape[-1] != tokens
