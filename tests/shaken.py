"""Other rounding, as on another CPU: what is computed in floating point comes out a little larger or smaller.

Two CPUs, or one CPU under two sets of instructions, add the terms of a product in another order and take another
polynomial for an exponential. Where tokens hold while every such result is shaken by `SIZE`, ten times the difference
between two sets of instructions, no prompt of theirs is a near tie on any CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from kernels.dispatch import watched

SIZE = 1e-5  # of fp32, and in proportion of fp64; 16 bits hide most of it, and are left alone
PRODUCTS = "mm bmm addmm addmv addbmm baddbmm dot mv _linalg_svd _linalg_eigh linalg_qr".split()
OTHERS = (
    "_softmax _log_softmax logsumexp logaddexp sum mean cumsum var std linalg_vector_norm exp exp2 log sqrt rsqrt pow "
    "sin cos silu gelu sigmoid tanh reciprocal div"
).split()
COPIES = ("gather_rows", "put_rows")  # operations of ours that compute nothing
SHARES = ("group_weights", "pq_weights", "column_sums", "windowed_sums")  # operations that end in a softmax


class Shaken(TorchDispatchMode):
    """Shakes the results of torch's operations, each number by a factor of its own drawn from `seed`."""

    def __init__(self, seed: int, size: float) -> None:
        super().__init__()
        self.size, self.seen = size, 0
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        name = name if name.startswith("_") else name.rstrip("_")
        by_row = name in PRODUCTS or name.startswith("_scaled_dot_product")
        if by_row or name in OTHERS:
            self.seen += 1
            tree_map_only(Tensor, lambda x: x.copy_(self.shaken(x, by_row)) if _rounded(x) else x, made)
        return made

    def shaken(self, x: Tensor, by_row: bool) -> Tensor:
        """`by_row`: by a share of what its row usually holds, as the terms of a small sum may be large."""
        size = self.size * torch.finfo(x.dtype).eps / torch.finfo(torch.float32).eps
        drawn = torch.rand(x.shape, generator=self.generator) * 2 - 1
        usual = x.nan_to_num(0, 0, 0)  # infinity, the logarithm of nothing, stays what it is
        return x + size * drawn * (usual.square().mean(-1, keepdim=True).sqrt() if by_row and x.dim() else usual)

    def around(self, name: str, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """An operation of ours; torch does not see what C++ computes."""
        before, made = self.seen, call()
        if self.seen > before or name in COPIES:
            return made
        return tree_map_only(Tensor, lambda x: self.shaken(x, name not in SHARES) if _rounded(x) else x, made)


def _rounded(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64) and x.device.type == "cpu" and x.numel() > 0


@contextmanager
def shaken(seed: int, size: float = SIZE) -> Iterator[None]:
    """In this thread; equal seeds shake alike."""
    with Shaken(seed, size) as mode, watched(mode.around):
        yield
